"""Metrics against values computed by hand, against plain NumPy loops, and Parseval's theorem."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ups.errors import ShapeError
from ups.eval.metrics import measure, pdebench, pdebench_compat, shell_energy, summary

torch.set_num_threads(1)


def make_pair(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def on_a_line(*samples: list[float]) -> Tensor:
    """Samples of one frame and one channel: (B, 1, X, 1)."""
    return torch.tensor(samples)[:, None, :, None]


# --- by hand -------------------------------------------------------------------------------------------


def test_values_of_two_samples_by_hand() -> None:
    truth = on_a_line([3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    prediction = truth + on_a_line([2.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 1.0, 3.0])
    errors = {name: error.item() for name, error in pdebench(measure(prediction, truth)).items()}
    assert errors["rmse"] == pytest.approx((1.0 + math.sqrt(3.0)) / 2)
    assert errors["nrmse"] == pytest.approx((1.0 / 2.5 + math.sqrt(3.0) / 1.0) / 2)
    assert errors["crmse"] == pytest.approx(math.sqrt((2.0**2 + 4.0**2) / 2) / 4)
    assert errors["max_error"] == 3.0
    assert errors["brmse"] == pytest.approx((math.sqrt(4 / 2) + math.sqrt((1 + 9) / 2)) / 2)
    # Transforms of the errors: 2, 2, 2 and 4, -2 + 2i, -4.
    low = (math.sqrt((4 + 16) / 2) + math.sqrt((4 + 8) / 2) + math.sqrt((4 + 16) / 2)) / 3 / 4
    assert errors["frmse_low"] == pytest.approx(low)
    assert math.isnan(errors["frmse_mid"])  # four points have no wave number 4


def test_batches_are_averaged_in_the_compatible_form() -> None:
    truth = on_a_line([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    prediction = truth + on_a_line([1.0, 1.0], [-3.0, -3.0], [5.0, 5.0])
    errors = pdebench_compat(measure(prediction, truth), 2)
    assert errors["rmse"] == pytest.approx(((1 + 3) / 2 + 5) / 2)  # not (1 + 3 + 5) / 3
    assert errors["crmse"] == pytest.approx((math.sqrt((1 + 9) / 2) + 5) / 2)
    assert errors["max_error"] == pytest.approx((3 + 5) / 2)


def test_compatible_form_of_one_batch_is_the_exact_one() -> None:
    prediction, truth = make_pair(4, 2, 32, 2)
    measured = measure(prediction, truth)
    exact, compat = summary(pdebench(measured)), pdebench_compat(measured, 4)
    assert compat == pytest.approx(exact, nan_ok=True)


def test_vrmse_of_the_mean_is_one_and_of_the_truth_zero() -> None:
    _, truth = make_pair(3, 2, 64, 2)
    mean = truth.mean(2, keepdim=True).expand_as(truth)
    torch.testing.assert_close(
        measure(mean, truth)["vrmse"].mean(0), torch.ones(2, 2).double(), rtol=1e-5, atol=0
    )
    assert measure(truth, truth)["vrmse"].max() == 0


def test_relative_l2_of_a_scaled_field_is_the_scale() -> None:
    _, truth = make_pair(3, 2, 8, 8, 2)
    torch.testing.assert_close(measure(1.25 * truth, truth)["relative_l2"], torch.full((3,), 0.25).double())


def test_correlation_time_is_when_it_first_falls_below() -> None:
    x = torch.arange(32) / 32 * 2 * math.pi
    angles = torch.tensor([0.0, 0.5, 0.7, 0.1])  # the correlation of shifted sines is the shift's cosine
    truth = torch.sin(x)[None, None, :, None].expand(2, 4, -1, -1)
    shifted = torch.sin(x + angles[:, None])[None, :, :, None]
    prediction = torch.cat([shifted, truth[:1]])
    t = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    errors = measure(prediction, truth, t=t.numpy())
    torch.testing.assert_close(errors["correlation"][0], angles.double().cos(), atol=1e-6, rtol=0)
    assert errors["correlation_time"].tolist() == [t[2].item(), t[3].item()]


def test_constant_field_has_no_correlation() -> None:
    _, truth = make_pair(1, 1, 8, 1)
    assert measure(torch.ones_like(truth), truth)["correlation"].item() == 0


# --- frequency -----------------------------------------------------------------------------------------


def test_one_dimensional_energies_satisfy_parseval() -> None:
    field, _ = make_pair(2, 3, 16, 2)
    energy = shell_energy(field.double())
    both_signs = 2 * energy.sum(2) - energy[:, :, 0] - energy[:, :, -1]
    torch.testing.assert_close(both_signs, 16 * field.double().square().sum(2))


def test_radial_energies_of_a_smooth_field_satisfy_parseval() -> None:
    """Only a field without the corners of the spectrum lies within the shells as a whole."""
    y, x = torch.meshgrid(*(torch.arange(n).double() / n * 2 * math.pi for n in (16, 24)), indexing="ij")
    field = (torch.sin(x + 2 * y) + 0.3 * torch.cos(5 * x) + 0.1)[None, None, :, :, None]
    energy = shell_energy(field)
    torch.testing.assert_close(energy.sum(2), 16 * 24 * field.square().sum((2, 3)))
    present = energy[0, 0, :, 0] > 1e-6
    assert present.nonzero().flatten().tolist() == [0, 2, 5]  # |(2, 1)| = 2.24


@pytest.mark.parametrize(("wave_number", "band"), [(3, "low"), (4, "mid"), (11, "mid"), (12, "high")])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_error_of_one_wave_number_lies_in_its_band(wave_number: int, band: str, ndim: int) -> None:
    x = torch.arange(32).double() / 32 * 2 * math.pi
    wave = (
        torch.cos(wave_number * x).reshape(-1, *(1,) * (ndim - 1)).expand((32,) * ndim)[None, None, ..., None]
    )
    errors = pdebench(measure(wave, torch.zeros_like(wave)))
    frmse = {name: error for name, error in errors.items() if name.startswith("frmse_")}
    assert [name for name, error in frmse.items() if error.item() > 1e-6] == [f"frmse_{band}"]


def test_length_of_the_domain_scales_the_frequency_errors() -> None:
    prediction, truth = make_pair(2, 1, 8, 8, 1)
    once = pdebench(measure(prediction, truth))["frmse_low"]
    scaled = pdebench(measure(prediction, truth, lengths=(2, 5)))["frmse_low"]
    torch.testing.assert_close(scaled, 10 * once)


# --- plain twins ---------------------------------------------------------------------------------------


def test_two_dimensional_values_agree_with_numpy_loops() -> None:
    prediction, truth = make_pair(3, 2, 4, 6, 2)
    errors = pdebench(measure(prediction, truth))
    p, y = prediction.double().numpy(), truth.double().numpy()
    for t in range(2):
        for c in range(2):
            d = p[:, t, :, :, c] - y[:, t, :, :, c]
            size = np.sqrt((y[:, t, :, :, c] ** 2).mean((1, 2)))
            assert errors["rmse"][t, c] == pytest.approx(np.mean([np.sqrt((s**2).mean()) for s in d]))
            assert errors["nrmse"][t, c] == pytest.approx(np.mean(np.sqrt((d**2).mean((1, 2))) / size))
            assert errors["crmse"][t, c] == pytest.approx(np.sqrt(np.mean([s.sum() ** 2 for s in d])) / 24)
            inside = np.zeros((4, 6), bool)
            inside[1:-1, 1:-1] = True
            boundary = np.mean([np.sqrt((s[~inside] ** 2).mean()) for s in d])
            assert errors["brmse"][t, c] == pytest.approx(boundary)


def looped_compat(difference: np.ndarray, lengths: tuple[float, ...]) -> dict[str, float]:
    """brmse and frmse of one batch as PDEBench counts them; (B, X...), one time step and channel."""
    num, points = len(difference), difference.shape[1:]
    square, count = np.zeros(num), 0
    for axis in range(len(points)):
        for end in (0, -1):  # an edge belongs to several faces, and counts in each
            face = np.take(difference, end, axis=axis + 1).reshape(num, -1)
            square += (face**2).sum(1)
            count += face.shape[1]
    spectrum = np.fft.fftn(difference, axes=range(1, difference.ndim))
    energy = np.zeros((num, min(points) // 2))  # without the shell of half the points
    for index in np.ndindex(*points):
        numbers = [i if 2 * i < n else i - n for i, n in zip(index, points, strict=True)]
        shell = math.floor(math.sqrt(sum(i * i for i in numbers)))
        if min(numbers) >= 0 and shell < energy.shape[1]:
            energy[:, shell] += np.abs(spectrum[(slice(None), *index)]) ** 2
    amplitude = np.sqrt(energy.mean(0)) / math.prod(points) * math.prod(lengths)
    bands = {"frmse_low": amplitude[:4], "frmse_mid": amplitude[4:12], "frmse_high": amplitude[12:]}
    present = {name: values.mean() for name, values in bands.items() if len(values)}
    return {"brmse": np.sqrt(square / count).mean(), **present}


@pytest.mark.parametrize("points", [(26, 30), (9, 12), (6, 8, 10), (5, 10, 7)])
def test_compatible_form_counts_edges_and_sums_wave_vectors_as_pdebench(points: tuple[int, ...]) -> None:
    lengths = (2.0, 3.0, 0.5)[: len(points)]
    prediction, truth = make_pair(5, 2, *points, 1)
    batches = (prediction - truth).double().split(2)  # the last has one sample
    measured = measure(prediction, truth, lengths=lengths)
    found, exact = pdebench_compat(measured, 2), summary(pdebench(measured))
    by_hand = [looped_compat(batch[:, t, ..., 0].numpy(), lengths) for batch in batches for t in range(2)]
    for name in by_hand[0]:
        expected = np.mean([values[name] for values in by_hand])
        assert found[name] == pytest.approx(expected), name
        assert exact[name] != pytest.approx(expected, rel=1e-4), name
    assert all(math.isnan(found[f"frmse_{band}"]) for band in ("mid", "high") if len(points) == 3)


def test_summary_averages_over_time_and_channels() -> None:
    errors = {"nrmse": torch.tensor([[1.0, 3.0]]), "max_error": torch.tensor([[1.0, 3.0]])}
    assert summary(errors) == {"nrmse": 2.0, "max_error": 3.0}


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="prediction: expected"):
        measure(torch.zeros(1, 2, 3, 1), torch.zeros(1, 2, 4, 1))
    with pytest.raises(ShapeError, match=r"\(B, T, X\.\.\., C\)"):
        measure(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
