"""What callers give to a rollout, checked and turned into tensors: fields, parameters, time steps.

Letters: B batch, X the axes of the grid, C channels, K steps, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.device import free_bytes
from ups.errors import ConfigError, ShapeError
from ups.grid import FIELDS
from ups.trained.specs import SimulatedTask, whole_number
from ups_store.printable import counted

_FLOAT32_BYTES = 4
_PARAMETER_TOLERANCE, _DT_TOLERANCE = 1e-5, 1e-3  # relative: float32, and times as sources have them
_CPU = torch.device("cpu")
Numbers = Tensor | npt.NDArray[Any] | float


@dataclass(frozen=True)
class RolloutStart:
    """Where a rollout begins, and under which conditions.

    Attributes:
        task: Name of the task.
        given_BXC: Fields on the training's grid, physical units.
        state_BLD: Normalised states of them.
        parameters_BP: In the order of the models, NaN where the task has none of the name.
        dt_BK: Physical time of every step.
        points: Of the frames that are wanted, along each axis.
    """

    task: str
    given_BXC: Tensor
    state_BLD: Tensor
    parameters_BP: Tensor
    dt_BK: Tensor
    points: tuple[int, ...]


def check_steps(steps: object, task: SimulatedTask) -> int:
    """The steps of a rollout as a number."""
    number = whole_number(steps, "steps of the rollout", kind="steps")
    if task.steady and number != 1:
        expected = "1 of a steady task"
        raise ConfigError("steps of the rollout", kind="steps", expected=expected, found=repr(steps))
    return number


def check_members(members: object) -> int:
    """The members of an ensemble as a number; ConfigError, kind "members", unless they are at least 1."""
    return whole_number(members, "members of the ensemble", kind="members")


def check_seed(seed: object) -> int:
    """The seed of an ensemble as a number; ConfigError, kind "seed", unless it is 0 or more."""
    return whole_number(seed, "seed of the ensemble", kind="seed", least=0)


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
        device: Where they go.
        any_points: Whether another number of points will do, at least two along each axis.
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


def outside_training(
    task: SimulatedTask, parameters: Mapping[str, Numbers], dt: Numbers | None, *, device: torch.device = _CPU
) -> list[str]:
    """What a rollout is asked for that training knew nothing like, for people.

    Args:
        task: Says what training knew: ranges of parameters, and the time of a step.
        parameters: Numbers or arrays by name.
        dt: Times of steps; None for that of the training.
    """
    known = {name: (ends, _PARAMETER_TOLERANCE) for name, ends in task.parameters.items()}
    asked = {name: values for name, values in parameters.items() if name in known}
    if dt is not None and not task.steady:
        known["dt"], asked["dt"] = ((task.dt, task.dt), _DT_TOLERANCE), dt
    outside = []
    for name, values in asked.items():
        (low, high), tolerance = known[name]
        numbers, room = _numbers(values, name, device=device), tolerance * max(abs(low), abs(high))
        if numbers.numel() and (numbers.min() < low - room or numbers.max() > high + room):
            trained = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            least, most = numbers.min().item(), numbers.max().item()
            given = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            outside.append(f"{name} = {given}, in training {trained}")
    return outside


def check_within_training(
    task: SimulatedTask, parameters: Mapping[str, Numbers] | None, dt: Numbers | None, *, extrapolate: bool
) -> None:
    """Refuse parameters and time steps that training knew nothing like, unless they are asked for."""
    outside = [] if extrapolate else outside_training(task, parameters or {}, dt)
    if outside:
        raise ConfigError(
            f"outside the training: {'; '.join(outside)}",
            kind="outside_training",
            hint="predict within it, or say --extrapolate (extrapolate=True), which nothing was measured of",
        )


def check_room(
    task: SimulatedTask,
    *,
    num: int,
    steps: int,
    device: torch.device,
    points: tuple[int, ...] | None = None,
    members: int | None = None,
) -> None:
    """Fail before a rollout that doesn't fit into the device's free memory; it is held twice at the end.

    Args:
        task: Whose it is.
        num: Samples.
        steps: Predicted frames of each.
        device: Where they are held.
        points: Of the predicted frames; by default the task's.
        members: Of an ensemble of each sample; None of a single forecast.
    """
    values = math.prod(points or task.grid.points) * dict(task.grid.channels)[FIELDS]
    needed = 2 * _FLOAT32_BYTES * num * (members or 1) * steps * values
    free = free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"a rollout of {_shown_size(num, members, steps)} doesn't fit into memory",
            kind="no_memory",
            expected=f"at most {free / 2**20:,.0f} MiB",
            found=f"{needed / 2**20:,.0f} MiB",
            hint="roll out fewer samples at a time, or fewer "
            + ("steps" if members is None else "members" if steps == 1 else "members or steps"),
        )


def _shown_size(num: int, members: int | None, steps: int) -> str:
    """For people; of an ensemble whose time steps aren't held together without them."""
    samples, ahead = counted(num, "sample"), counted(steps, "step")
    if members is None:
        return f"{samples} and {ahead}"
    of_each = counted(members, "member")
    return f"{samples} and {of_each}" if steps == 1 else f"{samples}, {of_each} and {ahead}"


def step_times(dt: Numbers, *, num: int, steps: int, device: torch.device) -> Tensor:
    """Physical time of every step, shape (B, K), from a number, (B,) or (B, K)."""
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
