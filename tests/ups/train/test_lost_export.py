"""Training that is over, or goes on, and whose checkpoint is gone or damaged: exported again, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from noted import taken
from operator_runs import configure, made_once, own_copy, prepare_fields

from ups.config import RunConfig
from ups.data.identities import checkpoint_identity
from ups.errors import CheckpointError
from ups.train.run import run_stage, train_unless_valid
from ups.train.saved_state import TRAINING, state_path
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups.trained.specs import OPERATOR

PATH = Path("checkpoints/operator.safetensors")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare_fields)


@pytest.fixture
def config(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    folder = own_copy(prepared, tmp_path, monkeypatch)
    wanted = ("operator.state=fields", "training.ema_decay=0.9", "stages.operator.steps=10")
    return configure(folder, *wanted, "stages.operator.steps_per_epoch=5")


def train(config: RunConfig, **options: Any) -> dict[str, Any]:
    return run_stage("operator", config, **options)


def flip(path: Path) -> None:
    """Damage a checkpoint whose header stays whole."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def with_position(config: RunConfig, **position: Any) -> None:
    """Change what the training state says of where it is."""
    path = state_path(config, "operator")
    tensors, document = load_checkpoint(path, kind=TRAINING)
    document["position"] |= position
    save_checkpoint(path, tensors, kind=TRAINING, document=document)


@pytest.mark.parametrize("lose", [Path.unlink, flip, lambda path: path.write_bytes(b"")])
def test_lost_checkpoint_is_exported_again_from_the_training_state(
    config: RunConfig, lose: Callable[[Path], Any], notes: list[str]
) -> None:
    before = train(config)
    whole = checkpoint_identity(PATH, kind=OPERATOR)
    lose(PATH)
    assert checkpoint_identity(PATH, kind=OPERATOR) is None
    report = train(config)
    assert report["resumed_at"] == report["best_step"] == 10
    assert checkpoint_identity(PATH, kind=OPERATOR) == whole
    assert report["nrmse"] == before["nrmse"]
    assert f"it is exported again from {state_path(config, 'operator')}" in taken(notes)
    assert train(config)["resumed_at"] == 10
    assert "again" not in taken(notes)


def test_lost_weights_that_the_training_state_lacks_are_trained_again(
    config: RunConfig, notes: list[str]
) -> None:
    train(config)
    with_position(config, best_step=5)
    PATH.unlink()
    with pytest.raises(CheckpointError, match=r"those of step 5 were exported.*--restart") as caught:
        train(config)
    assert caught.value.kind == "lost_weights"
    report = train_unless_valid("operator", config, restart=False)
    assert report["resumed_at"] == 0
    assert PATH.exists()
    assert any("stage operator is trained again" in note for note in notes)


def test_lost_checkpoint_of_a_training_that_goes_on_is_that_of_an_epoch_to_come(
    config: RunConfig, notes: list[str]
) -> None:
    train(config)
    with_position(config, best_step=0, best=1e-9, step=5)
    PATH.unlink()
    report = train(config)
    assert (report["resumed_at"], report["best_step"]) == (5, 10)
    assert PATH.exists()
    assert "the best weights of the epochs to come are exported" in taken(notes)
