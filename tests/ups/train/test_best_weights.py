"""Which weights a run exports: its best, or those before its first step; and what it replaces by them."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from noted import taken
from test_trainer import CPU, Regression, make_config, train
from torch import Tensor, nn

from ups.errors import OutputError
from ups.optim import WeightsCopy
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, read_document, save_checkpoint

torch.set_num_threads(1)


class Exporting(Regression):
    """Exports its weights; validation gives these scores, the second of which is that of the untrained."""

    def __init__(self, folder: Path, scores: list[float], *overrides: str) -> None:
        super().__init__()
        self.path = folder / "autoencoder.safetensors"
        self.scores, self.config = iter(scores), make_config(folder, *overrides)

    def validate(self) -> dict[str, float]:
        return {"score": next(self.scores)}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        document = {"report": dict(metrics), "config": self.config.model_dump(mode="json")}
        save_checkpoint(self.path, weights, kind="autoencoder", document=document)
        return self.path

    def exports(self) -> dict[Path, str]:
        return {self.path: "autoencoder"}


def train_anew(folder: Path, scores: list[float], *overrides: str) -> Trainer:
    stage = Exporting(folder, scores, *overrides)
    return train(stage, stage.config, restart=True)


def score_of(path: Path) -> float:
    return float(read_document(path, kind="autoencoder")["report"]["score"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "autoencoder.safetensors"


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    return tmp_path / "autoencoder.previous.safetensors"


# --- which weights, and how long -----------------------------------------------------------------------


def test_only_improvements_are_exported_and_patience_ends_the_run(tmp_path: Path) -> None:
    scores = iter([3.0, 9.0, 2.0, 2.5, 2.5, 2.5, 1.0])  # the second is that before the first step
    stage = Regression()
    stage.validate = lambda: {"score": next(scores)}  # type: ignore[method-assign]
    config = make_config(tmp_path, "stages.autoencoder.epochs=6", "training.patience=3")
    assert train(stage, config).epoch == 5
    assert stage.exported == [3.0, 2.0]


def test_patience_counts_from_the_best_epoch_and_not_from_the_untrained_weights(tmp_path: Path) -> None:
    scores = iter([3.0, 0.5, 2.0, 1.0, 1.5, 0.1])
    stage = Regression()
    stage.validate = lambda: {"score": next(scores)}  # type: ignore[method-assign]
    config = make_config(tmp_path, "stages.autoencoder.epochs=6", "training.patience=1")
    assert train(stage, config).epoch == 4
    assert stage.exported == [0.5]


def test_run_that_continues_knows_its_best_epoch(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    first = Trainer(Exporting(tmp_path, [3.0, 0.5]), config, device=CPU)
    for _ in range(5):
        first.train_step()
    first._validate()
    first.save()
    second = Trainer(Exporting(tmp_path, []), config, device=CPU)
    assert second.best_weights.state() == first.best_weights.state()
    second.best_weights.take({"score": 2.0}, step=10)
    assert second.best_weights.bad_epochs == 0
    second.best_weights.take({"score": 2.5}, step=15)
    assert second.best_weights.bad_epochs == 1


def test_training_that_makes_it_worse_keeps_the_weights_before_it_and_warns(
    tmp_path: Path, notes: list[str]
) -> None:
    stage = Exporting(tmp_path, [3e8, 0.5, 1e9])
    untrained = {name: tensor.clone() for name, tensor in stage.model.state_dict().items()}
    best = train(stage, make_config(tmp_path)).best_weights
    kept, document = load_checkpoint(stage.path, kind="autoencoder")
    torch.testing.assert_close(kept, untrained, rtol=0, atol=0)
    assert document["report"] == {"score": 0.5}
    assert (best.step, best.start, best.score) == (0, 0.5, 0.5)
    assert not torch.equal(stage.model.state_dict()["0.weight"], untrained["0.weight"])
    said = taken(notes)
    assert "warning: training made it worse: validation error 3e+08 after step 5, 0.5 before" in said
    assert "1e+09 after step 10" in said


def test_weights_before_the_first_step_are_known_to_a_run_that_continues(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    first = Trainer(Exporting(tmp_path, []), config, device=CPU)
    untrained = first.stage.model.state_dict()["0.weight"].clone()
    for _ in range(3):
        first.train_step()
    first.save()
    stage = Exporting(tmp_path, [3e8, 0.5, 1e9])
    assert train(stage, config).best_weights.step == 0
    kept, _ = load_checkpoint(stage.path, kind="autoencoder")
    assert torch.equal(kept["0.weight"], untrained)


def test_untrained_weights_are_copied_to_the_cpu_in_the_first_epoch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Any] = []

    class Recorded(WeightsCopy):
        def __init__(self, model: nn.Module, *, device: torch.device | str | None = None) -> None:
            places.append(device)
            super().__init__(model, device=device)

    monkeypatch.setattr("ups.train.best.WeightsCopy", Recorded)
    config = make_config(tmp_path)
    first = Trainer(Exporting(tmp_path, []), config, device=CPU)
    first.train_step()
    first.save()
    train(Exporting(tmp_path, [0.3, 0.5, 0.2]), config)  # continues within the first epoch
    assert places == ["cpu", "cpu"]
    Trainer(Exporting(tmp_path, []), config, device=CPU)
    assert places == ["cpu", "cpu"]


# --- checkpoints of an earlier run ---------------------------------------------------------------------


def test_better_checkpoint_of_an_earlier_run_is_set_aside(
    tmp_path: Path, path: Path, previous: Path, notes: list[str]
) -> None:
    train_anew(tmp_path, [0.2, 0.5, 0.1])
    assert (score_of(path), previous.exists()) == (0.1, False)
    file = path.stat().st_ino
    train_anew(tmp_path, [3e8, 0.5, 1e9])
    assert (score_of(path), score_of(previous)) == (0.5, 0.1)
    assert previous.stat().st_ino == file  # the same file: nothing was copied
    better = f"{path} of an earlier run is better than the first epoch of this run"
    assert f"{better} (validation error 0.1, now 0.5); kept as {previous}" in taken(notes)
    train_anew(tmp_path, [0.55, 0.6, 1.0])  # the better of the two stays
    assert (score_of(path), score_of(previous)) == (0.55, 0.1)
    shown = f"(validation error 0.5, now 0.55); not kept, since {previous} is at least as good (0.1)"
    said = taken(notes)
    assert f"{better} {shown}" in said
    assert f"; kept as {previous}" not in said
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    "other",
    [
        "data.limit=7",
        "training.stride=2",
        "training.max_val_frames=3",
        "operator.val_trajectories=1",
    ],
)
def test_checkpoint_that_was_validated_otherwise_is_not_compared(
    tmp_path: Path, path: Path, previous: Path, notes: list[str], other: str
) -> None:
    train_anew(tmp_path, [0.2, 0.5, 0.1], other)
    train_anew(tmp_path, [0.4, 0.5, 0.3])
    assert (score_of(path), previous.exists()) == (0.3, False)
    assert "earlier run" not in taken(notes)


def test_checkpoint_with_other_metrics_is_replaced(tmp_path: Path, path: Path, previous: Path) -> None:
    stage = Exporting(tmp_path, [0.4, 0.5, 0.3])
    document = {"report": {"score": 0.1, "other": 1.0}, "config": stage.config.model_dump(mode="json")}
    save_checkpoint(path, {}, kind="autoencoder", document=document)
    train(stage, stage.config)
    assert score_of(path) == 0.3
    assert not previous.exists()


def refuse(number: int) -> Any:
    def refused(*args: Any) -> None:
        raise OSError(number, errno.errorcode[number])

    return refused


def test_better_checkpoint_is_copied_where_links_can_not_be_made(
    tmp_path: Path, path: Path, previous: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_anew(tmp_path, [0.2, 0.5, 0.1])
    monkeypatch.setattr(Path, "hardlink_to", refuse(errno.EPERM))
    train_anew(tmp_path, [0.3, 0.5, 0.4])
    assert (score_of(path), score_of(previous)) == (0.3, 0.1)


def full_disk(path: Path, content: bytes) -> None:
    raise OutputError.of(OSError(errno.ENOSPC, "no room"), path)


def test_better_checkpoint_that_can_not_be_kept_does_not_cost_the_epoch(
    tmp_path: Path, path: Path, previous: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    train_anew(tmp_path, [0.2, 0.5, 0.1])
    monkeypatch.setattr(Path, "hardlink_to", refuse(errno.EPERM))
    monkeypatch.setattr("ups.train.best.write_atomically", full_disk)
    trainer = train_anew(tmp_path, [0.3, 0.5, 0.4])
    assert (trainer.step, score_of(path), previous.exists()) == (10, 0.3, False)
    said = taken(notes)
    assert "warning: " in said
    assert f"it can't be kept: {previous}: can't be written (no room)" in said
