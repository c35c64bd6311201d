"""Flow matching where the truth is known: a Gaussian, in closed form, and residuals of two modes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gaussian_path import gaussian_velocity
from torch import Tensor

from ups.diffusion.paths import FlowTimes, at_time, flow_matching_error, flow_time
from ups.diffusion.samplers import sample
from ups.models.corrector import VelocityNetwork
from ups.models.operator_size import OperatorSize, TokenAxis
from ups.nn.layers import Condition

L = 4
Data = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


class Toy:
    """A velocity network of residuals r, shape (B, L, 1), that depend on a given state z."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        size = OperatorSize(width=24, depths=(2,), mixers=("convolution",))
        axes = (TokenAxis(L, False),)
        self.network = VelocityNetwork(1, num_given=1, num_tasks=1, ranges=[], size=size, axes=axes)
        self.geometry = self.network.geometry((L,), ("periodic",), steady=False)

    def velocity(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        condition = Condition(0, torch.zeros(len(x), 0))
        conditions = self.network.conditions(condition, torch.ones(len(x)), self.geometry)
        return self.network.velocity(x, t, [z], conditions, self.geometry)

    def train(self, data: Data, *, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        weights = self.network.parameters()
        optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        for _ in range(steps):
            z, r = data(128, generator)
            e = torch.randn(r.shape, generator=generator)
            t = flow_time(FlowTimes().draw(len(r), generator))
            loss = flow_matching_error(self.velocity(at_time(e, r, t), t, z), e, r).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def ensembles(self, z: Tensor, *, members: int) -> Tensor:
        """Shape (B, M, L)."""
        noise = torch.randn(len(z) * members, L, 1, generator=torch.Generator().manual_seed(2))
        repeated = z.repeat_interleave(members, dim=0)
        drawn = sample(lambda x, t: self.velocity(x, t, repeated), noise, num_steps=16)
        return drawn.x[..., 0].unflatten(0, (len(z), members))


def energy_score(ensembles_BML: Tensor, truth_BL: Tensor) -> float:
    """The fair estimator: 0 is best, and no forecast has less than the truth's own distribution."""
    members = ensembles_BML.shape[1]
    far = (ensembles_BML - truth_BL[:, None]).norm(dim=2).mean()
    apart = torch.cdist(ensembles_BML, ensembles_BML).sum(dim=(1, 2)).mean() / (members * (members - 1))
    return float(far - apart / 2)


def spread_over_skill(ensembles_BML: Tensor, truth_BL: Tensor) -> float:
    members = ensembles_BML.shape[1]
    error = (ensembles_BML.mean(dim=1) - truth_BL).square().mean()
    return float((ensembles_BML.var(dim=1).mean() * (1 + 1 / members) / error).sqrt())


def gaussian(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """r = z / 2 + 0.5 e."""
    z, e = torch.randn(2, num, L, 1, generator=generator)
    return z, 0.5 * z + 0.5 * e


def two_modes(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A wave whose sign nothing says and whose phase is that of the given state, and a little noise."""
    phase = 2 * math.pi * torch.rand(num, 1, generator=generator)
    z = (torch.arange(L) * math.pi / 2 + phase).sin()
    sign = torch.randint(2, (num, 1), generator=generator) * 2.0 - 1
    r = sign * z + 0.2 * torch.randn(num, L, generator=generator)
    return z[..., None], r[..., None]


def test_velocity_of_a_gaussian_is_that_of_the_closed_form() -> None:
    toy = Toy()
    toy.train(gaussian, steps=150)
    generator = torch.Generator().manual_seed(3)
    z, r = gaussian(1000, generator)
    e = torch.randn(r.shape, generator=generator)
    for time in (0.1, 0.5, 0.9):
        t = torch.full((len(r),), time)
        x = at_time(e, r, t)
        with torch.no_grad():
            found = toy.velocity(x, t, z)
        expected = gaussian_velocity(x, t, mean=0.5 * z, std=0.5)
        assert (found - expected).square().mean() < 0.03 * expected.square().mean()


def test_ensembles_of_two_modes_have_nearly_the_scores_of_the_truth() -> None:
    toy = Toy()
    toy.train(two_modes, steps=300)
    generator = torch.Generator().manual_seed(3)
    z, r = two_modes(100, generator)
    truth = r[..., 0]
    signs = torch.randint(2, (100, 64, 1), generator=generator) * 2.0 - 1
    best = signs * z[:, None, :, 0] + 0.2 * torch.randn(100, 64, L, generator=generator)
    mean_alone = torch.zeros_like(best)
    found = toy.ensembles(z, members=64)
    assert energy_score(found, truth) < 1.05 * energy_score(best, truth)
    assert energy_score(found, truth) < 0.8 * energy_score(mean_alone, truth)
    assert 0.85 < spread_over_skill(found, truth) < 1.15
    amplitude = (found * z[:, None, :, 0]).mean(dim=2) / z[:, None, :, 0].square().mean(dim=2)
    assert ((amplitude.abs() - 1).abs() < 0.5).float().mean() > 0.9  # at one of the modes, not between them
