"""Distillation: where a student's map is known, its error is zero there, and training finds it."""

from __future__ import annotations

import pytest
import torch
from gaussian_path import gaussian_velocity
from torch import Tensor

from ups.diffusion.distillation import (
    consistency_error,
    consistency_intervals,
    consistency_target,
    jump,
    own_times,
    student_times,
)
from ups.diffusion.paths import LAST_TIME, along, at_time, datum_of_velocity, flow_matching_error, time_grid
from ups.diffusion.samplers import euler, heun

torch.set_num_threads(1)
MEAN, STD = 1.5, 0.5  # of Gaussian data


def teacher(x: Tensor, t: Tensor) -> Tensor:
    return gaussian_velocity(x, t, mean=MEAN, std=STD)


def flow_map(x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Where the teacher's path through x is at time s: x_t is normal, and paths keep their quantiles."""
    t, s = along(t, x), along(s, x)
    scale_t, scale_s = (((1 - time) ** 2 + time**2 * STD**2).sqrt() for time in (t, s))
    return s * MEAN + scale_s / scale_t * (x - t * MEAN)


def exact(x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The velocity of the student that jumps as the teacher flows."""
    return (flow_map(x, t, s) - x) / along(s - t, x)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gaussian_teacher_s_map_is_the_one_in_closed_form() -> None:
    e = drawn(64, 2)
    ends = flow_map(e, torch.zeros(64), torch.ones(64))
    torch.testing.assert_close(ends, MEAN + STD * e)
    torch.testing.assert_close(heun(teacher, e, time_grid(64)).x, ends, rtol=0, atol=5e-3)


def test_linear_student_of_reflow_learns_the_teacher_s_map() -> None:
    """v(e, 0) = a + b e by least squares on pairs: a = mean and b = std - 1, so e + v(e, 0) = T(e)."""
    e = drawn(512, 1)
    r = heun(teacher, e, time_grid(64)).x
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], line_search_fn="strong_wolfe")

    def velocity(x: Tensor) -> Tensor:
        return weights[0] + weights[1] * x

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = flow_matching_error(velocity(at_time(e, r, torch.zeros(512))), e, r).mean()
        error.backward()
        return error

    optimizer.step(loss)
    assert weights.tolist() == pytest.approx([MEAN, STD - 1], abs=5e-3)
    student = euler(lambda x, t: velocity(x), e, time_grid(1))
    assert student.num_evaluations == 1
    torch.testing.assert_close(student.x.detach(), r, rtol=0, atol=5e-3)


def test_pairs_of_a_flow_have_straight_paths_whose_velocity_is_the_same_at_all_times() -> None:
    e = drawn(64, 1)
    r = flow_map(e, torch.zeros(64), torch.ones(64))
    for time in (0.0, 0.3, 0.9):
        t = torch.full((64,), time, dtype=torch.float64)
        x = at_time(e, r, t)  # (1 - t + t std) e + t mean: each point belongs to one path
        back = (x - time * MEAN) / (1 - time + time * STD)
        assert flow_matching_error(MEAN + (STD - 1) * back, e, r).max() < 1e-20


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_consistency_error_is_zero_for_the_student_that_jumps_as_the_teacher_flows(num_steps: int) -> None:
    x = drawn(32, 3)
    for one in consistency_intervals(num_steps, 256):
        t, u, s = (torch.full((32,), time, dtype=torch.float64) for time in one)
        points = flow_map(x, torch.zeros(32), t)

        def target(x: Tensor, at: Tensor, s: Tensor = s) -> Tensor:
            return exact(x, torch.minimum(at, s - 1e-3), s)

        aim = consistency_target(teacher, target, points, t=t, u=u, s=s)
        errors = consistency_error(exact(points, t, s), points, aim, t=t, s=s)
        assert errors.max() < 5e-3**2  # of the last step, 1/32 long and straight
        wrong = consistency_error(exact(points, t, s) + 0.5, points, aim, t=t, s=s)
        torch.testing.assert_close(wrong, (0.5 * (s - t)) ** 2, rtol=0.1, atol=1e-4)


def test_consistency_training_carries_the_end_of_the_path_back_to_its_beginning() -> None:
    """At each time a linear student is fitted to its own jump from the next: one step is the flow."""
    weights: dict[float, tuple[float, float]] = {}
    x0 = drawn(256, 1)
    for t, u, s in reversed(consistency_intervals(1, 32)):
        times = [torch.full((256,), time, dtype=torch.float64) for time in (t, u, s)]
        x = flow_map(x0, torch.zeros(256), times[0])

        def target(x: Tensor, at: Tensor, u: float = u) -> Tensor:
            offset, slope = weights.get(u, (0.0, 0.0))
            return offset + slope * x

        aim = consistency_target(teacher, target, x, t=times[0], u=times[1], s=times[2])
        table = torch.cat([torch.ones_like(x), x], dim=1)
        fitted = torch.linalg.lstsq(table, (aim - x) / (s - t)).solution[:, 0]
        weights[t] = (float(fitted[0]), float(fitted[1]))
    assert weights[0.0] == pytest.approx((MEAN, STD - 1), abs=0.01)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_intervals_fill_the_segments_of_the_student_and_end_where_the_teacher_may_be_asked(
    num_steps: int,
) -> None:
    intervals = consistency_intervals(num_steps, 32)
    assert [one.t for one in intervals[1:]] == [one.u for one in intervals[:-1]]
    assert (intervals[0].t, intervals[-1].u) == (0, 1)
    assert max(one.t for one in intervals) <= LAST_TIME
    assert all(one.t < one.u <= one.s for one in intervals)
    ends = sorted({one.s for one in intervals})
    assert ends == [*student_times(num_steps)[1:], 1.0]
    assert 24 <= len(intervals) <= 33


def test_student_is_asked_at_the_times_of_euler_s_method() -> None:
    for num_steps in (1, 2, 3, 4):
        asked: list[float] = []

        def velocity(x: Tensor, t: Tensor, asked: list[float] = asked) -> Tensor:
            asked.append(float(t[0]))
            return torch.zeros_like(x)

        euler(velocity, drawn(1, 2), time_grid(num_steps))
        assert asked == pytest.approx(student_times(num_steps))


def test_share_of_flow_times_is_that_of_the_student_s_own() -> None:
    generator = torch.Generator().manual_seed(0)
    tau = torch.rand(4096, generator=generator) * 0.1 + 0.8
    assert torch.equal(own_times(tau, 0.0, 2, generator), tau)
    both = own_times(tau, 0.5, 2, generator)
    own = both != tau
    assert 0.45 < float(own.float().mean()) < 0.55
    assert set(both[own].tolist()) == {0.0, 0.5}


def test_jump_to_the_end_of_time_is_the_datum() -> None:
    x, v, t = drawn(4, 3), drawn(4, 3, seed=1), torch.tensor([0.0, 0.3, 0.9, 1.0], dtype=torch.float64)
    torch.testing.assert_close(jump(x, v, t, torch.ones(4)), datum_of_velocity(x, v, t))
    assert torch.equal(jump(x, v, t, t), x)
