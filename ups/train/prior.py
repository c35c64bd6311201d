"""Stage `prior`: flow matching on the solutions of steady tasks, given their inputs, perhaps partly.

By `prior.method=regression` the same network is trained to say the mean of solutions: the loss is the
same, with no noise and at flow time 0. Letters: B batch, L tokens, D channels of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups import stages
from ups.config import RunConfig
from ups.config.operator_size import corrector_size
from ups.data.batches import SolutionBatch, WindowBatch, augment_windows_of, batch_size_of, window_data
from ups.data.fields import Fields, evenly_spread, parameter_names
from ups.data.held_out import Items
from ups.data.observations import check_observed, drawn_masks, masks_of_samples
from ups.data.statistics import latent_statistics, measure_statistics
from ups.data.windows import Trajectories, Windows, open_trajectories, parameter_table
from ups.distributed.sharding import ShardedPart
from ups.eval.ensembles import Climate, ensemble_numbers, roll_out_members
from ups.eval.forecasters import PriorForecaster
from ups.grid import FIELDS
from ups.log import logger
from ups.train.checks import check_steady_task, is_steady_task
from ups.train.flow import FlowStage, sampling_of
from ups.train.operator import boundary_of, load_autoencoder_of, spec_of_states, tokens_of
from ups.train.stage import QUIET_START, StageStart
from ups.trained.autoencoder import Autoencoder
from ups.trained.checkpoint import hash_tensors
from ups.trained.prior import SteadyPrior, load_prior, save_prior
from ups.trained.specs import PRIOR, PRIOR_FILE, PriorSpec, SimulatedTask, SimulatorSpec

_MAX_ENCODED = 4096  # samples of a task whose latents are measured, evenly spread
_AT_ONCE = 64


def make_prior_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> SteadyPriorStage:
    """Open the fields of the steady tasks, measure statistics, and build the model."""
    check_steady_task(config)
    settings = config.prior
    with start.phase("data_opening"):
        train, val = (_open(config, split) for split in ("train", "val"))
        check_steady_task(config, found=train)
        for name in sorted(set(config.data.tasks) - train.keys()):
            logger.info(f"{name} isn't steady: the prior leaves it out")
        for name, samples in train.items():
            check_observed(settings.observed_points, samples.info.grid, task=name)
    autoencoder, digest = None, None
    if config.operator.state == "latent":
        path = config.autoencoder_path
        autoencoder, digest = load_autoencoder_of(config, path, device), hash_tensors(path)
    data = {name: samples.fields.identity for name, samples in train.items()}
    start.check_data({**data, "autoencoder": digest})
    with start.phase("statistics"):
        fields = {name: samples.fields for name, samples in train.items()}
        spec = _make_spec(config, fields, autoencoder=autoencoder, autoencoder_sha256=digest)
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        prior = PriorSpec(settings.method, settings.observed_points, sampling_of(config))
        model = SteadyPrior(spec, prior, autoencoder).to(device)
    return SteadyPriorStage(config, model, train=train, val=val, data=data, device=device)


class SteadyPriorStage(FlowStage):
    """See `ups.train.stage.Stage`.

    Args:
        model: On its device.
        train: Training samples by task.
        val: Validation samples by task.
        data: What the training samples are, by task, as `Fields.identity` says.
    """

    facts = stages.PRIOR
    model: SteadyPrior
    most_checked, rows_checked = 256, 32

    def __init__(
        self,
        config: RunConfig,
        model: SteadyPrior,
        *,
        train: Mapping[str, Trajectories],
        val: Mapping[str, Trajectories],
        data: Mapping[str, str],
        device: torch.device,
    ) -> None:
        super().__init__(config, model, states=model, device=device)
        self._val, self._origins = val, data
        self.score_name = model.prior_spec.method
        self._is_flow = self.score_name == "flow"
        if not self._is_flow:
            self.times_checked = 1  # without noise all are the same
        batches = window_data(
            {task: Windows(some.fields) for task, some in train.items()},
            parameters=model.spec.parameters,
            global_batch_size=batch_size_of(config.stage(self.name)),
            seed=config.seed,
        )
        self.loader = batches.loader(config, device, prepare=self._prepare)
        self.path = config.checkpoint.dir / PRIOR_FILE

    @torch.no_grad()  # by a frozen encoder, or none
    def flow_of(self, batch: SolutionBatch, parameters: Tensor) -> tuple[Any, Tensor]:
        """The input where it is observed, and the normalised solution."""
        (states,) = self._moved(batch.states)
        observed = None if batch.observed is None else self._moved(batch.observed)[0]
        given = self.model.given(states[:, 0], observed, parameters, task=batch.task)
        return given, self.model.encode(states[:, 1], parameters, task=batch.task, array=FIELDS).float()

    def num_checked(self) -> Mapping[str, int]:
        """Samples of the validation split."""
        return {task: len(samples) for task, samples in self._val.items()}

    def checked(self, task: str, numbers: Items) -> SolutionBatch:
        """Samples of these numbers; their observed points never change."""
        samples = self._val[task].read(numbers)
        table = parameter_table(samples.parameters, self.model.spec.parameters, len(samples))
        states = torch.stack([samples.given, samples.truth[:, 0]], dim=1)
        batch = WindowBatch(task, states, table, torch.ones(len(samples)))
        num, none = self.model.prior_spec.observed_points, torch.zeros(0)
        observed = None if num is None else masks_of_samples(samples.given, num=num, seed=self._config.seed)
        return SolutionBatch(**vars(batch), noise=none, tau=none, observed=observed)

    def with_flow(self, batch: SolutionBatch, noise: Tensor, tau: Tensor) -> SolutionBatch:
        """See `FlowStage.with_flow`; of a regression neither."""
        share = 1.0 if self._is_flow else 0.0
        return dataclasses.replace(batch, noise=share * noise, tau=share * tau)

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write `prior.safetensors`: prior, autoencoder, statistics."""
        said: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "report": metrics}
        save_prior(self.path, self.model, weights=weights, data=self._origins, **said)
        return self.path

    def exports(self) -> Mapping[Path, str]:
        """`prior.safetensors`."""
        return {self.path: PRIOR}

    def sharded_parts(self) -> list[ShardedPart]:
        """The network; a frozen autoencoder stays whole on every rank."""
        return [ShardedPart(self.model.network, ("conditions", "velocity"))]

    def data_identity(self) -> Mapping[str, Any]:
        """What the training samples are, by task, and the hash of the autoencoder."""
        return {**self._origins, "autoencoder": self.model.spec.autoencoder_sha256}

    def finish(self) -> dict[str, Any]:
        """Scores of what was exported, on the validation split; values over their root mean square."""
        model, config, scores = load_prior(self.path, device=str(self._device)), self._config, {}
        members = config.diffusion.val_members if self._is_flow else None
        forecaster = PriorForecaster(model, seed=config.seed)
        for task, val in self._val.items():
            rolled = roll_out_members(
                forecaster, val, Climate.of(val), members=members, seed=config.seed, ranks=self.ranks
            )
            scores[task] = ensemble_numbers(rolled.errors)
        return {
            "checkpoint": str(self.path),
            "states": model.spec.states,
            "method": model.prior_spec.method,
            "observed_points": model.prior_spec.observed_points,
            "parameters": sum(weight.numel() for weight in model.network.parameters()),
            "members": members or 1,
            "scores": scores,
        }

    def _prepare(self, batch: WindowBatch, number: int) -> SolutionBatch:
        """Augmented, with the points that are observed, noise and flow times, drawn in this order."""
        task = self.model.spec.tasks[batch.task]
        if self._config.training.augment:
            batch = augment_windows_of(task, batch, laws=self._config.own_laws)
        draws, num = batch.draws, self.model.prior_spec.observed_points
        observed = None if num is None else drawn_masks(draws, task.grid.points, num=num)
        noise = draws.normal(self._state_shape(batch.task))
        tau = draws.of_rows(self._times.draw(draws.num_rows, draws.generator))
        return self.with_flow(
            SolutionBatch(**vars(batch), noise=noise, tau=tau, observed=observed), noise, tau
        )


def _open(config: RunConfig, split: str) -> dict[str, Trajectories]:
    opened = {
        task: open_trajectories(config.build, task, split, source=config.training.field_source)
        for task in config.data.tasks
        if is_steady_task(config, task)
    }
    return {task: samples for task, samples in opened.items() if samples.info.steady}


def _make_spec(
    config: RunConfig,
    train: Mapping[str, Fields],
    *,
    autoencoder: Autoencoder | None,
    autoencoder_sha256: str | None,
) -> SimulatorSpec:
    """States of steady tasks, and the size of the network."""
    tasks = {}
    for name, fields in sorted(train.items()):
        info = fields.info
        tokens = tokens_of(config, info.grid, autoencoder)  # may fail, so it comes before minutes of reading
        known = fields.parameters(np.arange(len(fields.num_steps)))
        if autoencoder is None:
            measured = measure_statistics(fields)
        else:
            measured = {
                array: latent_statistics(_latents(fields, array, autoencoder)) for array in info.grid.arrays
            }
            known = {key: known[key] for key in autoencoder.spec.parameters if key in known}
        tasks[name] = SimulatedTask(
            grid=info.grid,
            boundary=boundary_of(info.boundary, info.grid),
            tokens=tokens,
            channels=info.channels,
            steady=True,
            dt=1.0,
            parameters={key: (float(column.min()), float(column.max())) for key, column in known.items()},
            statistics={array: statistics.to_json() for array, statistics in measured.items()},
        )
    size, parameters = corrector_size(config), parameter_names(train)
    spec = spec_of_states(
        config, tasks, operator=size.to_json(), parameters=parameters, autoencoder=autoencoder
    )
    return dataclasses.replace(spec, autoencoder_sha256=autoencoder_sha256)


@torch.no_grad()
def _latents(fields: Fields, array: str, autoencoder: Autoencoder) -> Iterator[npt.NDArray[np.float32]]:
    """Latents of some samples, each (B, L, D)."""
    samples = evenly_spread(len(fields.num_steps), _MAX_ENCODED)
    for first in range(0, len(samples), _AT_ONCE):
        some = samples[first : first + _AT_ONCE]
        values = torch.from_numpy(fields.read(array, some, np.zeros_like(some))).to(autoencoder.device)
        table = parameter_table(fields.parameters(some), autoencoder.spec.parameters, len(some))
        encoded = autoencoder.encode(values, table.to(autoencoder.device), task=fields.info.task, array=array)
        yield encoded.float().cpu().numpy()
