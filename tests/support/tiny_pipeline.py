"""A run of tiny nodes that write files, in this process or, as a program, in one that can be killed.

    python tiny_pipeline.py [SECONDS]    every node takes so long before it writes

Each node appends a line to `<name>.txt` from the content of the one before it, and one to `begun.txt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from noted import noted

from ups.config import load_config
from ups.data.identities import file_identity
from ups.pipeline import run as module
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.nodes import Run
from ups.pipeline.run import Options, run_pipeline

NAMES = ("first", "second", "third")
_PROGRAM = """
import sys, time
from pathlib import Path
name, before, seconds = sys.argv[1:]
with open("begun.txt", "a") as file: file.write(name + "\\n")
time.sleep(float(seconds))
if Path("fails").exists() and Path("fails").read_text() == name: sys.exit(3)
Path(name + ".txt").write_text(name if Path("constant").exists() else Path(before).read_text() + name)
"""


def tiny_run(**values: Any) -> Run:
    """A run with nothing but folders."""
    config = load_config({"data": {"tasks": ["burgers1d"], "root": "data"}, **values})
    return Run(config, config, config, Path("run"))


def make_graph(*, seconds: float = 0.0, extra: tuple[Node, ...] = ()) -> Graph:
    """first -> second -> third, and others."""
    groups: tuple[Group, ...] = ("training", "training", "full-eval")
    return Graph([*map(lambda name, group: _node(name, group, seconds), NAMES, groups), *extra])


def execute(graph: Graph, **options: Any) -> list[str]:
    """Run a graph; returns what was noted."""
    with noted() as notes:
        result(graph, **options)
    return notes


def result(graph: Graph, **options: Any) -> dict[str, Any]:
    """Run a graph; returns what `run_pipeline` does."""
    before, module.declare_graph = module.declare_graph, lambda run: graph
    try:
        return run_pipeline(tiny_run(), Options(**options))
    finally:
        module.declare_graph = before


def begun() -> list[str]:
    """The nodes that were begun, in order."""
    return Path("begun.txt").read_text().split() if Path("begun.txt").exists() else []


def _node(name: str, group: Group, seconds: float) -> Node:
    number = NAMES.index(name)
    before = Path(f"{NAMES[number - 1]}.txt" if number else "input.txt")
    path = Path(f"{name}.txt")
    return Node(
        name,
        group,
        NAMES[:number],
        inputs=lambda: {"before": file_identity(before)},
        outputs=lambda: {str(path): file_identity(path)},
        command=lambda restart: [sys.executable, "-c", _PROGRAM, name, str(before), str(seconds)],
    )


if __name__ == "__main__":
    execute(make_graph(seconds=float(sys.argv[1])))
    heavy = sorted({"torch", "h5py", "scipy", "matplotlib", "zarr"} & set(sys.modules))
    sys.stderr.write(f"{heavy}\n")
