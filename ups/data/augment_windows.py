"""Augmentation of windows by symmetries of the equations; all frames of a window are changed alike.

Letters: B batch.
"""

from __future__ import annotations

import dataclasses

from ups.data.augment import augment_trajectories, shift_periodic
from ups.data.window_batches import WindowBatch


def augment_windows(
    batch: WindowBatch, *, tokens: tuple[int, ...], periodic: tuple[bool, ...], is_latent: bool
) -> WindowBatch:
    """Shift every window along its periodic axes; fields are reflected too where the equation allows it.

    Latents are shifted by whole tokens, with which encoder and decoder commute.

    Args:
        batch: Windows of a task.
        tokens: Tokens along each axis.
        periodic: Whether each axis is.
        is_latent: Whether the states are latents, not fields.
    """
    generator = batch.generator
    if not is_latent:
        moved = augment_trajectories(batch.states, task=batch.task, periodic=periodic, generator=generator)
        return dataclasses.replace(batch, states=moved)
    states = batch.states.unflatten(2, tokens)
    states = shift_periodic(states, periodic, first_axis=2, generator=generator)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))
