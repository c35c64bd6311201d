"""Reading simulations that others wrote: what a file holds, which files make a split, and their samples.

`open_source` opens one file of a task (`get_task`), reduced as a `Selection` says; `TaskDeclaration` is what
a configuration says about files of your own. Names come when they are first asked for.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from ups_store.sources.contents import Selection, SourceInfo
    from ups_store.sources.declaration import LocalPath, TaskDeclaration
    from ups_store.sources.source import Source, open_source
    from ups_store.sources.source_files import SourceFile, find_sources, samples_by_split
    from ups_store.sources.tasks import TASKS, Task, get_task

__all__ = [
    "TASKS",
    "LocalPath",
    "Selection",
    "Source",
    "SourceFile",
    "SourceInfo",
    "Task",
    "TaskDeclaration",
    "find_sources",
    "get_task",
    "open_source",
    "samples_by_split",
]

_HOMES = {
    "Selection": "contents",
    "SourceInfo": "contents",
    "LocalPath": "declaration",
    "TaskDeclaration": "declaration",
    "Source": "source",
    "open_source": "source",
    "SourceFile": "source_files",
    "find_sources": "source_files",
    "samples_by_split": "source_files",
    "TASKS": "tasks",
    "Task": "tasks",
    "get_task": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ups_store.sources' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"ups_store.sources.{_HOMES[name]}"), name)
    return value
