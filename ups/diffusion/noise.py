"""Noise of ensembles: each member has a stream of its own, so it doesn't depend on how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def member_generators(seed: int, members: int) -> list[torch.Generator]:
    """A generator for each member, on the CPU: the same numbers on every device."""
    seeds = (np.random.SeedSequence([seed, number]).generate_state(1, np.uint64) for number in range(members))
    return [torch.Generator().manual_seed(int(own[0])) for own in seeds]


def member_noise(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Standard normal numbers of one step, a member after the other within each sample.

    Args:
        generators: Of the members; each goes on.
        like: A state of each sample, shape (B, ...), on the device that they are wanted on.
    Returns:
        float32, shape (B M, ...).
    """
    drawn = [torch.randn(like.shape, generator=generator) for generator in generators]
    return torch.stack(drawn, dim=1).flatten(0, 1).to(like.device)
