"""The tables of docs/contributing.md lead to what they say: each file exists and defines the symbol."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "contributing.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def symbols(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Names that a module or class defines, those inside of its classes with a dot."""
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name
                yield from symbols(inner, f"{prefix}{name}.")
            case ast.FunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def test_file_of_every_row_defines_its_symbol() -> None:
    missing = [
        (file, symbol)
        for file, symbol in ROWS
        if symbol not in set(symbols(ast.parse((REPOSITORY / file).read_text()).body))
    ]
    assert missing == []


def test_every_row_is_read() -> None:
    tables = PAGE.partition("## Where is")[2]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == len(ROWS) > 30


def test_every_room_is_named() -> None:
    rooms = {
        f"{path.parent.name}/"
        for package in ("ups_store", "ups")
        for path in (REPOSITORY / package).glob("*/__init__.py")
    }
    assert {room for room in rooms if f"`{room}`" not in PAGE} == set()
