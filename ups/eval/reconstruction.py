"""The autoencoder's floor, the error of decoder(encoder(x)) in field space; the decoder's spectrum; a figure.

No operator on the latents can be better than their floor, and its errors are amplified as the decoder's
singular values differ. Letters: B batch, X the axes of the grid, P points,
C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ups.data.batches import FrameBatch, spread_batches
from ups.data.fields import Fields
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import needs
from ups.eval.metrics import DefinedErrors, mean_of_defined
from ups.grid import FIELDS
from ups.models.any_point_decoder import grid_queries
from ups.trained.autoencoder import Autoencoder
from ups.trained.isometry import DecoderSpectrum, LatentFrames, spectrum_of, token_gram
from ups_store.check import colours_of

FRAMES_OF_SPECTRUM = 64  # at a token of each of which the decoder is differentiated


@dataclass(frozen=True)
class Floor:
    """Errors of the reconstruction.

    Attributes:
        nrmse: nRMSE averaged over frames and channels, by "task" or "task/array" of constant fields; those
            whose truth is zero throughout are left out.
        compression: Numbers of a frame over those of its latent state, under the same names.
        by_step: The same by stored time step, of the steps that were looked at; constant fields have step 0.
        num_frames: Frames that were looked at, under the same names.
        left_out: Frames and channels that were left out, under the same names.
    """

    nrmse: Mapping[str, float]
    by_step: Mapping[str, Mapping[int, float]]
    compression: Mapping[str, float]
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
    ranks: Ranks = ALONE,
) -> Floor:
    """Measure how well frames survive encoding."""
    found: dict[str, DefinedErrors] = {}
    places: dict[str, list[Tensor]] = {}
    compression: dict[str, float] = {}
    for batch in batches:
        name = _name_of(batch)
        prediction = reconstruct(model, batch, query=queries[batch.task], latent_dtype=latent_dtype)
        truth = batch.values.to(prediction.device)
        pair = (field.double().unsqueeze(1) for field in (prediction, truth))
        found.setdefault(name, DefinedErrors()).add(*pair, items=batch.items)
        places.setdefault(name, []).append(torch.stack([batch.items, batch.steps]))
        num_latents = model.spec.num_tokens * model.spec.latent_dim
        compression[name] = model.spec.tasks[batch.task].grid.num_values(batch.array) / num_latents
    nrmse, by_step, num_frames, left_out = {}, {}, {}, {}
    for name, errors_of in found.items():
        errors, defined = errors_of.joined(ranks)
        items, steps = torch.cat(places[name], dim=1)
        nrmse[name] = mean_of_defined(errors[defined], task=name, channels=_channels(model, name))
        by_step[name] = _means(errors, defined, ranks.joined(items, steps))
        num_frames[name], left_out[name] = len(errors), int((~defined).sum())
    return Floor(nrmse, by_step, compression, num_frames, left_out)


def _name_of(batch: FrameBatch) -> str:
    return batch.task if batch.array == FIELDS else f"{batch.task}/{batch.array}"


def _means(errors: Tensor, defined: Tensor, steps: Tensor) -> dict[int, float]:
    """Mean of each step's errors, steps going up; without steps whose truth is zero throughout."""
    some = {step: errors[steps == step][defined[steps == step]] for step in steps.unique().tolist()}
    return {step: float(of_step.mean()) for step, of_step in some.items() if len(of_step)}


@torch.no_grad()
def measure_spectra(
    model: Autoencoder,
    batches: Iterable[FrameBatch],
    *,
    queries: Mapping[str, Tensor],
    ranks: Ranks = ALONE,
) -> dict[str, DecoderSpectrum]:
    """Singular values of the decoder at the latents of frames, by "task" or "task/array".

    With `ranks` each has its share of the frames, and it is a collective.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch in batches:
        gram = token_gram(model, encoded(model, batch), query=queries[batch.task])
        found.setdefault(_name_of(batch), []).append((batch.items, gram))
    return {
        name: spectrum_of(ranks.joined(*map(torch.cat, zip(*some, strict=True))))
        for name, some in found.items()
    }


def spectrum_of_fields(model: Autoencoder, fields: Fields) -> DecoderSpectrum:
    """Singular values of the decoder at the latents of some frames of a task's "fields"."""
    task, num = fields.info.task, FRAMES_OF_SPECTRUM
    queries = {task: grid_queries(fields.info.grid.points).to(model.device)}
    batches = spread_batches({task: fields}, batch_size=num, max_frames=num, parameters=model.spec.parameters)
    return measure_spectra(model, (batch for batch in batches if batch.array == FIELDS), queries=queries)[
        task
    ]


def encoded(model: Autoencoder, batch: FrameBatch) -> LatentFrames:
    """The latents of a batch of frames, on the model's device."""
    values, parameters = batch.values.to(model.device), batch.parameters.to(model.device)
    tokens = model.encode(values, parameters, task=batch.task, array=batch.array)
    return LatentFrames(batch.task, batch.array, batch.items, tokens, parameters)


def _channels(model: Autoencoder, name: str) -> tuple[str, ...]:
    """Names of the channels of "task" or "task/array", for people."""
    task, _, array = name.partition("/")
    return (array,) if array else model.spec.tasks[task].channels


def reconstruct(
    model: Autoencoder, batch: FrameBatch, *, query: Tensor, latent_dtype: torch.dtype = torch.float32
) -> Tensor:
    """decoder(encoder(x)) on the grid of x, float32, shape (B, X..., C)."""
    frames = encoded(model, batch)
    tokens = frames.tokens.to(latent_dtype).float()
    values = model.decode(tokens, query, frames.parameters, task=batch.task, array=batch.array)
    return values.reshape(batch.values.shape)


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
    low, high, colours = colours_of(truth)
    for axis, (name, values) in zip(row, panels.items(), strict=True):
        axis.set_title(name, fontsize=9)
        if values.ndim == 1:
            axis.plot((np.arange(len(values)) + 0.5) / len(values), values, linewidth=1.2)
            axis.set_xlabel("x [domain lengths]", fontsize=8)
            continue
        largest = float(np.abs(np.nan_to_num(values)).max()) or 1.0
        limits = (-largest, largest, "coolwarm") if name == "error" else (low, high, colours)
        image = axis.imshow(values, origin="lower", cmap=limits[2], vmin=limits[0], vmax=limits[1])
        axis.figure.colorbar(image, ax=axis)
