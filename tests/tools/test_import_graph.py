"""The imports of both packages: no circle of modules, also not by imports in functions or for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("ups", "ups_store")

Graph = Mapping[str, set[str]]


def sources() -> dict[str, str]:
    """Text of every module by its dotted name."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in paths
    }


def graph_of(modules: Mapping[str, str]) -> Graph:
    """Which modules each one imports, anywhere in its text."""
    return {
        name: {found for word in _imported(ast.parse(text)) if (found := _module(word, modules)) != name}
        - {""}
        for name, text in modules.items()
    }


def _statements(node: ast.AST) -> Iterable[ast.AST]:
    """Without the expressions in them, which are most of a tree."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, block, ()):
            yield inner
            yield from _statements(inner)


def _imported(tree: ast.Module) -> Iterable[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(word: str, modules: Mapping[str, str]) -> str:
    """The module that an imported name is, or comes from; "" for those of other packages."""
    while word and word not in modules:
        word = word.rpartition(".")[0]
    return word


def circle_in(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    # The package itself names everything for its users, lazily: modules inside don't import it.
    graph = graph_of(sources())
    assert len(graph) > 200
    assert circle_in(graph) == []


@pytest.mark.parametrize(
    "text",
    [
        "import ups_store.a",
        "from ups_store import a",
        "def f():\n    from ups_store.a import g",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ups_store.a import A",
    ],
)
def test_circle_is_found_wherever_the_import_stands(text: str) -> None:
    modules = {"ups_store": "", "ups_store.a": "from ups_store.b import x", "ups_store.b": text}
    assert set(circle_in(graph_of(modules))) == {"ups_store.a", "ups_store.b"}
