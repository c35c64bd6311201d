"""A residual of 16 numbers with two modes, whose flow is known: a step of a student draws as its teacher."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ups.diffusion.distillation import own_times
from ups.diffusion.paths import (
    FlowTimes,
    along,
    at_time,
    flow_matching_error,
    flow_time,
    time_grid,
    velocity_of_datum,
)
from ups.diffusion.samplers import euler
from ups.eval.ensembles import fair_energy_score

torch.set_num_threads(1)
DIM, STD = 16, 0.3
MODE = torch.sin(2 * torch.pi * torch.arange(DIM) / DIM)  # r = +- MODE + STD noise


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def truth(num: int, *, seed: int) -> Tensor:
    signs = drawn(num, 1, seed=seed).sign()
    return signs * MODE + STD * drawn(num, DIM, seed=seed + 1)


def teacher(x: Tensor, t: Tensor) -> Tensor:
    """The velocity of the flow to both modes, by the posterior means under each."""
    t = along(t, x)
    variance = (1 - t) ** 2 + t**2 * STD**2
    weight = torch.sigmoid(2 * t * (x @ MODE)[:, None] / variance)  # of the mode +MODE
    centre = (2 * weight - 1) * MODE
    datum = centre + t * STD**2 / variance * (x - t * centre)
    return velocity_of_datum(x, datum, t.flatten())


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(DIM + 1, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, DIM)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return velocity_of_datum(x, self.layers(torch.cat([x, t[:, None]], dim=1)), t)


def reflowed(num_steps: int) -> Student:
    """A student of the teacher's pairs, after a short training."""
    generator = torch.Generator().manual_seed(0)
    e = drawn(16384, DIM, seed=1)
    r = euler(teacher, e, time_grid(32)).x
    torch.manual_seed(0)
    student = Student()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    num = 500
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num)
    for _ in range(num):
        rows = torch.randint(len(e), (256,), generator=generator)
        t = own_times(flow_time(FlowTimes().draw(256, generator)), 0.9, num_steps, generator)
        loss = flow_matching_error(student(at_time(e[rows], r[rows], t), t), e[rows], r[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return student.eval()


def energy_score(members: Tensor) -> float:
    """Of one ensemble, for as many truths."""
    truths = truth(256, seed=10)
    return float(fair_energy_score(members.expand(256, *members.shape), truths).mean())


@torch.no_grad()
@pytest.mark.parametrize("num_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_student_of_few_steps_scores_as_its_teacher_of_32(num_steps: int) -> None:
    with torch.enable_grad():
        student = reflowed(num_steps)
    e = drawn(256, DIM, seed=2)
    best = energy_score(truth(256, seed=20))
    taught = energy_score(euler(teacher, e, time_grid(32)).x)
    coarse = energy_score(euler(teacher, e, time_grid(num_steps)).x)
    own = energy_score(euler(student, e, time_grid(num_steps)).x)
    assert taught == pytest.approx(best, rel=0.03)
    assert coarse > 1.04 * taught  # what the teacher itself makes of so few steps
    assert own < 1.03 * taught
    places = euler(student, drawn(512, DIM, seed=3), time_grid(num_steps)).x @ MODE / (MODE @ MODE)
    assert 0.4 < float((places > 0).float().mean()) < 0.6  # of both modes
    assert float((places.abs() > 0.5).float().mean()) > 0.6  # what a smooth map leaves at them
