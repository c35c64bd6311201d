"""The autoencoder's floor: the error of decoder(encoder(x)) in field space, and a figure of it.

No operator on the latents can be better than their floor. Letters: B batch, X the axes of the grid, P points,
C channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ups.data.field_batches import FrameBatch
from ups.errors import needs
from ups.eval.metrics import defined_nrmse, mean_of_defined
from ups.trained.autoencoder import Autoencoder


@dataclass(frozen=True)
class LatentSize:
    """Numbers of one frame before and after encoding."""

    values: int
    latents: int

    @property
    def compression(self) -> float:
        """Numbers of a frame over numbers of its latent state; 2 means half as many."""
        return self.values / self.latents


@dataclass(frozen=True)
class Floor:
    """Errors of the reconstruction.

    Attributes:
        nrmse: nRMSE averaged over frames and channels, by "task" or "task/array" of constant fields; those
            whose truth is zero throughout are left out.
        sizes: Sizes under the same names.
        num_frames: Frames that were looked at, under the same names.
        left_out: Frames and channels that were left out, under the same names.
    """

    nrmse: Mapping[str, float]
    sizes: Mapping[str, LatentSize]
    num_frames: Mapping[str, int]
    left_out: Mapping[str, int]

    @property
    def mean(self) -> float:
        """Mean over tasks and arrays."""
        return sum(self.nrmse.values()) / len(self.nrmse)


@torch.no_grad()
def measure_floor(
    model: Autoencoder,
    batches: Iterable[FrameBatch],
    *,
    queries: Mapping[str, Tensor],
    latent_dtype: torch.dtype = torch.float32,
) -> Floor:
    """Measure how well frames survive encoding.

    Args:
        model: In evaluation mode.
        batches: Frames of validation or test.
        queries: Centres of the grid's cells by task, shape (P, N), on the model's device.
        latent_dtype: Dtype that the latents are rounded to before decoding, as in a store.

    Raises:
        ConfigError: Kind "zero_truth", if all frames of an array are zero throughout.
    """
    errors: dict[str, list[Tensor]] = {}
    num_frames: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    sizes: dict[str, LatentSize] = {}
    for batch in batches:
        name = batch.task if batch.array == "fields" else f"{batch.task}/{batch.array}"
        prediction = reconstruct(model, batch, query=queries[batch.task], latent_dtype=latent_dtype)
        truth = batch.values.to(prediction.device)
        pair = (field.double().unsqueeze(1) for field in (prediction, truth))
        errors.setdefault(name, []).append(found := defined_nrmse(*pair))
        num_frames[name] += len(truth)
        left_out[name] += len(truth) * truth.shape[-1] - len(found)
        num_latents = model.spec.num_tokens * model.spec.latent_dim
        sizes[name] = LatentSize(model.spec.tasks[batch.task].grid.num_values(batch.array), num_latents)
    nrmse = {
        name: mean_of_defined(values, task=name, channels=_channels(model, name))
        for name, values in errors.items()
    }
    return Floor(nrmse, sizes, dict(num_frames), dict(left_out))


def _channels(model: Autoencoder, name: str) -> tuple[str, ...]:
    """Names of the channels of "task" or "task/array", for people."""
    task, _, array = name.partition("/")
    return (array,) if array else model.spec.tasks[task].channels


def reconstruct(
    model: Autoencoder, batch: FrameBatch, *, query: Tensor, latent_dtype: torch.dtype = torch.float32
) -> Tensor:
    """decoder(encoder(x)) on the grid of x, float32, shape (B, X..., C)."""
    which = {"task": batch.task, "array": batch.array}
    values, parameters = batch.values.to(query.device), batch.parameters.to(query.device)
    tokens = model.encode(values, parameters, **which).to(latent_dtype).float()
    return model.decode(tokens, query, parameters, **which).reshape(values.shape)


@torch.no_grad()
def write_figure(
    path: Path, model: Autoencoder, batches: Iterable[FrameBatch], *, queries: Mapping[str, Tensor]
) -> Path:
    """Draw truth, reconstruction and error of each batch's first frame, one row each; return the path."""
    with needs("plot"):
        from matplotlib.figure import Figure

    drawn = [(batch, reconstruct(model, batch, query=queries[batch.task])) for batch in batches]
    figure = Figure(figsize=(11, 2.6 * len(drawn)), layout="constrained")
    axes = figure.subplots(len(drawn), 3, squeeze=False)
    for row, (batch, prediction) in zip(axes, drawn, strict=True):
        truth, restored = (field[0, ..., 0].cpu().numpy() for field in (batch.values, prediction))
        title = f"{batch.task} {batch.array}"
        _draw_row(row, truth, restored, title)
    figure.savefig(path, dpi=110)
    return path


def _draw_row(row: np.ndarray, truth: np.ndarray, restored: np.ndarray, title: str) -> None:
    """First channel of one frame; of a volume the middle slice."""
    while truth.ndim > 2:
        truth, restored = truth[len(truth) // 2], restored[len(restored) // 2]
    panels = {f"{title}: truth": truth, "reconstruction": restored, "error": restored - truth}
    for axis, (name, values) in zip(row, panels.items(), strict=True):
        axis.set_title(name, fontsize=9)
        if values.ndim == 1:
            axis.plot((np.arange(len(values)) + 0.5) / len(values), values, linewidth=1.2)
            axis.set_xlabel("x [domain lengths]", fontsize=8)
            continue
        limits = {"vmin": truth.min(), "vmax": truth.max()} if name != "error" else {}
        image = axis.imshow(values, origin="lower", cmap="viridis" if limits else "coolwarm", **limits)
        axis.figure.colorbar(image, ax=axis)
