"""Configuration of the data: what a run shares with the build of its stores."""

from ups_store.build.config import BuildConfig, CacheConfig, DataConfig, EncodingConfig, ReadingConfig
from ups_store.build.config_file import check_like, expected_by, long_dtype, parse_overrides, read_yaml
from ups_store.errors import ConfigError as SharedConfigError
from ups_store.old_names import with_present_names
from ups_store.sources.declaration import TaskDeclaration

__all__ = [
    "BuildConfig",
    "CacheConfig",
    "DataConfig",
    "EncodingConfig",
    "ReadingConfig",
    "SharedConfigError",
    "TaskDeclaration",
    "check_like",
    "expected_by",
    "long_dtype",
    "parse_overrides",
    "read_yaml",
    "with_present_names",
]
