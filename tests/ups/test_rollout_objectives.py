"""Losses of rollouts: their values by hand, what they weigh, and that they are means over samples."""

from __future__ import annotations

import math

import pytest
import torch

from ups.losses import LossContext, reconstruction_error, rollout_losses, spectral_error

B, K, L, D = 3, 2, 16, 2
NO_FIELDS = LossContext("waves", (L,), torch.ones(B), torch.zeros(B, 0), fields=pytest.fail)


def losses_of(predicted: torch.Tensor, truth: torch.Tensor, **weights: float) -> dict[str, torch.Tensor]:
    """Of a mean square error unless weights say otherwise."""
    return rollout_losses(predicted, truth, weights=weights or {"mse": 1.0}, context=NO_FIELDS)


def states(num_steps: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(B, num_steps, L, D, generator=generator)
    return truth + 0.1 * torch.randn(truth.shape, generator=generator), truth


def relative_error(predicted: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return losses_of(predicted, truth, relative=1.0)["relative"]


def waves(number: int) -> torch.Tensor:
    """One sine over the token axis, shape (1, 1, L, 1)."""
    return torch.sin(2 * math.pi * number * torch.arange(L) / L)[None, None, :, None]


def test_first_and_later_steps_are_weighed_apart() -> None:
    truth = torch.zeros(B, 3, L, D)
    predicted = torch.stack([truth[:, 0] + 1, truth[:, 1] + 2, truth[:, 2] + 4], dim=1)
    losses = losses_of(predicted, truth)
    assert {name: loss.item() for name, loss in losses.items()} == {"one_step": 1.0, "rollout": 10.0}
    assert losses_of(predicted[:, :1], truth[:, :1]).keys() == {"one_step"}


def test_weights_scale_their_losses_and_zero_leaves_them_out() -> None:
    predicted, truth = states()
    losses = losses_of(predicted, truth, mse=1.0, relative=2.0, spectral=0.5)
    power_BK = truth.square().mean((2, 3)) + 0.01
    square_BK = (predicted - truth).square().mean((2, 3))
    torch.testing.assert_close(losses["relative"], 2 * (square_BK / power_BK).mean())
    torch.testing.assert_close(losses["spectral"], 0.5 * spectral_error(predicted, truth, tokens=(L,)))
    assert losses_of(predicted, truth).keys() == {"one_step", "rollout"}


def test_relative_error_does_not_depend_on_the_size_of_the_states() -> None:
    predicted, truth = states()
    large = relative_error(10 * predicted, 10 * truth)
    assert relative_error(100 * predicted, 100 * truth).item() == pytest.approx(large.item(), rel=1e-3)
    assert relative_error(truth, truth).item() == 0.0


def test_unsquared_relative_error_is_the_root_of_each_state() -> None:
    predicted, truth = states(3)
    losses = losses_of(predicted, truth, relative_l2=1.0)
    norm = (truth.square().sum((2, 3)) + 0.01 * L * D).sqrt()
    error_BK = (predicted - truth).square().sum((2, 3)).sqrt() / norm
    torch.testing.assert_close(losses, {"one_step": error_BK[:, 0].mean(), "rollout": error_BK[:, 1:].mean()})
    near = losses_of(truth + 0.1 * (predicted - truth), truth, relative_l2=1.0)
    torch.testing.assert_close(near["one_step"], 0.1 * losses["one_step"], rtol=1e-3, atol=0)


def test_perfect_prediction_has_finite_gradients() -> None:
    predicted = states()[1].requires_grad_()
    losses = losses_of(predicted, predicted.detach(), relative_l2=1.0)
    losses["one_step"].backward()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "expected"), [("mse", 4.0), ("relative_l2", 2.0), ("l1", math.sqrt(2))])
def test_errors_of_fields_are_over_the_power_of_their_frame(kind: str, expected: float) -> None:
    """Half of the points are off by twice the frame's root mean square times the square root of 2."""
    truth = torch.full((2, 8, 1), 3.0)
    truth[1] = 300.0  # counts as much
    error = torch.zeros_like(truth)
    error[:, ::2] = 2 * math.sqrt(2) * truth[:, ::2]
    power = truth.square().mean(1)
    found = reconstruction_error(
        truth + error,
        truth,
        power_BC=power,
        std_C=torch.tensor([1e-4]),
        kind=kind,  # type: ignore[arg-type]
    )
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_spectral_error_sees_small_scales_as_much_as_large_ones() -> None:
    """The mean square error of the second is a hundredth of the first's."""
    truth = waves(1) + 0.1 * waves(5)
    without_large = spectral_error(0.1 * waves(5), truth, tokens=(L,))
    without_small = spectral_error(waves(1), truth, tokens=(L,))
    assert without_small > 0.5 * without_large > 0
    assert spectral_error(truth, truth, tokens=(L,)).item() == 0.0


def test_spectral_error_of_a_plane_is_that_of_its_two_dimensional_wave_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(B, K, 16, D, generator=generator)
    error = 0.1 * torch.randn(truth.shape, generator=generator)
    energies = []
    for field in (error, truth):
        amplitude = torch.fft.fft(torch.fft.fft(field.unflatten(2, (4, 4)), dim=2), dim=3)[:, :, :, :3]
        energies.append(amplitude.abs().square().sum(-1))
    ratio = energies[0] / (energies[1] + 0.01 * energies[1].mean((2, 3), keepdim=True))
    torch.testing.assert_close(spectral_error(truth + error, truth, tokens=(4, 4)), ratio.mean())


def test_empty_state_has_finite_losses_and_gradients() -> None:
    predicted = torch.zeros(B, K, L, D, requires_grad=True)
    losses = losses_of(predicted, torch.zeros(B, K, L, D), mse=1.0, relative=1.0, spectral=1.0)
    torch.stack(list(losses.values())).sum().backward()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


def test_losses_of_a_batch_are_means_of_those_of_its_samples() -> None:
    """So ranks may share a batch."""
    predicted, truth = states()
    weights = {"mse": 1.0, "relative": 1.0, "spectral": 1.0}
    together = losses_of(predicted, truth, **weights)
    alone = [losses_of(predicted[i : i + 1], truth[i : i + 1], **weights) for i in range(B)]
    for name, loss in together.items():
        torch.testing.assert_close(loss, torch.stack([one[name] for one in alone]).mean())
