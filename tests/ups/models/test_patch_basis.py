"""The linear part of encoder and decoder: projection, interpolation, equivariance, and how it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from memory_fields import fields_of
from torch import Tensor

import ups.data.patch_basis as measuring
from ups.data.fields import Fields, FieldsInfo
from ups.data.patch_basis import measure_bases
from ups.data.statistics import measure_statistics
from ups.errors import ConfigError
from ups.grid import GridSpec
from ups.models.any_point_decoder import grid_queries
from ups.nn.patches import interpolate
from ups.trained.autoencoder import Autoencoder
from ups.trained.specs import AutoencoderSpec, TaskSpec

LINE = GridSpec((32,), (True,), (("fields", 2),))
PLANE = GridSpec((8, 8), (True, False), (("fields", 1), ("coefficient", 1)))
BOX = GridSpec((8, 8, 8), (True, True, False), (("fields", 1),))


def make_fields(task: str, grid: GridSpec, *, seed: int = 0, num: int = 12) -> Fields:
    """Sums of a few smooth waves, of another amplitude and offset in every channel."""
    rng = np.random.default_rng(seed)
    steady = len(grid.channels) > 1
    place = grid_queries(grid.points).numpy()

    def frames(count: int, channels: int) -> np.ndarray:
        angles = (
            2 * np.pi * (place @ rng.integers(0, 4, (grid.ndim, count, 5, channels)).reshape(grid.ndim, -1))
        )
        waves = np.sin(angles + rng.uniform(0, 6, angles.shape[1])).reshape(len(place), count, 5, channels)
        values = waves.sum(2) * np.arange(1.0, 1 + channels) + 3.0
        return values.swapaxes(0, 1).reshape(count, *grid.points, channels).astype(np.float32)

    steps = 1 if steady else 4
    arrays = {"fields": frames(num * steps, grid.channels[0][1]).reshape(num, steps, *grid.points, -1)}
    arrays |= {name: frames(num, channels) for name, channels in grid.channels[1:]}
    names = tuple(f"u{channel}" for channel in range(grid.channels[0][1]))
    info = FieldsInfo(task, grid, names, {}, {}, (), steady)
    return fields_of(info, arrays)


def make_model(
    fields: Mapping[str, Fields], *, latent_dim: int, num_tokens: int, patch_size: int = 4, **linear: bool
) -> Autoencoder:
    tasks = {
        name: TaskSpec(
            some.info.grid,
            some.info.channels,
            some.info.steady,
            {array: values.to_json() for array, values in measure_statistics(some).items()},
        )
        for name, some in fields.items()
    }
    sizes = {"width": 8, "depth": 1, "num_heads": 2}
    spec = AutoencoderSpec(
        tasks=tasks,
        parameters=(),
        latent_dim=latent_dim,
        num_tokens=num_tokens,
        patch_size=patch_size,
        encoder={**sizes, "basis": "pca", "residual": True, "isometry": True, **linear},
        decoder={**sizes, "radius": 1},
    )
    model = Autoencoder(spec)
    measure_bases(model, fields)
    return model.eval()


def frames_of(fields: Fields, array: str = "fields") -> Tensor:
    values = fields.store.gather(fields.samples, [array])[array]
    return torch.from_numpy(values.reshape(-1, *fields.info.grid.points, values.shape[-1]))


def restored(model: Autoencoder, task: str, values: Tensor, array: str = "fields") -> Tensor:
    nothing = torch.zeros(len(values), 0)
    query = grid_queries(model.spec.tasks[task].grid.points)
    with torch.no_grad():
        return model(values, query, nothing, task=task, array=array).reshape(values.shape)


def cells_of(values: Tensor, cell: tuple[int, ...]) -> np.ndarray:
    """Plainly: the values of one cell after another, of all frames, shape (cells, P)."""
    frames = values.double().numpy()
    starts = np.ndindex(*(n // c for n, c in zip(frames.shape[1:-1], cell, strict=True)))
    parts = []
    for start in starts:
        place = tuple(slice(s * c, (s + 1) * c) for s, c in zip(start, cell, strict=True))
        parts.append(frames[(slice(None), *place)].reshape(len(frames), -1))
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("grid", "cell", "tokens"), [(LINE, (4,), 8), (PLANE, (4, 4), 4), (BOX, (4, 4, 4), 8)]
)
def test_untrained_autoencoder_is_the_orthogonal_projection(
    grid: GridSpec, cell: tuple[int, ...], tokens: int
) -> None:
    fields = make_fields("a", grid)
    model = make_model({"a": fields}, latent_dim=3, num_tokens=tokens)
    for array in grid.arrays:
        values = frames_of(fields, array)
        normalizer = model.normalizer_of("a", array)
        cells = cells_of(normalizer(values), cell)
        # The whole split was looked at, so the projection is that of NumPy's SVD of all of its cells.
        mean = cells.mean(0)
        vectors = np.linalg.svd(cells - mean, full_matrices=False)[2][:3]
        expected = (cells - mean) @ vectors.T @ vectors + mean
        found = cells_of(normalizer(restored(model, "a", values, array)), cell)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert np.abs(found - cells).max() > 0.05  # three numbers don't hold a cell
        latent = model.encode(values, torch.zeros(len(values), 0), task="a", array=array)
        assert math.isclose(latent.square().mean().sqrt().item(), 1.0, abs_tol=1e-3)


def test_as_many_channels_as_values_lose_nothing() -> None:
    fields = make_fields("a", PLANE)
    model = make_model({"a": fields}, latent_dim=18, num_tokens=4, residual=False)
    assert not list(model.parameters())
    values = frames_of(fields)
    torch.testing.assert_close(restored(model, "a", values), values, rtol=0, atol=1e-4)


def test_shift_by_a_token_shifts_the_tokens() -> None:
    fields = make_fields("a", LINE)
    model = make_model({"a": fields}, latent_dim=3, num_tokens=8)
    values, nothing = frames_of(fields)[:5], torch.zeros(5, 0)
    tokens = model.encode(values, nothing, task="a")
    shifted = model.encode(values.roll(4, dims=1), nothing, task="a")
    torch.testing.assert_close(shifted, tokens.roll(1, dims=1), rtol=0, atol=1e-6)
    query = torch.rand(20, 1)
    read = model.decode(tokens, query, nothing, task="a")
    again = model.decode(shifted, query + 1 / 8, nothing, task="a")
    torch.testing.assert_close(again, read, rtol=0, atol=1e-4)


def test_tasks_on_other_grids_and_arrays_have_their_own_basis() -> None:
    fields = {"a": make_fields("a", LINE), "b": make_fields("b", LINE, seed=1), "d": make_fields("d", PLANE)}
    model = make_model(fields, latent_dim=3, num_tokens=4, patch_size=2)
    bases = [model.encoder_of(PLANE).basis_of(array).vectors for array in PLANE.arrays]
    assert not torch.allclose(*bases)
    shared = model.encoder_of(LINE).basis_of("fields")
    alone = make_model({"a": fields["a"]}, latent_dim=3, num_tokens=4, patch_size=2)
    assert not torch.allclose(shared.vectors, alone.encoder_of(LINE).basis_of("fields").vectors)
    for name in fields:
        with torch.no_grad():
            error = restored(model, name, frames_of(fields[name])) - frames_of(fields[name])
        assert error.square().mean() < frames_of(fields[name]).var()


def test_gradients_reach_both_networks_from_zero() -> None:
    fields = make_fields("a", LINE)
    model = make_model({"a": fields}, latent_dim=3, num_tokens=8)
    values = frames_of(fields)
    query, nothing = grid_queries((32,)), torch.zeros(len(values), 0)
    (model(values, query, nothing, task="a").reshape(values.shape) - values).square().mean().backward()
    for layer in (model.encoder_of(LINE).out, model.decoder_of(LINE).out["fields"]):
        assert layer.weight.grad.abs().max() > 0


def test_autocast_does_not_round_the_linear_part() -> None:
    fields = make_fields("a", LINE)
    model = make_model({"a": fields}, latent_dim=8, num_tokens=8, residual=False)
    values = frames_of(fields)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(restored(model, "a", values), values, rtol=0, atol=1e-4)


def test_autoencoder_with_a_basis_is_compiled_as_a_whole() -> None:
    fields = make_fields("a", LINE)
    model = make_model({"a": fields}, latent_dim=3, num_tokens=8)
    given = frames_of(fields), grid_queries((32,)), torch.zeros(48, 0)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(*given, task="a")
        torch.testing.assert_close(compiled, model(*given, task="a"))


def test_cells_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MAX_CELL_VALUES", 15)
    given = {"a": make_fields("a", LINE)}
    with pytest.raises(ConfigError, match="basis") as caught:
        make_model(given, latent_dim=3, num_tokens=4)
    assert caught.value.kind == "large_cells"
    assert caught.value.hint == "say latent.tokens = 8 or more, or encoder.basis=none"
    make_model(given, latent_dim=3, num_tokens=8)
    monkeypatch.setattr(measuring, "MAX_CELL_VALUES", 7)
    with pytest.raises(ConfigError, match=r"say a smaller encoder\.patch_size, or encoder\.basis=none"):
        make_model(given, latent_dim=3, num_tokens=8)


# --- interpolation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [(1024,), (6, 4), (5, 3, 4)])
def test_interpolation_is_exact_at_points_of_the_grid(points: tuple[int, ...]) -> None:
    values = torch.randn(2, *points, 3)
    for periodic in (True, False):
        query = grid_queries(points)[None]
        found = interpolate(values, query, periodic=(periodic,) * len(points))
        assert torch.equal(found, values.flatten(1, -2))
        later = query + 2.0 * periodic
        torch.testing.assert_close(interpolate(values, later, periodic=(periodic,) * len(points)), found)


def test_interpolation_is_exact_for_cubics_up_to_the_ends() -> None:
    def cubic(place: Tensor) -> Tensor:
        x, y = place.double().unbind(-1)
        return ((x**3 - 2 * x) * (1 - y + 3 * y**3)).unsqueeze(-1)

    x, y = ((torch.arange(num, dtype=torch.float64) + 0.5) / num for num in (9, 6))
    values = cubic(torch.cartesian_prod(x, y)).reshape(1, 9, 6, 1)
    query = torch.rand(50, 2, dtype=torch.float64)
    query[:4] = torch.tensor([[0, 0], [1, 1], [0, 1], [1, 0.5]])
    found = interpolate(values, query[None], periodic=(False, False))
    torch.testing.assert_close(found, cubic(query)[None], rtol=0, atol=1e-12)


def test_interpolation_is_continuous_and_of_fourth_order() -> None:
    def error(num: int) -> float:
        place = (torch.arange(num, dtype=torch.float64) + 0.5) / num
        values = torch.sin(2 * torch.pi * place)[None, :, None]
        query = torch.linspace(-0.5, 1.5, 20001, dtype=torch.float64)[None, :, None]
        found = interpolate(values, query, periodic=(True,))
        assert found.diff(dim=1).abs().max() < 2 * torch.pi * 1.1e-4
        return float((found - torch.sin(2 * torch.pi * query)).abs().max())

    assert 14 < error(16) / error(32) < 18


def test_each_frame_may_have_queries_of_its_own() -> None:
    values, query = torch.randn(3, 6, 2), torch.rand(3, 7, 1)
    found = interpolate(values, query, periodic=(True,))
    for row in range(3):
        alone = interpolate(values[row : row + 1], query[row : row + 1], periodic=(True,))
        torch.testing.assert_close(found[row : row + 1], alone)
