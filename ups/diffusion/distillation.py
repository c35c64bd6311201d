"""Distillation: a student that goes from noise to data in a few evaluations learns from its teacher's flow.

Both methods give a velocity, which Euler's method of N steps follows: with one step its prediction at t = 0
is the student's map. A student of N steps is asked at N times, where its N segments begin; the last one ends
at t = 1.

- Rectified flow: noise e and what the teacher makes of it, r = T(e), are drawn once, in pairs. Flow matching
  on pairs makes paths that don't cross, so straight ones; `flow_matching_error` is the loss.
- Consistency: from any time of a segment the student jumps to the segment's end, where the jump from a point
  a little further along the teacher's path ends, too. No pairs are needed.

Letters: B batch, x point, t flow time, u the next time of the teacher's grid, s end of the student's segment,
v velocity, N steps.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ups.diffusion.paths import LAST_TIME, along, time_grid
from ups.diffusion.samplers import Velocity


def student_times(num_steps: int) -> list[float]:
    """The times at which a student of N steps is asked, t = 0 first; those of Euler's method.

    Args:
        num_steps: N, >= 1.
    """
    return time_grid(num_steps)[:-1]


def own_times(tau: Tensor, share: float, num_steps: int, generator: torch.Generator) -> Tensor:
    """Flow times for rectified flow: a share of them those at which the student is asked, the rest as drawn.

    All of a path is learnt, so that paths become straight, yet the student is asked at few of its points.
    With share 1 and one step it is plain regression of T(e) on e (Luhman and Luhman 2021, arXiv:2101.02388).

    Args:
        tau: Flow times as drawn, shape (B,).
        share: Probability of one of the student's own, 0 to 1.
        num_steps: N.
        generator: Of what is drawn here, on the CPU.
    """
    times = torch.tensor(student_times(num_steps))
    chosen = times[torch.randint(len(times), tau.shape, generator=generator)]
    return torch.where(torch.rand(tau.shape, generator=generator) < share, chosen, tau)


class Interval(NamedTuple):
    """A step of the teacher's within a segment of the student's.

    Attributes:
        t: Its beginning.
        u: Its end.
        s: End of the segment, >= u.
    """

    t: float
    u: float
    s: float


def consistency_intervals(num_steps: int, teacher_steps: int) -> list[Interval]:
    """Each of the student's segments cut into equal steps of the teacher's.

    Args:
        num_steps: N, of the student.
        teacher_steps: Of the teacher's over all segments, about; no step begins later than `LAST_TIME`.

    Source: Heek et al. 2024, algorithm 1 (arXiv:2403.06807); with one segment Song et al. 2023, algorithm 2.
    """
    found = []
    for begin, end in pairwise([*student_times(num_steps), 1.0]):
        num = max(1, round(teacher_steps * (end - begin)))
        if end == 1.0:
            num = min(num, math.floor((1 - begin) / (1 - LAST_TIME)))
        times = [begin + (end - begin) * number / num for number in range(num)]
        found += [Interval(t, u, end) for t, u in pairwise([*times, end])]
    return found


def jump(x: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """f(x, t) = x + (s - t) v: where the straight line through x is at time s; x itself at t = s.

    With s = 1 it is f = x + (1 - t) F, `ups.diffusion.paths.datum_of_velocity`.
    Source: Song et al. 2023, eq. 5 (arXiv:2303.01469), c_skip = 1 and c_out = s - t.
    """
    return x + along(s - t, x) * v


def consistency_target(
    teacher: Velocity, target: Velocity, x: Tensor, *, t: Tensor, u: Tensor, s: Tensor
) -> Tensor:
    """Where the student should jump to from x: as its target network does from the teacher's next point.

    Args:
        teacher: Its velocity; one step of Heun's method, or Euler's where the step ends at t = 1.
        target: The velocity of the student's averaged weights.
        x: Points of paths, shape (B, ...), at the times t.
        t: Beginning of the teacher's step, shape (B,).
        u: Its end.
        s: End of the student's segment; where u is s, the teacher's point is the target.

    Source: Song et al. 2023, eq. 7 and algorithm 2; Heek et al. 2024, algorithm 1.
    """
    ahead = _teacher_step(teacher, x, t, u)
    asked = u.clamp(max=LAST_TIME)  # where the segment ends, what is found there is multiplied by 0
    return jump(ahead, target(ahead, asked), u, s)


def _teacher_step(teacher: Velocity, x: Tensor, t: Tensor, u: Tensor) -> Tensor:
    """Heun's method; the slope at t = 1, of which there is none, is taken to be that at t."""
    slope = teacher(x, t)
    ahead = jump(x, slope, t, u)
    after = teacher(ahead, u.clamp(max=LAST_TIME))
    mean = torch.where(along(u, x) > LAST_TIME, slope, (slope + after) / 2)
    return jump(x, mean, t, u)


def consistency_error(v: Tensor, x: Tensor, target: Tensor, *, t: Tensor, s: Tensor) -> Tensor:
    """|f(x, t) - target|^2, the mean over all but the batch, shape (B,).

    Args:
        v: The student's velocity at x and t.
        x: Points of paths.
        target: As `consistency_target` gives it; no gradient goes through it.
        t: Flow time, shape (B,).
        s: End of the segment.

    Source: Song et al. 2023, eq. 7 with the squared distance and a weight of 1.
    """
    return (jump(x, v, t, s) - target.detach()).square().flatten(1).mean(dim=1)
