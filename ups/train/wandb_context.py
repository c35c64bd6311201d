"""The context file: one run of Weights & Biases for all processes that work on a run.

Builds of stores, stages, evaluations and `ups run` find it at WANDB_CONTEXT_FILE, else beside the
checkpoints. The first of them makes it. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import secrets
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from ups.config.run import WandbConfig
from ups.output import write_atomically
from ups.train.launched import restored

CONTEXT_VARIABLE = "WANDB_CONTEXT_FILE"
INFO_VARIABLE = "FAST_TO_SOTA_WANDB_INFO"  # where the earlier system wants to read which run it is
CONTEXT_FILE = "wandb_context.json"
OFF = "disabled"  # the mode in which nothing is kept
_ID_LENGTH = 8  # as wandb's own
_PROJECT = "uncategorized"  # W&B's own word


@dataclass(frozen=True)
class WandbContext:
    """Which run it is, and how far it is.

    Attributes:
        run_id: Its id.
        project: Project.
        entity: User or team; None for W&B's own choice, as of those that follow.
        group: Group of runs.
        name: Of the run, for people.
        mode: "online" or "offline", where WANDB_MODE doesn't say it.
        step: Rows that all processes have sent.
        url: Where to see it.
    """

    run_id: str
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    mode: str | None = None
    step: int = 0
    url: str | None = None

    @classmethod
    def of(cls, settings: WandbConfig, run_id: str | None = None) -> Self:
        """The context of a run that begins."""
        letters = string.ascii_lowercase + string.digits
        made_up = "".join(secrets.choice(letters) for _ in range(_ID_LENGTH))
        return cls(
            run_id or made_up,
            project=settings.project or os.environ.get("WANDB_PROJECT") or _PROJECT,
            entity=settings.entity,
            group=settings.group,
            name=settings.run_name,
            mode=os.environ.get("WANDB_MODE"),
        )

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What a file says; None if there is none, or it is no context."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
            return replace(cls(**known), step=int(known.get("step", 0)))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            OutputError: Such as on a full disk.
        """
        write_atomically(path, json.dumps(self.to_json(), indent=2).encode() + b"\n")

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def context_path(folder: Path, variables: Mapping[str, str] = os.environ) -> Path:
    """Where the context of a run lies."""
    return Path(variables.get(CONTEXT_VARIABLE) or folder / CONTEXT_FILE).absolute()


def forget_run(folder: Path) -> None:
    """Let a run that begins from scratch be one of its own, unless its context was handed over."""
    if not os.environ.get(CONTEXT_VARIABLE):
        (folder / CONTEXT_FILE).unlink(missing_ok=True)


@contextmanager
def handing_on(path: Path) -> Iterator[None]:
    """Inside, this process and those that it starts work on the run of a context."""
    with restored(CONTEXT_VARIABLE):
        os.environ[CONTEXT_VARIABLE] = str(path)
        yield
