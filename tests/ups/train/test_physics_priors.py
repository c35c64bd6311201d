"""Physics priors in the stages: what they are of, when they are due, gradients, what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from numbered_batches import batch_of
from operator_runs import configure
from torch import Tensor

from ups.config import load_config
from ups.config.training import LawsConfig, PhysicsPriorsConfig
from ups.data.batches import WindowBatch
from ups.errors import ConfigError
from ups.laws import EQUATIONS, PRIORS, Laws, Prior
from ups.physics.priors import TaskPhysics, prior_losses
from ups.train.joint import make_joint_stage
from ups.train.operator import OperatorStage, make_operator_stage
from ups.train.physics_priors import PhysicsBatch
from ups.train.run import run_stage
from ups.train.stage import StageStart

CPU = torch.device("cpu")
ONE, FIELDS = "data.tasks=[burgers1d]", "operator.state=fields"


def prior(**weights: float) -> list[str]:
    return [f"training.physics_priors.{name}={value}" for name, value in weights.items()]


def make_stage(run: Path, *overrides: str) -> OperatorStage:
    return make_operator_stage(configure(run, *overrides), device=CPU)


# --- formulas ------------------------------------------------------------------------------------------


def line(**changes: object) -> TaskPhysics:
    plain = TaskPhysics(
        Laws(conserved=("u",), equation="burgers1d"), ("u",), ("periodic",), (1.0,), ("nu",), cell=2
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def losses_of(physics: TaskPhysics, predicted: Tensor, truth: Tensor, given: Tensor) -> dict[str, Tensor]:
    num = len(given)
    return prior_losses(
        physics,
        dict.fromkeys(PRIORS, 1.0),
        predicted_BKXC=predicted,
        truth_BKXC=truth,
        given_BXC=given,
        values={"nu": torch.full((num,), 0.05), "bc_left": torch.ones(num)},
        dt_B=torch.full((num,), 0.1),
    )


def test_truth_costs_nothing_and_a_drift_costs_its_square() -> None:
    given, truth = torch.rand(3, 16, 1), torch.rand(3, 2, 16, 1)
    truth = truth - truth.mean(2, keepdim=True) + given.mean(1)[:, None, None]
    same = losses_of(line(), truth, truth, given)
    assert set(same) == {"physics/conservation", "physics/residual"}
    assert all(float(loss) == 0 for loss in same.values())
    moved = losses_of(line(), truth + 0.1, truth, given)
    expected = 0.01 / given.square().mean((1, 2))
    torch.testing.assert_close(moved["physics/conservation"], expected.mean(), rtol=1e-4, atol=0)
    assert float(moved["physics/residual"]) > 0


def test_boundary_prior_takes_the_samples_boundary_values() -> None:
    physics = line(boundary=("dirichlet",), conditions=("nu", "bc_left"))
    given, truth = torch.ones(2, 16, 1), torch.ones(2, 1, 16, 1)
    truth[:, :, -3:] = 0  # bc_left is 1, and the right end has none, which is 0
    wrong = losses_of(physics, torch.zeros_like(truth), truth, given)
    assert set(wrong) == {"physics/boundary"}
    torch.testing.assert_close(wrong["physics/boundary"], torch.tensor(0.5 * 16 / 13))


def test_gradients_of_all_priors_in_float64() -> None:
    """The sum of rows of a batch is that of each: ranks that share it have the same loss."""
    given, truth = torch.rand(2, 12, 1).double(), torch.rand(2, 2, 12, 1).double()
    found = (truth + 0.3 + 0.1 * torch.rand_like(truth)).requires_grad_()
    for physics in (line(), line(boundary=("dirichlet",))):
        whole = losses_of(physics, found, truth, given)
        rows = [losses_of(physics, found[i : i + 1], truth[i : i + 1], given[i : i + 1]) for i in range(2)]
        for name, loss in whole.items():
            torch.testing.assert_close(loss, (rows[0][name] + rows[1][name]) / 2)
            (gradient,) = torch.autograd.grad(loss, found)
            assert gradient.isfinite().all()
            step = 1e-3 * torch.rand_like(truth)
            ends = [losses_of(physics, found.detach() + s * step, truth, given)[name] for s in (1, -1)]
            torch.testing.assert_close(
                (gradient * step).sum().float(), (ends[0] - ends[1]).float() / 2, rtol=0.02, atol=1e-7
            )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("conservation", {"boundary": ("dirichlet",)}, "conserved"),
        ("residual", {"boundary": ("dirichlet",)}, "periodic"),
        ("residual", {"conditions": ()}, "no nu"),
        ("residual", {"lengths": None}, "length"),
        ("residual", {"laws": Laws()}, "equation"),
        ("divergence", {}, "velocity"),
        ("boundary", {}, "dirichlet"),
    ],
)
def test_priors_that_say_nothing_say_why(name: Prior, changes: dict[str, object], reason: str) -> None:
    assert reason in (line(**changes).why_not(name) or "")


def test_divergence_of_two_components() -> None:
    laws = Laws(divergence_free=("Vx", "Vy"))
    plane = line(
        laws=laws, channels=("Vx", "Vy"), boundary=("periodic",) * 2, lengths=(1.0, 1.0), conditions=()
    )
    y, x = torch.meshgrid(*[torch.arange(16.0) / 16 * 2 * torch.pi] * 2, indexing="ij")
    shear = torch.stack([torch.sin(y), torch.sin(x)], -1)[None, None]
    swapped = shear.flip(-1)
    found = losses_of(plane, swapped, shear, shear[:, 0])
    assert float(found["physics/divergence"]) > 0.05
    assert float(losses_of(plane, shear, swapped, shear[:, 0])["physics/divergence"]) == 0


# --- configuration --------------------------------------------------------------------------------------


def test_earlier_names_of_weights_are_taken() -> None:
    given = {"enabled": True, "lambda_conservation": 0.1, "lambda_positivity": 0.0, "bc_value": 0.0}
    assert PhysicsPriorsConfig.model_validate(given).weights == {"conservation": 0.1}
    assert PhysicsPriorsConfig.model_validate({**given, "enabled": False}).weights == {}
    assert PhysicsPriorsConfig().weights == {}
    with pytest.raises(ConfigError, match="lambda_latent_norm"):
        load_config(overrides=[ONE, "training.physics_priors.lambda_latent_norm=1e-4"])


def test_equations_of_the_configuration_are_those_that_there_are() -> None:
    for name in EQUATIONS:
        assert LawsConfig(equation=name).equation == name  # type: ignore[arg-type]
    config = load_config(overrides=[ONE, "laws.burgers1d.conserved=[]"])
    assert config.own_laws["burgers1d"] == Laws()


# --- stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["operator.state=latent", FIELDS])
def test_priors_are_losses_of_decoded_predictions(run: Path, states: str) -> None:
    weights = prior(conservation=2.0, residual=0.5)
    stage = make_stage(run, ONE, states, "training.horizon=2", "operator.noise=0.1", *weights)
    for parameter in stage.model.operator.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch = batch_of(stage, 0)
    losses = stage.losses(stage.model, batch)
    assert {"one_step", "physics/conservation", "physics/residual"} <= set(losses)
    sum(losses[name] for name in losses if name.startswith("physics/")).backward()  # type: ignore[union-attr]
    gradients = [weight.grad for weight in stage.model.operator.parameters() if weight.grad is not None]
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients)
    frozen = stage.model.autoencoder.parameters() if stage.model.autoencoder is not None else ()
    assert all(weight.grad is None for weight in frozen)


def test_perfect_predictions_cost_nothing_though_the_given_state_is_noisy(run: Path) -> None:
    stage = make_stage(run, ONE, FIELDS, "operator.noise=0.1", *prior(conservation=1.0, residual=1.0))
    batch = batch_of(stage, 0)
    truth, _ = stage._states(batch)
    assert isinstance(batch, PhysicsBatch)
    assert batch.clean is not None
    assert float((batch.clean - batch.states[:, 0]).abs().max()) > 0.01  # and it was moved as they were
    losses = stage.losses(lambda *a, **k: truth, batch)
    assert float(losses["physics/residual"]) == pytest.approx(0, abs=1e-6)
    assert float(losses["physics/conservation"]) == pytest.approx(0, abs=1e-9)


def test_pushed_forward_steps_are_compared_with_the_frames_that_they_predict(run: Path) -> None:
    """Whichever step of the window is the last, the true frame after it costs nothing."""
    settings = ("training.horizon=4", "training.pushforward=true", "operator.noise=0.1")
    stage = make_stage(run, ONE, FIELDS, *settings, *prior(conservation=1.0, residual=1.0))
    for number in range(6):
        batch = batch_of(stage, number)
        truth, _ = stage._states(batch)
        first = batch.pushed

        def perfect(
            *given: Tensor, steps: int, truth: Tensor = truth, first: int = first, **k: object
        ) -> Tensor:
            return truth[:, first : first + 1] if steps == 1 else truth[:, :steps]

        losses = stage.losses(perfect, batch)
        assert float(losses["physics/residual"]) == pytest.approx(0, abs=1e-6)


def test_priors_leave_the_batches_as_they_are(run: Path) -> None:
    options = (ONE, FIELDS, "operator.noise=0.1")
    plain, with_priors = make_stage(run, *options), make_stage(run, *options, *prior(conservation=1.0))
    one, other = batch_of(plain, 3), batch_of(with_priors, 3)
    assert type(one) is WindowBatch
    torch.testing.assert_close(one.states, other.states, rtol=0, atol=0)


def test_priors_are_due_every_few_steps_and_warm_up(run: Path) -> None:
    settings = prior(conservation=2.0, every=4, warmup_steps=10)
    stage = make_stage(run, ONE, FIELDS, "training.accum_steps=2", *settings)
    due = {number: getattr(batch_of(stage, number), "prior_weights", {}) for number in (0, 2, 8, 9, 24)}
    assert due == {
        0: {},
        2: {},
        8: {"conservation": 0.8},
        9: {"conservation": 0.8},
        24: {"conservation": 2.0},
    }


def test_several_tasks_have_the_priors_that_they_have_laws_for(run: Path, notes: list[str]) -> None:
    """Darcy's residual takes its coefficient, out of latents, too; what has no law is left out, and said."""
    config = configure(run, "data.tasks=[burgers1d,darcy2d]", *prior(conservation=1.0, residual=1.0))
    stage = make_operator_stage(config, device=CPU, start=StageStart())
    assert any("conservation is left out" in note and "darcy2d" in note for note in notes)
    found = {}
    for number in range(12):
        batch = batch_of(stage, number)
        found[batch.task] = stage.losses(stage.model, batch)
    assert {name for name in found["darcy2d"] if "/" in name} == {"physics/residual"}
    assert {name for name in found["burgers1d"] if "/" in name} == {
        "physics/residual",
        "physics/conservation",
    }


def test_prior_without_any_law_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_stage(run, ONE, FIELDS, *prior(divergence=1.0))
    assert caught.value.kind == "no_law"
    with pytest.raises(ConfigError):
        make_stage(run, ONE, FIELDS, "laws.burgers1d.conserved=[]", *prior(conservation=1.0))


def test_stage_joint_has_priors_whose_gradients_reach_encoder_and_decoder(run: Path) -> None:
    joint = ["training.use_inverse_losses=true", "training.query_sampling.num_queries=4"]
    stage = make_joint_stage(configure(run, ONE, *joint, *prior(residual=1.0)), device=CPU)
    losses = stage.losses(stage.model, batch_of(stage, 0))
    assert {"prediction", "physics/residual"} <= set(losses)
    losses["physics/residual"].backward()
    for part in ("encoder", "decoder"):
        weights = getattr(stage.autoencoder, part).parameters()
        assert any(weight.grad is not None and float(weight.grad.abs().max()) > 0 for weight in weights)


def test_training_goes_on_with_priors_and_logs_them(run: Path) -> None:
    settings = prior(conservation=1.0, every=2, warmup_steps=5)
    config = configure(run, ONE, FIELDS, *settings, "stages.operator.epochs=1", "training.log_every=1")
    run_stage("operator", config)
    log = (run / "checkpoints" / "operator.jsonl").read_text()
    assert "physics/conservation" in log
