"""Principal components of the cells of tokens, over frames of the training split: the basis of `PatchBasis`.

Letters: B batch, L tokens, P values of a cell, D channels of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ups.data.fields import Fields
from ups.data.statistics import frame_items, spread_frames
from ups.errors import ConfigError
from ups.grid import GridSpec, token_counts
from ups.nn.layers import cut_cells
from ups.nn.patches import PatchBasis, num_cell_values
from ups.trained.autoencoder import Autoencoder

MAX_CELL_VALUES = 4096  # their covariance takes 128 MiB, its eigenvectors about a minute of a core

_MAX_FRAMES = 4096  # of a task that are looked at
_MAX_NBYTES = 1 << 30  # of these, in float32
_BATCH_NBYTES = 32 << 20

Moments = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def measure_bases(model: Autoencoder, fields: Mapping[str, Fields]) -> None:
    """Give encoders and decoders the bases of the training split; those that have none stay as they are.

    Tasks that share an encoder share its basis, and count the same in it.

    Args:
        model: On any device; its basis is replaced in place.
        fields: Training fields by task.
    """
    for grid in {task.grid.name: task.grid for task in model.spec.tasks.values()}.values():
        encoder, decoder = model.encoder_of(grid), model.decoder_of(grid)
        for array in encoder.basis:
            _check_size(model, grid, array)
            moments = [_moments(model, name, fields[name], array) for name in model.spec.tasks_on(grid)]
            set_basis([encoder.basis_of(array), decoder.basis_of(array)], *_mean_of(moments))


def set_basis(
    bases: Sequence[PatchBasis], mean_P: npt.NDArray[np.float64], covariance_PP: npt.NDArray[np.float64]
) -> None:
    """Make the leading eigenvectors of a covariance the basis, in one unit for all.

    The unit is such that the coefficients' mean square is 1, over all D that the covariance has.
    """
    eigenvalues, eigenvectors = np.linalg.eigh(covariance_PP)
    variances, vectors = eigenvalues[::-1].clip(min=0.0), eigenvectors[:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    vectors = vectors * np.sign(vectors[largest, np.arange(len(largest))])  # else the library chooses
    num = min(bases[0].vectors.shape[1], len(mean_P))
    scale = np.sqrt(variances[:num].mean()) or 1.0
    rest = np.sqrt(variances[num:].sum() / len(mean_P))
    for basis in bases:
        basis.mean.copy_(torch.from_numpy(mean_P))
        basis.vectors.zero_()
        basis.vectors[:, :num].copy_(torch.from_numpy(vectors[:, :num].copy()))
        basis.scale.fill_(float(scale))
        basis.rest.fill_(float(rest))


def _check_size(model: Autoencoder, grid: GridSpec, array: str) -> None:
    cut = model.spec.cut(grid)
    num_values = num_cell_values(cut, dict(grid.channels)[array])
    if num_values > MAX_CELL_VALUES:
        counts = token_counts(grid, patch_size=cut.patch_size)
        enough = [num for num in counts if grid.num_values(array) <= num * MAX_CELL_VALUES]
        more = f"latent.tokens = {enough[0]} or more" if enough else "a smaller encoder.patch_size"
        raise ConfigError(
            f"the cell of one of {model.spec.num_tokens} tokens has too many values of {array!r} for a basis",
            kind="large_cells",
            expected=f"at most {MAX_CELL_VALUES}",
            found=num_values,
            hint=f"say {more}, or encoder.basis=none",
        )


def _moments(model: Autoencoder, task: str, fields: Fields, array: str) -> Moments:
    """Mean and second moment of the normalised cells of a task, in float64; frames are read in batches."""
    grid = model.spec.tasks[task].grid
    cell = model.spec.cut(grid).points_per_token
    statistics = model.spec.tasks[task].statistics[array]
    mean, std = (np.array(statistics[name], np.float32) for name in ("mean", "std"))
    num_values = num_cell_values(model.spec.cut(grid), dict(grid.channels)[array])
    total, square, num = np.zeros(num_values), np.zeros((num_values, num_values)), 0
    for values in _frames(fields, array, grid):
        cells = cut_cells(torch.from_numpy((values - mean) / std), cell)
        cells_RP = cells.flatten(2).flatten(0, 1).double().numpy()
        total += cells_RP.sum(0)
        square += cells_RP.T @ cells_RP
        num += len(cells_RP)
    return total / num, square / num


def _frames(fields: Fields, array: str, grid: GridSpec) -> Iterator[npt.NDArray[np.float32]]:
    """Frames of an array, spread over the split; each batch is let go of before the next is read."""
    frame_nbytes = 4 * grid.num_values(array)
    items = spread_frames(fields, array, max(1, min(_MAX_FRAMES, _MAX_NBYTES // frame_nbytes)))
    samples, steps = frame_items(fields, array)
    size = max(1, _BATCH_NBYTES // frame_nbytes)
    for first in range(0, len(items), size):
        some = items[first : first + size]
        yield fields.read(array, samples[some], steps[some])


def _mean_of(moments: Sequence[Moments]) -> Moments:
    """Mean and covariance of several tasks' cells, in equal shares."""
    mean_P = np.mean([mean for mean, _ in moments], axis=0)
    square_PP = np.mean([square for _, square in moments], axis=0)
    return mean_P, square_PP - np.outer(mean_P, mean_P)
