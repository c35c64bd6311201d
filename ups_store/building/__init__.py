"""From source files to stores: `python -m ups_store.build`, and the same from Python.

    config = load_config(Path("build.yaml"), overrides=["data.limit=100"])
    with open_build(config, "burgers1d", "train") as build:
        print(explain(build))  # reuse, build, continue, rebuild or refuse, and why
        build.begin()
        if not build.is_reused:
            build.fill()
        store = build.finish()

`build_all` does that for every task and split. With `Readers`, processes of their own read the sources, with
deadlines. All names come when they are first asked for: `import ups_store.build` alone costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.building.__main__ import main
    from ups_store.building.config import (
        BuildConfig,
        CacheConfig,
        DataConfig,
        EncodingConfig,
        LatentConfig,
        ReadingConfig,
        load_config,
        long_dtype,
    )
    from ups_store.building.config_file import near_config, read_config, shipped_configs
    from ups_store.building.config_problems import config_error, config_errors
    from ups_store.building.digests import DigestCache
    from ups_store.building.explanation import Explanation, explain
    from ups_store.building.fill import Filling
    from ups_store.building.place import check_replaceable
    from ups_store.building.progress import QuietWatcher, Watcher
    from ups_store.building.ranks import BuildRank
    from ups_store.building.read import UnreadSamplesError
    from ups_store.building.readers import Readers
    from ups_store.building.result import BuildReport
    from ups_store.building.shared import SharedStores
    from ups_store.building.staging import stage_sources
    from ups_store.building.store_build import Build, open_build
    from ups_store.building.stores import build_all

__all__ = [
    "Build",
    "BuildConfig",
    "BuildRank",
    "BuildReport",
    "CacheConfig",
    "DataConfig",
    "DigestCache",
    "EncodingConfig",
    "Explanation",
    "Filling",
    "LatentConfig",
    "QuietWatcher",
    "Readers",
    "ReadingConfig",
    "SharedStores",
    "UnreadSamplesError",
    "Watcher",
    "build_all",
    "check_replaceable",
    "config_error",
    "config_errors",
    "explain",
    "load_config",
    "long_dtype",
    "main",
    "near_config",
    "open_build",
    "read_config",
    "shipped_configs",
    "stage_sources",
]

_HOMES = {  # modules and the names there
    "__main__": ("main",),
    "config": (
        *("BuildConfig", "CacheConfig", "DataConfig", "EncodingConfig", "LatentConfig", "ReadingConfig"),
        *("load_config", "long_dtype"),
    ),
    "config_file": ("near_config", "read_config", "shipped_configs"),
    "config_problems": ("config_error", "config_errors"),
    "digests": ("DigestCache",),
    "explanation": ("Explanation", "explain"),
    "fill": ("Filling",),
    "place": ("check_replaceable",),
    "progress": ("QuietWatcher", "Watcher"),
    "ranks": ("BuildRank",),
    "read": ("UnreadSamplesError",),
    "readers": ("Readers",),
    "result": ("BuildReport",),
    "shared": ("SharedStores",),
    "staging": ("stage_sources",),
    "store_build": ("Build", "open_build"),
    "stores": ("build_all",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ups_store.build' has no attribute {name!r}")
    from importlib import import_module

    module = next(module for module, names in _HOMES.items() if name in names)
    value = globals()[name] = getattr(import_module(f"ups_store.building.{module}"), name)
    return value
