"""What autoencoders and simulators are made of, for which tasks: all but the weights. No torch here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import index
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_args

from ups.errors import CheckpointError, ConfigError, UpsError, needs
from ups.grid import FIELDS, PERIODIC, Grid, GridSpec, TokenGrid, cut_grid
from ups.models.operator_size import OperatorSize
from ups.parsing import Count, Finite, Length, NotNegative, Parsed, Positive, Statistics, Window
from ups.stages import CORRECTOR_MODEL, ENCODER_MODEL, OPERATOR_MODEL, PRIOR_MODEL, STUDENT_MODEL

with needs("train"):
    from pydantic import AfterValidator
    from typing_extensions import TypedDict

# Kinds of checkpoints, and their names in the folder of a run.
AUTOENCODER, AUTOENCODER_FILE = ENCODER_MODEL.kind, ENCODER_MODEL.file
OPERATOR, OPERATOR_FILE = OPERATOR_MODEL.kind, OPERATOR_MODEL.file
CORRECTOR, CORRECTOR_FILE = CORRECTOR_MODEL.kind, CORRECTOR_MODEL.file
STUDENT, STUDENT_FILE = STUDENT_MODEL.kind, STUDENT_MODEL.file
PRIOR, PRIOR_FILE = PRIOR_MODEL.kind, PRIOR_MODEL.file  # of steady solutions
GATES = "gates"  # key of a document: verdicts on the gates that its model was exported in spite of, or by
States = Literal["latent", "fields"]
Own = TypeVar("Own")


@dataclass(frozen=True)
class TaskSpec:
    """What an autoencoder knows about a task.

    Attributes:
        grid: Its grid.
        channels: Names along the channel axis of "fields".
        steady: Whether a sample is one state instead of a trajectory.
        statistics: For each array {"mean": [...], "std": [...]} by channel, of the training split.
    """

    grid: Grid
    channels: tuple[str, ...]
    steady: bool
    statistics: Mapping[str, Statistics]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "grid": self.grid.to_json(), "channels": list(self.channels)}


def _is_task(task: TaskSpec) -> TaskSpec:
    for array, num in task.grid.channels:
        if array not in task.statistics or len(task.statistics[array]["mean"]) != num:
            raise ValueError(f"statistics of {array!r}")
    return task


class NetworkSize(TypedDict):
    """Size of an encoder or a decoder; see `ups.config.EncoderConfig` and `DecoderConfig`."""

    width: Count
    depth: Count
    num_heads: Count
    radius: NotRequired[Window]
    basis: NotRequired[Literal["pca", "none"]]
    residual: NotRequired[bool]
    isometry: NotRequired[bool]


@dataclass(frozen=True)
class AutoencoderSpec(Parsed):
    """Everything that decides the architecture and the normalisation; the weights aside.

    Attributes:
        tasks: By name, sorted.
        parameters: Names of the equations' parameters, in the order of `Condition.parameters`.
        latent_dim: D.
        num_tokens: L.
        patch_size: Points of a patch along each axis.
        encoder: `width`, `depth` and `num_heads` of the encoders; `basis`, `residual` and `isometry` of
            encoders and decoders, which files of earlier versions lack.
        decoder: `width`, `depth`, `num_heads` and `radius` of the decoders.
    """

    tasks: Mapping[str, Annotated[TaskSpec, AfterValidator(_is_task)]]
    parameters: tuple[str, ...]
    latent_dim: Count
    num_tokens: Count
    patch_size: Length
    encoder: NetworkSize
    decoder: NetworkSize

    def cut(self, grid: GridSpec) -> TokenGrid:
        """Patches and tokens of a grid."""
        return cut_grid(grid, patch_size=self.patch_size, num_tokens=self.num_tokens)

    @property
    def linear_part(self) -> dict[str, Any]:
        """What encoders and decoders have besides their networks; of earlier versions nothing."""
        return {
            name: self.encoder[name] for name in ("basis", "residual", "isometry") if name in self.encoder
        }

    @property
    def has_one_array(self) -> bool:
        """Whether there is one task, of one array: then every frame needs all weights."""
        return sum(len(task.grid.arrays) for task in self.tasks.values()) == 1

    def tasks_on(self, grid: GridSpec) -> list[str]:
        """Names of the tasks on a grid, sorted; their places are the numbers in `Condition.task`."""
        return sorted(name for name, task in self.tasks.items() if task.grid == grid)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        tasks = {name: self.tasks[name].to_json() for name in sorted(self.tasks)}
        return {**asdict(self), "tasks": tasks, "parameters": list(self.parameters)}


def parse_spec(document: Mapping[str, Any], path: str | os.PathLike[str]) -> AutoencoderSpec:
    """The specification in a checkpoint's document."""
    try:
        return AutoencoderSpec.from_json(document["spec"])
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what="autoencoder") from error


def check_task(spec: AutoencoderSpec, task: str | None, path: object) -> str:
    """The task, or the only one if none is named."""
    return _one_of(spec.tasks, task, "the autoencoder wasn't trained for this task", path=path)


def _one_of(tasks: Collection[str], task: str | None, problem: str, *, path: object = None) -> str:
    if task is None and len(tasks) == 1:
        return next(iter(tasks))
    if task is None or task not in tasks:
        expected, found = " or ".join(sorted(tasks)), task or "none named"
        raise ConfigError(problem, kind="other_task", path=path, expected=expected, found=found)
    return task


@dataclass(frozen=True)
class SimulatedTask:
    """What a simulator knows about a task.

    Attributes:
        grid: Grid of its fields.
        boundary: Boundary type of each axis of the grid, as stores name it: "periodic", "neumann", ...
        tokens: Tokens of a state along each axis.
        channels: Names along the channel axis of "fields".
        steady: Whether a sample is an input and its solution instead of a trajectory.
        dt: Physical time of one step of the operator in the training data; 1 for a steady task.
        parameters: Least and largest value of each parameter in the training data.
        statistics: For "fields", and for the input of a steady task, {"mean": [...], "std": [...]} by channel
            of the state, of the training split.
    """

    grid: Grid
    boundary: tuple[str, ...]
    tokens: tuple[Length, ...]
    channels: tuple[str, ...]
    steady: bool
    dt: Positive
    parameters: Mapping[str, tuple[Finite, Finite]]
    statistics: Mapping[str, Statistics]

    @property
    def is_periodic(self) -> tuple[bool, ...]:
        """Whether each axis is."""
        return tuple(kind == PERIODIC for kind in self.boundary)

    @property
    def input_array(self) -> str:
        """The array that a rollout starts from: "fields", or the constant field of a steady task."""
        return next(name for name in self.grid.arrays if name != FIELDS) if self.steady else FIELDS

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        lists = {name: list(getattr(self, name)) for name in ("boundary", "tokens", "channels")}
        parameters = {name: list(ends) for name, ends in self.parameters.items()}
        return {**asdict(self), **lists, "grid": self.grid.to_json(), "parameters": parameters}


def _is_simulated(task: SimulatedTask) -> SimulatedTask:
    if not len(task.boundary) == len(task.tokens) == task.grid.ndim:
        raise ValueError(
            f"{len(task.boundary)} boundaries, {len(task.tokens)} tokens of {task.grid.ndim} axes"
        )
    if task.steady and task.grid.arrays == (FIELDS,):
        raise ValueError("a steady task without an input")
    wanted = {FIELDS, task.input_array}
    if missing := wanted - task.statistics.keys():
        raise ValueError(f"no statistics of {', '.join(sorted(missing))}")
    if any(low > high for low, high in task.parameters.values()):
        raise ValueError("parameters from more to less")
    return task


@dataclass(frozen=True)
class SimulatorSpec(Parsed):
    """Everything that decides the architecture and the normalisation; the weights aside.

    Attributes:
        states: What the operator advances: latent tokens, or patches of the fields themselves.
        tasks: By name, sorted.
        parameters: Names of the equations' parameters, in the order that models take them.
        state_dim: D, channels of a token of the state.
        patch_size: Points of a patch along each axis, where states are patches of fields.
        stride: Stored time steps from one step of the operator to the next in training.
        operator: Fields of `ups.models.operator_size.OperatorSize`; or {"name": ..., "config": {...}} of an
            operator that `ups.models.operators` knows by name.
        autoencoder_sha256: Of the autoencoder's weights, as `ups.trained.checkpoint.hash_tensors` gives it;
            None where states are patches of fields, or latents that nothing says it made.
        is_encoder_known: Whether states can be encoded and decoded: False for an operator that was trained on
            latents of which nothing says what encoded them, of any of its tasks.
    """

    states: States
    tasks: Mapping[str, Annotated[SimulatedTask, AfterValidator(_is_simulated)]]
    parameters: tuple[str, ...]
    state_dim: Count
    patch_size: Length | None
    stride: Count
    operator: Mapping[str, Any]
    autoencoder_sha256: str | None
    is_encoder_known: bool = True

    @property
    def ranges(self) -> tuple[tuple[float, float], ...]:
        """Least and largest value of each parameter in the training data of all tasks."""
        found = []
        for name in self.parameters:
            ends = [task.parameters[name] for task in self.tasks.values() if name in task.parameters]
            found.append((min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0.0, 0.0))
        return tuple(found)

    def task_number(self, task: str) -> int:
        """Place of a task among the operator's."""
        return sorted(self.tasks).index(task)

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        tasks = {name: self.tasks[name].to_json() for name in sorted(self.tasks)}
        return {**asdict(self), "tasks": tasks, "parameters": list(self.parameters)}


def parse_simulator_spec(document: Mapping[str, Any], path: str | os.PathLike[str]) -> SimulatorSpec:
    """The specification in a checkpoint's document."""
    try:
        if not document["spec"]["operator"].keys() & {"mixers", "name"}:
            raise CheckpointError(
                "an operator of an earlier version of ups, whose layers were others",
                kind="old_operator",
                path=path,
                hint="train the operator again",
            )
        spec = SimulatorSpec.from_json(document["spec"])
        _check_simulator(spec)
        return spec
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what="operator") from error


def _check_simulator(spec: SimulatorSpec) -> None:
    """Refuse what goes into no operator together, with a ValueError."""
    if "name" not in spec.operator:
        OperatorSize.from_json(spec.operator)
    elif not (isinstance(spec.operator["name"], str) and isinstance(spec.operator.get("config"), dict)):
        raise ValueError("operator: no name and config")
    if not spec.tasks or (spec.states == "fields") != (spec.patch_size is not None):
        raise ValueError(f"states: {spec.states} of {len(spec.tasks)} tasks, patch_size {spec.patch_size}")
    for name, task in spec.tasks.items():
        if unknown := task.parameters.keys() - set(spec.parameters):
            raise ValueError(f"parameters: no {', '.join(sorted(unknown))} of {name}")
        channels = dict(task.grid.channels)
        if spec.patch_size is not None:
            points = tuple(num * spec.patch_size for num in task.tokens)
            if (
                points != task.grid.points
                or spec.patch_size**task.grid.ndim * channels[FIELDS] > spec.state_dim
            ):
                raise ValueError(f"tasks.{name}: tokens of {spec.state_dim} values don't hold its fields")
        for array, statistics in task.statistics.items():
            num = channels.get(array) if spec.states == "fields" else spec.state_dim
            if len(statistics["mean"]) != num:
                raise ValueError(f"tasks.{name}.statistics.{array}: not {num} of them")


def parse_joined_specs(
    document: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    name: str,
    parse: Callable[[Mapping[str, Any]], Own],
) -> tuple[SimulatorSpec, Own]:
    """The specifications in the document of a generative model: of its states, and its own under a name."""
    try:
        values = dict(document["spec"])
        own = parse(values.pop(name))
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what=name) from error
    return parse_simulator_spec({"spec": values}, path), own


def incomplete_spec(error: Exception, path: str | os.PathLike[str], *, what: str) -> CheckpointError:
    """The error for a document whose specification can't be read."""
    why = str(error) if isinstance(error, ValueError | UpsError) else repr(error)
    problem, hint = f"its specification is incomplete or wrong ({why})", f"train the {what} again"
    return CheckpointError(problem, kind="no_spec", path=path, hint=hint)


def check_known_encoder(spec: SimulatorSpec) -> None:
    """Refuse to turn fields into states, or states into fields, where nothing says what does."""
    if not spec.is_encoder_known:
        raise ConfigError(
            "the operator was trained on latents of an unknown encoder, which nothing can decode",
            kind="unknown_encoder",
            hint="compare its latents with `ups evaluate`, or train on latents of your autoencoder",
        )


def check_simulated_task(spec: SimulatorSpec, task: str | None) -> str:
    """The task, or the only one if none is named."""
    return _one_of(spec.tasks, task, "task of the simulator")


Sampler = Literal["euler", "heun", "adaptive"]  # as `ups.diffusion.samplers` has them


@dataclass(frozen=True)
class Sampling:
    """How residuals are drawn.

    Attributes:
        sampler: "euler", "heun" or "adaptive".
        num_steps: Of Euler's and Heun's method.
        tolerance: Of the adaptive one: largest error of a step.
        max_evaluations: Of the adaptive one, at most.
    """

    sampler: Sampler = "euler"
    num_steps: Count = 32
    tolerance: Positive = 1e-2
    max_evaluations: Count = 200


@dataclass(frozen=True)
class Taught:
    """Of a student, where it comes from.

    Attributes:
        teacher_sha256: Of the corrector's file, as `ups.trained.checkpoint.hash_tensors` gives it.
        method: "reflow" or "consistency".
    """

    teacher_sha256: str
    method: str


@dataclass(frozen=True)
class CorrectorSpec(Parsed):
    """What a corrector is, besides its weights.

    Attributes:
        operator_sha256: Of the operator's file, as `ups.trained.checkpoint.hash_tensors` gives it.
        size: Fields of `ups.models.operator_size.OperatorSize`.
        sigma: sigma_c by task: root mean square of the operator's residual, in normalised units.
        lead_times: Steps of the operator's own rollouts that residuals were taken from.
        sampling: How residuals are drawn where nothing else is asked for.
        taught: Of a student of another corrector; None of one that was trained on residuals.
        takes_seams: Whether a linear map takes the operator's seams off before residuals are drawn.
    """

    operator_sha256: str
    size: Mapping[str, Any]
    sigma: Mapping[str, NotNegative]
    lead_times: Count
    sampling: Sampling = Sampling()
    taught: Taught | None = None
    takes_seams: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return asdict(self)


def parse_specs(
    document: Mapping[str, Any], path: str | os.PathLike[str]
) -> tuple[SimulatorSpec, CorrectorSpec]:
    """The specifications in a corrector's or a student's document: of the operator in it, and its own."""
    spec, corrector = parse_joined_specs(document, path, name=CORRECTOR, parse=CorrectorSpec.from_json)
    try:
        OperatorSize.from_json(corrector.size)
        if missing := spec.tasks.keys() - corrector.sigma.keys():
            raise ValueError(f"sigma: none of {', '.join(sorted(missing))}")
    except (KeyError, TypeError, ValueError) as error:
        raise incomplete_spec(error, path, what=CORRECTOR) from error
    return spec, corrector


def checked_sampling(sampling: Sampling) -> Sampling:
    """The same, if it can be."""
    if sampling.sampler not in get_args(Sampler):
        expected = ", ".join(get_args(Sampler))
        raise ConfigError("sampler", kind="sampler", expected=expected, found=repr(sampling.sampler))
    whole_number(sampling.num_steps, "num_sampler_steps", kind="sampler")
    return sampling


def whole_number(value: object, what: str, *, kind: str, least: int = 1) -> int:
    """What a caller gives as a number of steps or members, or as a seed; NumPy's integers, too."""
    with suppress(TypeError):
        number = index(value)  # type: ignore[arg-type]
        if number >= least and not isinstance(value, bool):
            return number
    expected = f"a whole number, {'at least 1' if least else '0 or more'}"
    raise ConfigError(what, kind=kind, expected=expected, found=repr(value))


Method = Literal["flow", "regression"]


@dataclass(frozen=True)
class PriorSpec(Parsed):
    """What a prior of steady solutions is, besides its weights and its states.

    Attributes:
        method: "flow", a generative model; or "regression" by the same network, the mean of solutions.
        observed_points: Points at which it was trained to be given the input; None for all of them.
        sampling: How solutions are drawn where nothing else is asked for.
    """

    method: Method
    observed_points: Count | None
    sampling: Sampling

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return asdict(self)

    def num_given(self, spec: SimulatorSpec) -> int:
        """States of D channels that the input of a task fills, with its mask where it has one, at most."""
        if self.is_encoded(spec):
            return 1
        has_mask = self.observed_points is not None
        most = 1
        for task in spec.tasks.values():
            num_points = math.prod(task.grid.points) // math.prod(task.tokens)
            num_values = num_points * (dict(task.grid.channels)[task.input_array] + has_mask)
            most = max(most, math.ceil(num_values / spec.state_dim))
        return most

    def is_encoded(self, spec: SimulatorSpec) -> bool:
        """Whether the input is given as latents; one that is known at some points is given as its values."""
        return spec.states == "latent" and self.observed_points is None
