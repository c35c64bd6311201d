"""Each option of the training loop changes what it says: schedule, optimiser, precision, compiling, data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_runs import make_folder
from numbered_batches import batch_of
from test_trainer import CPU, Regression, Rows, make_config, records, train
from torch import Tensor, nn

from ups.config import OptimizerConfig, load_config
from ups.errors import ConfigError
from ups.optim import ParameterGroup, make_optimizer
from ups.train.autoencoder import AutoencoderStage, make_autoencoder_stage
from ups.train.distributed import joined_ranks
from ups.train.trainer import Trainer

OPTIMIZER, SCHEDULER = "stages.autoencoder.optimizer", "stages.autoencoder.scheduler"


# --- learning rates and optimisers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (["name=constant"], [0.02, 0.02, 0.02]),
        (["name=step", "step_size=1", "gamma=0.1"], [0.02, 0.002, 0.0002]),
        (["name=plateau", "patience=0", "factor=0.1"], [0.02, 0.02, 0.002]),  # no epoch is better
        (["name=cosine", "t_max=2"], [0.02, 0.01, 0.0]),
        (["name=constant", "warmup_steps=10"], [0.002, 0.012, 0.02]),
    ],
)
def test_schedule_sets_the_rate_of_the_first_step_of_each_epoch(
    tmp_path: Path, settings: list[str], rates: list[float]
) -> None:
    stage = Regression()
    stage.validate = lambda: {"score": 1.0}  # type: ignore[method-assign]
    scheduler = [f"{SCHEDULER}.{setting}" for setting in settings]
    train(stage, make_config(tmp_path, "stages.autoencoder.epochs=3", "training.log_every=1", *scheduler))
    found = {record["step"]: record["lr"] for record in records(tmp_path, "step")}
    assert [found[1], found[6], found[11]] == pytest.approx(rates)


def test_rate_of_training_is_that_of_a_stage_that_says_none(tmp_path: Path) -> None:
    config = make_config(tmp_path, f"{OPTIMIZER}.lr=null", "training.lr=0.005")
    train(Regression(), config)
    assert records(tmp_path, "step")[0]["lr"] == pytest.approx(0.005, rel=0.3)  # a cosine's third step


def two_steps(**settings: Any) -> list[float]:
    """A weight of 1 whose gradient is 0.5, after each of two steps."""
    weight = nn.Parameter(torch.ones(1, 1))
    config = OptimizerConfig(lr=0.1, **settings)
    optimizer = make_optimizer([ParameterGroup({"weight": weight}, config.weight_decay)], config)
    found = []
    for _ in range(2):
        weight.grad = torch.full((1, 1), 0.5)
        optimizer.step()
        found.append(weight.item())
    return found


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"name": "sgd", "momentum": 0.0}, [0.95, 0.9]),
        ({"name": "sgd", "momentum": 0.5}, [0.95, 0.875]),
        ({"name": "sgd", "momentum": 0.0, "weight_decay": 1.0}, [0.85, 0.715]),  # added to the gradient
        ({"name": "adam"}, [0.9, 0.8]),
        ({"name": "adam", "eps": 0.5}, [0.95, 0.9]),
        ({"name": "adamw", "weight_decay": 1.0}, [0.8, 0.62]),  # apart from the gradient
        ({"name": "adam", "weight_decay": 1.0}, [0.9, 0.8003]),  # added to it, and divided by its size
    ],
)
def test_optimizer_moves_a_weight_by_its_formula(settings: dict[str, Any], weights: list[float]) -> None:
    assert two_steps(**settings) == pytest.approx(weights, abs=1e-3)


def test_betas_weigh_old_gradients() -> None:
    def after_a_turn(*betas: float) -> float:
        weight = nn.Parameter(torch.ones(1, 1))
        config = OptimizerConfig(name="adam", lr=0.1, betas=betas)
        optimizer = make_optimizer([ParameterGroup({"weight": weight}, 0.0)], config)
        for gradient in (1.0, -1.0):
            weight.grad = torch.full((1, 1), gradient)
            optimizer.step()
        return weight.item()

    assert after_a_turn(0.0, 0.5) == pytest.approx(1.0)  # the last gradient alone
    assert after_a_turn(0.5, 0.5) == pytest.approx(0.9 + 0.1 / 3)  # (0.5 x 0.5 - 0.5) / (1 - 0.5^2) = -1/3


# --- the loop ------------------------------------------------------------------------------------------


HALF = ["training.amp=true", "training.amp_dtype=float16"]


def make_trainer(folder: Path, *overrides: str) -> Trainer:
    stage = Regression()
    stage.model[2].p = 0.0  # no dropout
    return Trainer(stage, make_config(folder, f"{OPTIMIZER}.name=sgd", *overrides), device=CPU)


def set_scale(trainer: Trainer, scale: float) -> None:
    trainer.scaler.scale(torch.zeros(1))  # which makes it
    trainer.scaler.update(scale)


def test_step_in_float16_is_that_in_float32_whatever_its_scale(tmp_path: Path) -> None:
    found: list[Tensor] = []
    for number, overrides in enumerate(([], HALF, HALF)):
        trainer = make_trainer(tmp_path / str(number), "training.grad_clip=null", *overrides)
        if overrides:
            set_scale(trainer, 64.0**number)
        trainer.train_step()
        found.append(trainer.stage.model[0].weight.detach())
    assert not torch.equal(found[1], found[0])
    # Gradients of float16 have 11 bits, and are multiplied by the learning rate.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3 * 0.02)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-3 * 0.02)


def test_gradients_that_overflow_in_float16_are_left_out_and_the_scale_is_halved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, *HALF)
    before = [p.detach().clone() for p in trainer.stage.model.parameters()]
    set_scale(trainer, 2.0**40)
    trainer.train_step()
    assert trainer.scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, old) for p, old in zip(trainer.stage.model.parameters(), before, strict=True))


@pytest.mark.parametrize("most", [1e-3, None])
def test_logged_gradient_norm_is_that_of_the_last_step_before_it_is_clipped(
    tmp_path: Path, most: float | None
) -> None:
    shown = "null" if most is None else most
    overrides = [f"training.grad_clip={shown}", "training.log_every=1", "training.accum_steps=2"]
    trainer, expected = make_trainer(tmp_path, *overrides), list[float]()
    taken = trainer.optimizer.step

    def watched() -> None:
        after = [p.grad for p in trainer.stage.model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in after]).norm().item()
        assert most is None or norm == pytest.approx(most, rel=1e-3)
        taken()

    def losses(forward: Callable[..., Tensor], batch: Rows) -> dict[str, Tensor]:
        weights = list(trainer.stage.model.parameters())
        found = plain(forward, batch)
        total = torch.stack(list(found.values())).sum()
        gradients.append(torch.autograd.grad(total, weights, retain_graph=True))
        if len(gradients) % 2 == 0:
            mean = [(one + other) / 2 for one, other in zip(*gradients[-2:], strict=True)]
            expected.append(torch.stack([gradient.norm() for gradient in mean]).norm().item())
        return found

    plain, gradients = trainer.stage.losses, list[tuple[Tensor, ...]]()
    trainer.work.add = lambda batch: None  # type: ignore[method-assign]  # computes them once more
    trainer.stage.losses = losses  # type: ignore[method-assign]
    trainer.optimizer.step = watched  # type: ignore[method-assign,assignment]
    trainer.fit()
    found = [record["training/gradient_norm"] for record in records(tmp_path, "step")]
    assert found == pytest.approx(expected, rel=1e-4)
    assert min(found) > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_autocast_is_the_one_that_is_said(tmp_path: Path, dtype: str) -> None:
    seen: set[torch.dtype] = set()

    class Watched(Regression):
        def losses(self, forward: Callable[..., Tensor], batch: Rows) -> dict[str, Tensor]:
            seen.add(forward(batch.x).dtype)
            return super().losses(forward, batch)

    config = make_config(tmp_path, "training.amp=true", f"training.amp_dtype={dtype}")
    Trainer(Watched(), config, device=CPU).train_step()
    assert seen == {getattr(torch, dtype)}


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_compiled_model_is_what_the_losses_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    calls: list[str] = []

    def compiled(model: nn.Module, *, mode: str) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            calls.append(mode)
            return model(*args)

        return call

    monkeypatch.setattr("torch.compile", compiled)
    make_trainer(tmp_path, "training.compile=true", f"training.compile_mode={mode}").train_step()
    assert calls == [mode, mode]  # its losses call it twice


def test_run_without_averages_has_none(tmp_path: Path) -> None:
    assert make_trainer(tmp_path / "with").averaged is not None
    assert make_trainer(tmp_path / "without", "training.ema_decay=null").averaged is None


def test_log_goes_where_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "log.jsonl"
    train(Regression(), make_config(tmp_path, f"training.log_path={path}"))
    assert "autoencoder" in path.read_text()
    assert not (tmp_path / "autoencoder.jsonl").exists()


def test_state_is_dropped_after_the_end_where_nobody_wants_it(tmp_path: Path) -> None:
    kept = train(Regression(), make_config(tmp_path / "kept"))
    assert kept.state_path.exists()
    dropped = train(Regression(), make_config(tmp_path / "d", "checkpoint.keep_training_state=false"))
    assert not dropped.state_path.exists()


def test_ranks_wait_for_each_other_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def joined(backend: str, **options: Any) -> None:
        told.update(options)
        raise ConfigError("seen")

    monkeypatch.setattr("torch.distributed.init_process_group", joined)
    variables = {"RANK": "0", "WORLD_SIZE": "2"}
    with (
        pytest.raises(ConfigError, match="seen"),
        joined_ranks("cpu", timeout_s=12.5, variables=variables),
    ):
        pass
    assert told["timeout"] == timedelta(seconds=12.5)


# --- data of the autoencoder ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("run"))


def autoencoder(folder: Path, *overrides: str) -> AutoencoderStage:
    paths = [f"data.root={folder / 'data'}", f"cache.dir={folder / 'cache'}"]
    config = load_config(folder / "run.yaml", overrides=[*paths, *overrides])
    return make_autoencoder_stage(config, device=CPU)


def test_decoder_is_asked_at_as_many_points_as_is_said(folder: Path) -> None:
    asked: list[int] = []

    def forward(values: Tensor, query: Tensor, parameters: Tensor, **which: Any) -> Tensor:
        asked.append(len(query))
        return torch.zeros(len(values), len(query), 1)

    for overrides in ([], ["training.query_sampling.num_queries=5"]):
        stage = autoencoder(folder, *overrides)
        stage.losses(forward, batch_of(stage, 0))
    assert asked == [32, 5]


def test_validation_looks_at_as_many_frames_as_is_said(folder: Path) -> None:
    stages = [autoencoder(folder, f"training.max_val_frames={num}") for num in (3, 1024)]
    counts = [dict(stage._measure(stage.model).num_frames) for stage in stages]
    assert counts == [{"burgers1d": 3}, {"burgers1d": 15}]  # every second of 6 trajectories of 5


def test_frames_are_augmented_unless_it_is_switched_off(folder: Path) -> None:
    augmented, plain = (
        batch_of(autoencoder(folder, "training.augment=true"), 0),
        batch_of(autoencoder(folder, "training.augment=false"), 0),
    )
    assert augmented.values.shape == plain.values.shape
    assert not torch.equal(augmented.values, plain.values)


def test_source_of_fields_is_the_one_that_is_insisted_on(folder: Path) -> None:
    autoencoder(folder, "training.field_source=hdf5")
    with pytest.raises(ConfigError, match="cache"):
        autoencoder(folder, "training.field_source=store")


def test_batches_have_the_size_that_is_said(folder: Path) -> None:
    assert [len(batch_of(autoencoder(folder, f"training.batch_size={num}"), 0)) for num in (3, 7)] == [3, 7]
