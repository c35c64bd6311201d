"""`Simulator`: from fields to a rollout of fields, and the file that holds everything it needs.

What callers give is checked and becomes tensors here. Letters: B batch, X the axes of the grid, C channels, L
tokens of a state, D channels of a token, K steps, P parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ups.device import free_bytes
from ups.errors import ConfigError, ShapeError
from ups.grid import FIELDS
from ups.models.any_point_decoder import grid_queries
from ups.models.latent_operator import LatentOperator, StepConditions
from ups.models.operator_size import OperatorSize, token_axes
from ups.models.token_geometry import TokenGeometry
from ups.nn.interpolation import resampled
from ups.nn.layers import Condition, patchify, unpatchify
from ups.trained.autoencoder import Autoencoder, Normalizer
from ups.trained.checkpoint import fill_weights, load_checkpoint, save_checkpoint
from ups.trained.specs import (
    OPERATOR,
    SimulatedTask,
    SimulatorSpec,
    check_known_encoder,
    check_simulated_task,
    parse_simulator_spec,
    parse_spec,
)

_FLOAT32_BYTES = 4
Numbers = Tensor | npt.NDArray[Any] | float


class Simulator(nn.Module):
    """An operator with what turns fields into its states and back; evaluation needs nothing else.

    States are normalised tokens: latents of a frozen autoencoder, or patches of the fields themselves, which
    the operator's first and last layer embed and take apart again.

    Args:
        spec: Tasks, statistics, architecture.
        autoencoder: Encoder and decoder where states are latents; frozen here.
    """

    def __init__(self, spec: SimulatorSpec, autoencoder: Autoencoder | None = None) -> None:
        super().__init__()
        assert (spec.states == "latent") == (autoencoder is not None)
        self.spec = spec
        self.autoencoder = autoencoder
        if autoencoder is not None:
            autoencoder.requires_grad_(False).eval()
        self.operator = LatentOperator(
            spec.state_dim,
            num_tasks=len(spec.tasks),
            ranges=spec.ranges,
            size=OperatorSize.from_json(spec.operator),
            axes=token_axes((task.tokens, task.is_periodic) for task in spec.tasks.values()),
        )
        self.normalizer, self.queries, self.geometry = nn.ModuleDict(), nn.Module(), nn.ModuleDict()
        for name, task in spec.tasks.items():
            for array, statistics in task.statistics.items():
                self.normalizer[f"{name}/{array}"] = Normalizer(**statistics)
            # Functions of the grid alone, so they aren't part of the weights.
            self.queries.register_buffer(name, grid_queries(task.grid.points), persistent=False)
            self.geometry[name] = self.operator.geometry(task.tokens, task.boundary, steady=task.steady)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.operator.out.weight.device

    @property
    def uses_all_weights(self) -> bool:
        """Whether a step needs every weight of the operator: there is one task, on a grid that does."""
        geometries = [self._geometry_of(task) for task in self.spec.tasks]
        return len(geometries) == 1 and self.operator.uses_all_weights(geometries[0])

    def train(self, mode: bool = True) -> Simulator:
        """As `nn.Module.train`; the autoencoder stays in evaluation mode."""
        super().train(mode)
        if self.autoencoder is not None:
            self.autoencoder.eval()
        return self

    def encode(self, values_BXC: Tensor, parameters_BP: Tensor, *, task: str, array: str = FIELDS) -> Tensor:
        """Physical fields to normalised states.

        Args:
            values_BXC: Frames of one array of one task, physical units, shape (B, X..., C).
            parameters_BP: In the order of `spec.parameters`, NaN where unknown, shape (B, P).
            task: Name of the task.
            array: Which array.
        Returns:
            Shape (B, L, D).
        """
        if self.autoencoder is None:
            return self.normalise(values_BXC, task=task, array=array)
        latent_BLD = self.autoencoder.encode(values_BXC, parameters_BP, task=task, array=array)
        return self.normalise(latent_BLD, task=task, array=array)

    def normalise(self, states: Tensor, *, task: str, array: str = FIELDS) -> Tensor:
        """What a store holds to normalised states.

        Args:
            states: Latents (..., L, D), or fields (B, X..., C) where states are patches of fields.
            task: Name of the task.
            array: Which array they are, or are the latents of.
        Returns:
            Shape (..., L, D), float32.
        """
        normalised: Tensor = self.normalizer_of(task, array)(states.float())
        if self.spec.patch_size is None:
            return normalised
        return self._padded(patchify(normalised, patch_size=self.spec.patch_size))

    def conditions(self, parameters_BP: Tensor, *, task: str, dt_B: Tensor) -> StepConditions:
        """What the steps by the physical times `dt_B`, shape (B,), are told besides the state."""
        condition = Condition(self.spec.task_number(task), parameters_BP)
        return self.operator.conditions(condition, dt_B, self._geometry_of(task))

    def advance(self, state_BLD: Tensor, conditions: StepConditions, *, task: str) -> Tensor:
        """Advance normalised states by one step; same shape, a new tensor."""
        advanced_BLD = self.operator.advance(state_BLD, conditions, self._geometry_of(task))
        dim = self._own_dim(self.spec.tasks[task])
        return advanced_BLD if dim == self.spec.state_dim else self._padded(advanced_BLD[..., :dim])

    def step(self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str, dt_B: Tensor) -> Tensor:
        """Advance normalised states by the physical times `dt_B`, shape (B,); same shape, a new tensor."""
        return self.advance(state_BLD, self.conditions(parameters_BP, task=task, dt_B=dt_B), task=task)

    def forward(
        self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str, dt_B: Tensor, steps: int = 1
    ) -> Tensor:
        """Several steps in one call, under the same conditions.

        Returns:
            States after each step, shape (B, K, L, D).
        """
        conditions, states = self.conditions(parameters_BP, task=task, dt_B=dt_B), []
        for _ in range(steps):
            state_BLD = self.advance(state_BLD, conditions, task=task)
            states.append(state_BLD)
        return torch.stack(states, dim=1)

    def decode(self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str) -> Tensor:
        """Normalised states to physical fields on the task's grid, shape (B, X..., C).

        Raises:
            ConfigError: Kind "unknown_encoder", if the operator's states aren't those of the autoencoder.
        """
        check_known_encoder(self.spec)
        known = self.spec.tasks[task]
        normalizer = self.normalizer_of(task, FIELDS)
        if self.autoencoder is None:
            patches_BLD = state_BLD[..., : self._own_dim(known)]
            assert self.spec.patch_size is not None
            return normalizer.inverse(
                unpatchify(patches_BLD, points=known.grid.points, patch_size=self.spec.patch_size)
            )
        query_PN = self.queries.get_buffer(task)
        values_BPC = self.decode_at(state_BLD, query_PN, parameters_BP, task=task, array=FIELDS)
        return values_BPC.unflatten(1, known.grid.points)

    def decode_at(
        self, state_BLD: Tensor, query_PN: Tensor, parameters_BP: Tensor, *, task: str, array: str
    ) -> Tensor:
        """Normalised states of an array, latents of the autoencoder, to physical values at points.

        Args:
            state_BLD: States.
            query_PN: Points as fractions of the domain.
            parameters_BP: In the order of `spec.parameters`.
            task: Name of the task.
            array: Which array.
        Returns:
            Shape (B, P, C).
        """
        assert self.autoencoder is not None
        latent_BLD = self.normalizer_of(task, array).inverse(state_BLD)
        return self.autoencoder.decode(latent_BLD, query_PN, parameters_BP, task=task, array=array)

    @torch.no_grad()
    def rollout(
        self,
        fields: Tensor | npt.NDArray[Any],
        steps: int,
        *,
        task: str | None = None,
        parameters: Mapping[str, Numbers] | None = None,
        dt: Numbers | None = None,
        resample: bool = False,
    ) -> Tensor:
        """Predict what follows, decoding every state on the way.

        Args:
            fields: Initial fields in physical units, of a steady task its input, shape (B, X..., C); the axis
                C may be missing where there is one channel.
            steps: K; 1 for a steady task.
            task: Name of the task; may be left out where there is only one.
            parameters: Numbers or arrays (B,) by name; may be left out where training knew one value only.
            dt: Physical time of a step, a number, (B,), or (B, K) for steps of different lengths; by default
                that of the training data.
            resample: Take fields on another number of points of the same domain: they are interpolated onto
                the grid of the training, and what is predicted back onto theirs, by cubics.
        Returns:
            Physical units, float32, shape (B, K, X..., C), on the model's device; without the initial state.
        Raises:
            ConfigError: Another task, a missing or unknown parameter, steps of a steady task; kind
                "unknown_encoder" of an operator whose states nothing can decode; kind "no_memory".
            ShapeError: If the fields aren't on the task's grid, or with `resample` on one of its kind.
        """
        check_known_encoder(self.spec)
        name = check_simulated_task(self.spec, task)
        known = self.spec.tasks[name]
        values_BXC = frames_of(fields, known, device=self.device, any_points=resample)
        points, periodic = tuple(values_BXC.shape[1:-1]), known.grid.periodic
        is_count = isinstance(steps, (int, np.integer)) and not isinstance(steps, bool) and steps >= 1
        if not is_count or (known.steady and steps != 1):
            expected = "1 of a steady task" if known.steady else "a whole number, at least 1"
            raise ConfigError("steps of the rollout", kind="steps", expected=expected, found=steps)
        num, steps = len(values_BXC), int(steps)  # NumPy's overflow
        check_room(known, num=num, steps=steps, device=self.device, points=points)
        order = self.spec.parameters
        parameters_BP = parse_parameters(parameters or {}, known, order=order, num=num, device=self.device)
        dt_BK = step_times(known.dt if dt is None else dt, num=num, steps=steps, device=self.device)
        values_BXC = resampled(values_BXC, known.grid.points, periodic=periodic)
        state_BLD = self.encode(values_BXC, parameters_BP, task=name, array=known.input_array)
        frames = []
        for dt_B in dt_BK.unbind(1):
            state_BLD = self.step(state_BLD, parameters_BP, task=name, dt_B=dt_B)
            decoded_BXC = self.decode(state_BLD, parameters_BP, task=name)
            frames.append(resampled(decoded_BXC, points, periodic=periodic))
        return torch.stack(frames, dim=1)

    def normalizer_of(self, task: str, array: str) -> Normalizer:
        """Shift and scale of the states of one array of one task."""
        normalizer = self.normalizer[f"{task}/{array}"]
        assert isinstance(normalizer, Normalizer)
        return normalizer

    def _geometry_of(self, task: str) -> TokenGeometry:
        geometry = self.geometry[task]
        assert isinstance(geometry, TokenGeometry)
        return geometry

    def _own_dim(self, task: SimulatedTask) -> int:
        """Channels of a token that the task uses; a patch of fewer values is padded with zeros."""
        if self.spec.patch_size is None:
            return self.spec.state_dim
        return int(self.spec.patch_size**task.grid.ndim * dict(task.grid.channels)[FIELDS])

    def _padded(self, tokens: Tensor) -> Tensor:
        return nn.functional.pad(tokens, (0, self.spec.state_dim - tokens.shape[-1]))


def save_simulator(
    path: str | os.PathLike[str],
    simulator: Simulator,
    *,
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    data: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights of operator and autoencoder, specifications, the run's configuration and its report.

    Args:
        path: Where the file goes; its model card goes beside it.
        simulator: To be written.
        config: Of the run.
        report: Validation errors by name.
        data: What training data were, by task, such as the hash of a store.
        weights: Its `state_dict`, whole; by default the model's own.
    """
    autoencoder = simulator.autoencoder
    document = {
        "spec": simulator.spec.to_json(),
        "autoencoder": None if autoencoder is None else {"spec": autoencoder.spec.to_json()},
        "config": dict(config),
        "report": dict(report),
        "data": dict(data or {}),
    }
    tensors = simulator.state_dict() if weights is None else weights
    save_checkpoint(path, tensors, kind=OPERATOR, document=document)


def load_simulator(path: str | os.PathLike[str], *, device: str = "cpu") -> Simulator:
    """Read a simulator, in evaluation mode; the one file is enough.

    Raises:
        CheckpointError: As `load_checkpoint`; kind "no_spec" or "other_weights" if it doesn't hold together.
    """
    tensors, document = load_checkpoint(path, kind=OPERATOR, device=device)
    spec = parse_simulator_spec(document, path)
    inner = document.get("autoencoder")
    autoencoder = None if inner is None else Autoencoder(parse_spec(inner, path))
    simulator = Simulator(spec, autoencoder).to(device)
    fill_weights(simulator, tensors, path=path)
    return simulator.eval()


def frames_of(
    fields: Tensor | npt.NDArray[Any],
    task: SimulatedTask,
    *,
    device: torch.device,
    any_points: bool = False,
) -> Tensor:
    """Initial fields as float32, shape (B, X..., C); the axis C may be missing where there is one channel.

    Args:
        fields: Physical units.
        task: Whose they are.
        device: Where they go.
        any_points: Whether another number of points will do, at least two along each axis.

    Raises:
        ShapeError: If they aren't numbers on the task's grid.
        ConfigError: Kind "not_finite".
    """
    values = _numbers(fields, task.input_array, device=device)
    points = task.grid.points
    given = tuple(values.shape[1 : 1 + len(points)])
    if any_points and len(given) == len(points) and min(given) > 1:
        points = given
    expected = (*points, dict(task.grid.channels)[task.input_array])
    if expected[-1] == 1 and tuple(values.shape[1:]) == expected[:-1]:
        values = values.unsqueeze(-1)
    if tuple(values.shape[1:]) != expected or not len(values):
        shown = ", ".join(map(str, expected))
        raise ShapeError(task.input_array, expected=f"(B, {shown})", found=tuple(values.shape))
    if len(bad := torch.nonzero(~values.flatten(1).isfinite().all(1)).flatten()):
        raise _not_finite(f"sample {int(bad[0])} of {task.input_array!r}")
    return values


def parse_parameters(
    given: Mapping[str, Numbers],
    task: SimulatedTask,
    *,
    order: tuple[str, ...],
    num: int,
    device: torch.device,
) -> Tensor:
    """Parameters in the order of the models, NaN where a task has none of the name, shape (B, P).

    A parameter that had one value in all of training needs no mention.

    Raises:
        ConfigError: Kinds "unknown_parameter", "missing_parameter", "not_finite".
        ShapeError: If a parameter isn't one number, nor one for each of `num` samples.
    """
    if unknown := given.keys() - task.parameters.keys():
        expected = " and ".join(task.parameters) or "none"
        found = ", ".join(sorted(unknown))
        raise ConfigError("parameters", kind="unknown_parameter", expected=expected, found=found)
    table_BP = torch.full((num, len(order)), torch.nan, device=device)
    for name, (low, high) in task.parameters.items():
        if name not in given and low != high:
            expected = f"a value, {low:g} to {high:g} in training"
            raise ConfigError(f"parameter {name} is missing", kind="missing_parameter", expected=expected)
        values = _numbers(given.get(name, low), name, device=device)
        if not values.isfinite().all():
            raise _not_finite(f"parameter {name}")
        if tuple(values.shape) not in ((), (num,)):
            raise ShapeError(name, expected=f"a number or ({num},)", found=tuple(values.shape))
        table_BP[:, order.index(name)] = values
    return table_BP


def check_room(
    task: SimulatedTask,
    *,
    num: int,
    steps: int,
    device: torch.device,
    points: tuple[int, ...] | None = None,
) -> None:
    """Fail before a rollout that doesn't fit into the device's free memory; it is held twice at the end.

    Args:
        task: Whose it is.
        num: Samples.
        steps: Predicted frames of each.
        device: Where they are held.
        points: Of the predicted frames; by default the task's.

    Raises:
        ConfigError: Kind "no_memory".
    """
    values = math.prod(points or task.grid.points) * dict(task.grid.channels)[FIELDS]
    needed = 2 * _FLOAT32_BYTES * num * steps * values
    free = free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"a rollout of {num} samples and {steps} steps doesn't fit into memory",
            kind="no_memory",
            expected=f"at most {free / 2**20:,.0f} MiB",
            found=f"{needed / 2**20:,.0f} MiB",
            hint="roll out fewer samples at a time, or fewer steps",
        )


def step_times(dt: Numbers, *, num: int, steps: int, device: torch.device) -> Tensor:
    """Physical time of every step, shape (B, K), from a number, (B,) or (B, K).

    Raises:
        ShapeError: For another shape.
        ConfigError: Kind "time_step", unless all are positive.
    """
    times = _numbers(dt, "dt", device=device)
    shaped = times[:, None] if times.ndim == 1 else times
    if tuple(shaped.shape) not in ((), (num, 1), (num, steps)):
        expected = f"a number, ({num},) or ({num}, {steps})"
        raise ShapeError("dt", expected=expected, found=tuple(times.shape))
    if not bool((shaped > 0).all()):
        raise ConfigError("dt of the rollout", kind="time_step", expected="> 0", found=float(shaped.min()))
    return shaped.expand(num, steps)


def _numbers(values: Numbers, name: str, *, device: torch.device) -> Tensor:
    """As float32 on a device; a copy, unless it is such a tensor already."""
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
            raise ShapeError(name, kind="dtype", expected="real numbers", found=array.dtype)
        values = torch.from_numpy(np.array(array, np.float32, order="C"))  # a copy: views may be read-only
    elif values.is_complex():
        raise ShapeError(name, kind="dtype", expected="real numbers", found=values.dtype)
    return values.to(device, torch.float32)


def _not_finite(what: str) -> ConfigError:
    hint = "leave it out, or mend it"
    return ConfigError(f"{what} isn't finite", kind="not_finite", expected="no NaN and no Inf", hint=hint)
