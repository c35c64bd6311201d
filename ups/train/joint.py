"""Stage `joint`: encoder, operator and decoder together on a field store, with inverse losses.

Encoder and decoder begin with the basis of the training frames, or from scratch without one, and are scaled
by these frames. The stage leaves a new autoencoder and an operator that goes with it; stores of latents are
then of another encoder, and the next build makes them again. Letters: B batch, X the axes of the grid, C
channels, L tokens, D channels of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ups import stages
from ups.config import RunConfig
from ups.config.checks import check_joint
from ups.data.batches import WindowBatch, augment_windows_of, batch_size_of, window_data
from ups.data.fields import Fields, evenly_spread
from ups.data.patch_basis import measure_bases
from ups.data.statistics import INPUT, Statistics, latent_statistics
from ups.data.windows import Windows
from ups.distributed.sharding import ShardedPart
from ups.eval.forecasters import AutoencoderFloor, OperatorForecaster
from ups.grid import FIELDS
from ups.losses import inverse_losses
from ups.train.autoencoder import autoencoder_parts
from ups.train.autoencoder import make_spec as make_autoencoder_spec
from ups.train.operator import (
    as_stores,
    data_hashes,
    make_spec,
    open_field_windows,
    operator_part,
    preload_windows,
)
from ups.train.physics_priors import PhysicsPriors, check_floors, make_priors
from ups.train.schedules import INVERSE_LOSSES, Schedule, inverse_weights, num_queries
from ups.train.stage import QUIET_START, Losses, Stage, StageStart
from ups.train.validation import RolloutValidation, open_validation, scored
from ups.trained.autoencoder import Autoencoder, save_autoencoder
from ups.trained.checkpoint import check_whole, hash_tensors
from ups.trained.simulator import Simulator, load_simulator, save_simulator
from ups.trained.specs import (
    AUTOENCODER,
    AUTOENCODER_FILE,
    OPERATOR,
    OPERATOR_FILE,
    AutoencoderSpec,
    SimulatorSpec,
)

# What the stage reports on; stage operator replaces the copy of it that others use.
JOINT_FILE = "joint.safetensors"
_INNER = "autoencoder."  # names of its weights in a simulator begin so
_FRAMES_OF_SCALE = 256  # of a task, that the scale of its latents is measured on


@dataclass(frozen=True)
class JointBatch(WindowBatch):
    """Windows of fields, (B, K + 1, X..., C).

    Attributes:
        weights: Of the inverse losses that their step takes, too, by name; none of those without a weight.
        points: Numbers of the grid's points at which fields are compared, int64, shape (points,).
        prior_weights: Of the physics priors that their step takes, too, by name.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    points: Tensor | None = None
    prior_weights: Mapping[str, float] = field(default_factory=dict)


def make_joint_stage(
    config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> JointStage:
    """Open field stores and validation trajectories, and build the model."""
    check_joint(config)
    with start.phase("data_opening"):
        windows = open_field_windows(config)
        validation = open_validation(config)
    start.check_data(data_hashes(windows))
    with start.phase("statistics"):
        fields = {task: Fields(some.store, limit=config.data.limit) for task, some in windows.items()}
        spec = make_autoencoder_spec(config, fields)
    with start.phase("model_built"):
        torch.manual_seed(config.seed)
        autoencoder = Autoencoder(spec)
        measure_bases(autoencoder, fields)
        model = make_joint_simulator(config, autoencoder, windows).to(device)
    with start.phase("preload"):
        preload_windows(config, windows, device=device)
    priors = make_priors(config, model.spec, windows)
    check_floors(config, windows)
    return JointStage(config, model, windows=windows, validation=validation, device=device, priors=priors)


class JointStage(Stage):
    """See `ups.train.stage.Stage`.

    Args:
        model: With a trainable autoencoder, on its device.
        windows: Training windows of fields by task.
        validation: Trajectories that are rolled out.
        priors: Physics priors of decoded states; None for none.
    """

    facts = stages.JOINT
    model: Simulator
    compiled = ("encode", "conditions", "advance", "decode_at")

    def __init__(
        self,
        config: RunConfig,
        model: Simulator,
        *,
        windows: Mapping[str, Windows],
        validation: RolloutValidation,
        device: torch.device,
        priors: PhysicsPriors | None = None,
    ) -> None:
        self.priors, self._laws = priors, config.own_laws
        assert model.autoencoder is not None
        self.model, self.autoencoder = model, model.autoencoder
        if (
            self.autoencoder.spec.has_one_array
        ):  # what encodes another needs the losses that not all batches have
            self.gradients = "all" if model.uses_all_weights else "the same"
        self._config, self._validation, self._device = config, validation, device
        data = window_data(
            windows,
            global_batch_size=batch_size_of(config.stage(self.name)),
            seed=config.seed,
            parameters=model.spec.parameters,
        )
        self.loader = data.loader(config, device, prepare=self._prepare)
        self._schedule = Schedule.of(
            config.stage(self.name), num_batches=len(self.loader), accum_steps=config.training.accum_steps
        )
        self._data_hashes = data_hashes(windows)
        self.path = config.checkpoint.dir / JOINT_FILE
        self.operator_path = config.checkpoint.dir / OPERATOR_FILE
        self.autoencoder_path = config.checkpoint.dir / AUTOENCODER_FILE

    def _prepare(self, batch: WindowBatch, number: int) -> JointBatch:
        """Augmented, with what the schedules say of its step."""
        training, schedule = self._config.training, self._schedule
        if training.augment:
            batch = augment_windows_of(self.model.spec.tasks[batch.task], batch, laws=self._laws)
        is_inverse = schedule.step_of(number) % training.inverse_loss_frequency == 0
        weights = inverse_weights(training, schedule.epochs_before(number)) if is_inverse else {}
        num_points = len(self.model.queries.get_buffer(batch.task))
        progress = schedule.progress(number)
        num_queried = num_queries(training.query_sampling, progress=progress, num_points=num_points)
        return JointBatch(
            **vars(batch),
            weights={name: weight for name, weight in weights.items() if weight},
            points=batch.draws.order(num_points)[:num_queried],
            prior_weights={} if self.priors is None else self.priors.weights_at(number),
        )

    def losses(self, forward: Callable[..., Tensor], batch: JointBatch) -> Losses:
        """Prediction, alignment and weighted inverse losses; fields are compared at random points."""
        training = self._config.training
        assert batch.points is not None
        assert isinstance(forward, Simulator)
        rollouts: list[Tensor] = []

        def keeping(*args: Any, **options: Any) -> Tensor:
            rollouts.append(forward(*args, **options))
            return rollouts[-1]

        losses = inverse_losses(
            forward,
            batch.states.to(self._device, non_blocking=True),
            batch.parameters.to(self._device, non_blocking=True),
            task=batch.task,
            dt_B=batch.dt.to(self._device, non_blocking=True),
            points_P=batch.points.to(self._device, non_blocking=True),
            forward=keeping,
            is_inverse=bool(batch.weights),
            kind=training.reconstruction_loss,
            lambda_alignment=training.lambda_alignment,
        )
        weights = dict.fromkeys(losses.keys() - INVERSE_LOSSES, 1.0) | dict(batch.weights)
        losses = {name: weights[name] * loss for name, loss in losses.items() if name in weights}
        if batch.prior_weights and self.priors is not None:
            states_BKLD, priors = rollouts[0], batch.prior_weights
            losses |= self.priors.losses(forward, batch, states_BKLD, priors, are_fields=True)
        return losses

    def validate(self) -> dict[str, float]:
        """nRMSE of decoded rollouts per task, whose mean is the `score`, and the autoencoder's floor."""
        nrmse = self._validation.nrmse(OperatorForecaster(self.called), ranks=self.ranks)
        floor = self._validation.nrmse(AutoencoderFloor(self.called.autoencoder), ranks=self.ranks)
        return scored(nrmse) | {f"val/floor_nrmse/{name}": value for name, value in floor.items()}

    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write `autoencoder.safetensors`, and the simulator that names it, also as the present operator."""
        return self._export(metrics, weights, simulators=(self.path, self.operator_path))

    def export_again(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """As `export`; the operator that is there stays, which its own stage may have trained since."""
        is_there = self.operator_path.exists()
        simulators = (self.path,) if is_there else (self.path, self.operator_path)
        return self._export(metrics, weights, simulators=simulators)

    def check_exported(self, score: float) -> None:
        """Of what stage operator doesn't replace."""
        check_whole(self.path, kind=OPERATOR)
        check_whole(self.autoencoder_path, kind=AUTOENCODER)

    def _export(
        self, metrics: dict[str, float], weights: Mapping[str, Tensor], *, simulators: Sequence[Path]
    ) -> Path:
        said: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "report": metrics}
        said["data"] = as_stores(self._data_hashes)
        own = {name.removeprefix(_INNER): t for name, t in weights.items() if name.startswith(_INNER)}
        save_autoencoder(self.autoencoder_path, self.autoencoder, weights=own, **said)
        digest = hash_tensors(self.autoencoder_path)
        self.model.spec = dataclasses.replace(self.model.spec, autoencoder_sha256=digest)
        for path in simulators:
            save_simulator(path, self.model, weights=weights, **said)
        return self.path

    def exports(self) -> Mapping[Path, str]:
        """The autoencoder, and two copies of the simulator."""
        return {self.path: OPERATOR, self.operator_path: OPERATOR, self.autoencoder_path: AUTOENCODER}

    def sharded_parts(self) -> list[ShardedPart]:
        """Operator, encoders and decoders."""
        return [operator_part(self.model), *autoencoder_parts(self.autoencoder)]

    def data_identity(self) -> Mapping[str, Any]:
        """Hashes of the stores by task."""
        return self._data_hashes

    def state(self) -> dict[str, Any]:
        """The statistics: measured by another machine they may differ in the last bit."""
        return {"simulator": self.model.spec.to_json(), "autoencoder": self.autoencoder.spec.to_json()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the statistics of `state`."""
        self.model.spec = SimulatorSpec.from_json(values["simulator"])
        self.autoencoder.spec = AutoencoderSpec.from_json(values["autoencoder"])
        for module, tasks in (
            (self.model, self.model.spec.tasks),
            (self.autoencoder, self.autoencoder.spec.tasks),
        ):
            for name, task in tasks.items():
                for array, statistics in task.statistics.items():
                    _set_statistics(module.normalizer[f"{name}/{array}"], statistics)

    def finish(self) -> dict[str, Any]:
        """Errors of what was exported beside persistence and the autoencoder's floor."""
        simulator = load_simulator(self.path, device=str(self._device))
        assert simulator.autoencoder is not None
        tasks, spec = simulator.spec.tasks, simulator.autoencoder.spec
        num_latents = spec.num_tokens * spec.latent_dim
        found = self._validation.report(OperatorForecaster(simulator), ranks=self.ranks)
        floor = AutoencoderFloor(simulator.autoencoder)
        return {
            "checkpoint": str(self.path),
            "autoencoder": str(self.autoencoder_path),
            "latent": {"tokens": spec.num_tokens, "dim": spec.latent_dim},
            "compression": {n: task.grid.num_values(FIELDS) / num_latents for n, task in tasks.items()},
            **found,
            "floor_nrmse": self._validation.nrmse(floor, ranks=self.ranks),
        }


def _set_statistics(normalizer: nn.Module, statistics: Mapping[str, list[float]]) -> None:
    for name, values in statistics.items():
        buffer = normalizer.get_buffer(name)
        buffer.copy_(torch.tensor(values))


def make_joint_simulator(
    config: RunConfig, autoencoder: Autoencoder, windows: Mapping[str, Windows]
) -> Simulator:
    """A new simulator all of whose weights are trained.

    Its states are latents in the scale that the untrained encoder gives them; the encoder is free to change
    it, and what is exported keeps it.

    Args:
        autoencoder: A new one, with its basis if it has one.
        windows: Training windows of fields by task.

    Returns:
        The simulator, on the CPU.
    """
    statistics = {name: _latent_statistics(autoencoder, name, some) for name, some in windows.items()}
    spec = make_spec(config, windows, statistics=statistics, autoencoder=autoencoder, autoencoder_sha256=None)
    simulator = Simulator(spec, autoencoder)
    autoencoder.requires_grad_(True)
    return simulator


@torch.no_grad()
def _latent_statistics(autoencoder: Autoencoder, task: str, windows: Windows) -> dict[str, Statistics]:
    """Of the latents of some windows' last frames, and of a steady task's input, as a store's would be."""
    states = windows.read(evenly_spread(len(windows), _FRAMES_OF_SCALE)).states
    frames = {FIELDS: (FIELDS, states[:, -1])}
    if windows.input_array is not None:
        frames[INPUT] = (windows.input_array, states[:, 0])
    unknown = torch.full((len(states), len(autoencoder.spec.parameters)), torch.nan)
    latents = {
        key: autoencoder.encode(values_BXC, unknown, task=task, array=array).numpy()
        for key, (array, values_BXC) in frames.items()
    }
    return {key: latent_statistics([latent_BLD]) for key, latent_BLD in latents.items()}
