"""How much memory a stage takes, estimated from the sizes alone, rather too much than too little.

What is counted: weights, gradients, the optimiser's states, averages; and what the forward pass keeps for the
backward pass, in numbers of the width for each token, patch or point, which `tests/ups/pipeline` hold against
what PyTorch keeps. Letters: W width, L tokens, A axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ups.config import RunConfig
from ups.config.operator_size import corrector_size, operator_size, student_size
from ups.grid import (
    FIELDS,
    PERIODIC,
    UNKNOWN_BOUNDARY,
    GridSpec,
    TokenGrid,
    cut_grid,
    halved_axes,
    window_size,
)
from ups.models.operator_size import NORMALISED, TOKEN_UNET, OperatorSize
from ups.pipeline.planned_ranks import PlannedRanks
from ups.stages import BASELINES, STAGES

_FLOAT = 4  # bytes; autocast keeps some in 2, which isn't counted on
_CONTEXT_BYTES = 1 << 30  # CUDA, its libraries, and blocks of the allocator that aren't full
_MARGIN = 1.25
# Numbers of an optimiser for each weight, or a few more.
_STATES = {"adamw": 2, "adam": 2, "muon_hybrid": 2, "sgd": 1, "adamw8bit": 1}
# Numbers kept for the backward pass, in widths for each place.
_OF_RESIDUAL_BLOCK = 8  # norm, modulation, convolution (its input, unrolled by axis), GELU
_OF_MIXING_BLOCK = 16  # modulation, spectra of twice the places, GELU
_OF_ATTENTION_BLOCK = 16  # norms, queries, keys, values, scores aside
_OF_NEIGHBOUR = 6  # of each token that a point of the decoder attends to
_OF_POINT = 10
_MOST_MODES, _MOST_MIXED = (64, 16, 8), (64, 64, 16)  # as `ups.models.operator_blocks`
_SHARES = {"none": 1.0, "selective": 0.7, "full": 0.4}  # what activation checkpointing leaves of it


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
    """Memory of each stage.

    Args:
        config: Configuration of the run, whose sizes fit the grids.
        stages: Names of its stages; baselines are left out.
        grids: By task.
    """
    return {name: _of_stage(config, name, grids) for name in stages if name not in BASELINES}


def _of_stage(config: RunConfig, name: str, grids: Mapping[str, GridSpec]) -> Estimate:
    settings = config.stage(name)
    is_latent = config.operator.state == "latent"
    num_tokens = config.latent.tokens if is_latent else None
    cuts = {
        task: cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=num_tokens)
        for task, grid in grids.items()
    }
    parts = {model.kind for model in STAGES[name].makes}
    ranks = PlannedRanks.of(config)
    batch = settings.batch_size or -(-(settings.global_batch_size or 1) // ranks.num)
    frames = batch * (1 if STAGES[name].items == "frames" else config.training.horizon + 1)
    trained, activations = 0, 0
    if "autoencoder" in parts:
        kinds = {grid.name: (grid, cuts[task]) for task, grid in grids.items()}
        trained += sum(_autoencoder_weights(config, grid, cut) for grid, cut in kinds.values())
        activations += max(
            frames * _autoencoder_numbers(config, grids[task], cut) for task, cut in cuts.items()
        )
    if "operator" in parts:
        weights, numbers = _operator(config, cuts, grids)
        trained += weights
        activations += batch * config.training.horizon * numbers
    if parts & {"corrector", "prior"}:
        size = corrector_size(config)
        trained += corrector_weights(size, _largest(cuts, grids), _state_dim(config, grids))
        activations += batch * max(_operator_numbers(size, cut.tokens) for cut in cuts.values())
    if "student" in parts:
        size = student_size(config, corrector_size(config))
        trained += corrector_weights(size, _largest(cuts, grids), _state_dim(config, grids))
        rows = min(batch * config.training.distill_num_taus, config.training.distill_micro_batch or math.inf)
        activations += int(rows * max(_operator_numbers(size, cut.tokens) for cut in cuts.values()))
    frozen = 0
    if "autoencoder" not in parts and is_latent:  # validation decodes
        frozen = sum(_autoencoder_weights(config, grids[task], cut) for task, cut in cuts.items())
    if "student" in parts:  # the teacher, and the student's averages
        size = corrector_size(config)
        frozen += 2 * corrector_weights(size, _largest(cuts, grids), _state_dim(config, grids))
    if STAGES[name].learns == "residuals":  # the frozen operator
        frozen += _operator(config, cuts, grids)[0]
    copies = 2 + _STATES[settings.optimizer.name] + bool(settings.ema_decay)
    share = _SHARES[config.training.activation_checkpointing]
    states = -(-copies * trained // ranks.num_shards) + frozen
    return Estimate(_FLOAT * states, int(_FLOAT * share * activations))


def _operator(
    config: RunConfig, cuts: Mapping[str, TokenGrid], grids: Mapping[str, GridSpec]
) -> tuple[int, int]:
    """Weights of the operator, and numbers kept of one step of one sample."""
    state_dim = _state_dim(config, grids)
    if config.operator.name == TOKEN_UNET:
        size = operator_size(config.operator)
        numbers = max(_operator_numbers(size, cut.tokens) for cut in cuts.values())
        return operator_weights(size, _largest(cuts, grids), state_dim), numbers
    from ups.models.operators import States, numbers_of  # torch

    tasks = sorted(cuts)
    states = States(
        state_dim,
        tokens={task: cuts[task].tokens for task in tasks},
        boundary={
            task: tuple(PERIODIC if wraps else UNKNOWN_BOUNDARY for wraps in grids[task].periodic)
            for task in tasks
        },
        ranges={},  # parameters aren't known before the data are read, and make little of it
    )
    return numbers_of(config.operator.name, config.operator.config, states)


def _largest(cuts: Mapping[str, TokenGrid], grids: Mapping[str, GridSpec]) -> tuple[tuple[int, bool], ...]:
    """Tokens along each axis, the most of any task, and whether it has ends in one."""
    ndim = max(len(cut.tokens) for cut in cuts.values())
    axes = []
    for axis in range(ndim):
        found = [
            (cut.tokens[axis], grids[task].periodic[axis])
            for task, cut in cuts.items()
            if axis < len(cut.tokens)
        ]
        axes.append((max(num for num, _ in found), not all(wraps for _, wraps in found)))
    return tuple(axes)


def _state_dim(config: RunConfig, grids: Mapping[str, GridSpec]) -> int:
    if config.operator.state == "latent":
        return config.latent.dim
    return max(config.encoder.patch_size**grid.ndim * dict(grid.channels)[FIELDS] for grid in grids.values())


def operator_weights(size: OperatorSize, axes: tuple[tuple[int, bool], ...], state_dim: int) -> int:
    """Weights of a latent operator, or a few more.

    Args:
        size: Its architecture.
        axes: Tokens along each axis, and whether it has ends.
        state_dim: Channels of a token.
    """
    ndim = len(axes)
    total = (2 * state_dim + 4 * size.width + 16 * ndim + 64) * size.width  # in, out, conditions
    lengths = tuple(length for length, _ in axes)
    for level, depth in enumerate(size.depths):
        width, is_bottom = size.width * 2**level, level == len(size.depths) - 1
        padded = tuple(
            length + math.ceil(size.padding * length) * has_ends
            for length, (_, has_ends) in zip(lengths, axes, strict=True)
        )
        block = _block_weights(size, level, padded, ndim)
        total += depth * (1 if is_bottom else 2) * block
        if not is_bottom:  # coarser, finer, and what joins them
            total += (2 * ndim + 2) * 2 * width**2 + 4 * width**2 + 2 * width**2
        halved = halved_axes(lengths)
        lengths = tuple(num // 2 if axis in halved else num for axis, num in enumerate(lengths))
    return total


def corrector_weights(size: OperatorSize, axes: tuple[tuple[int, bool], ...], state_dim: int) -> int:
    """Weights of a corrector, or a few more; arguments as of `operator_weights`."""
    given, embedded = 2 * state_dim * size.width, (3 * size.width + 16) * size.width
    return operator_weights(size, axes, state_dim) + given + embedded + (size.width + 1) * state_dim


def _block_weights(size: OperatorSize, level: int, lengths: tuple[int, ...], ndim: int) -> int:
    width, mixer = size.width * 2**level, size.mixer(level)
    spectral = _spectral_weights(size, width, lengths)
    if mixer not in NORMALISED:
        mixing = spectral if mixer == "spectral" else 5 * ndim * width**2
        return mixing + width**2 + width + 2 * width * (size.width + 1)
    attention = 4 * width**2 + 4 * width + 64 * (ndim + size.num_heads * 2**level + 2)
    mlp = int(2 * width * width * size.mlp_ratio + width * (size.mlp_ratio + 1))
    return attention + mlp + (spectral if mixer == "hybrid" else 0) + 6 * width * (size.width + 1)


def _spectral_weights(size: OperatorSize, width: int, lengths: tuple[int, ...]) -> int:
    most = size.modes or _MOST_MODES[len(lengths) - 1]
    *others, last = lengths
    kept = math.prod(2 * min((num + 1) // 2, most) for num in others) * min(last // 2 + 1, most)
    limit = _MOST_MIXED[len(lengths) - 1]
    groups = next(num for num in range(1, width + 1) if width % num == 0 and width // num <= limit)
    return 2 * kept * width * (width // groups)


def _operator_numbers(size: OperatorSize, tokens: tuple[int, ...]) -> int:
    """Numbers kept of one step of one sample."""
    total = 0
    for level, depth in enumerate(size.depths):
        width, num = size.width * 2**level, math.prod(tokens)
        ways = 1 if level == len(size.depths) - 1 else 2
        if size.mixer(level) in NORMALISED:
            each = (_OF_ATTENTION_BLOCK + 2 * size.mlp_ratio) * width
            seen = math.prod(window_size(length, largest=size.window) for length in tokens)
            each += 3 * size.num_heads * 2**level * seen
            each += _OF_MIXING_BLOCK * width if size.mixer(level) == "hybrid" else 0
        else:
            each = (_OF_MIXING_BLOCK + (5 * len(tokens) if size.mixer(level) == "convolution" else 0)) * width
        total += int(num * (ways * depth * each + 8 * ways * width))
        halved = halved_axes(tokens)
        tokens = tuple(length // 2 if axis in halved else length for axis, length in enumerate(tokens))
    return total


def _autoencoder_weights(config: RunConfig, grid: GridSpec, cut: TokenGrid) -> int:
    """Weights of encoder and decoder of one kind of grid, bases among them."""
    total, ndim = 0, grid.ndim
    num_channels = sum(num for _, num in grid.channels)
    if config.encoder.basis == "pca":
        total += 2 * config.latent.dim * math.prod(cut.points_per_token) * num_channels
    if not config.encoder.residual:
        return total
    for part in (config.encoder, config.decoder):
        block = (3**ndim + 1 + 2) * part.width**2 + 6 * part.width
        is_encoder = part is config.encoder
        total += (2 if is_encoder else 1) * part.depth * block + 16 * part.width**2
    total += cut.patch_size**ndim * num_channels * config.encoder.width
    total += math.prod(cut.groups) * config.encoder.width
    return total + (2 * 33 * ndim + 16) * config.decoder.width + 2 * config.latent.dim * config.encoder.width


def _autoencoder_numbers(config: RunConfig, grid: GridSpec, cut: TokenGrid) -> int:
    """Numbers kept of encoding and decoding one frame."""
    points, patches, tokens = map(math.prod, (grid.points, cut.patches, cut.tokens))
    values = points * max(num for _, num in grid.channels)
    if not config.encoder.residual:
        return 4 * values
    encoder, decoder = config.encoder, config.decoder
    asked = min(config.training.query_sampling.num_queries or points, points)
    if config.training.query_sampling.curriculum.enabled:
        asked = min(max(asked, config.training.query_sampling.curriculum.start_queries or points), points)
    near = (2 * decoder.radius + 1) ** grid.ndim
    return (
        4 * values
        + _OF_RESIDUAL_BLOCK * encoder.width * encoder.depth * (patches + tokens)
        + _OF_RESIDUAL_BLOCK * encoder.width * patches
        + _OF_RESIDUAL_BLOCK * decoder.width * decoder.depth * tokens
        + asked * decoder.width * (_OF_NEIGHBOUR * near + _OF_POINT)
    )


def host_bytes(estimates: Mapping[str, Estimate], *, has_gpu: bool, num_workers: int) -> int:
    """Memory of the machine that a run takes beside its data: Python and torch, readers, a stage on a CPU."""
    reader_bytes, process_bytes = 160 << 20, 1 << 30
    on_cpu = 0 if has_gpu else max((estimate.total for estimate in estimates.values()), default=0)
    return process_bytes + num_workers * reader_bytes + on_cpu


def device_bytes(estimate: Estimate) -> int:
    """Memory of a GPU that a stage takes."""
    return _CONTEXT_BYTES + estimate.total
