"""Stage `operator`: advances states, latents of a frozen autoencoder or the fields themselves.

It is trained on windows of the stores of its states. Letters: B batch, K steps, L tokens, D channels of a
token, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups import stages
from ups.config import RunConfig
from ups.config.checks import check_latent_size, check_no_inverse_losses
from ups.config.operator_size import operator_size
from ups.data.batches import (
    TrainingData,
    WindowBatch,
    WindowSource,
    augment_windows_of,
    batch_size_of,
    window_data,
)
from ups.data.latents import open_latent_windows
from ups.data.statistics import INPUT, Statistics, measure_state_statistics
from ups.data.stores import check_configured_encoder, open_field_states, tells_encoder
from ups.data.windows import EncodedWindows, Windows
from ups.distributed.sharding import ShardedPart
from ups.errors import ConfigError
from ups.eval.forecasters import AutoencoderFloor, operator_forecaster
from ups.grid import FIELDS, LATENT, PERIODIC, GridSpec, boundary_types, cut_grid
from ups.log import logger
from ups.losses import LossContext, check_losses, loss_weights, rollout_losses
from ups.models.operator_size import TOKEN_UNET
from ups.models.operators import dotted_name
from ups.train.checks import HOW_TO_HAVE_ENCODER
from ups.train.flops import count_flops
from ups.train.physics_priors import PhysicsBatch, PhysicsPriors, check_floors, make_priors
from ups.train.schedules import Schedule
from ups.train.stage import (
    QUIET_START,
    Curriculum,
    Losses,
    Stage,
    StageStart,
    push_forward,
    pushed,
    with_noise,
)
from ups.train.validation import (
    RolloutValidation,
    mean_over_tasks,
    open_latent_validation,
    open_validation,
    scored,
)
from ups.trained.autoencoder import Autoencoder, load_autoencoder
from ups.trained.checkpoint import hash_tensors, hinting_where_missing
from ups.trained.simulator import Simulator, load_simulator, save_simulator
from ups.trained.specs import OPERATOR, OPERATOR_FILE, SimulatedTask, SimulatorSpec, TaskSpec, check_task


def open_windows(
    config: RunConfig, *, autoencoder_path: Path, device: torch.device, start: StageStart
) -> TrainingData[WindowSource]:
    """Training windows of all tasks: latents as `training.cache_mode` says, or those of field stores.

    Args:
        autoencoder_path: The checkpoint whose latents are wanted.
        device: Where states are used.
        start: Called with what is done, also from another thread; asked before a store is replaced.
    """
    batch_size = batch_size_of(config.stage(stages.OPERATOR.name))
    if config.operator.state == "latent":
        return open_latent_windows(
            config,
            "train",
            autoencoder_path=autoencoder_path,
            global_batch_size=batch_size,
            horizon=config.training.horizon,
            seed=config.seed,
            device=str(device),
            made=start.latents,
            check_data=start.check_data,
        )
    windows = open_field_windows(config)
    preload_windows(config, windows, device=device)
    parameters = window_parameters(windows)
    return window_data(windows, global_batch_size=batch_size, seed=config.seed, parameters=parameters)


def open_field_windows(config: RunConfig) -> dict[str, Windows]:
    """Training windows of the field stores of all tasks."""
    training = config.training
    return {
        task: Windows(
            open_field_states(config, task, "train"),
            horizon=training.horizon,
            stride=training.stride,
            limit=config.data.limit,
        )
        for task in config.data.tasks
    }


def preload_windows(config: RunConfig, windows: Mapping[str, Windows], *, device: torch.device) -> None:
    """Bring the stores into memory as `training.preload` says, and say where each lies then."""
    for some in windows.values():
        logger.info(f"{some.store.path}: {some.preload(config.training.preload, device=str(device))}")


def data_hashes(windows: Mapping[str, Windows]) -> dict[str, str]:
    """What a stage is trained on: hashes of the stores by task."""
    return {task: some.store.config_hash for task, some in windows.items()}


def as_stores(hashes: Mapping[str, str]) -> dict[str, str]:
    """What a model card says of the training data: hashes of stores by task."""
    return {task: f"store {config_hash}" for task, config_hash in hashes.items()}


def are_of_known_encoder(source: WindowSource) -> bool:
    """Whether all stores of latents say what encoded them."""
    return all(tells_encoder(some.store) for some in source.tasks.values())


def make_operator_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> OperatorStage:
    """Open stores and validation trajectories, measure the statistics, and build the model."""
    check_no_inverse_losses(config)
    check_losses(config.training)
    path = config.autoencoder_path
    autoencoder, digest = None, None
    if config.operator.state == "latent":
        autoencoder, digest = load_autoencoder_of(config, path, device), hash_tensors(path)
    with start.phase("data_opening"):
        data = open_windows(config, autoencoder_path=path, device=device, start=start)
        windows = data.source.tasks
        is_known = are_of_known_encoder(data.source)
        validation = open_validation(config) if is_known else open_latent_validation(config)
        if not is_known:
            what = "they aren't decoded, errors are those of latents"
            logger.info(f"nothing says what encoded these latents: {what}")
    with start.phase("statistics"):
        spec = make_spec(
            config,
            windows,
            statistics={name: measure_state_statistics(some) for name, some in windows.items()},
            autoencoder=autoencoder,
            autoencoder_sha256=digest,
            is_encoder_known=is_known,
        )
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        simulator = Simulator(spec, autoencoder).to(device)
    priors = make_priors(config, spec, windows)
    check_floors(config, windows)
    return OperatorStage(config, simulator, data=data, validation=validation, device=device, priors=priors)


class OperatorStage(Stage):
    """See `ups.train.stage.Stage`.

    Args:
        model: On its device.
        data: Training windows.
        validation: Trajectories that are rolled out.
        priors: Physics priors of decoded states; None for none.
    """

    facts = stages.OPERATOR
    model: Simulator
    compiled = ("conditions", "advance")

    def __init__(
        self,
        config: RunConfig,
        model: Simulator,
        *,
        data: TrainingData[WindowSource],
        validation: RolloutValidation,
        device: torch.device,
        priors: PhysicsPriors | None = None,
    ) -> None:
        self.model, self._config, self._validation, self._device = model, config, validation, device
        self.priors, self._laws = priors, config.own_laws
        if len(model.spec.tasks) == 1:
            self.gradients = "all" if model.uses_all_weights else "the same"
        settings = config.stage(self.name)
        self._is_compiled = bool(settings.compile)
        self._data = data
        self._encodes = any(isinstance(some, EncodedWindows) for some in data.source.tasks.values())
        self.loader = data.loader(config, device, prepare=self._prepare)
        self._data_hashes = data_hashes(data.source.tasks)
        self._data_identity = {task: some.data_hash for task, some in data.source.tasks.items()}
        accum_steps = config.training.accum_steps
        schedule = Schedule.of(settings, num_batches=len(self.loader), accum_steps=accum_steps)
        self.curriculum = Curriculum(
            config.training.horizon, config.operator.curriculum, schedule.num_batches
        )
        self.path = config.checkpoint.dir / OPERATOR_FILE

    def _prepare(self, batch: WindowBatch, number: int) -> WindowBatch:
        """As long as the curriculum says, with noise, augmented; with what its physics priors take."""
        batch = self.curriculum.cut(batch, number)
        if self._encodes:  # fields, which can be shifted by single points, and reflected
            batch = self._data.source.encoded(self._augmented(batch, is_latent=False))
        batch = self._with_priors(batch, number)
        return pushed(batch) if self._config.training.pushforward else batch

    def _with_priors(self, batch: WindowBatch, number: int) -> WindowBatch:
        """With noise, augmented, and with what the physics priors that are due take."""
        states, batch = batch.states, self._with_noise(batch)
        weights = self.priors.weights_at(number) if self.priors is not None else {}
        is_latent = self.model.spec.states == "latent"
        if not weights:
            return batch if self._encodes else self._augmented(batch, is_latent=is_latent)
        # Priors hold between the frames themselves: the one without noise moves along, as a last frame.
        batch = dataclasses.replace(batch, states=torch.cat([batch.states, states[:, :1]], dim=1))
        batch = batch if self._encodes else self._augmented(batch, is_latent=is_latent)
        moved, clean = batch.states[:, :-1], batch.states[:, -1]
        return PhysicsBatch(**{**vars(batch), "states": moved}, prior_weights=weights, clean=clean)

    def _augmented(self, batch: WindowBatch, *, is_latent: bool) -> WindowBatch:
        if not self._config.training.augment:
            return batch
        task = self.model.spec.tasks[batch.task]
        return augment_windows_of(task, batch, laws=self._laws, is_latent=is_latent)

    def losses(self, forward: Callable[..., Tensor], batch: WindowBatch) -> Losses:
        """One-step and rollout errors of normalised states, and whatever else has a weight."""
        training, (truth_BKLD, given_BLD) = self._config.training, self._states(batch)
        step = partial(
            forward,
            parameters_BP=batch.parameters.to(self._device, non_blocking=True),
            task=batch.task,
            dt_B=batch.dt.to(self._device, non_blocking=True),
        )
        before = 0
        if training.pushforward:
            before = batch.pushed
            given_BLD, truth_BKLD = push_forward(step, given_BLD, truth_BKLD, num=before)
        # Later states need gradients: were the first one to differ, a compiled step would have two forms.
        given_BLD.requires_grad_(self._is_compiled)
        predicted_BKLD = step(given_BLD, steps=truth_BKLD.shape[1])
        parameters_BP, dt_B = step.keywords["parameters_BP"], step.keywords["dt_B"]

        def fields(states_BKLD: Tensor) -> Tensor:
            num_steps = states_BKLD.shape[1]
            later_BP = parameters_BP.repeat_interleave(num_steps, dim=0)
            decoded = self.model.decode(states_BKLD.flatten(0, 1), later_BP, task=batch.task)
            return decoded.float().unflatten(0, (-1, num_steps))

        tokens = self.model.spec.tasks[batch.task].tokens
        losses = rollout_losses(
            predicted_BKLD,
            truth_BKLD,
            weights=loss_weights(training),
            context=LossContext(batch.task, tokens, dt_B, parameters_BP, fields),
        )
        if isinstance(batch, PhysicsBatch) and self.priors is not None:
            losses |= self.priors.losses(
                self.model,
                dataclasses.replace(batch, states=batch.states[:, before:]),
                predicted_BKLD,
                batch.prior_weights,
                are_fields=self.model.spec.states == "fields",
                clean=None if before else batch.clean,
            )
        return losses

    def validate(self) -> dict[str, float]:
        """nRMSE of decoded rollouts per task; `score` is their mean.

        Of states that nothing can decode it is that of latents, under "val/latent_nrmse/".
        """
        nrmse = self._validation.nrmse(operator_forecaster(self.called), ranks=self.ranks)
        return scored(nrmse, "nrmse" if self.model.spec.is_encoder_known else "latent_nrmse")

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write `operator.safetensors`: operator, autoencoder, statistics."""
        said: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "report": metrics}
        save_simulator(self.path, self.model, weights=weights, data=as_stores(self._data_hashes), **said)
        return self.path

    def exports(self) -> Mapping[Path, str]:
        """`operator.safetensors`."""
        return {self.path: OPERATOR}

    def sharded_parts(self) -> list[ShardedPart]:
        """The operator; a frozen autoencoder stays whole on every rank."""
        return [operator_part(self.model)]

    def data_identity(self) -> Mapping[str, Any]:
        """Hashes of the stores by task, or of fields and their encoder."""
        return self._data_identity

    def preparation_flops(self) -> float:
        """Of encoding every training frame once, where states are latents."""
        autoencoder = self.model.autoencoder
        if autoencoder is None or not self.model.spec.is_encoder_known:
            return 0.0
        total = 0.0
        for task, num_frames in self._data.source.num_frames().items():
            arrays = {FIELDS, self.model.spec.tasks[task].input_array}  # of a steady task both, once a sample
            total += num_frames * sum(encoding_flops(autoencoder, task, array) for array in arrays)
        return total

    def finish(self) -> dict[str, Any]:
        """Errors of what was exported beside persistence and the autoencoder's floor."""
        simulator = load_simulator(self.path, device=str(self._device))
        found = self._validation.report(operator_forecaster(simulator), ranks=self.ranks)
        floor = {}
        if simulator.autoencoder is not None and simulator.spec.is_encoder_known:
            floor = self._validation.nrmse(AutoencoderFloor(simulator.autoencoder), ranks=self.ranks)
        return {
            "checkpoint": str(self.path),
            "states": simulator.spec.states,
            "nrmse_of": "fields" if simulator.spec.is_encoder_known else "latents",
            "parameters": sum(weight.numel() for weight in simulator.operator.parameters()),
            "score": mean_over_tasks(found["nrmse"]),
            **found,
            "floor_nrmse": floor,
        }

    def _with_noise(self, batch: WindowBatch) -> WindowBatch:
        task = self.model.spec.tasks[batch.task]
        level = 0.0 if task.steady else self._config.operator.noise
        return with_noise(batch, level=level, std=task.statistics[FIELDS]["std"])

    def _states(self, batch: WindowBatch) -> tuple[Tensor, Tensor]:
        """Normalised states that are to be predicted, (B, K, L, D), and the one that is given, (B, L, D)."""
        task = self.model.spec.tasks[batch.task]
        states = batch.states.to(self._device, non_blocking=True)
        given_BLD = self.model.normalise(states[:, 0], task=batch.task, array=task.input_array)
        truth = self.model.normalise(states[:, 1:].flatten(0, 1), task=batch.task, array=FIELDS)
        return truth.unflatten(0, (len(states), -1)), given_BLD


def operator_part(model: Simulator) -> ShardedPart:
    """The operator of a simulator, which calls these methods of it."""
    return ShardedPart(model.operator, ("conditions", "advance"))


def encoding_flops(autoencoder: Autoencoder, task: str, array: str) -> int:
    """Floating-point operations of encoding one frame of an array of a task."""
    grid, device = autoencoder.spec.tasks[task].grid, autoencoder.normalizer_of(task, FIELDS).std.device
    frame = torch.zeros(1, *grid.points, dict(grid.channels)[array], device=device)
    unknown = torch.full((1, len(autoencoder.spec.parameters)), torch.nan, device=device)
    with torch.no_grad():
        return count_flops(lambda: autoencoder.encode(frame, unknown, task=task, array=array))


def load_autoencoder_of(config: RunConfig, path: Path, device: torch.device) -> Autoencoder:
    """The autoencoder whose latents are a stage's states."""
    with hinting_where_missing(HOW_TO_HAVE_ENCODER):
        autoencoder = load_autoencoder(path, device=str(device))
    for task in config.data.tasks:
        check_task(autoencoder.spec, task, path)
    check_configured_encoder(config, path)
    check_latent_size(config, (autoencoder.spec.num_tokens, autoencoder.spec.latent_dim), path)
    return autoencoder


def make_spec(
    config: RunConfig,
    windows: Mapping[str, Windows],
    *,
    statistics: Mapping[str, Mapping[str, Statistics]],
    autoencoder: Autoencoder | None,
    autoencoder_sha256: str | None,
    is_encoder_known: bool = True,
) -> SimulatorSpec:
    """The simulator's specification: grids and time steps from the stores, sizes as configured.

    Args:
        windows: Training windows by task.
        statistics: Of the operator's states, by task, as `measure_state_statistics` gives them.
        autoencoder: Encoder and decoder where states are latents.
        autoencoder_sha256: Of its weights; None while they are trained, too.
        is_encoder_known: Whether it made the latents, as `operator_states.are_of_known_encoder` says.
    """
    known = {
        name: _of_fields(some) if autoencoder is None else autoencoder.spec.tasks[name]
        for name, some in windows.items()
    }
    tasks = {
        name: _simulated(config, windows[name], known[name], statistics[name], autoencoder)
        for name in sorted(windows)
    }
    return dataclasses.replace(
        spec_of_states(
            config,
            tasks,
            operator=operator_document(config),
            parameters=window_parameters(windows),
            autoencoder=autoencoder,
        ),
        stride=config.training.stride,
        autoencoder_sha256=autoencoder_sha256 if is_encoder_known else None,
        is_encoder_known=is_encoder_known,
    )


def operator_document(config: RunConfig) -> dict[str, Any]:
    """What a specification says of the operator: sizes of the package's own, or name and configuration."""
    operator = config.operator
    if operator.name == TOKEN_UNET:
        return operator_size(operator).to_json()
    return {"name": dotted_name(operator.name), "config": operator.config}


def spec_of_states(
    config: RunConfig,
    tasks: Mapping[str, SimulatedTask],
    *,
    operator: Mapping[str, Any],
    parameters: tuple[str, ...],
    autoencoder: Autoencoder | None,
) -> SimulatorSpec:
    """The specification of states, latents or patches of fields, and of the network that works on them.

    Args:
        tasks: By name.
        operator: Of the network, as `SimulatorSpec.operator`.
        parameters: Names of those that the tasks have; an autoencoder has its own.
        autoencoder: Encoder and decoder where states are latents.
    """
    patch_size = config.encoder.patch_size
    dims = [patch_size**task.grid.ndim * dict(task.grid.channels)[FIELDS] for task in tasks.values()]
    return SimulatorSpec(
        states=config.operator.state,
        tasks=tasks,
        parameters=parameters if autoencoder is None else autoencoder.spec.parameters,
        state_dim=max(dims) if autoencoder is None else autoencoder.spec.latent_dim,
        patch_size=patch_size if autoencoder is None else None,
        stride=1,
        operator=operator,
        autoencoder_sha256=None,
    )


def _simulated(
    config: RunConfig,
    windows: Windows,
    known: TaskSpec,
    statistics: Mapping[str, Statistics],
    autoencoder: Autoencoder | None,
) -> SimulatedTask:
    ranges = windows.parameter_ranges()
    if autoencoder is not None:
        _check_shape(windows, autoencoder)
        ranges = {name: ends for name, ends in ranges.items() if name in autoencoder.spec.parameters}
    task = SimulatedTask(
        grid=known.grid,
        boundary=boundary_of(windows.store.attrs.get("boundary") or {}, known.grid),
        tokens=tokens_of(config, known.grid, autoencoder),
        channels=known.channels,
        steady=windows.is_steady,
        dt=windows.typical_dt(),
        parameters=ranges,
        statistics={},
    )
    names = {FIELDS: FIELDS, INPUT: task.input_array}
    measured = {names[key]: values.to_json() for key, values in statistics.items()}
    return dataclasses.replace(task, statistics=measured)


def _check_shape(windows: Windows, autoencoder: Autoencoder) -> None:
    """A store of an unknown encoder needn't have the shape of this one's latents."""
    if windows.state != LATENT:  # fields, which are encoded in every step
        return
    found = tuple(windows.store.arrays[windows.state].shape[2:])
    expected = (autoencoder.spec.num_tokens, autoencoder.spec.latent_dim)
    if found != expected:
        shown = " x ".join(map(str, expected))
        raise ConfigError(
            "latents of another shape than the autoencoder's",
            kind="latent_size",
            path=windows.store.path,
            expected=f"{shown} a frame",
            found=" x ".join(map(str, found)),
        )


def boundary_of(named: Mapping[str, str], grid: GridSpec) -> tuple[str, ...]:
    """Boundary type of each axis, as a store names it; of imported latents only the grid is known."""
    kinds = boundary_types(named, ndim=grid.ndim)
    return tuple(PERIODIC if wraps else kind for kind, wraps in zip(kinds, grid.periodic, strict=True))


def tokens_of(config: RunConfig, grid: GridSpec, autoencoder: Autoencoder | None) -> tuple[int, ...]:
    """Tokens along each axis: those of the autoencoder, or one for each patch."""
    if autoencoder is not None:
        return autoencoder.spec.cut(grid).tokens
    return cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=None).tokens


def _of_fields(windows: Windows) -> TaskSpec:
    info = windows.fields.info
    return TaskSpec(info.grid, info.channels, info.steady, statistics={})


def window_parameters(windows: Mapping[str, Windows]) -> tuple[str, ...]:
    """Names of all parameters that any of the tasks has, sorted."""
    return tuple(sorted({name for some in windows.values() for name in some.parameters}))
