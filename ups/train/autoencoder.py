"""Stage `autoencoder`: encoder and decoder of all tasks, trained on single frames.

Letters: B batch, X the axes of the grid, C channels, P query points, N axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ups import stages
from ups.config import RunConfig
from ups.data.augment import Symmetries
from ups.data.batches import FrameBatch, augmented, batch_size_of, frame_data, spread_batches
from ups.data.fields import Fields, parameter_names
from ups.data.patch_basis import measure_bases
from ups.data.splits import open_fields
from ups.data.statistics import measure_statistics
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import ShardedPart
from ups.eval.reconstruction import (
    FRAMES_OF_SPECTRUM,
    Floor,
    encoded,
    measure_floor,
    measure_spectra,
    write_figure,
)
from ups.laws import laws_of
from ups.losses import reconstruction_error
from ups.models.any_point_decoder import grid_queries
from ups.train.schedules import Schedule, num_queries
from ups.train.stage import QUIET_START, Losses, Stage, StageStart
from ups.trained.autoencoder import Autoencoder, load_autoencoder, save_autoencoder
from ups.trained.checkpoint import read_document
from ups.trained.isometry import DecoderSpectrum, is_isometric, make_isometric
from ups.trained.specs import AUTOENCODER, AUTOENCODER_FILE, AutoencoderSpec, NetworkSize, TaskSpec

# The first of three evenly spread frames is drawn: a third into the data is rarely an initial state.
_FRAMES_TO_DRAW_FROM = 3
_FRAMES_OF_ISOMETRY = 256  # of each array of each task, a token of each


def make_autoencoder_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> AutoencoderStage:
    """Open the data, measure statistics and basis on the training split, and build the model."""
    with start.phase("data_opening"):
        train, val = (open_all(config, split) for split in ("train", "val"))
    with start.phase("statistics"):
        spec = make_spec(config, train)
    start.check_data(spec.to_json())
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        model = Autoencoder(spec)
        measure_bases(model, train)
        model = model.to(device)
    return AutoencoderStage(config, model, train=train, val=val, device=device)


def make_spec(config: RunConfig, train: Mapping[str, Fields]) -> AutoencoderSpec:
    """What the autoencoder will be: grids and statistics from the training fields, sizes as configured."""
    tasks = {
        name: TaskSpec(
            grid=fields.info.grid,
            channels=fields.info.channels,
            steady=fields.info.steady,
            statistics={array: values.to_json() for array, values in measure_statistics(fields).items()},
        )
        for name, fields in train.items()
    }
    return AutoencoderSpec(
        tasks=tasks,
        parameters=parameter_names(train),
        latent_dim=config.latent.dim,
        num_tokens=config.latent.tokens,
        patch_size=config.encoder.patch_size,
        encoder=cast(NetworkSize, config.encoder.model_dump(exclude={"patch_size"})),
        decoder=cast(NetworkSize, config.decoder.model_dump()),
    )


class AutoencoderStage(Stage):
    """See `ups.train.stage.Stage`.

    Args:
        model: On its device.
        train: Training fields by task.
        val: Validation fields by task.
    """

    facts = stages.AUTOENCODER
    model: Autoencoder

    def __init__(
        self,
        config: RunConfig,
        model: Autoencoder,
        *,
        train: Mapping[str, Fields],
        val: Mapping[str, Fields],
        device: torch.device,
    ) -> None:
        self.model, self._config, self._val, self._device = model, config, val, device
        self.gradients = "all" if model.spec.has_one_array else "some"
        self._batch_size, self._laws = batch_size_of(config.stage(self.name)), config.own_laws
        self._data = {task: fields.identity for task, fields in train.items()}
        data = frame_data(
            train,
            global_batch_size=self._batch_size,
            seed=config.seed,
            parameters=model.spec.parameters,
        )
        self.loader = data.loader(config, device, prepare=self._prepare)
        self._schedule = Schedule.of(
            config.stage(self.name), num_batches=len(self.loader), accum_steps=config.training.accum_steps
        )
        self._queries = {
            name: grid_queries(task.grid.points).to(device) for name, task in model.spec.tasks.items()
        }
        self.path = config.checkpoint.dir / AUTOENCODER_FILE

    def losses(self, forward: Callable[..., Tensor], batch: FrameBatch) -> Losses:
        """Relative error at random points of the grid, as `training.reconstruction_loss` says."""
        values_BXC = batch.values.to(self._device, non_blocking=True)
        assert batch.points is not None
        points_P = batch.points.to(self._device, non_blocking=True)
        prediction_BPC = forward(
            values_BXC,
            self._queries[batch.task][points_P],
            batch.parameters.to(self._device, non_blocking=True),
            task=batch.task,
            array=batch.array,
        )
        loss = reconstruction_error(
            prediction_BPC.float(),
            values_BXC.flatten(1, -2)[:, points_P],
            power_BC=values_BXC.flatten(1, -2).square().mean(1),
            std_C=self.model.normalizer_of(batch.task, batch.array).std,
            kind=self._config.training.reconstruction_loss,
        )
        return {"reconstruction": loss}

    def validate(self) -> dict[str, float]:
        """nRMSE of the reconstruction in field space, per task and array; `score` is their mean."""
        floor = self._measure(self.called)
        return {"score": floor.mean, **{f"val/nrmse/{name}": value for name, value in floor.nrmse.items()}}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write `autoencoder.safetensors`."""
        config = self._config.model_dump(mode="json")
        said: dict[str, Any] = {"config": config, "report": metrics, "data": self._data}
        save_autoencoder(self.path, self.model, weights=weights, **said)
        return self.path

    def exports(self) -> Mapping[Path, str]:
        """`autoencoder.safetensors`."""
        return {self.path: AUTOENCODER}

    def sharded_parts(self) -> list[ShardedPart]:
        """Encoders and decoders."""
        return autoencoder_parts(self.model)

    def data_identity(self) -> Mapping[str, Any]:
        """The specification: grids, and statistics of the training split."""
        return self.model.spec.to_json()

    def finish(self) -> dict[str, Any]:
        """Make what was exported isometric, and report on it.

        The floor is that of float32 latents, by time step too, and of latents rounded as a store holds them;
        beside it stand the decoder's singular values.
        """
        model = load_autoencoder(self.path, device=str(self._device))
        trained = self._make_isometric(model)
        spectra = self._spectra(model)
        latent_dtype = self._config.training.latent_cache_dtype
        floor = self._measure(model)
        rounded = self._measure(model, latent_dtype=getattr(torch, latent_dtype))
        figure = self.path.with_suffix(".png")
        if self.ranks.is_first:
            drawn = self._val_batches(model, _FRAMES_TO_DRAW_FROM, ranks=ALONE)
            write_figure(figure, model, drawn, queries=self._queries)
        return {
            "checkpoint": str(self.path),
            "figure": str(figure),
            "latent": {"tokens": model.spec.num_tokens, "dim": model.spec.latent_dim},
            "compression": dict(floor.compression),
            "floor_nrmse": floor.nrmse,
            "floor_by_step": {name: dict(steps) for name, steps in floor.by_step.items()},
            "decoder_condition": {name: found.condition for name, found in spectra.items()},
            "decoder_singular_values": {name: asdict(found) for name, found in spectra.items()},
            "decoder_condition_before_isometry": {name: found.condition for name, found in trained.items()},
            "nrmse_left_out": {name: num for name, num in floor.left_out.items() if num},
            f"floor_nrmse_{latent_dtype}_latents": rounded.nrmse,
            "validation_frames": floor.num_frames,
        }

    def _make_isometric(self, model: Autoencoder) -> dict[str, DecoderSpectrum]:
        """Rescale the latents of a trained model and export it again, once; returns the spectra before.

        At the end rather than with every export, as it costs D decodings of every frame that is looked at.
        """
        if is_isometric(model):
            return {}
        before = self._spectra(model)
        sample = (encoded(model, batch) for batch in self._val_batches(model, _FRAMES_OF_ISOMETRY))
        make_isometric(model, sample, queries=self._queries, ranks=self.ranks)
        if self.ranks.is_first:
            document = read_document(self.path, kind=AUTOENCODER)
            said = {name: document[name] for name in ("config", "report", "data")}
            save_autoencoder(self.path, model, **said)
        return before

    def _spectra(self, model: Autoencoder) -> dict[str, DecoderSpectrum]:
        batches = self._val_batches(model, FRAMES_OF_SPECTRUM)
        return measure_spectra(model, batches, queries=self._queries, ranks=self.ranks)

    def _prepare(self, batch: FrameBatch, number: int) -> FrameBatch:
        """Augmented, with the points at which the decoder is asked."""
        training, num_points = self._config.training, len(self._queries[batch.task])
        if training.augment:
            spec = self.model.spec
            laws, periodic = laws_of(batch.task, self._laws), spec.tasks[batch.task].grid.periodic
            batch = augmented(batch, Symmetries.of(laws, periodic=periodic, conditions=spec.parameters))
        progress = self._schedule.progress(number)
        num_queried = num_queries(training.query_sampling, progress=progress, num_points=num_points)
        return dataclasses.replace(batch, points=batch.draws.order(num_points)[:num_queried])

    def _measure(self, model: Autoencoder, *, latent_dtype: torch.dtype = torch.float32) -> Floor:
        batches = self._val_batches(model, self._config.training.max_val_frames)
        floor_of = partial(measure_floor, queries=self._queries, ranks=self.ranks)
        return floor_of(model, batches, latent_dtype=latent_dtype)

    def _val_batches(
        self, model: Autoencoder, max_frames: int, *, ranks: Ranks | None = None
    ) -> Iterator[FrameBatch]:
        return spread_batches(
            self._val,
            batch_size=self._batch_size,
            max_frames=max_frames,
            parameters=model.spec.parameters,
            ranks=ranks or self.ranks,
        )


def autoencoder_parts(model: Autoencoder) -> list[ShardedPart]:
    """What of an autoencoder is called by its forward pass alone."""
    return [ShardedPart(part) for parts in (model.encoder, model.decoder) for part in parts.values()]


def open_all(config: RunConfig, split: str) -> dict[str, Fields]:
    """Open the fields of every task of a split."""
    return {
        task: open_fields(config.build, task, split, source=config.training.field_source)
        for task in config.data.tasks
    }
