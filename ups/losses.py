"""Losses: of reconstructed frames, of rollouts, and inverse losses, which tie encoder, operator and decoder.

Inverse losses (UPT, Alkin et al. 2024): with z = E(x_t), z' = A(z) and x' = D(z') the loss is |x' -
x_{t+1}|^2 + |D(z) - x_t|^2 + |E(x') - z'|^2: besides the prediction, the decoder undoes the encoder and the
encoder undoes the decoder, so that an operator can stay in the latent space for many steps. Gradients reach
E, A and D.

Letters: B batch, K steps, X the axes of the grid, C channels, L tokens, D channels of a token, G the axes of
the token grid, P points, Q parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ups.errors import ConfigError, needs
from ups.grid import FIELDS
from ups.registry import Registry
from ups.trained.simulator import Simulator

if TYPE_CHECKING:
    from ups.config import TrainingConfig

with needs("train"):
    import torch
    from torch import Tensor

# Share of a channel's variance that is added to a frame's power, so that faint frames don't dominate.
_FAINT = 0.01
_TINY = 1e-12
ReconstructionLoss = Literal["mse", "l1", "relative_l2"]


def inverse_losses(
    simulator: Simulator,
    frames_BTXC: Tensor,
    parameters_BQ: Tensor,
    *,
    task: str,
    dt_B: Tensor,
    points_P: Tensor,
    forward: Callable[..., Tensor],
    is_inverse: bool,
    kind: ReconstructionLoss = "mse",
    lambda_alignment: float = 0.0,
) -> dict[str, Tensor]:
    """Losses of a rollout from the first frame, and the inverse losses.

    Fields are compared at points, relative to the power of their frame; states in normalised units.

    Args:
        simulator: With an autoencoder, all of it trained.
        frames_BTXC: K + 1 frames in physical units, of a steady task input and solution.
        parameters_BQ: In the order of the simulator.
        dt_B: Physical time of one step.
        points_P: Numbers of the grid's points at which fields are compared.
        forward: Calls the simulator.
        is_inverse: Whether to take the inverse losses, too; the encoder's needs x' at all points.
        kind: How fields are compared, as of `reconstruction_error`.
        lambda_alignment: Weight of `alignment_error`.
    Returns:
        "prediction"; with a weight "alignment"; with `is_inverse` also "decoder_inverse" and
        "encoder_inverse". Means over the batch.
    """
    known = simulator.spec.tasks[task]
    given_BXC, truth_BKXC = frames_BTXC[:, 0], frames_BTXC[:, 1:]
    num_steps = truth_BKXC.shape[1]
    state_BLD = simulator.encode(given_BXC, parameters_BQ, task=task, array=known.input_array)
    states_BKLD = forward(state_BLD, parameters_BQ, task=task, dt_B=dt_B, steps=num_steps)
    losses = {
        "prediction": _error_at(
            points_P,
            simulator,
            states_BKLD.flatten(0, 1),
            truth_BKXC.flatten(0, 1),
            parameters_BQ.repeat_interleave(num_steps, dim=0),
            task=task,
            array=FIELDS,
            kind=kind,
        )
    }
    if lambda_alignment:
        aligned = alignment_error(simulator, states_BKLD, truth_BKXC, parameters_BQ, task=task)
        losses["alignment"] = lambda_alignment * aligned
    if not is_inverse:
        return losses
    losses["decoder_inverse"] = _error_at(
        points_P,
        simulator,
        state_BLD,
        given_BXC,
        parameters_BQ,
        task=task,
        array=known.input_array,
        kind=kind,
    )
    first_BLD = states_BKLD[:, 0]
    predicted_BXC = simulator.decode(first_BLD, parameters_BQ, task=task)
    again_BLD = simulator.encode(predicted_BXC, parameters_BQ, task=task, array=FIELDS)
    losses["encoder_inverse"] = (again_BLD.float() - first_BLD.float()).square().mean()
    return losses


def _error_at(
    points_P: Tensor,
    simulator: Simulator,
    state_BLD: Tensor,
    truth_BXC: Tensor,
    parameters_BQ: Tensor,
    *,
    task: str,
    array: str,
    kind: ReconstructionLoss,
) -> Tensor:
    """Relative error of decoded states at some points of the grid."""
    assert simulator.autoencoder is not None
    query_PN = simulator.queries.get_buffer(task)[points_P]
    values_BPC = simulator.decode_at(state_BLD, query_PN, parameters_BQ, task=task, array=array)
    truth_BAC = truth_BXC.flatten(1, -2)
    return reconstruction_error(
        values_BPC.float(),
        truth_BAC[:, points_P],
        power_BC=truth_BAC.square().mean(1),
        std_C=simulator.autoencoder.normalizer_of(task, array).std,
        kind=kind,
    )


def alignment_error(
    simulator: Simulator, states_BKLD: Tensor, truth_BKXC: Tensor, parameters_BQ: Tensor, *, task: str
) -> Tensor:
    """|A(z) - E(x')|^2: the operator stays where the encoder puts the true frames.

    Gradients reach the encoder on both sides. Without it a joint training may lower its first steps' errors
    by states that the encoder never gives, and from these later steps begin.
    """
    num_steps = truth_BKXC.shape[1]
    repeated = parameters_BQ.repeat_interleave(num_steps, dim=0)
    encoded = simulator.encode(truth_BKXC.flatten(0, 1), repeated, task=task, array=FIELDS)
    return (states_BKLD.flatten(0, 1).float() - encoded.float()).square().mean()


def reconstruction_error(
    prediction_BPC: Tensor,
    truth_BPC: Tensor,
    *,
    power_BC: Tensor,
    std_C: Tensor,
    kind: ReconstructionLoss = "mse",
) -> Tensor:
    """Mean over frames and channels of an error over the power of the frame, so that all count alike.

    Args:
        prediction_BPC: Predicted values at points, physical units.
        truth_BPC: True ones.
        power_BC: mean_X y^2 of the whole frames.
        std_C: Standard deviation of each channel in the training data.
        kind: "mse" is mean_P (p - y)^2 / power, the square of nRMSE; "relative_l2" its root, nRMSE itself;
            "l1" is mean_P |p - y| / power^(1/2), which a few large errors don't rule.

    Returns:
        Scalar.
    """
    error_BPC, power_BC = prediction_BPC - truth_BPC, power_BC + _FAINT * std_C.square()
    if kind == "l1":
        return (error_BPC.abs().mean(1) / power_BC.sqrt()).mean()
    square_BC = error_BPC.square().mean(1) / power_BC
    return square_BC.mean() if kind == "mse" else root(square_BC).mean()


def root(square: Tensor) -> Tensor:
    """Square root whose gradient at zero is finite."""
    return (square + _TINY).sqrt()


@dataclass(frozen=True)
class LossContext:
    """What a loss is told besides predicted and true states.

    Attributes:
        task: Name of the task.
        tokens: Tokens along each axis, L in all; of a network that works on fields itself its points.
        dt_B: Physical time of a step.
        parameters_BQ: In the order of the model, NaN where the task has none of that name.
        fields: Gives the fields, (B, K, X..., C) in physical units, of states, (B, K, L, D); gradients go
            through it, and where states are latents through the decoder.
    """

    task: str
    tokens: tuple[int, ...]
    dt_B: Tensor
    parameters_BQ: Tensor
    fields: Callable[[Tensor], Tensor]


Loss = Callable[[Tensor, Tensor, LossContext], Tensor]

# Decorates a loss of rollouts, `@register_loss("h1")`, which `training.losses` then weighs by its name. It is
# called with predicted and true normalised states after each of K steps, both float32, (B, K, L, D), and a
# `LossContext`; it returns a scalar, or an error of each sample and step, (B, K), whose mean is taken.
register_loss: Registry[Loss] = Registry("loss", key="training.losses")


@register_loss("mse")
def _square_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, context: LossContext) -> Tensor:
    return (predicted_BKLD - truth_BKLD).square().mean(dim=(2, 3))


@register_loss("relative")
def _relative_square_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, context: LossContext) -> Tensor:
    """|p - y|^2 / |y|^2: every frame counts the same however faint it is."""
    square_BK = _square_error(predicted_BKLD, truth_BKLD, context)
    return square_BK / (truth_BKLD.square().mean(dim=(2, 3)) + _FAINT)


@register_loss("relative_l2")
def _relative_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, context: LossContext) -> Tensor:
    """|p - y| / |y|: its gradient doesn't fade with the error."""
    return root(_relative_square_error(predicted_BKLD, truth_BKLD, context))


@register_loss("spectral")
def _spectral_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, context: LossContext) -> Tensor:
    return spectral_error(predicted_BKLD, truth_BKLD, tokens=context.tokens)


# Of which the first step counts as much as all later ones together, logged as "one_step" and "rollout".
_BY_STEP = ("mse", "relative_l2")


def loss_weights(training: TrainingConfig) -> dict[str, float]:
    """Weights of the losses of a rollout by name: `training.losses`, or what the older keys say."""
    if training.losses:
        return dict(training.losses)
    weights = {"relative": training.lambda_relative, "spectral": training.lambda_spectral}
    return {training.rollout_loss: 1.0} | {name: weight for name, weight in weights.items() if weight}


def check_losses(training: TrainingConfig, *, allow_code: str | Iterable[str] | None = None) -> None:
    """Find every loss of `training.losses`, importing the modules that they name.

    Args:
        allow_code: See `Registry.find`.
    """
    for name in training.losses:
        if not callable(register_loss.find(name, allow_code=allow_code)):
            raise ConfigError(f"training.losses = {name}", kind="no_code", expected="a function")


def rollout_losses(
    predicted_BKLD: Tensor, truth_BKLD: Tensor, *, weights: Mapping[str, float], context: LossContext
) -> dict[str, Tensor]:
    """Losses of a rollout, weighted; their sum is minimised.

    Args:
        predicted_BKLD: States after each of K steps, shape (B, K, L, D).
        truth_BKLD: True ones.
        weights: By name, as `loss_weights` gives them.
        context: What losses are told besides.
    Returns:
        By name; of "mse" and "relative_l2" as "one_step" and, of longer rollouts, "rollout": the errors of
        the first and of the later steps.

    Raises:
        ConfigError: Kind "loss_shape", if a loss returns neither a scalar nor errors (B, K).
    """
    predicted_BKLD, truth_BKLD = predicted_BKLD.float(), truth_BKLD.float()
    losses: dict[str, Tensor] = {}
    for name, weight in weights.items():
        error = register_loss.find(name)(predicted_BKLD, truth_BKLD, context)
        if error.ndim and error.shape != predicted_BKLD.shape[:2]:
            expected = f"a scalar, or errors {tuple(predicted_BKLD.shape[:2])} of samples and steps"
            found = f"shape {tuple(error.shape)}"
            raise ConfigError(f"loss {name}", kind="loss_shape", expected=expected, found=found)
        if name not in _BY_STEP:
            losses[name] = weight * error.mean()
            continue
        parts = {"one_step": error[:, 0].mean()}
        if error.shape[1] > 1:
            parts["rollout"] = error[:, 1:].mean()
        for part, value in parts.items():
            losses[part] = losses[part] + weight * value if part in losses else weight * value
    return losses


def spectral_error(predicted_BKLD: Tensor, truth_BKLD: Tensor, *, tokens: tuple[int, ...]) -> Tensor:
    """Mean over wave numbers along the token axes of |FFT(p - y)|^2 / |FFT(y)|^2.

    Every wave number counts the same however little energy it has, so small scales do that a mean square
    error hardly sees. It is taken of the states, not of the fields: nothing is decoded.
    """
    axes = tuple(range(2, 2 + len(tokens)))
    error, truth = (
        torch.fft.rfftn(states.unflatten(2, tokens), dim=axes, norm="ortho").abs().square().sum(-1)
        for states in (predicted_BKLD - truth_BKLD, truth_BKLD)
    )
    mean_energy = truth.mean(dim=axes, keepdim=True)
    return (error / (truth + _FAINT * mean_energy + torch.finfo(truth.dtype).tiny)).mean()
