"""Configuration of the data: the sections that a run shares with the build of its stores."""

from ups_store.build.config import CacheConfig, DataConfig, ReadingConfig

__all__ = ["CacheConfig", "DataConfig", "ReadingConfig"]
