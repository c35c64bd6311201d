"""Corrected simulators: the operator if untrained; ensembles, seeds, iterators, files bound to operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_simulators
import torch

import ups
from ups.config import RunConfig
from ups.data.splits import open_fields
from ups.errors import CheckpointError, ConfigError
from ups.eval.forecasters import CorrectedForecaster, Start
from ups.trained.checkpoint import hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.corrected import CorrectedSimulator, load_corrected, save_corrected
from ups.trained.simulator import Simulator, save_simulator
from ups.trained.specs import CORRECTOR, CorrectorSpec, Sampling

SAMPLING = Sampling(num_steps=3)
POINTS = (32, 1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small_simulators.configure(small_simulators.make_data(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def fields(config: RunConfig) -> torch.Tensor:
    some = open_fields(config.build, "burgers1d", "val")
    numbers = torch.arange(2).numpy()
    return torch.from_numpy(some.read("fields", numbers[:1].repeat(2), numbers))


def make_simulator(config: RunConfig, states: str = "fields") -> Simulator:
    torch.manual_seed(0)
    autoencoder = small_simulators.make_autoencoder(config) if states == "latent" else None
    simulator = small_simulators.make_simulator(config, autoencoder)
    with torch.no_grad():
        simulator.operator.out.weight.normal_(std=0.1)
    return simulator


def make_corrected(
    simulator: Simulator, *, is_trained: bool = True, operator_sha256: str = "0" * 64
) -> CorrectedSimulator:
    spec = CorrectorSpec(operator_sha256, small_simulators.OPERATOR, {"burgers1d": 0.2}, 2, SAMPLING)
    model = CorrectedSimulator(simulator, spec).eval()
    if is_trained:
        with torch.no_grad():
            model.corrector.skip.bias.fill_(0.5)
            model.corrector.out.weight.normal_(std=0.2)
    return model


@pytest.mark.parametrize("states", ["fields", "latent"])
@pytest.mark.parametrize("sampler", ["euler", "heun", "adaptive"])
def test_untrained_corrector_corrects_nothing(
    config: RunConfig, fields: torch.Tensor, states: str, sampler: Any
) -> None:
    simulator = make_simulator(config, states)
    corrected = make_corrected(simulator, is_trained=False)
    task = simulator.spec.tasks["burgers1d"]
    z = torch.randn(2, *task.tokens, simulator.spec.state_dim)
    given = {"given": (z, z), "parameters_BP": torch.full((2, 1), 0.1), "dt_B": torch.ones(2)}
    sampling = Sampling(sampler, num_steps=3)
    drawn = corrected.residual(torch.randn_like(z), **given, task="burgers1d", sampling=sampling)
    assert not drawn.any()
    expected = simulator.rollout(fields, 3)
    for member in corrected.rollout(fields, 3, members=2, sampler=sampler).unbind(1):
        torch.testing.assert_close(member, expected, rtol=0, atol=1e-5)  # products of more rows


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_seed_that_is_none_is_refused(config: RunConfig, fields: torch.Tensor, seed: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_corrected(make_simulator(config)).rollout(fields, 1, members=2, seed=seed)
    assert (caught.value.kind, caught.value.expected) == ("seed", "a whole number, 0 or more")


def test_ensemble_has_members_that_differ_and_repeat_with_their_seed(
    config: RunConfig, fields: torch.Tensor
) -> None:
    corrected = make_corrected(make_simulator(config))
    ensemble = corrected.rollout(fields, 3, members=4, seed=1)
    assert ensemble.shape == (2, 4, 3, *POINTS)
    assert ensemble.std(dim=1).min() > 0
    assert torch.equal(corrected.rollout(fields, 3, members=4, seed=1), ensemble)
    assert not torch.equal(corrected.rollout(fields, 3, members=4, seed=2), ensemble)


def test_member_is_the_same_whatever_their_number(
    config: RunConfig, fields: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected = make_corrected(make_simulator(config))
    ensemble = corrected.rollout(fields, 3, members=5, seed=1)
    torch.testing.assert_close(corrected.rollout(fields, 3, members=2, seed=1), ensemble[:, :2])
    path = corrected.rollout(fields, 3, seed=1)
    assert path.shape == (2, 3, *POINTS)
    torch.testing.assert_close(path, ensemble[:, 0])
    monkeypatch.setattr("ups.trained.corrected._ROWS", 3)
    torch.testing.assert_close(corrected.rollout(fields, 3, members=5, seed=1), ensemble)


def test_iterator_gives_one_time_step_of_all_members_at_a_time(
    config: RunConfig, fields: torch.Tensor
) -> None:
    corrected = make_corrected(make_simulator(config))
    frames = corrected.rollout_steps(fields, 3, members=4, seed=1)
    first = next(frames)
    assert first.shape == (2, 4, *POINTS)
    assert torch.is_grad_enabled()
    found = torch.stack([first, *frames], dim=2)
    assert torch.equal(found, corrected.rollout(fields, 3, members=4, seed=1))


def test_more_sampler_steps_are_taken_where_asked_for(config: RunConfig, fields: torch.Tensor) -> None:
    corrected = make_corrected(make_simulator(config))
    few, more = (corrected.rollout(fields, 1, num_sampler_steps=num) for num in (2, 8))
    assert not torch.equal(few, more)
    assert torch.equal(corrected.rollout(fields, 1, num_sampler_steps=3), corrected.rollout(fields, 1))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"members": 0}, "members", "members of the ensemble: expected a whole number, at least 1, found 0"),
        ({"members": 1.5}, "members", "found 1.5"),
        ({"members": "3"}, "members", "found '3'"),
        ({"sampler": "ddim"}, "sampler", "ddim"),
        ({"num_sampler_steps": 0}, "sampler", "found 0"),
        ({"num_sampler_steps": "3"}, "sampler", "found '3'"),
        ({"members": 10**9}, "no_memory", "1,000,000,000 members and 2 steps doesn't fit into memory"),
    ],
)
def test_impossible_ensembles_are_refused(
    config: RunConfig, fields: torch.Tensor, options: dict[str, Any], kind: str, says: str
) -> None:
    corrected = make_corrected(make_simulator(config))
    with pytest.raises(ConfigError) as caught:
        corrected.rollout(fields, 2, **options)
    assert caught.value.kind == kind
    assert says in str(caught.value)


def test_ensemble_that_is_streamed_is_said_to_be_large_in_members_alone(
    config: RunConfig, fields: torch.Tensor
) -> None:
    corrected = make_corrected(make_simulator(config))
    with pytest.raises(ConfigError, match=r"and 1,000,000,000 members doesn't fit.*or fewer members$"):
        corrected.rollout_steps(fields, 2, members=10**9)


def test_operator_alone_has_no_ensemble(config: RunConfig, fields: torch.Tensor) -> None:
    simulator = make_simulator(config)
    assert simulator.rollout(fields, 2, members=1).shape == (2, 1, 2, *POINTS)
    with pytest.raises(ConfigError, match="corrector") as caught:
        simulator.rollout(fields, 2, members=2, seed=3)
    assert caught.value.kind == "no_ensemble"


def test_forecaster_gives_an_ensemble_step_by_step(config: RunConfig, fields: torch.Tensor) -> None:
    corrected = make_corrected(make_simulator(config))
    forecaster = CorrectedForecaster(corrected)
    start = Start("burgers1d", fields, {"nu": torch.full((2,), 0.1)}, corrected.spec.tasks["burgers1d"].dt)
    frames = torch.stack(list(forecaster.forecast_members(start, 3, members=4, seed=7)), dim=2)
    assert torch.equal(frames, corrected.rollout(fields, 3, members=4, seed=7))
    assert forecaster.forecast(start, 3).shape == (2, 3, *POINTS)


def saved(tmp_path: Path, config: RunConfig, states: str) -> tuple[CorrectedSimulator, Path, Path]:
    simulator = make_simulator(config, states)
    operator, path = tmp_path / "operator.safetensors", tmp_path / "corrector.safetensors"
    save_simulator(operator, simulator, config={}, report={})
    corrected = make_corrected(simulator, operator_sha256=hash_tensors(operator))
    save_corrected(path, corrected, config={"seed": 0}, report={"val/flow": 1.0})
    return corrected, path, operator


@pytest.mark.parametrize("states", ["fields", "latent"])
def test_file_alone_gives_the_same_ensemble(
    tmp_path: Path, config: RunConfig, fields: torch.Tensor, states: str
) -> None:
    corrected, path, operator = saved(tmp_path, config, states)
    assert corrected.corrector_spec.operator_sha256 == hash_tensors(operator)
    operator.unlink()
    loaded = ups.load(path)
    assert isinstance(loaded, CorrectedSimulator)
    assert loaded.corrector_spec == corrected.corrector_spec
    assert torch.equal(
        loaded.rollout(fields, 2, members=3, seed=5), corrected.rollout(fields, 2, members=3, seed=5)
    )
    card = path.with_name("corrector.card.md").read_text()
    assert "members=64" in card


def test_corrector_of_another_operator_is_refused(tmp_path: Path, config: RunConfig) -> None:
    _, path, _ = saved(tmp_path, config, "fields")
    tensors, document = load_checkpoint(path, kind=CORRECTOR)
    tensors["simulator.operator.out.bias"] += 0.1
    save_checkpoint(path, tensors, kind=CORRECTOR, document=document)
    with pytest.raises(CheckpointError) as caught:
        load_corrected(path)
    assert caught.value.kind == "other_operator"


def test_file_without_its_specification_is_refused(tmp_path: Path, config: RunConfig) -> None:
    _, path, _ = saved(tmp_path, config, "fields")
    tensors, document = load_checkpoint(path, kind=CORRECTOR)
    del document["spec"]["corrector"]
    save_checkpoint(path, tensors, kind=CORRECTOR, document=document)
    with pytest.raises(CheckpointError) as caught:
        ups.load(path)
    assert caught.value.kind == "no_spec"


def test_file_of_a_kind_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "other", {"a": torch.zeros(1)}, kind="autoencoder", document={"spec": {}})
    with pytest.raises(CheckpointError, match="operator or corrector") as caught:
        ups.load(tmp_path / "other")
    assert caught.value.kind == "other_kind"
