"""What a training state was saved of: whether a stage can be continued from it, and would compute the same.

Its document is read without its tensors, and without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.config import RunConfig, StageConfig
from ups.config.legacy import of_document, present_stage, stage_file
from ups.config.stage_keys import flat_keys, stage_keys
from ups.config.training import LawsConfig
from ups.errors import CheckpointError, ConfigError
from ups.stages import BASELINES, STAGES
from ups.trained.checkpoint import read_document

TRAINING = "training"  # kind of checkpoint
_MOST_SHOWN = 8  # differing keys in one message
# What a state holds, and what its position says; one that lacks any of it is of an earlier version.
_PARTS = frozenset({"config", "data_identity", "position", "scaler", "ema_updates", "named_by"})
NAMED_BY = "parameter"  # the state of the optimiser; by number before
POSITION = frozenset(
    {
        "step",
        "global_batch_size",
        "wandb_id",
        "learning_rate",
        "stage",
        "best",
        "best_step",
        "start_score",
        "best_epoch_score",
        "bad_epochs",
        "work",
    }
)


@dataclass(frozen=True)
class SavedState:
    """What a state was saved of, to be compared before anything is opened, built or replaced.

    Attributes:
        path: The file.
        document: Its JSON document.
    """

    path: Path
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedState:
        """Read the document without the tensors.

        Raises:
            CheckpointError: As `read_document`.
        """
        with hinting_at_restart():
            return cls(path, read_document(path, kind=TRAINING))

    def check_config(self, config: RunConfig, *, stage: str) -> None:
        """Fail unless a stage can continue from the state and would compute the same, or the same for longer.

        Raises:
            CheckpointError: Kind "too_old", with what the state lacks; "other_config", with the keys that
                differ.
        """
        self._check_complete()
        differing = differing_keys(self.document["config"], config, stage=stage)
        length = _length_keys(stage)
        check_same(self.path, "configuration", [text for text in differing if not text.startswith(length)])

    def check_batch(self, config: RunConfig, *, stage: str, num_ranks: int) -> None:
        """Fail unless the configuration makes batches of as many rows; before stores are built for it."""
        if not isinstance(STAGES[stage].maker, str):
            return  # a stage of one's own draws what batches it likes; the trainer compares them
        rows = config.stage(stage).rows_over(num_ranks)
        check_batch(self.path, self.document["position"], rows=rows, num_ranks=num_ranks)

    def changes(self, config: RunConfig, *, stage: str) -> Iterator[str]:
        """Say what may differ from the state and yet changes what is still to be trained."""
        saved = of_document(self.document["config"])
        for text in differing_keys(saved, config, stage=stage):
            yield f"{text}: training goes on, from here on by the schedule of the new length"
        values = config.model_dump(mode="json")
        for section in ("training", f"stages.{stage}"):
            was, now = (flat_keys(keys).get(f"{section}.compile") for keys in (saved, values))
            if was != now:
                yield f"{section}.compile was {was} and is {now}: training goes on, equal up to rounding"

    def check_data(self, data_identity: Mapping[str, Any]) -> None:
        """Fail unless these are the data that the state was trained on.

        Raises:
            CheckpointError: Kind "other_data", with what differs.
        """
        was, now = json.loads(json.dumps([self.document["data_identity"], dict(data_identity)]))
        check_same(self.path, "data", _differing(flat_keys(was), flat_keys(now)))

    @property
    def is_over(self) -> bool:
        """Whether nothing was left to train; False of a state of earlier versions, which don't say."""
        return bool(self.document.get("is_over", False))

    @property
    def is_first_epoch_over(self) -> bool:
        """Whether the weights before the first step were measured already."""
        return self.document.get("position", {}).get("start_score") is not None

    def _check_complete(self) -> None:
        position = self.document.get("position", {})
        missing = sorted((_PARTS - self.document.keys()) | (POSITION - position.keys()))
        if missing:
            with hinting_at_restart():
                raise CheckpointError(
                    "the training state was written by an earlier version",
                    kind="too_old",
                    path=self.path,
                    found="no " + ", ".join(missing),
                )


def state_path(config: RunConfig, stage: str) -> Path:
    """Where the state of a stage is saved."""
    return stage_file(config.checkpoint.dir / f"{stage}.training.safetensors")


def check_interrupted(config: RunConfig, stages: Iterable[str], *, num_ranks: int) -> None:
    """Fail if stages were interrupted that can't go on with this configuration."""
    for stage in stages:
        if (path := state_path(config, stage)).exists() and not (state := SavedState.read(path)).is_over:
            state.check_config(config, stage=stage)
            state.check_batch(config, stage=stage, num_ranks=num_ranks)


def check_batch(path: Path, position: Mapping[str, Any], *, rows: int, num_ranks: int) -> None:
    """Fail unless a run goes on with batches of as many rows, over all ranks."""
    if (saved := position["global_batch_size"]) != rows:
        of_ranks = "" if num_ranks == 1 else f" on {num_ranks} ranks"
        kept = f"training.batch_size={saved}"
        if num_ranks > 1:
            kept = f"training.global_batch_size={saved}, on any number of ranks that divides it,"
        check_same(
            path,
            "configuration",
            [f"a batch over all ranks had {saved} rows and has {rows}{of_ranks}"],
            hint=f"{kept} keeps it; or use another checkpoint.dir, or begin again: {_anew(path)}",
        )


def _anew(path: Path) -> str:
    return f"ups train --stage {present_stage(path.name.partition('.')[0])} --restart"


@contextmanager
def hinting_at_restart() -> Iterator[None]:
    """Inside, a state that can't be read says how to go on without it."""
    try:
        yield
    except CheckpointError as error:
        error.hint = "begin again with --restart; what was exported before is kept"
        raise


def differing_keys(saved: Mapping[str, Any], config: RunConfig, *, stage: str) -> list[str]:
    """Keys that change what a stage computes and differ from a saved configuration, with both values."""
    both = (of_document(saved), config.model_dump(mode="json"))
    before, now = (stage_keys(_with_stage(values, stage), stage) for values in both)
    return _differing(before, now)


def _with_stage(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Fill in the defaults of a stage, and of laws, that weren't said, or weren't known then."""
    stages = values.get("stages", {})
    own = {**StageConfig().model_dump(mode="json"), **stages.get(stage, {})}
    plain = LawsConfig().model_dump(mode="json")
    laws = {task: {**plain, **said} for task, said in values.get("laws", {}).items()}
    return {**values, "stages": {**stages, stage: own}, "laws": laws}


def _length_keys(stage: str) -> tuple[str, ...]:
    """Begin the sentences about keys that only say how long a stage is trained.

    The budget of a baseline isn't one: what is compared at equal budgets is trained within them from scratch.
    """
    names = ("epochs ", "steps ") if stage in BASELINES else ("epochs ", "steps ", "budget")
    return tuple(f"stages.{stage}.{name}" for name in names)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def check_same(
    path: Path,
    what: str,
    differing: list[str],
    *,
    hint: str | None = None,
) -> None:
    """Fail where anything differs: CheckpointError, kind "other_config" or "other_data", with what does."""
    if differing:
        shown = "; ".join(differing[:_MOST_SHOWN])
        more = f" and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
        error = CheckpointError(
            f"the training state is of another {what}: {shown}{more}",
            kind="other_config" if what == "configuration" else "other_data",
            path=path,
            hint=hint or f"go back to it, use another checkpoint.dir, or begin again: {_anew(path)}",
        )
        error.exit_code = ConfigError.exit_code  # as for a store that is of something else
        raise error
