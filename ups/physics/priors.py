"""Losses of predicted fields that compare them with the laws of their task instead of the truth.

A law holds for stored data up to a floor: their solver's error, the quadrature's, and on latents that of the
decoder. So what is minimised is what a prediction's error has beyond that of the true frames of the same
window, which is 0 for a perfect prediction, and no prior pulls away from the data.

Letters: B batch, K steps, X the axes of the grid, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ups.laws import PRIORS, Prior
from ups.physics.task_physics import Step, TaskPhysics


def prior_losses(
    physics: TaskPhysics,
    weights: Mapping[str, float],
    *,
    predicted_BKXC: Tensor,
    truth_BKXC: Tensor,
    given_BXC: Tensor,
    values: Mapping[str, Tensor],
    dt_B: Tensor,
) -> dict[str, Tensor]:
    """Weighted excess of each prior's error over that of the truth, relative.

    Args:
        physics: Of the task.
        weights: By prior; those that say nothing about the task are passed over.
        predicted_BKXC: Decoded predictions, physical units, shape (B, K, X..., C).
        truth_BKXC: The frames that they predict, restored by the same decoder.
        given_BXC: The frame that they start from, without noise; of a steady task its input.
        values: Parameters and boundary values by name, each (B,).
        dt_B: Time of a step, shape (B,).

    Returns:
        Scalars "physics/<prior>", means over batch and steps.
    """
    steps = [
        _pairs(frames.float(), given_BXC.float(), values, dt_B)
        for frames in (predicted_BKXC, truth_BKXC.detach())
    ]
    found = {}
    for prior in PRIORS:
        if weights.get(prior) and physics.why_not(prior) is None:
            found[f"physics/{prior}"] = weights[prior] * excess(physics, prior, *steps).mean()
    return found


def excess(physics: TaskPhysics, prior: Prior, predicted: Step, truth: Step) -> Tensor:
    """What a prior's error of predictions has beyond that of the truth, relative, at least 0, shape (B,)."""
    with torch.no_grad():
        floor_B, scale_B = physics.error(prior, truth), physics.scale(prior, truth)
    return (physics.error(prior, predicted) - floor_B).relu() / scale_B


def _pairs(frames_BKXC: Tensor, given_BXC: Tensor, values: Mapping[str, Tensor], dt_B: Tensor) -> Step:
    """Frames as steps side by side, the K of a sample one after another."""
    num = frames_BKXC.shape[1]
    if num == 1:
        before_BKXC = given_BXC.unsqueeze(1)
    else:
        before_BKXC = torch.cat([given_BXC.unsqueeze(1), frames_BKXC[:, :-1]], dim=1)
    return Step(
        before=before_BKXC.flatten(0, 1),
        after=frames_BKXC.flatten(0, 1),
        start=given_BXC.repeat_interleave(num, dim=0),
        values={name: column.repeat_interleave(num) for name, column in values.items()},
        dt=dt_B.repeat_interleave(num),
    )
