"""The training loop on a small regression: exact resume, signals, divergence, averages, the log."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from noted import taken
from numbered_batches import numbered_loader
from torch import Tensor, nn

from ups.config import RunConfig, load_config
from ups.data.augment import Draws
from ups.data.batches import TaskBatch
from ups.errors import CheckpointError, ConfigError, DivergedError, InterruptedTrainingError
from ups.train.meter import LossMeter
from ups.train.saved_state import differing_keys
from ups.train.stage import Losses, Stage, make_stage
from ups.train.trainer import Trainer
from ups.trained.checkpoint import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rows(TaskBatch):
    """Where a sine is wanted, (B, 1)."""

    x: Tensor


class Regression(Stage):
    """A stage: fit y = sin(x) with dropout, so that the generators of random numbers matter too."""

    name = "autoencoder"

    def __init__(
        self,
        *,
        bad_batch: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ahead: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.bad_batch, self.on_batch = bad_batch, on_batch
        self.numbers: list[int] = []
        self.exported: list[float] = []
        self.loader = numbered_loader(self.batch, 5, ahead=ahead)

    def batch(self, number: int) -> Rows:
        self.numbers.append(number)
        if self.on_batch is not None:
            self.on_batch(number)
        x = torch.rand(4, 1, generator=torch.Generator().manual_seed(number))
        draws = Draws.of_batch(4, seed=number)
        return Rows("sine", x * math.nan if number == self.bad_batch else x, draws=draws)

    def losses(self, forward: Callable[..., Tensor], batch: Rows) -> Losses:
        error = (forward(batch.x) - batch.x.sin()).square().mean()
        return {"error": error, "size": 1e-3 * forward(batch.x).square().mean()}

    def validate(self) -> dict[str, float]:
        assert not self.model.training
        x = torch.linspace(0, 1, 9)[:, None]
        with torch.no_grad():
            return {"score": (self.model(x) - x.sin()).square().mean().item()}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        self.exported.append(metrics["score"])
        return Path("exported")

    def finish(self) -> dict[str, Any]:
        return {"score": self.exported[-1] if self.exported else None}


def make_config(folder: Path, *overrides: str) -> RunConfig:
    common = ["data.tasks=burgers1d", f"checkpoint.dir={folder}", "stages.autoencoder.epochs=2"]
    settings = ["stages.autoencoder.optimizer.lr=0.02", "training.log_every=3", "training.ema_decay=0.9"]
    settings += ["training.prefetch_factor=0"]  # a signal or a bad batch comes at its step, not ahead of it
    return load_config(overrides=[*common, *settings, *overrides])


def train(stage: Regression, config: RunConfig, **options: Any) -> Trainer:
    trainer = Trainer(stage, config, device=CPU, **options)
    trainer.fit()
    return trainer


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "autoencoder.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def expect_equal(first: Trainer, second: Trainer) -> None:
    """Weights, averages and optimiser states are equal to the bit."""
    for name, tensor in first.stage.model.state_dict().items():
        torch.testing.assert_close(second.stage.model.state_dict()[name], tensor, rtol=0, atol=0)
    if first.averaged is not None and second.averaged is not None:
        for name, tensor in first.averaged.averages.items():
            torch.testing.assert_close(second.averaged.averages[name], tensor, rtol=0, atol=0)
    states = (trainer.optimizer.state_dict()["state"] for trainer in (first, second))
    torch.testing.assert_close(*states, rtol=0, atol=0)


# --- resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("scheduler", ["cosine", "plateau"])
def test_ten_steps_equal_five_and_a_resume_and_five(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    overrides = [
        f"stages.autoencoder.optimizer.name={optimizer}",
        f"stages.autoencoder.scheduler.name={scheduler}",
        "stages.autoencoder.scheduler.patience=0",
    ]
    through = train(Regression(), make_config(tmp_path / "through", *overrides))
    config = make_config(tmp_path / "parts", *overrides)
    first = Trainer(Regression(), config, device=CPU)
    for _ in range(5):
        first.train_step()
    first._validate()
    first.save()
    torch.manual_seed(99)  # whatever happens between the two processes
    stage = Regression()
    second = train(stage, config)
    assert stage.numbers == list(range(5, 10))
    assert second.step == 10
    expect_equal(through, second)
    assert second.best_weights.score == through.best_weights.score


def test_resume_in_the_middle_of_an_epoch_and_with_accumulation(tmp_path: Path) -> None:
    overrides = ["training.accum_steps=2", "stages.autoencoder.steps_per_epoch=4"]
    through = train(Regression(), make_config(tmp_path / "through", *overrides))
    config = make_config(tmp_path / "parts", *overrides)
    first = Trainer(Regression(), config, device=CPU)
    for _ in range(3):
        first.train_step()
    first.save()
    stage = Regression()
    second = train(stage, config)
    assert stage.numbers == list(range(6, 16))
    expect_equal(through, second)


def test_number_of_steps_is_cut_into_epochs_and_resumed_from(tmp_path: Path) -> None:
    overrides = ["stages.autoencoder.steps=7", "stages.autoencoder.epochs=3"]
    through = train(Regression(), make_config(tmp_path / "through", *overrides))
    assert (through.step, through.learning_rate.at(7)) == (7, 0.0)  # the cosine ends with the last step
    assert [record["step"] for record in records(tmp_path / "through", "epoch")] == [3, 6, 7]
    config = make_config(tmp_path / "parts", *overrides)
    first = Trainer(Regression(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    expect_equal(through, train(Regression(), config))


def test_work_is_counted_once_however_a_run_is_interrupted(tmp_path: Path) -> None:
    """Two passes through layers of 1 x 8 and 8 x 1: forward, and backward for weights and inner values."""
    through = train(Regression(), make_config(tmp_path / "through"))
    products = 2 * 4 * (8 + 8)  # of 4 rows
    step = 2 * (3 * products - 2 * 4 * 8)  # the input needs no gradient
    assert through.work.read()["training/flops"] == 10 * step
    config = make_config(tmp_path / "parts")
    first = Trainer(Regression(), config, device=CPU)
    for _ in range(4):
        first.train_step()
    first.save()
    second = train(Regression(), config)
    assert second.work.read()["training/flops"] == 10 * step
    assert second.work.read()["training/processor_s"] > first.work.read()["training/processor_s"] > 0
    assert records(tmp_path / "parts", "epoch")[-1]["training/flops"] == 10 * step


def test_finished_run_is_not_repeated_and_restart_repeats_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    done = train(Regression(), config)
    again = Regression()
    train(again, config)
    assert again.numbers == []
    anew = Regression()
    expect_equal(done, train(anew, config, restart=True))
    assert anew.numbers == list(range(10))


def test_state_of_another_configuration_is_refused_with_the_keys(tmp_path: Path) -> None:
    train(Regression(), make_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"training\.accum_steps was 1 and is 2") as caught:
        train(Regression(), make_config(tmp_path, "training.accum_steps=2"))
    assert caught.value.kind == "other_config"
    train(Regression(), make_config(tmp_path, "training.log_every=1", "stages.operator.epochs=3"))


@pytest.mark.parametrize(
    "override",
    [
        "latent.pin_memory=false",
        "training.pin_memory=false",
        "training.latent_cache_dir=elsewhere",
        "training.latent_cache_dtype=float32",
        "training.activation_checkpointing=selective",
        "operator.pdet.use_activation_checkpoint=true",
    ],
)
def test_key_that_changes_no_step_may_differ_between_a_run_and_its_continuation(
    tmp_path: Path, override: str
) -> None:
    saved = make_config(tmp_path).model_dump(mode="json")
    assert differing_keys(saved, make_config(tmp_path, override), stage="operator") == []
    assert differing_keys(saved, make_config(tmp_path, "latent.micro_batch=8"), stage="operator") != []


@pytest.mark.parametrize("prefix", ["model.", "ema."])
def test_state_that_lacks_weights_is_refused_with_a_way_on(tmp_path: Path, prefix: str) -> None:
    config = make_config(tmp_path)
    path = train(Regression(), config).state_path
    tensors, document = load_checkpoint(path, kind="training")
    del tensors[f"{prefix}0.weight"]
    save_checkpoint(path, tensors, kind="training", document=document)
    with pytest.raises(CheckpointError, match=r"0\.weight.*; begin again with --restart") as caught:
        Trainer(Regression(), config, device=CPU)
    assert (caught.value.kind, caught.value.path) == ("other_weights", str(path))


@pytest.mark.parametrize("key", ["best_step", "start_score"])
def test_state_of_an_earlier_version_is_refused_with_what_it_lacks(tmp_path: Path, key: str) -> None:
    config = make_config(tmp_path)
    path = train(Regression(), config).state_path
    tensors, document = load_checkpoint(path, kind="training")
    del document["position"][key]
    save_checkpoint(path, tensors, kind="training", document=document)
    with pytest.raises(CheckpointError, match=f"by an earlier version: found no {key}; begin") as caught:
        Trainer(Regression(), config, device=CPU)
    assert caught.value.kind == "too_old"


# --- interruption and divergence -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_next_run_continues(tmp_path: Path, number: signal.Signals) -> None:
    config = make_config(tmp_path / "parts")

    def stop(batch: int) -> None:
        if batch == 6:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(
        InterruptedTrainingError, match=f"stopped by {number.name} after step 7 of 10"
    ) as caught:
        train(Regression(on_batch=stop), config)
    assert caught.value.exit_code == 5
    assert signal.getsignal(number) is before
    expect_equal(train(Regression(), make_config(tmp_path / "through")), train(Regression(), config))


def test_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    stage = Regression(bad_batch=6)
    with pytest.raises(DivergedError, match="step 7: loss 'error' is not finite") as caught:
        train(stage, config)
    assert (caught.value.step, caught.value.loss_name) == (7, "error")
    kept = Trainer(Regression(), config, device=CPU)
    assert kept.step == 5
    assert all(tensor.isfinite().all() for tensor in kept.stage.model.state_dict().values())


def test_state_is_saved_at_intervals_within_an_epoch(tmp_path: Path) -> None:
    config = make_config(tmp_path, "checkpoint.interval=2")
    with pytest.raises(DivergedError):
        train(Regression(bad_batch=3), config)
    assert Trainer(Regression(), config, device=CPU).step == 2
    assert [record["step"] for record in records(tmp_path, "step")] == [2, 3]


def test_meter_averages_and_names_the_first_loss_that_is_not_finite() -> None:
    meter = LossMeter()
    meter.add({"a": torch.tensor(1.0), "b": torch.tensor(4.0)}, step=1)
    meter.add({"a": torch.tensor(3.0)}, step=2)
    assert meter.read() == {"a": 2.0, "b": 4.0}
    assert meter.read() == {}
    meter.add({"a": torch.tensor(1.0), "b": torch.tensor(math.inf)}, step=5)
    meter.add({"a": torch.tensor(math.nan), "b": torch.tensor(1.0)}, step=6)
    with pytest.raises(DivergedError, match="step 5: loss 'b'"):
        meter.read()


# --- the rest ------------------------------------------------------------------------------------------


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    class Large(Regression):
        def batch(self, number: int) -> Rows:
            parts = [super(Large, self).batch(2 * number + i) for i in range(2)]
            return dataclasses.replace(parts[0], x=torch.cat([part.x for part in parts]))

    def without_dropout(stage: Regression, *overrides: str) -> Regression:
        stage.model[2].p = 0.0
        Trainer(stage, make_config(tmp_path / str(len(overrides)), *overrides), device=CPU).train_step()
        return stage

    small = without_dropout(Regression(), "training.accum_steps=2")
    large = without_dropout(Large())
    torch.testing.assert_close(small.model[0].weight, large.model[0].weight)


def test_averaged_weights_are_validated_and_trained_ones_stay(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), make_config(tmp_path), device=CPU)
    assert trainer.averaged is not None
    untrained = trainer.stage.model[0].weight.detach().clone()
    for _ in range(3):
        trainer.train_step()
    trained = trainer.stage.model[0].weight.detach().clone()
    averaged = trainer.averaged.averages["0.weight"].clone()
    assert not torch.equal(trained, averaged)
    seen: list[Tensor] = []
    trainer.stage.validate = lambda: (
        seen.append(trainer.stage.model[0].weight.detach().clone()) or {"score": 1.0}
    )  # type: ignore[method-assign,func-returns-value]
    trainer._validate()
    torch.testing.assert_close(seen, [averaged, untrained], rtol=0, atol=0)
    torch.testing.assert_close(trainer.stage.model[0].weight.detach(), trained, rtol=0, atol=0)


def test_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    overrides = [
        "training.grad_clip=1e-3",
        "stages.autoencoder.optimizer.name=sgd",
        "training.ema_decay=null",
    ]
    config = make_config(tmp_path, *overrides, "stages.autoencoder.optimizer.momentum=0")
    trainer = Trainer(Regression(), config, device=CPU)
    before = [p.detach().clone() for p in trainer.stage.model.parameters()]
    trainer.train_step()
    pairs = zip(trainer.stage.model.parameters(), before, strict=True)
    step = torch.cat([(new.detach() - old).flatten() for new, old in pairs])
    assert step.norm().item() == pytest.approx(0.02 * 1e-3, rel=1e-3)


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Watched(Regression):
        def losses(self, forward: Callable[..., Tensor], batch: Rows) -> Losses:
            seen.append(forward(batch.x).dtype)
            return super().losses(forward, batch)

    trainer = train(Watched(), make_config(tmp_path, "training.amp=true"))
    assert set(seen) == {torch.bfloat16}
    assert trainer.stage.model[0].weight.dtype == torch.float32


def test_float16_scales_its_loss_and_continues_with_the_scale(tmp_path: Path) -> None:
    overrides = ["training.amp=true", "training.amp_dtype=float16"]
    through = train(Regression(), make_config(tmp_path / "through", *overrides))
    assert through.scaler.is_enabled()
    config = make_config(tmp_path / "parts", *overrides)
    first = Trainer(Regression(), config, device=CPU)
    for _ in range(5):
        first.train_step()
    first.scaler.update(256.0)
    first._validate()
    first.save()
    assert Trainer(Regression(), config, device=CPU).scaler.get_scale() == 256.0


def test_log_holds_losses_rates_and_epochs(tmp_path: Path) -> None:
    train(Regression(), make_config(tmp_path))
    steps = records(tmp_path, "step")
    assert [record["step"] for record in steps] == [3, 5, 6, 9, 10]
    assert {"lr", "loss/error", "loss/size", "training/data_wait_share"} <= steps[0].keys()
    assert [record["epoch"] for record in records(tmp_path, "epoch")] == [1, 2]
    assert records(tmp_path, "start")[0]["config"]["data"]["tasks"] == ["burgers1d"]
    assert len(records(tmp_path, "end")) == 1


def test_failing_compiler_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(model: nn.Module, *, mode: str) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            raise TorchDynamoException(f"no compiler for {mode}")

        return call

    monkeypatch.setattr("torch.compile", broken)
    trainer = train(Regression(), make_config(tmp_path / "broken", "training.compile=true"))
    assert "torch.compile failed, going on without: TorchDynamoException: no compiler" in taken(notes)
    expect_equal(trainer, train(Regression(), make_config(tmp_path / "eager")))


def test_unknown_stage_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one of autoencoder.*found 'operatr'") as caught:
        make_stage("operatr", make_config(tmp_path), device=CPU)
    assert caught.value.kind == "unknown_stage"
