"""The graph of a run: nodes that say what they come after, what they depend on, and what they leave.

A node is valid if its record says that it was done with the inputs that there are now, and what it left is
still there. Inputs are the identities of files as they are when its turn comes, so a node that leaves the
same as before leaves the nodes behind it valid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ups.config.legacy import earlier_stage, present_stage
from ups.errors import ConfigError, did_you_mean

Group = Literal["validation", "data-check", "dry-run", "training", "small-eval", "full-eval", "promotion"]
GROUPS: tuple[Group, ...] = get_args(Group)
Document = Mapping[str, Any]  # JSON values


@dataclass(frozen=True)
class Node:
    """One step of a run.

    Attributes:
        name: Its name.
        group: What it belongs to: `ups run --skip-GROUP` leaves it out.
        after: Nodes, or whole groups, that come before it, as far as the run has them.
        inputs: Gives what decides what it does: identities of files and values of the configuration.
        outputs: Gives the identity of what it leaves, by path; None for what isn't there.
        command: Its command line, given whether it is to begin from scratch; None where `work` does it.
        work: What is done in the process of the run, as it takes no time.
        stage: Which stage it trains, if it trains one.
    """

    name: str
    group: Group
    after: tuple[str, ...]
    inputs: Callable[[], Document]
    outputs: Callable[[], Mapping[str, str | None]] = dict
    command: Callable[[bool], Sequence[str]] | None = None
    work: Callable[[], Document] | None = None
    stage: str | None = None

    def key(self) -> str:
        """Hash of its inputs as they are now, 64 hexadecimal digits."""
        text = json.dumps(
            {"node": earlier_stage(self.name), "inputs": self.inputs()}, sort_keys=True, default=str
        )
        return hashlib.sha256(text.encode()).hexdigest()


class Graph:
    """Nodes in an order in which each comes after all that it is to come after.

    Args:
        nodes: As they are declared, which decides where nothing else does.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        declared = list(nodes)
        names = [node.name for node in declared]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two nodes of a run are named {', '.join(twice)}", kind="graph")
        self.nodes: tuple[Node, ...] = ()
        while declared:  # the first declared node that waits for none, again and again
            waited_for = {*(node.name for node in declared), *(node.group for node in declared)}
            ready = next((node for node in declared if not waited_for.intersection(node.after)), None)
            if ready is None:
                names = [node.name for node in declared]
                raise ConfigError(
                    f"nodes come after each other in a circle: {', '.join(names)}", kind="graph"
                )
            declared.remove(ready)
            self.nodes += (ready,)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __contains__(self, name: str) -> bool:
        return any(node.name == name for node in self.nodes)

    def of(self, group: Group) -> list[Node]:
        """The nodes of a group, in order."""
        return [node for node in self.nodes if node.group == group]

    def chosen(
        self, *, skipped: Collection[str] = (), first: str | None = None, only: str | None = None
    ) -> list[Node]:
        """The nodes that are looked at.

        Args:
            skipped: Groups that are left out.
            first: Where to begin; what comes before, in order, is taken as it is.
            only: The one node.
        """
        if first is not None and only is not None:
            raise ConfigError("--from and --only", expected="one of them", found="both")
        names = [node.name for node in self.nodes]
        first, only = present_stage(first), present_stage(only)
        for flag, name in (("--from", first), ("--only", only)):
            if name is not None and name not in names:
                known = ", ".join(names)
                raise ConfigError(flag, expected=known, found=repr(name), hint=did_you_mean(name, names))
        if only is not None:
            return [node for node in self.nodes if node.name == only]
        rest = self.nodes[names.index(first) :] if first is not None else self.nodes
        return [node for node in rest if node.group not in skipped]
