"""Public names of a package that are imported when they are first asked for.

The package's `__init__.pyi` is the one table of them, which type checkers read too: a line
`from MODULE import NAME as NAME` for each, or `from MODULE import NAME` and `PUBLIC = NAME` where it has
another name there. `import ups_store` alone so costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; to import `typing` takes longer than all else here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Make `__getattr__` and `__all__` of a package.

    Args:
        package: Its `__name__`.
        file: Its `__file__`, beside which the table lies.
    """
    homes, known = {}, {}
    with open(f"{file.rpartition('.')[0]}.pyi", encoding="utf-8") as table:
        for words in map(str.split, table):
            if words[:1] == ["from"] and words[4:5] == ["as"]:
                homes[words[5]] = (words[1], words[3])
            elif words[:1] == ["from"]:
                known[words[3]] = (words[1], words[3])
            elif words[1:2] == ["="]:
                homes[words[0]] = known[words[2]]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import sys
        from importlib import import_module

        module, attribute = homes[name]
        return sys.modules[package].__dict__.setdefault(name, getattr(import_module(module), attribute))

    return get, sorted(homes)
