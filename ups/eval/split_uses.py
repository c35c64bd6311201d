"""Which split an evaluation takes, and how often that was the test split.

For every use there is a line of a file beside the checkpoints. Each look at a test split, and what is changed
after it, makes it more of a development split, so reports show the number.
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
from ups.data.splits import SPLITS, Split
from ups.errors import ConfigError, OutputError, did_you_mean
from ups.log import logger
from ups.trained.checkpoint import hash_tensors

FILE = "test_uses.jsonl"


def check_split(split: str) -> Split:
    """One of the splits; "valid" is "val", as for the build."""
    known: dict[str, Split] = {name: name for name in SPLITS} | {"valid": "val"}
    if split not in known:
        hint = did_you_mean(split, known)
        raise ConfigError("--split", expected="dev, val, test or train", found=repr(split), hint=hint)
    return known[split]


def daily_split(split: str | None, configured: str) -> Split:
    """The split of an evaluation that isn't `ups evaluate --split test`: never "test".

    Configurations of earlier versions name the test split, as every one did by default: they get "dev".
    """
    wanted = check_split(split or configured)
    if wanted != "test":
        return wanted
    if split is not None:
        raise ConfigError(
            "the test split isn't for comparing while you work",
            kind="test_split",
            expected="--split dev, val or train",
            found="test",
            hint="`ups evaluate --split test` takes it, and counts how often it was used",
        )
    logger.info(
        "evaluation.split = test is taken as dev: only `ups evaluate --split test` uses the test split"
    )
    return "dev"


def count_test_uses(folder: Path) -> int:
    """How often the runs in a folder were evaluated on the test split."""
    path = folder / FILE
    if not path.exists():
        return 0
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())


def record_test_use(folder: Path, *, config: RunConfig, checkpoints: Sequence[Path]) -> None:
    """Count that a run was evaluated on its test split."""
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
