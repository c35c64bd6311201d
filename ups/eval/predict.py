"""Predictions as a store: what `ups predict` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ups
from ups.data.given_states import ALL, AskSplit, GivenStates, Where, read_given
from ups.data.prediction_files import PredictionStore, save_preview_of
from ups.device import choose_device
from ups.errors import ConfigError
from ups.eval.field_figures import Trajectory, fields_figure, points_along
from ups.eval.figure_style import IMAGES
from ups.eval.runs import config_of
from ups.eval.ttc import ConditionedForecaster
from ups.grid import FIELDS
from ups.output import Note, check_writable, write_atomically
from ups.trained.checkpoint import hash_tensors
from ups.trained.simulator import check_room
from ups.trained.specs import SimulatedTask, check_simulated_task

Frames = npt.NDArray[np.float32]
Rollout = Callable[..., torch.Tensor]  # called as `Simulator.rollout`


@dataclass(frozen=True)
class PredictionRequest:
    """What is to be predicted.

    Attributes:
        source: Store or HDF5 file with the states to start from.
        checkpoint: Operator's file.
        out: Store to write.
        steps: Frames to predict.
        task: Name of the task; None where the operator knows one.
        start: Time step of the source that is given.
        dt: Time of a step; None for that of the training.
        parameters: Numbers by name that are used instead of the source's, and written instead of them.
        split: Which samples of an HDF5 file: those of "train", "val" or "test", or "all".
        limit: At most so many samples.
        batch_size: Samples that are predicted together.
        figure: PNG, SVG or PDF of the first sample, beside the source's own frames where it has them.
        device: As `training.device`.
        replace: Whether a store that is there may be replaced.
        ttc: Whether rollouts are conditioned at test time; None for what the checkpoint's configuration says.
    """

    source: Path
    checkpoint: Path
    out: Path
    steps: int = 1
    task: str | None = None
    start: int = 0
    dt: float | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    split: str | None = None
    limit: int | None = None
    batch_size: int = 32
    figure: Path | None = None
    device: str = "auto"
    replace: bool = False
    ttc: bool | None = None


def predict_store(
    request: PredictionRequest,
    *,
    note: Note,
    ask: AskSplit | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Predict what follows the states of a source, into a store.

    Args:
        request: What, with what, and where to.
        note: Takes warnings, what was reduced, and what is begun.
        ask: Asked for the split, if the source has samples of several and none is named.
        progress: Called after every batch with the number of samples that are done, and of all.

    Returns:
        Where the store and the figure are, as JSON values.

    Raises:
        ConfigError: If there is a store already (kind "exists"), or the source doesn't go with the operator.
        CheckpointError: If the checkpoint is missing or damaged.
        OutputError: If there can be no file in a folder, before the work; or the figure can't be written.
        ups_store.StoreError: If the source can't be read or the store not be written.
    """
    if request.out.exists() and not request.replace:
        raise ConfigError("there is a file already", kind="exists", path=request.out, hint="say --force")
    for path in filter(None, (request.out, request.figure)):
        check_writable(path.parent)
    if request.figure:
        _suffix_of(request.figure)
    config = config_of(request.checkpoint, (), note=note)
    device = choose_device(request.device, note=note, key="--device")
    simulator = ups.load(request.checkpoint, device=str(device))
    name = check_simulated_task(simulator.spec, request.task)
    task = simulator.spec.tasks[name]
    stride = simulator.spec.stride
    where = Where(
        points=task.grid.points,
        dt=None if task.steady else task.dt / stride,
        array=task.input_array,
        start=request.start,
        stride=stride,
        num_after=request.steps,
        split=check_split_or_all(request.split),
        limit=request.limit,
    )
    source = read_given(request.source, name, where, config=config.build, ask=ask, note=note)
    given = source.with_parameters({**_only_values(task, source), **request.parameters})
    dt = None if task.steady else request.dt or task.dt
    note(f"{name}: {len(given.values)} samples of {given.origin}, {request.steps} steps")
    identity: dict[str, Any] = {"checkpoint": hash_tensors(request.checkpoint), "dt": dt}
    rollout: Rollout = simulator.rollout
    if config.ttc.enabled if request.ttc is None else request.ttc:
        conditioned = ConditionedForecaster(simulator, config, lengths={name: _domain_lengths(given)})
        rollout = conditioned.rollout
        identity["ttc"] = {**config.ttc.model_dump(mode="json", exclude={"enabled"}), "seed": config.seed}
        note(f"test-time conditioning: {conditioned.note}")
    # Mistakes are found before a file is begun.
    largest = min(request.batch_size, len(given.values))
    check_room(task, num=largest, steps=request.steps, device=simulator.device)
    tried = request.steps if task.steady else min(request.steps, 1)
    _predict(rollout, task, name, given, np.arange(1), replace(request, steps=tried))
    store = PredictionStore(
        request.out,
        given,
        task=name,
        frame_shape=(*task.grid.points, dict(task.grid.channels)[FIELDS]),
        steps=request.steps,
        dt=dt,
        given_array=task.input_array,
        identity=identity,
    )
    with store:
        missing = store.missing()
        for first in range(0, len(missing), request.batch_size):
            samples = missing[first : first + request.batch_size]
            store.commit(samples, _predict(rollout, task, name, given, samples, request))
            progress(len(given.values) - len(missing) + first + len(samples), len(given.values))
        path = store.finish()
    figure = _draw(rollout, task, name, given, request) if request.figure else None
    return {"store": str(path), "figure": figure}


def check_split_or_all(split: str | None) -> str | None:
    """A split, "all", or None where none is named.

    Raises:
        ConfigError: For another name.
    """
    known = {name: name for name in ("train", "val", "test", ALL)} | {"valid": "val"}
    if split is not None and split not in known:
        raise ConfigError("--split", expected="train, val, test or all", found=repr(split))
    return None if split is None else known[split]


def _only_values(task: SimulatedTask, source: GivenStates) -> dict[str, float]:
    """Parameters that the source doesn't have and training knew one value of, which a rollout takes."""
    ends = {name: ends for name, ends in task.parameters.items() if name not in source.parameters}
    return {name: low for name, (low, high) in ends.items() if low == high}


def _domain_lengths(source: GivenStates) -> dict[str, float]:
    """Of the domain by axis name; points are cell centres, so n of them span n spacings."""
    lengths = {
        axis: len(points) * float(points[-1] - points[0]) / (len(points) - 1)
        for axis, points in source.coordinates.items()
        if len(points) > 1
    }
    return lengths | dict(source.attrs.get("domain_lengths") or {})


def _predict(
    rollout: Rollout,
    task: SimulatedTask,
    name: str,
    given: GivenStates,
    samples: npt.NDArray[np.int64],
    request: PredictionRequest,
) -> Frames:
    """Predicted frames of some samples, shape (B, K, X..., C)."""
    taken = {*task.parameters, *request.parameters}  # a flag for what the operator doesn't know is refused
    parameters = {
        key: torch.from_numpy(values[samples]) for key, values in given.parameters.items() if key in taken
    }
    frames = rollout(
        torch.from_numpy(given.values[samples]),
        request.steps,
        task=name,
        parameters=parameters,
        dt=None if task.steady else request.dt,
    )
    return frames.cpu().numpy()


def _suffix_of(figure: Path) -> str:
    suffix = figure.suffix.lower().removeprefix(".")
    if suffix not in IMAGES:
        raise ConfigError("--figure", expected=f"a name that ends in .{', .'.join(IMAGES)}", found=figure)
    return suffix


def _draw(
    rollout: Rollout, task: SimulatedTask, name: str, given: GivenStates, request: PredictionRequest
) -> str:
    """Truth, prediction and error of the first sample where the source has it; else what was written."""
    assert request.figure is not None
    is_comparable = request.dt in (None, task.dt) and not request.parameters
    if given.after.shape[1] < request.steps or not is_comparable:
        request.figure.parent.mkdir(parents=True, exist_ok=True)
        save_preview_of(request.out, request.figure)
        return str(request.figure)
    prediction, truth = _predict(rollout, task, name, given, np.arange(1), request)[0], given.after[0]
    t = given.t + np.arange(request.steps + 1) * task.dt
    if task.steady:
        t = t[:1]
    else:
        prediction, truth = (np.concatenate([given.values[:1], frames]) for frames in (prediction, truth))
    quantity = next(iter(task.channels), "u")
    shown = Trajectory(
        truth[..., 0],
        {"operator": prediction[..., 0]},
        {"operator": "operator"},
        {
            "t": t,
            **points_along(
                given.coordinates, given.attrs.get("domain_lengths") or {}, points=task.grid.points
            ),
        },
        quantity,
        {task.input_array: given.values[0].reshape(*task.grid.points, -1)[..., 0]} if task.steady else {},
    )
    drawing = fields_figure(request.figure.stem, f"{quantity} of the first sample of {given.origin}", shown)
    suffix = _suffix_of(request.figure)
    write_atomically(request.figure, drawing.images(suffix)[suffix])
    return str(request.figure)
