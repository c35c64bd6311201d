"""Inverse losses (UPT, Alkin et al. 2024): encoder, operator and decoder are trained together.

With z = E(x_t), z' = A(z) and x' = D(z') the loss is |x' - x_{t+1}|^2 + |D(z) - x_t|^2 + |E(x') - z'|^2:
besides the prediction, the decoder undoes the encoder and the encoder undoes the decoder, so that an operator
can stay in the latent space for many steps. Gradients reach E, A and D.

Letters: B batch, K steps, X the axes of the grid, C channels, L tokens, D channels of a token, P points,
Q parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ups.grid import FIELDS
from ups.objectives.reconstruction import relative_square_error
from ups.simulator import Simulator


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
) -> dict[str, Tensor]:
    """Losses of a rollout from the first frame, and the inverse losses.

    Fields are compared at points, relative to the power of their frame, so that their loss is the square of
    nRMSE; states in normalised units.

    Args:
        simulator: With an autoencoder, all of it trained.
        frames_BTXC: K + 1 frames in physical units, of a steady task input and solution.
        parameters_BQ: In the order of the simulator.
        task: Name of the task.
        dt_B: Physical time of one step.
        points_P: Numbers of the grid's points at which fields are compared.
        forward: Calls the simulator.
        is_inverse: Whether to take the inverse losses, too; the encoder's needs x' at all points.
    Returns:
        "prediction"; with `is_inverse` also "decoder_inverse" and "encoder_inverse". Means over the batch.
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
        )
    }
    if not is_inverse:
        return losses
    losses["decoder_inverse"] = _error_at(
        points_P, simulator, state_BLD, given_BXC, parameters_BQ, task=task, array=known.input_array
    )
    first_BLD = states_BKLD[:, 0]
    predicted_BXC = simulator.decode(first_BLD, parameters_BQ, task=task)
    again_BLD = simulator.encode(predicted_BXC, parameters_BQ, task=task)
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
) -> Tensor:
    """Relative square error of decoded states at some points of the grid."""
    autoencoder = simulator.autoencoder
    assert autoencoder is not None
    latent_BLD = simulator.normalizer_of(task, array).inverse(state_BLD)
    query_PN = simulator.queries.get_buffer(task)[points_P]
    values_BPC = autoencoder.decode(latent_BLD, query_PN, parameters_BQ, task=task, array=array)
    truth_BAC = truth_BXC.flatten(1, -2)
    return relative_square_error(
        values_BPC.float(),
        truth_BAC[:, points_P],
        power_BC=truth_BAC.square().mean(1),
        std_C=autoencoder.normalizer_of(task, array).std,
    )
