"""Predictions as a store: what `ups predict` does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ups
from ups.config import RunConfig
from ups.data.observations import check_observed, masks_of_samples, read_mask
from ups.data.origins import origin_of_checkpoint, origin_of_given
from ups.data.predictions import (
    ALL,
    AskSplit,
    GivenStates,
    Where,
    read_given,
    save_preview_of,
    write_predictions,
)
from ups.device import choose_device
from ups.errors import ConfigError
from ups.eval.ensembles import check_members, seed_of
from ups.eval.field_figures import Trajectory, fields_figure, points_along
from ups.eval.figure_style import IMAGES
from ups.eval.runs import config_of
from ups.eval.ttc import ConditionedForecaster
from ups.grid import FIELDS, directed_lengths
from ups.log import logger
from ups.output import check_writable, write_atomically
from ups.trained.checkpoint import missing_checkpoint, read_any_document
from ups.trained.loading import Loaded
from ups.trained.prior import SteadyPrior
from ups.trained.rollout_inputs import check_room, check_within_training, outside_training
from ups.trained.simulator import Simulator
from ups.trained.specs import SimulatedTask, check_simulated_task

Frames = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
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
        members: Of an ensemble for each sample; None for a single forecast.
        seed: With a sample's number it decides its members.
        observed: Where a prior of partly observed inputs knows them: a .npy file, or a number of points.
        extrapolate: Whether parameters and time steps are taken that training knew nothing like.
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
    members: int | None = None
    seed: int = 0
    observed: str | None = None
    extrapolate: bool = False


def predict_store(
    request: PredictionRequest,
    *,
    ask: AskSplit | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Predict what follows the states of a source, into a store.

    Returns:
        Where the store and the figure are, as JSON values.
    """
    if request.out.exists() and not request.replace:
        raise ConfigError("there is a file already", kind="exists", path=request.out, hint="say --force")
    for path in filter(None, (request.out, request.figure)):
        check_writable(path.parent)
    if request.figure:
        _suffix_of(request.figure)
    if request.members is not None:
        check_members(request.members, flag="--members")
    if not request.checkpoint.exists():
        raise missing_checkpoint(request.checkpoint, hint="train it with `ups train`")
    kind, _ = read_any_document(request.checkpoint)
    config = config_of(request.checkpoint, (), kind=kind)
    device = choose_device(request.device, key="--device")
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
    source = read_given(request.source, name, where, config=config.build, ask=ask)
    given = source.with_parameters({**_only_values(task, source), **request.parameters})
    mask = _observed(simulator, given, task, request)
    if mask is not None:
        given = given.known_at(mask)
    dt = None if task.steady else request.dt or task.dt
    logger.info(f"{name}: {len(given.values)} samples of {given.origin}, {request.steps} steps")
    operator = origin_of_checkpoint(request.checkpoint, role=kind, kind=kind)
    rollout, chosen = _what_predicts(simulator, config, name, given, request)
    if mask is not None:
        chosen = {**chosen, "observed": hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()}
    # Mistakes are found before a file is begun.
    if request.members is None:
        batch_size = min(request.batch_size, len(given.values))
        check_room(task, num=batch_size, steps=request.steps, device=simulator.device)
    else:
        batch_size = 1
        room: dict[str, Any] = {"members": request.members, "device": torch.device("cpu")}
        check_room(task, num=1, steps=request.steps, **room)
    tried = request.steps if task.steady else min(request.steps, 1)
    _predict(rollout, task, name, given, np.arange(1), replace(request, steps=tried), mask)
    check_within_training(task, given.parameters, request.dt, extrapolate=request.extrapolate)
    if outside := outside_training(task, given.parameters, request.dt):
        chosen = {**chosen, "extrapolated": outside}
        logger.warning(f"outside the training: {'; '.join(outside)}")
    path = write_predictions(
        request.out,
        given,
        lambda samples: _predict(rollout, task, name, given, samples, request, mask),
        task=name,
        frame_shape=(*task.grid.points, dict(task.grid.channels)[FIELDS]),
        steps=request.steps,
        members=request.members,
        dt=dt,
        given_array=task.input_array,
        batch_size=batch_size,
        identity={"checkpoint": operator.hash, "dt": dt, **chosen},
        made_from=[operator, origin_of_given(request.source, role="given states")],
        progress=progress,
    )
    figure = _draw(rollout, task, name, given, request, mask) if request.figure else None
    return {"store": str(path), "figure": figure}


def _what_predicts(
    simulator: Loaded, config: RunConfig, name: str, given: GivenStates, request: PredictionRequest
) -> tuple[Rollout, dict[str, Any]]:
    """What is called as `Simulator.rollout`, and what decides its predictions besides the checkpoint."""
    is_conditioned = config.ttc.enabled if request.ttc is None else request.ttc
    if request.members is not None:
        members = _members_of(simulator, request, is_conditioned=is_conditioned)
        return members, {"members": request.members, "seed": request.seed}
    if not is_conditioned:
        return simulator.rollout, {}
    if not isinstance(simulator, Simulator):
        raise ConfigError(
            "test-time conditioning is of an operator alone",
            kind="ttc",
            path=request.checkpoint,
            hint="say --no-ttc, or take operator.safetensors",
        )
    conditioned = ConditionedForecaster(simulator, config, lengths={name: _domain_lengths(given)})
    logger.info(f"test-time conditioning: {conditioned.note}")
    settings = {**config.ttc.model_dump(mode="json", exclude={"enabled"}), "seed": config.seed}
    return conditioned.rollout, {"ttc": settings}


def _members_of(model: object, request: PredictionRequest, *, is_conditioned: bool) -> Rollout:
    """What predicts the members of one sample, called as `Simulator.rollout`, shape (1, M, K, X..., C).

    They are joined on the CPU: the device has those of one time step.
    """
    steps_of = getattr(model, "rollout_steps", None)
    if steps_of is None or is_conditioned:
        raise ConfigError(
            "--members",
            kind="no_ensemble",
            path=request.checkpoint,
            expected="the checkpoint of a generative model, without test-time conditioning",
            found="test-time conditioning" if is_conditioned else "a model that predicts one future",
            hint="say --no-ttc" if is_conditioned else "leave out --members",
        )

    def rollout(fields: torch.Tensor, steps: int, *, sample: int, **conditions: Any) -> torch.Tensor:
        seed = seed_of(request.seed, sample)
        frames = steps_of(fields, steps, members=request.members, seed=seed, **conditions)
        return torch.stack([frame.cpu() for frame in frames], dim=2)

    return rollout


def _observed(
    model: Loaded, given: GivenStates, task: SimulatedTask, request: PredictionRequest
) -> Mask | None:
    """Where inputs are known, shape (N, X...); None for a model that is given all of them."""
    num = model.prior_spec.observed_points if isinstance(model, SteadyPrior) else None
    if num is None and request.observed is None:
        return None
    if num is None or request.observed is None:
        raise ConfigError(
            "--observed",
            kind="observed",
            path=request.checkpoint,
            expected="none: the model is given whole inputs" if num is None else "where the input is known",
            found=request.observed or "no mask",
            hint="leave it out" if num is None else f"say --observed {num}, or --observed MASK.npy",
        )
    points, digits = task.grid.points, request.observed.strip()
    if digits.isdecimal() and int(digits):
        check_observed(int(digits), task.grid, task=request.task or "the task", key="--observed")
        values = torch.from_numpy(given.values.reshape(len(given.values), *points, -1))
        return masks_of_samples(values, num=int(digits), seed=request.seed).numpy()
    return read_mask(Path(request.observed), points, num=len(given.values))


def check_split_or_all(split: str | None) -> str | None:
    """A split, "all", or None where none is named."""
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
    return directed_lengths(lengths | dict(source.attrs.get("domain_lengths") or {}), source.coordinates)


def _predict(
    rollout: Rollout,
    task: SimulatedTask,
    name: str,
    given: GivenStates,
    samples: npt.NDArray[np.int64],
    request: PredictionRequest,
    mask: Mask | None,
) -> Frames:
    """Predicted frames of some samples, shape (B, K, X..., C), or of one sample (1, M, K, X..., C)."""
    taken = {*task.parameters, *request.parameters}  # a flag for what the operator doesn't know is refused
    parameters = {
        key: torch.from_numpy(values[samples]) for key, values in given.parameters.items() if key in taken
    }
    own: dict[str, Any] = {} if request.members is None else {"sample": int(samples[0])}
    if mask is not None:
        own["observed"] = mask[samples]
    frames = rollout(
        torch.from_numpy(given.values[samples]),
        request.steps,
        task=name,
        parameters=parameters,
        dt=None if task.steady else request.dt,
        extrapolate=True,  # which was asked for, or isn't needed
        **own,
    )
    return frames.cpu().numpy()


def _suffix_of(figure: Path) -> str:
    suffix = figure.suffix.lower().removeprefix(".")
    if suffix not in IMAGES:
        raise ConfigError("--figure", expected=f"a name that ends in .{', .'.join(IMAGES)}", found=figure)
    return suffix


def _draw(
    rollout: Rollout,
    task: SimulatedTask,
    name: str,
    given: GivenStates,
    request: PredictionRequest,
    mask: Mask | None,
) -> str:
    """Truth, prediction and error of the first sample where the source has it; else what was written."""
    assert request.figure is not None
    is_comparable = request.dt in (None, task.dt) and not request.parameters
    if given.after.shape[1] < request.steps or not is_comparable:
        request.figure.parent.mkdir(parents=True, exist_ok=True)
        save_preview_of(request.out, request.figure)
        return str(request.figure)
    prediction, truth = _predict(rollout, task, name, given, np.arange(1), request, mask)[0], given.after[0]
    label = "operator"
    if request.members is not None:
        prediction, label = prediction.mean(0), f"mean of {request.members} members"
    t = given.t + np.arange(request.steps + 1) * task.dt
    if task.steady:
        t = t[:1]
    else:
        prediction, truth = (np.concatenate([given.values[:1], frames]) for frames in (prediction, truth))
    quantity = next(iter(task.channels), "u")
    shown = Trajectory(
        truth[..., 0],
        {"operator": prediction[..., 0]},
        {"operator": label},
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
