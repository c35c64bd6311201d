"""Augmentation of windows by symmetries of the equations; all frames of a window are changed alike.

Letters: B batch, K steps, L tokens, D channels of a token, X the axes of the grid, C channels.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ups.data.augment import augment, shift_frames
from ups.data.latent_windows import WindowBatch


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
        states = _augment_fields(batch.states, task=batch.task, periodic=periodic, generator=generator)
        return dataclasses.replace(batch, states=states)
    states = batch.states.unflatten(2, tokens)
    for axis, (num, wraps) in enumerate(zip(tokens, periodic, strict=True), start=2):
        if wraps:
            shift_B = torch.randint(num, (len(states),), generator=generator)
            states = shift_frames(states, shift_B.to(states.device), axis=axis)
    return dataclasses.replace(batch, states=states.flatten(2, 1 + len(tokens)))


def _augment_fields(
    states: Tensor, *, task: str, periodic: tuple[bool, ...], generator: torch.Generator
) -> Tensor:
    """Frames and channels lie together meanwhile, so that all of a window share their shift."""
    num_frames, num_channels = states.shape[1], states.shape[-1]
    together = states.movedim(1, -2).flatten(-2)
    changed = augment(together, task=task, periodic=periodic, generator=generator)
    return changed.unflatten(-1, (num_frames, num_channels)).movedim(-2, 1)
