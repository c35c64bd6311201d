"""How often a run was evaluated on its test split: a line of a file beside its checkpoints for every time.

Each look at a test split, and what is changed after it, makes it more of a development split, so reports show
the number.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ups.config import RunConfig
from ups.errors import OutputError
from ups.trained.checkpoint import hash_tensors

FILE = "test_uses.jsonl"


def count_test_uses(folder: Path) -> int:
    """How often the runs in a folder were evaluated on the test split."""
    path = folder / FILE
    if not path.exists():
        return 0
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())


def record_test_use(folder: Path, *, config: RunConfig, checkpoints: Sequence[Path]) -> None:
    """Count that a run was evaluated on its test split.

    Args:
        folder: Of its checkpoints; of those of all seeds.
        config: Configuration of the run.
        checkpoints: The operators that were evaluated.

    Raises:
        OutputError: If the file can't be written.
    """
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["ups", *sys.argv[1:]]),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "checkpoints": {str(path): hash_tensors(path) for path in checkpoints},
    }
    try:
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise OutputError.of(error, folder / FILE) from error
