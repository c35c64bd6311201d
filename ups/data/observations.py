"""At which points the input of a steady task is observed: drawn for every sample and reproducible, or given.

Letters: B batch, X the axes of the grid, C channels.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.data.augment import Draws
from ups.errors import ConfigError
from ups.grid import GridSpec


def drawn_masks(draws: Draws, points: tuple[int, ...], *, num: int) -> Tensor:
    """Other points for every row of a training batch; bool, shape (B, X...)."""
    return masks_of_scores(draws.normal(torch.Size(points)), num=num)


def masks_of_samples(values_BXC: Tensor, *, num: int, seed: int) -> Tensor:
    """Points that depend on a seed and on the sample's input, not on what else is in the batch.

    Args:
        values_BXC: Inputs in physical units, float32.
        num: Points of each.
        seed: Of all samples.
    Returns:
        bool, shape (B, X...), on the CPU.
    """
    scores = [_scores(each, seed) for each in values_BXC.cpu()]
    return masks_of_scores(torch.from_numpy(np.stack(scores)), num=num)


def masks_of_scores(scores_BX: Tensor, *, num: int) -> Tensor:
    """True at the `num` points of the highest scores of each row."""
    flat = scores_BX.flatten(1)
    masks = torch.zeros_like(flat, dtype=torch.bool)
    return masks.scatter_(1, flat.topk(num, dim=1).indices, True).reshape(scores_BX.shape)


def read_mask(path: Path, points: tuple[int, ...], *, num: int) -> npt.NDArray[np.bool_]:
    """Points from a file.

    Args:
        path: A `.npy` file with true or false (or 1 and 0) for every point, shape (X...) for all samples
            alike, or (B, X...).
        points: Of the grid along each axis.
        num: B.

    Returns:
        Shape (B, X...).
    """
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        found = type(error).__name__ if path.exists() else "no file"
        raise _no_mask(path, found, expected="a .npy file, or a number of points") from error
    shapes = (points, (num, *points))
    if not isinstance(values, np.ndarray) or values.shape not in shapes or not np.isin(values, (0, 1)).all():
        found = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "an archive"
        shown = " or ".join(map(str, shapes))
        raise _no_mask(path, found, expected=f"true and false, of shape {shown}")
    mask = np.broadcast_to(values.astype(bool), (num, *points))
    if not mask.reshape(num, -1).any(1).all():
        raise _no_mask(path, "a sample without any", expected="points at which every sample is known")
    return mask


def _no_mask(path: Path, found: str, *, expected: str) -> ConfigError:
    return ConfigError("no mask", kind="observed", path=path, expected=expected, found=found)


def check_observed(num: int | None, grid: GridSpec, *, task: str, key: str = "prior.observed_points") -> None:
    """Refuse to observe more points than there are."""
    most = int(np.prod(grid.points))
    if num is not None and num > most:
        raise ConfigError(
            f"{key} = {num}",
            kind="observed_points",
            expected=f"at most the {most} points of {task}",
            hint="leave it out for inputs that are known everywhere",
        )


def _scores(values_XC: Tensor, seed: int) -> npt.NDArray[np.float64]:
    content = np.ascontiguousarray(values_XC.numpy(), np.float32).tobytes()
    digest = hashlib.sha256(seed.to_bytes(8, "little") + content).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.random(tuple(values_XC.shape[:-1]))
