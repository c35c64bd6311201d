"""Readers written by others, each run in a process of its own, under a timeout.

A peer is started as `COMMAND STORE REQUESTS OUT`. REQUESTS is a JSON file, a list of
`{"array": name, "first": row}`: the rows from `first` on, or the whole array where that is null. The peer
writes the elements that answer request `i` to `OUT/i.bin`, C order, little-endian; then `OUT/answers.json`, a
list of `{"shape": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

HERE = Path(__file__).parent
NO_ELEMENTS = "no elements"


@dataclass(frozen=True)
class Request:
    """An array, or its rows from `first` on."""

    array: str
    first: int | None = None


@dataclass(frozen=True)
class Answer:
    """What a peer read: a shape and its bytes, or its error."""

    shape: tuple[int, ...] = ()
    payload: bytes = b""
    error: str | None = None


@dataclass(frozen=True)
class Peer:
    """A reader.

    Attributes:
        name: As in the table of docs/results/readers.md.
        command: What starts it; a script of this folder last.
        package: Python package that it needs, or the folder of its Node package.
        refuses: Dtypes, or NO_ELEMENTS, that it refuses with an error, and why.
    """

    name: str
    command: tuple[str, ...]
    package: str
    refuses: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Why it can't run here; empty if it can."""
        program = self.command[0]
        if shutil.which(program) is None:
            return f"no {program}"
        if program == "node":
            found = (HERE / self.package).is_dir()
            return "" if found else "zarrita isn't installed: npm ci --prefix tests/interop"
        found = importlib.util.find_spec(self.package) is not None
        return "" if found else f"no {self.package}: pip install -r tests/interop/requirements.txt"

    def version(self) -> tuple[int, ...]:
        """Version of its Python package."""
        return tuple(int(part) for part in importlib.metadata.version(self.package).split(".")[:3])

    def refusal(self, value: npt.NDArray[Any]) -> str | None:
        """Why it may refuse such an array, if there is a reason."""
        return self.refuses.get(value.dtype.name if value.size else NO_ELEMENTS)

    def ask(
        self, store: Path, requests: Sequence[Request], out: Path, *, timeout_s: float = 60
    ) -> list[Answer]:
        """Run it.

        Raises:
            subprocess.TimeoutExpired: If it hangs; it is killed then.
            subprocess.CalledProcessError: If it fails as a whole.
        """
        out.mkdir()
        asked = out / "requests.json"
        asked.write_text(json.dumps([asdict(request) for request in requests]))
        script = str(HERE / self.command[-1])
        arguments = [*self.command[:-1], script, str(store), str(asked), str(out)]
        subprocess.run(arguments, check=True, timeout=timeout_s)
        found = json.loads((out / "answers.json").read_text())
        return [_answer(one, out / f"{i}.bin") for i, one in enumerate(found)]


def _answer(found: Mapping[str, Any], path: Path) -> Answer:
    if "error" in found:
        return Answer(error=found["error"])
    return Answer(tuple(found["shape"]), path.read_bytes())


TENSORSTORE = Peer("tensorstore", (sys.executable, "read_tensorstore.py"), "tensorstore")
ZARRS = Peer("zarrs", (sys.executable, "read_zarrs.py"), "zarrista")
ZARRITA = Peer(
    "zarrita.js",
    ("node", "read_zarrita.mjs"),
    "node_modules/zarrita",
    {
        "bfloat16": "zarrita.js 0.7.5 has no bfloat16",
        "float16": "needs the Float16Array of Node 24",
        NO_ELEMENTS: "zarrita.js 0.7.5 can't read an axis of length 0",
    },
)
PEERS = (TENSORSTORE, ZARRS, ZARRITA)
