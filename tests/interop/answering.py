"""What the readers in Python have in common: requests in, answers out, as `peers` describes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Read = Callable[[str, str, int | None], tuple[list[int], bytes]]


def answer_all(read: Read) -> None:
    """Run `read(store, array, first)` for every request of the command line, and write what it returns."""
    store, requests, out = sys.argv[1:]
    answers: list[dict[str, Any]] = []
    for i, request in enumerate(json.loads(Path(requests).read_text())):
        try:
            shape, payload = read(store, request["array"], request["first"])
        except Exception as error:  # whatever the reader raises is its answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
        else:
            Path(out, f"{i}.bin").write_bytes(payload)
            answers.append({"shape": shape})
    Path(out, "answers.json").write_text(json.dumps(answers))
