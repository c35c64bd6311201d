"""The folder of a run: which process works in it, a record of every node that is done, what happened when.

nodes/<node>.json    written after a node ended well: the hash of its inputs, and what it left
run.jsonl            a line for every begin and end of a node
lock                 held while a node works, by its process too
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ups.config.legacy import present_stage, stage_file
from ups.errors import OutputError
from ups.locks import holder_of, locked
from ups.output import json_document, write_atomically
from ups.pipeline.graph import Node
from ups_store.launch import log_origin

LOCK_TIMEOUT_S = 120.0  # of a killed run's child, which saves itself


class RunFolder:
    """What a run knows of its nodes.

    Args:
        path: The folder; made once something is written.
        siblings: Folders of other runs, whose nodes may have done what this one's would do.
    """

    def __init__(self, path: Path, *, siblings: Sequence[Path] = ()) -> None:
        self.path, self._siblings = path, tuple(map(RunFolder, siblings))

    @contextmanager
    def locked(self, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[int]:
        """Inside, no other run works in the folder; gives the descriptor that holds the lock.

        Processes that inherit it hold the lock as long as they live, whatever becomes of this one.
        """
        with locked(self.path / "lock", timeout_s=timeout_s) as fd:
            yield fd

    def is_valid(self, node: Node, key: str) -> bool:
        """Whether a node was done with these inputs, here or by a sibling, and what it left is there."""
        return self.valid_record(node, key) is not None

    def valid_record(self, node: Node, key: str) -> dict[str, Any] | None:
        """The record by which a node is valid; None if it isn't."""
        records = (folder.record_of(node.name) for folder in (self, *self._siblings))
        alike = [record for record in records if record is not None and record.get("key") == key]
        outputs = node.outputs() if alike else {}
        return next((record for record in alike if record.get("outputs") == outputs), None)

    def record_of(self, name: str) -> dict[str, Any] | None:
        """What was written when the node was last done; None if it wasn't."""
        return json_document(self._record_path(name)) or None

    def write_record(self, node: Node, *, key: str, result: Mapping[str, Any]) -> None:
        """Note that a node was done; what it left has to be there."""
        record = {"node": node.name, "key": key, "outputs": node.outputs(), **result}
        write_atomically(self._record_path(node.name), json.dumps(record, indent=2).encode() + b"\n")

    def log(self, event: str, node: str, **values: Any) -> None:
        """Append a line to `run.jsonl`."""
        line = {"time": time.time(), "event": event, "node": node, **values, **log_origin()}
        path = self.path / "run.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutputError.of(error, path) from error

    def seconds(self) -> dict[str, float]:
        """Seconds of each node, over all of its runs that ended or were stopped; a killed one is unknown."""
        seconds: dict[str, float] = {}
        for line in self.lines():
            if line.get("event") == "end":
                name = str(line.get("node"))
                seconds[name] = seconds.get(name, 0.0) + float(line.get("seconds", 0.0))
        return seconds

    def lines(self) -> Iterator[dict[str, Any]]:
        """What `log` wrote; none if nothing was executed yet."""
        path = self.path / "run.jsonl"
        return json_lines(path) if path.exists() else iter(())

    def holder(self) -> str | None:
        """Which process works in the folder, as it wrote it; None if none does. The lock isn't kept."""
        return holder_of(self.path / "lock")

    def _record_path(self, name: str) -> Path:
        return stage_file(self.path / "nodes" / f"{name}.json")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log for programs, with the present names of stages.

    What a kill cut off, or is being written, is left out.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                values = dict(json.loads(line))
            except (ValueError, TypeError):
                continue
            names = {key: present_stage(values[key]) for key in ("stage", "node") if key in values}
            yield {**values, **names}
