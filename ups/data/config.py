"""Configuration of the data: the sections that a run shares with the build of its stores."""

from ups_store.build.config import BuildConfig, CacheConfig, DataConfig, ReadingConfig
from ups_store.declaration import TaskDeclaration

__all__ = ["BuildConfig", "CacheConfig", "DataConfig", "ReadingConfig", "TaskDeclaration"]
