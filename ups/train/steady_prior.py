"""Stage `steady_prior`: flow matching on the solutions of steady tasks, given their inputs, perhaps partly.

By `steady_prior.method=regression` the same network is trained to say the mean of solutions: the loss is the
same, with no noise and at flow time 0. Letters: B batch, L tokens, D channels of a token; e, r, t, x, v as in
`ups.diffusion.paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.config import RunConfig
from ups.data.batches import SolutionBatch, WindowBatch, augment_windows_of, batch_size_of, window_data
from ups.data.observations import check_observed, drawn_masks, masks_of_samples
from ups.data.splits import open_trajectories
from ups.data.windows import Trajectories, Windows, parameter_table
from ups.diffusion.paths import at_time, flow_matching_error
from ups.diffusion.schedules import FlowTimes, flow_time
from ups.distributed.sharding import ShardedPart
from ups.eval.ensemble_scores import ensemble_numbers
from ups.eval.ensembles import Climate, roll_out_members, roll_out_point
from ups.eval.forecasters import PriorForecaster
from ups.grid import FIELDS
from ups.log import logger
from ups.train.checks import check_steady_task, is_steady_task
from ups.train.corrector import sampling_of
from ups.train.meter import startup_phase
from ups.train.operator import load_autoencoder_of
from ups.train.prior_spec import make_prior_states
from ups.train.stage import QUIET_START, Losses, Stage, StageStart
from ups.train.validation import mean_error, scored
from ups.trained.checkpoint import hash_tensors
from ups.trained.prior import SteadyPrior, load_prior, save_prior
from ups.trained.prior_spec import PriorSpec
from ups.trained.specs import PRIOR, PRIOR_FILE

STAGE = "steady_prior"
_VAL_SAMPLES = 256  # solutions of a task that validation looks at
_VAL_ROWS = 32  # of them at a time
_VAL_TIMES = 4  # flow times of each


def make_steady_prior_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> SteadyPriorStage:
    """Open the fields of the steady tasks, measure statistics, and build the model.

    Raises:
        CheckpointError: If states are latents, and there is no autoencoder, or it is damaged.
        ConfigError: Kinds "no_steady_task", "observed_points", "no_input", and those of a wrong size.
        ups_store.StoreError: If the data can't be read.
    """
    check_steady_task(config)
    with startup_phase("data_opening"):
        train, val = (_open(config, split) for split in ("train", "val"))
        check_steady_task(config, found=train)
        for name in sorted(set(config.data.tasks) - train.keys()):
            logger.info(f"{name} isn't steady: the prior leaves it out")
        for name, some in train.items():
            check_observed(config.steady_prior.observed_points, some.info.grid, task=name)
    autoencoder, digest = None, None
    if config.operator.state == "latent":
        path = config.autoencoder_path
        autoencoder, digest = load_autoencoder_of(config, path, device), hash_tensors(path)
    data = {name: some.fields.identity for name, some in train.items()}
    start.check_data(_identity(data, digest))
    with startup_phase("statistics"):
        spec = make_prior_states(
            config,
            {name: some.fields for name, some in train.items()},
            autoencoder=autoencoder,
            autoencoder_sha256=digest,
        )
    with startup_phase("model_built"):
        torch.manual_seed(config.seed)
        settings = config.steady_prior
        prior = PriorSpec(settings.method, settings.observed_points, sampling_of(config))
        model = SteadyPrior(spec, prior, autoencoder).to(device)
    return SteadyPriorStage(config, model, train=train, val=val, data=data, device=device)


class SteadyPriorStage(Stage):
    """See `ups.train.stage.Stage`.

    Args:
        model: On its device.
        train: Training samples by task.
        val: Validation samples by task.
        data: What the training samples are, by task, as `Fields.identity` says.
    """

    name = STAGE
    model: SteadyPrior
    compiled = ("conditions", "velocity")

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
        self.model, self._config, self._device = model, config, device
        self._laws = config.own_laws
        self._val, self._origins = val, data
        self._loss_name, self._is_flow = model.prior_spec.method, model.prior_spec.method == "flow"
        if len(model.spec.tasks) == 1:
            self.gradients = "all" if model.uses_all_weights else "the same"
        self._times = FlowTimes(**config.training.tau_distribution.model_dump())
        batches = window_data(
            {task: Windows(some.fields) for task, some in train.items()},
            parameters=model.spec.parameters,
            global_batch_size=batch_size_of(config.stage(self.name)),
            seed=config.seed,
        )
        self.loader = batches.loader(config, device, prepare=self._prepare)
        self.path = config.checkpoint.dir / PRIOR_FILE

    def losses(self, forward: Callable[..., Tensor], batch: SolutionBatch) -> Losses:
        """|v(x_t, t) - (r - e)|^2 of normalised solutions; of a regression |r(0, 0) - r|^2."""
        return {self._loss_name: self._errors(forward, batch).mean()}

    def validate(self) -> dict[str, float]:
        """The loss on validation samples; noise, flow times and observed points never change."""
        return scored({task: self._val_error(task) for task in self._val}, self._loss_name)

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
        return _identity(self._origins, self.model.spec.autoencoder_sha256)

    def finish(self) -> dict[str, Any]:
        """Scores of what was exported, on the validation split; values over their root mean square."""
        model = load_prior(self.path, device=str(self._device))
        return {
            "checkpoint": str(self.path),
            "states": model.spec.states,
            "method": model.prior_spec.method,
            "observed_points": model.prior_spec.observed_points,
            "parameters": sum(weight.numel() for weight in model.network.parameters()),
            "members": self._config.diffusion.val_members if self._is_flow else 1,
            "scores": {task: self._scores(model, some) for task, some in self._val.items()},
        }

    def _scores(self, model: SteadyPrior, val: Trajectories) -> dict[str, float]:
        forecaster, climate = PriorForecaster(model, seed=self._config.seed), Climate.of(val)
        if not self._is_flow:
            return ensemble_numbers(roll_out_point(forecaster, val, climate, ranks=self.ranks).errors)
        members, seed = self._config.diffusion.val_members, self._config.seed
        found = roll_out_members(forecaster, val, climate, members=members, seed=seed, ranks=self.ranks)
        return ensemble_numbers(found.errors)

    def _prepare(self, batch: WindowBatch, number: int) -> SolutionBatch:
        """Augmented, with noise, flow times and the points that are observed."""
        task = self.model.spec.tasks[batch.task]
        if self._config.training.augment:
            batch = augment_windows_of(task, batch, laws=self._laws)
        draws, num = batch.draws, self.model.prior_spec.observed_points
        observed = None if num is None else drawn_masks(draws, task.grid.points, num=num)
        noise = draws.normal(self._state_shape(batch.task))
        tau = draws.of_rows(self._times.draw(draws.num_rows, draws.generator))
        return self._with_flow(batch, noise, tau, observed)

    def _with_flow(
        self, batch: WindowBatch, noise: Tensor, tau: Tensor, observed: Tensor | None
    ) -> SolutionBatch:
        share = 1.0 if self._is_flow else 0.0
        return SolutionBatch(**vars(batch), noise=share * noise, tau=share * tau, observed=observed)

    def _state_shape(self, task: str) -> torch.Size:
        return torch.Size((int(np.prod(self.model.spec.tasks[task].tokens)), self.model.spec.state_dim))

    def _errors(self, forward: Callable[..., Tensor], batch: SolutionBatch) -> Tensor:
        """Of each sample, shape (B,)."""
        states, noise, tau, parameters = (
            tensor.to(self._device, non_blocking=True)
            for tensor in (batch.states, batch.noise, batch.tau, batch.parameters)
        )
        observed = None if batch.observed is None else batch.observed.to(self._device, non_blocking=True)
        with torch.no_grad():  # by a frozen encoder, or none
            given = self.model.given(states[:, 0], observed, parameters, task=batch.task)
            r = self.model.encode(states[:, 1], parameters, task=batch.task, array=FIELDS).float()
        t = flow_time(tau)
        v = forward(at_time(noise, r, t), t, given, parameters, task=batch.task)
        own = self.model.own_dim(batch.task)
        return flow_matching_error(v[..., :own], noise[..., :own], r[..., :own])

    @torch.no_grad()
    def _val_error(self, task: str) -> float:
        """Mean over samples and flow times."""
        num, errors_of = len(self._val[task]), partial(self._val_errors, task)
        return mean_error(errors_of, num=num, most=_VAL_SAMPLES, rows=_VAL_ROWS, ranks=self.ranks)

    def _val_errors(self, task: str, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Of samples of these numbers, shape (B,), over all flow times."""
        some = self._val[task].read(numbers)
        table = parameter_table(some.parameters, self.model.spec.parameters, len(some))
        states = torch.stack([some.given, some.truth[:, 0]], dim=1)
        batch = WindowBatch(task, states, table, torch.ones(len(some)))
        num = self.model.prior_spec.observed_points
        observed = None if num is None else masks_of_samples(some.given, num=num, seed=self._config.seed)
        times = _VAL_TIMES if self._is_flow else 1
        errors = [
            self._errors(
                self.called,
                self._with_flow(
                    batch,
                    _noise_of(numbers, time, self._state_shape(task)),
                    torch.full((len(some),), (time + 0.5) / times),
                    observed,
                ),
            )
            for time in range(times)
        ]
        return torch.stack(errors).mean(dim=0)


def _open(config: RunConfig, split: str) -> dict[str, Trajectories]:
    source = config.training.field_source
    opened = {
        task: open_trajectories(config.build, task, split, source=source)
        for task in config.data.tasks
        if is_steady_task(config, task)
    }
    return {task: some for task, some in opened.items() if some.info.steady}


def _identity(data: Mapping[str, str], autoencoder: str | None) -> dict[str, Any]:
    return {**data, "autoencoder": autoencoder}


def _noise_of(numbers: npt.NDArray[np.int64], time: int, shape: torch.Size) -> Tensor:
    """Standard normal numbers by the sample and the flow time."""
    seeds = [_VAL_TIMES * int(number) + time for number in numbers]
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
