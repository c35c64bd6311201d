"""The simulator: fields to rollouts of fields, its file, and what it says about wrong inputs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_autoencoders import LINE, PLANE, make_autoencoder

import ups
from ups.errors import CheckpointError, ConfigError, ShapeError
from ups.models.operator_size import Mixer, OperatorSize
from ups.nn.layers import patchify, unpatchify
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups.trained.simulator import Simulator, load_simulator, save_simulator
from ups.trained.specs import SimulatedTask, SimulatorSpec

OPERATOR = OperatorSize(width=8, depths=(1, 1)).to_json()


def make_tasks(dim: dict[str, int], tokens: dict[str, tuple[int, ...]]) -> dict[str, SimulatedTask]:
    statistics = {name: {"mean": [0.25] * num, "std": [0.5] * num} for name, num in dim.items()}
    line = {"fields": statistics["burgers1d"]}
    plane = {"fields": statistics["darcy2d"], "coefficient": statistics["darcy2d"]}
    beta, nu = {"beta": (1.0, 1.0)}, {"nu": (0.01, 0.1)}
    walls, around = ("dirichlet", "dirichlet"), ("periodic",)
    return {
        "burgers1d": SimulatedTask(LINE, around, tokens["burgers1d"], ("u",), False, 0.1, nu, line),
        "darcy2d": SimulatedTask(PLANE, walls, tokens["darcy2d"], ("u",), True, 1.0, beta, plane),
    }


def make_simulator(
    states: str = "latent", *, trained: bool = True, operator: Mapping[str, Any] = OPERATOR
) -> Simulator:
    """A simulator; its weights are random instead of the zeros of an untrained operator's last layers."""
    is_latent = states == "latent"
    tokens = {"burgers1d": (4,), "darcy2d": (2, 2)} if is_latent else {"burgers1d": (8,), "darcy2d": (4, 4)}
    dim = {"burgers1d": 3, "darcy2d": 3} if is_latent else {"burgers1d": 1, "darcy2d": 1}
    spec = SimulatorSpec(
        states="latent" if is_latent else "fields",
        tasks=make_tasks(dim, tokens),
        parameters=("beta", "nu"),
        state_dim=3 if is_latent else 4,
        patch_size=None if is_latent else 2,
        stride=1,
        operator=operator,
        autoencoder_sha256="0" * 64 if is_latent else None,
    )
    torch.manual_seed(1)
    simulator = Simulator(spec, make_autoencoder() if is_latent else None).eval()
    if trained:
        with torch.no_grad():
            for weight in simulator.operator.parameters():
                weight.normal_(std=0.3)
    return simulator


def fields_of(num: int = 2) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num, 16, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "operator.safetensors"
    save_simulator(path, make_simulator(), config={"seed": 1}, report={"score": 0.5})
    return path


# --- states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [(16,), (4, 4, 8)])
def test_patches_hold_their_points_and_give_the_field_back(points: tuple[int, ...]) -> None:
    values = torch.arange(2 * int(np.prod(points)) * 3.0).reshape(2, *points, 3)
    tokens = patchify(values, patch_size=2)
    corner = values[(slice(None), *(slice(0, 2),) * len(points))]
    torch.testing.assert_close(tokens[:, 0], corner.flatten(1), rtol=0, atol=0)
    back = unpatchify(tokens, points=points, patch_size=2)
    torch.testing.assert_close(back, values, rtol=0, atol=0)


def test_state_is_the_normalised_latent_and_decodes_to_the_reconstruction() -> None:
    simulator = make_simulator()
    assert simulator.autoencoder is not None
    values, parameters = torch.from_numpy(fields_of()), torch.tensor([[torch.nan, 0.02]] * 2)
    with torch.no_grad():
        latent = simulator.autoencoder.encode(values, parameters, task="burgers1d")
        state = simulator.encode(values, parameters, task="burgers1d")
        torch.testing.assert_close(state, (latent - 0.25) / 0.5)
        torch.testing.assert_close(simulator.normalise(latent, task="burgers1d"), state)
        query = simulator.queries.get_buffer("burgers1d")
        expected = simulator.autoencoder.decode(latent, query, parameters, task="burgers1d")
        decoded = simulator.decode(state, parameters, task="burgers1d")
        torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=1e-5)
    assert decoded.shape == (2, 16, 1)


def test_field_state_decodes_to_the_field_itself() -> None:
    simulator = make_simulator("fields")
    values, parameters = torch.from_numpy(fields_of()), torch.tensor([[torch.nan, 0.02]] * 2)
    state = simulator.encode(values, parameters, task="burgers1d")
    assert state.shape == (2, 8, 4)
    assert not state[..., 2:].any()  # a patch of 2 points in tokens for patches of 2 x 2
    torch.testing.assert_close(simulator.decode(state, parameters, task="burgers1d"), values)
    stepped = simulator.step(state, parameters, task="burgers1d", dt_B=torch.full((2,), 0.1))
    assert not torch.equal(stepped, state)
    assert not stepped[..., 2:].any()


@pytest.mark.parametrize("states", ["latent", "fields"])
def test_untrained_simulator_is_persistence(states: str) -> None:
    simulator, fields = make_simulator(states, trained=False), fields_of()
    predicted = simulator.rollout(fields, 3, task="burgers1d", parameters={"nu": 0.02})
    torch.testing.assert_close(predicted, predicted[:, :1].expand(-1, 3, -1, -1), rtol=0, atol=0)
    if states == "fields":
        torch.testing.assert_close(predicted[:, 0], torch.from_numpy(fields))


# --- rollouts ------------------------------------------------------------------------------------------


def test_rollout_repeats_steps_in_states_and_decodes_each() -> None:
    simulator = make_simulator()
    values, parameters = torch.from_numpy(fields_of()), torch.tensor([[torch.nan, 0.02]] * 2)
    dt_B = torch.full((2,), 0.1)
    with torch.no_grad():
        state = simulator.encode(values, parameters, task="burgers1d")
        states = simulator(state, parameters, task="burgers1d", dt_B=dt_B, steps=3)
        by_hand = [simulator.decode(s, parameters, task="burgers1d") for s in states.unbind(1)]
    predicted = simulator.rollout(fields_of(), 3, task="burgers1d", parameters={"nu": 0.02})
    assert predicted.shape == (2, 3, 16, 1)
    assert not predicted.requires_grad
    counted = simulator.rollout(fields_of(), np.int64(3), task="burgers1d", parameters={"nu": 0.02})  # type: ignore[arg-type]
    assert torch.equal(counted, predicted)
    torch.testing.assert_close(predicted, torch.stack(by_hand, dim=1), rtol=0, atol=0)


def test_samples_of_a_rollout_do_not_depend_on_each_other() -> None:
    simulator, fields = make_simulator(), fields_of(3)
    nu = np.array([0.01, 0.05, 0.1])
    together = simulator.rollout(fields, 2, task="burgers1d", parameters={"nu": nu})
    alone = simulator.rollout(fields[1:2], 2, task="burgers1d", parameters={"nu": 0.05})
    torch.testing.assert_close(together[1:2], alone, rtol=1e-5, atol=1e-5)


def test_time_step_and_parameters_reach_the_model() -> None:
    simulator = make_simulator()

    def predict(**options: Any) -> torch.Tensor:
        given = {"parameters": {"nu": 0.02}, "extrapolate": True, **options}
        return simulator.rollout(fields_of(), 2, task="burgers1d", **given)

    plain = predict()
    torch.testing.assert_close(predict(dt=0.1), plain, rtol=0, atol=0)
    torch.testing.assert_close(predict(dt=np.full((2, 2), 0.1)), plain, rtol=0, atol=0)
    assert not torch.allclose(predict(dt=0.2), plain)
    assert not torch.allclose(predict(parameters={"nu": 0.1}), plain)
    one_longer = predict(dt=torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(one_longer[0], plain[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(one_longer[1], plain[1])


def test_steady_task_goes_from_its_input_to_the_solution_in_one_step() -> None:
    simulator = make_simulator()
    coefficient = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    solution = simulator.rollout(coefficient, 1, task="darcy2d")
    assert solution.shape == (2, 1, 8, 8, 1)
    with pytest.raises(ConfigError, match="expected 1 of a steady task, found 3"):
        simulator.rollout(coefficient, 3, task="darcy2d")


@pytest.mark.parametrize("states", ["latent", "fields"])
def test_fields_of_another_resolution_are_resampled_when_asked(states: str) -> None:
    simulator, given = make_simulator(states), {"task": "burgers1d", "parameters": {"nu": 0.02}}
    fine = np.sin(2 * np.pi * (np.arange(48) + 0.5) / 48).astype(np.float32)[None, :, None]
    with pytest.raises(ShapeError, match=r"expected \(B, 16, 1\), found \(1, 48, 1\)"):
        simulator.rollout(fine, 2, **given)  # type: ignore[arg-type]
    predicted = simulator.rollout(fine, 2, resample=True, **given)  # type: ignore[arg-type]
    assert predicted.shape == (1, 2, 48, 1)
    # Every third of these cells has its centre where one of the 16 has it.
    coarse = simulator.rollout(fine[:, 1::3].copy(), 2, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(predicted[:, :, 1::3], coarse, rtol=1e-4, atol=1e-5)


def test_resampling_takes_fields_of_the_same_axes_and_channels_only() -> None:
    for wrong in (np.zeros((2, 8, 2)), np.zeros((2, 1, 1)), np.zeros((2, 8, 8, 1))):
        with pytest.raises(ShapeError, match="fields"):
            make_simulator().rollout(wrong, 1, task="burgers1d", parameters={"nu": 0.02}, resample=True)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"task": None}, "other_task", "expected burgers1d or darcy2d, found none named"),
        ({"task": "cfd1d"}, "other_task", "found cfd1d"),
        ({"steps": 0}, "steps", "at least 1"),
        ({"steps": 2.5}, "steps", "a whole number, at least 1, found 2.5"),
        ({"steps": "3"}, "steps", "a whole number, at least 1, found '3'"),
        ({"steps": True}, "steps", "a whole number, at least 1, found True"),
        ({"steps": np.int64(10**18)}, "no_memory", "and 1,000,000,000,000,000,000 steps doesn't fit"),
        ({"steps": 10**12}, "no_memory", "2 samples and 1,000,000,000,000 steps doesn't fit"),
        ({"parameters": {}}, "missing_parameter", "parameter nu is missing: expected a value, 0.01 to 0.1"),
        ({"parameters": {"nu": 0.1, "beta": 1}}, "unknown_parameter", "expected nu, found beta"),
        ({"parameters": {"nu": [0.1, 0.1, 0.1]}}, "shape", "nu: expected a number or (2,)"),
        ({"dt": -0.1}, "time_step", "expected > 0, found"),
        ({"dt": [0.1, 0.1, 0.1]}, "shape", "dt: expected a number, (2,) or (2, 1)"),
        ({"fields": np.full((2, 16, 1), np.nan)}, "not_finite", "sample 0 of 'fields' isn't finite"),
        ({"fields": "u"}, "dtype", "fields: expected real numbers"),
        ({"fields": np.zeros((2, 16, 1), complex)}, "dtype", "fields: expected real numbers"),
        ({"fields": np.zeros((0, 16, 1))}, "shape", "fields: expected (B, 16, 1), found (0, 16, 1)"),
        ({"parameters": {"nu": np.nan}}, "not_finite", "parameter nu isn't finite"),
        ({"parameters": {"nu": "x"}}, "dtype", "nu: expected real numbers"),
        ({"dt": "a"}, "dtype", "dt: expected real numbers"),
        ({"fields": np.zeros((2, 15, 1))}, "shape", "fields: expected (B, 16, 1), found (2, 15, 1)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], kind: str, says: str) -> None:
    given = {"fields": fields_of(), "steps": 1, "task": "burgers1d", "parameters": {"nu": 0.02}, **change}
    with pytest.raises((ConfigError, ShapeError)) as caught:
        make_simulator().rollout(given.pop("fields"), given.pop("steps"), **given)
    assert caught.value.kind == kind
    assert says in str(caught.value)


def test_fields_backwards_in_memory_are_taken() -> None:
    simulator, fields = make_simulator(), fields_of()
    expected = simulator.rollout(fields[:, ::-1].copy(), 1, task="burgers1d", parameters={"nu": 0.02})
    found = simulator.rollout(fields[:, ::-1], 1, task="burgers1d", parameters={"nu": 0.02})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- training, file ------------------------------------------------------------------------------------


def test_autoencoder_is_frozen_and_stays_in_evaluation_mode() -> None:
    simulator = make_simulator().train()
    assert simulator.autoencoder is not None
    trained = {name.partition(".")[0] for name, p in simulator.named_parameters() if p.requires_grad}
    assert trained == {"operator"}
    assert simulator.operator.training
    assert not any(module.training for module in simulator.autoencoder.modules())


@pytest.mark.parametrize(
    ("states", "mixers"),
    [("latent", ("spectral", "attention")), ("fields", ("hybrid",)), ("fields", ("convolution",))],
)
def test_file_alone_gives_the_same_rollout(tmp_path: Path, states: str, mixers: tuple[Mixer, ...]) -> None:
    size = OperatorSize(width=8, depths=(1, 1), num_heads=2, mixers=mixers)
    simulator = make_simulator(states, operator=size.to_json())
    save_simulator(tmp_path / "operator.safetensors", simulator, config={}, report={})
    loaded = ups.load(tmp_path / "operator.safetensors")
    assert loaded.spec == simulator.spec
    assert not loaded.training
    given: dict[str, Any] = {"task": "burgers1d", "parameters": {"nu": 0.02}}
    torch.testing.assert_close(
        loaded.rollout(fields_of(), 2, **given), simulator.rollout(fields_of(), 2, **given), rtol=0, atol=0
    )
    coefficient = np.random.default_rng(0).uniform(0.1, 1, (2, 8, 8, 1)).astype(np.float32)
    steady = [model.rollout(coefficient, 1, task="darcy2d") for model in (loaded, simulator)]
    torch.testing.assert_close(*steady, rtol=0, atol=0)


def test_incomplete_specification_and_other_weights_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="operator")
    assert all(name.startswith(("operator.", "autoencoder.")) for name in tensors)
    one_task = {"burgers1d": document["spec"]["tasks"]["burgers1d"]}
    other = {**document, "spec": {**document["spec"], "tasks": one_task}}
    without = {**document, "spec": {k: v for k, v in document["spec"].items() if k != "tasks"}}
    for kind, changed in {"other_weights": other, "no_spec": without}.items():
        save_checkpoint(tmp_path / kind, tensors, kind="operator", document=changed)
        with pytest.raises(CheckpointError) as caught:
            load_simulator(tmp_path / kind)
        assert caught.value.kind == kind


def test_boundary_types_survive_the_checkpoint_and_change_the_prediction(tmp_path: Path) -> None:
    simulator = make_simulator()
    coefficient = np.ones((2, 8, 8, 1), np.float32)
    spec = simulator.spec
    walls, flux = spec.tasks["darcy2d"], dataclasses.replace(spec.tasks["darcy2d"], boundary=("neumann",) * 2)
    other = Simulator(dataclasses.replace(spec, tasks={**spec.tasks, "darcy2d": flux}), make_autoencoder())
    other.load_state_dict(simulator.state_dict())
    predicted = simulator.rollout(coefficient, 1, task="darcy2d")
    assert not torch.allclose(other.eval().rollout(coefficient, 1, task="darcy2d"), predicted)
    for known, saved in ((walls, simulator), (flux, other)):
        save_simulator(tmp_path / "o.safetensors", saved, config={}, report={})
        loaded = load_simulator(tmp_path / "o.safetensors")
        assert loaded.spec.tasks["darcy2d"].boundary == known.boundary
        expected = saved.rollout(coefficient, 1, task="darcy2d")
        torch.testing.assert_close(loaded.rollout(coefficient, 1, task="darcy2d"), expected, rtol=0, atol=0)


def test_operator_with_a_name_is_built_no_larger_than_its_file(tmp_path: Path) -> None:
    spec = make_simulator("fields").spec
    named = {"name": "fno", "config": {"width": 8, "modes": 2, "depth": 1}}
    line = dataclasses.replace(spec, tasks={"burgers1d": spec.tasks["burgers1d"]}, operator=named)
    save_simulator(tmp_path / "small", Simulator(line), config={}, report={})
    assert load_simulator(tmp_path / "small").spec.operator == named
    tensors, document = load_checkpoint(tmp_path / "small", kind="operator")
    document["spec"]["operator"]["config"]["width"] = 1 << 20
    save_checkpoint(tmp_path / "large", tensors, kind="operator", document=document)
    with pytest.raises(CheckpointError, match="weights of") as caught:
        load_simulator(tmp_path / "large")
    assert caught.value.kind == "no_spec"


def test_checkpoint_without_boundary_types_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="operator")
    for task in document["spec"]["tasks"].values():
        del task["boundary"]
    save_checkpoint(tmp_path / "earlier", tensors, kind="operator", document=document)
    with pytest.raises(CheckpointError, match="train the operator again") as caught:
        load_simulator(tmp_path / "earlier")
    assert caught.value.kind == "no_spec"


def test_operator_of_an_earlier_version_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="operator")
    document["spec"]["operator"] = {"width": 8, "depths": [1, 1], "num_heads": 2}
    save_checkpoint(tmp_path / "earlier", tensors, kind="operator", document=document)
    with pytest.raises(CheckpointError, match="train the operator again") as caught:
        load_simulator(tmp_path / "earlier")
    assert caught.value.kind == "old_operator"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"operator\.safetensors: no such checkpoint"):
        ups.load(tmp_path / "operator.safetensors")


def test_importing_the_package_needs_no_torch() -> None:
    code = "import sys, ups; assert 'load' in dir(ups) or ups.__all__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[3])
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ups.nonsense
