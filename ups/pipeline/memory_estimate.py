"""How much memory a stage takes: its models are made on the meta device, where nothing is computed.

Weights are counted there, with gradients, the states of the optimiser, averages; and what PyTorch keeps of a
step of one sample for the backward pass, of the task that keeps most. So it holds whatever they are made of.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ups.config import RunConfig
from ups.config.operator_size import corrector_size, student_size
from ups.errors import ConfigWarning
from ups.grid import FIELDS, PERIODIC, UNKNOWN_BOUNDARY, GridSpec, cut_grid
from ups.pipeline.planned import PlannedRanks
from ups.stages import BASELINES, STAGES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ups.models.operator_size import OperatorSize
    from ups.trained.autoencoder import Autoencoder
    from ups.trained.simulator import Simulator

_FLOAT = 4  # bytes; autocast keeps some in 2, which isn't counted on
_CONTEXT_BYTES = 1 << 30  # CUDA, its libraries, and blocks of the allocator that aren't full
_PROCESS_BYTES, _READER_BYTES = 1 << 30, 160 << 20  # Python and torch; a process that reads
_MARGIN = 1.25  # also for what a step allocates and doesn't keep
# Numbers of an optimiser for each weight, or a few more.
_STATES = {"adamw": 2, "adam": 2, "muon_hybrid": 2, "sgd": 1, "adamw8bit": 1}
_SHARES = {"none": 1.0, "selective": 0.7, "full": 0.4}  # what activation checkpointing leaves of it
# Of equations; they aren't known before the data are read, and make little of it.
_PARAMETERS = dict.fromkeys("abcd", (0.0, 1.0))
_KEPT_UNSEEN = 16  # numbers that a place keeps, in widths, of a model that can't be looked at


@dataclass(frozen=True)
class Estimate:
    """Memory of a stage on the device that trains it, of one rank of several, in bytes.

    Attributes:
        states: Weights, gradients, states of the optimiser, averages: needed whatever the batch is.
        activations: What a batch adds.
    """

    states: int
    activations: int

    @property
    def total(self) -> int:
        """Both, with a margin."""
        return int(_MARGIN * (self.states + self.activations))


def estimate_stages(
    config: RunConfig, stages: tuple[str, ...], grids: Mapping[str, GridSpec]
) -> dict[str, Estimate]:
    """Estimate the memory of each stage, rather too much than too little; baselines are left out.

    Args:
        config: Configuration of the run, whose sizes fit the grids.
        stages: Names of its stages.
        grids: By task.
    """
    import torch

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # said before
        simulator = _simulator(config, grids)
        return {name: _of_stage(config, name, simulator) for name in stages if name not in BASELINES}


def _simulator(config: RunConfig, grids: Mapping[str, GridSpec]) -> Simulator:
    """Make the operator, in latents with their autoencoder."""
    from ups.train.operator import operator_document, spec_of_states
    from ups.trained.autoencoder import Autoencoder
    from ups.trained.simulator import Simulator
    from ups.trained.specs import AutoencoderSpec, NetworkSize, SimulatedTask, TaskSpec

    def statistics(grid: GridSpec, num: int | None) -> Any:
        return {
            array: {"mean": [0.0] * (num or own), "std": [1.0] * (num or own)} for array, own in grid.channels
        }

    is_latent, autoencoder = config.operator.state == "latent", None
    if is_latent:
        channels = {name: tuple(map(str, range(dict(grid.channels)[FIELDS]))) for name, grid in grids.items()}
        spec = AutoencoderSpec(
            tasks={
                name: TaskSpec(grid, channels[name], len(grid.arrays) > 1, statistics(grid, None))
                for name, grid in grids.items()
            },
            parameters=tuple(_PARAMETERS),
            latent_dim=config.latent.dim,
            num_tokens=config.latent.tokens,
            patch_size=config.encoder.patch_size,
            encoder=cast(NetworkSize, config.encoder.model_dump(exclude={"patch_size"})),
            decoder=cast(NetworkSize, config.decoder.model_dump()),
        )
        autoencoder = Autoencoder(spec)
    tasks = {}
    for name in sorted(grids):
        grid = grids[name]
        num_tokens = config.latent.tokens if is_latent else None
        tasks[name] = SimulatedTask(
            grid=grid,
            boundary=tuple(PERIODIC if wraps else UNKNOWN_BOUNDARY for wraps in grid.periodic),
            tokens=cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=num_tokens).tokens,
            channels=tuple(map(str, range(dict(grid.channels)[FIELDS]))),
            steady=len(grid.arrays) > 1,
            dt=1.0,
            parameters=_PARAMETERS,
            statistics=statistics(grid, config.latent.dim if is_latent else None),
        )
    states = spec_of_states(
        config,
        tasks,
        operator=operator_document(config),
        parameters=tuple(_PARAMETERS),
        autoencoder=autoencoder,
    )
    return Simulator(states, autoencoder)


def _of_stage(config: RunConfig, name: str, simulator: Simulator) -> Estimate:
    stage, settings, training = STAGES[name], config.stage(name), config.training
    parts, ranks = {model.kind for model in stage.makes}, PlannedRanks.of(config)
    batch = settings.batch_size or -(-(settings.global_batch_size or 1) // ranks.num)
    autoencoder, operator = simulator.autoencoder, _num_weights(simulator.operator)
    trained = frozen = activations = 0
    if autoencoder is not None:
        encoder = _num_weights(autoencoder)
        if "autoencoder" in parts:
            frames = batch * (1 if stage.items == "frames" else training.horizon + 1)
            trained += encoder
            activations += frames * _kept_by_autoencoder(config, autoencoder)
        else:  # validation decodes
            frozen += encoder
    if "operator" in parts:
        trained += operator
        activations += batch * training.horizon * _kept_by_operator(simulator)
    elif stage.learns == "residuals":
        frozen += operator
    for kind in parts & {"corrector", "prior", "student"}:
        size = corrector_size(config)
        teacher, _ = _flow(simulator, size)
        if kind == "student":
            size = student_size(config, size)
            batch = int(min(batch * training.distill_num_taus, training.distill_micro_batch or math.inf))
            frozen += 2 * teacher  # and the student's averages
        weights, kept = _flow(simulator, size)
        trained += weights
        activations += batch * kept
    copies = 2 + _STATES[settings.optimizer.name] + bool(settings.ema_decay)
    states = -(-copies * trained // ranks.num_shards) + frozen
    share = _SHARES[training.activation_checkpointing]
    return Estimate(_FLOAT * states, int(_FLOAT * share * activations))


def _kept_by_autoencoder(config: RunConfig, model: Autoencoder) -> int:
    """Numbers that encoding and decoding one frame keep, the most of any task and array."""
    import torch

    model.requires_grad_(True)  # a simulator's is frozen
    most, given = 0, torch.zeros(1, len(_PARAMETERS))
    for task, known in model.spec.tasks.items():
        num_points = math.prod(known.grid.points)
        sampling = config.training.query_sampling
        asked = min(sampling.num_queries or num_points, num_points)
        if sampling.curriculum.enabled:
            asked = min(max(asked, sampling.curriculum.start_queries or num_points), num_points)
        for array, num in known.grid.channels:
            values, query = torch.zeros(1, *known.grid.points, num), torch.zeros(asked, known.grid.ndim)
            step = partial(model, values, query, given, task=task, array=array)
            most = max(most, 4 * values.numel() + _kept(model, step, num_points))
    return most


def _kept_by_operator(simulator: Simulator) -> int:
    """Numbers that a step of one sample keeps, the most of any task."""
    import torch

    most, dim, given = 0, simulator.spec.state_dim, torch.zeros(1, len(_PARAMETERS))
    for task, known in simulator.spec.tasks.items():
        state, dt = torch.zeros(1, math.prod(known.tokens), dim), torch.ones(1)
        step = partial(simulator.step, state, given, task=task, dt_B=dt)
        most = max(most, _kept(simulator.operator, step, math.prod(known.tokens)))
    return most


def _flow(simulator: Simulator, size: OperatorSize) -> tuple[int, int]:
    """Weights of a generative model of states, and the numbers that one velocity keeps."""
    import torch

    from ups.models.corrector import VelocityNetwork
    from ups.models.operator_size import token_axes
    from ups.nn.layers import Condition
    from ups.trained.state_space import Geometries

    spec, most = simulator.spec, 0
    axes = token_axes((task.tokens, task.is_periodic) for task in spec.tasks.values())
    num_tasks = len(spec.tasks)
    network = VelocityNetwork(
        spec.state_dim,
        num_given=2,
        num_tasks=num_tasks,
        ranges=tuple(_PARAMETERS.values()),
        size=size,
        axes=axes,
    )
    geometry = Geometries(network, spec)
    for task, known in spec.tasks.items():
        state = torch.zeros(1, math.prod(known.tokens), spec.state_dim)

        def step() -> object:
            place = geometry.of(task)  # noqa: B023
            condition = Condition(spec.task_number(task), torch.zeros(1, len(_PARAMETERS)))  # noqa: B023
            conditions = network.conditions(condition, torch.ones(1), place)
            return network.velocity(state, torch.ones(1), [state, state], conditions, place)  # noqa: B023

        most = max(most, _kept(network, step, math.prod(known.tokens)))
    return _num_weights(network), most


def _kept(model: nn.Module, step: Callable[[], object], num_places: int) -> int:
    """Count numbers that a step keeps for its backward pass, besides the weights."""
    import torch

    saved: dict[int, Tensor] = {}  # tensors by identity: what is kept twice is there once

    def keep(tensor: Tensor) -> Tensor:
        return saved.setdefault(id(tensor), tensor)

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()
    except (RuntimeError, NotImplementedError):  # it looks at numbers, which aren't there
        widest = max((max(weight.shape, default=1) for weight in model.parameters()), default=1)
        return _KEPT_UNSEEN * num_places * widest
    weights = {id(weight) for weight in model.parameters()}
    return sum(tensor.numel() for key, tensor in saved.items() if key not in weights)


def _num_weights(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.state_dict().values())


def host_bytes(estimates: Mapping[str, Estimate], *, has_gpu: bool, num_workers: int) -> int:
    """Memory of the machine that a run takes beside its data: Python and torch, readers, a stage on a CPU."""
    on_cpu = 0 if has_gpu else max((estimate.total for estimate in estimates.values()), default=0)
    return _PROCESS_BYTES + num_workers * _READER_BYTES + on_cpu


def device_bytes(estimate: Estimate) -> int:
    """Memory of a GPU that a stage takes."""
    return _CONTEXT_BYTES + estimate.total
