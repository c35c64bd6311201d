"""`AnyPointDecoder`: latent tokens to values at arbitrary points: a linear basis, and attention to tokens.

Letters: B batch, L latent tokens, D latent channels, W width, G the axes of the token grid, N their number,
Q queries' batch (1 or B), P query points, K tokens that a query attends to, H heads, V channels of a head,
C channels of the field, E condition.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ups.errors import ShapeError
from ups.grid import FIELDS, GridSpec, TokenGrid
from ups.nn.activation_checkpointing import Recomputing, recomputed
from ups.nn.layers import (
    Condition,
    ConditionEmbedding,
    ResidualBlock,
    boundary_features,
    num_boundary_features,
    pointwise,
    zero_init,
)
from ups.nn.patches import Basis, ChannelMap, PatchBasis

_MAX_WAVES = 16
_MOST_NEIGHBOURS = 1 << 18
_LEAST_WINDOW = 1e-6


@dataclass(frozen=True)
class Neighbours:
    """The tokens around each query.

    Attributes:
        index: Numbers of the tokens, shape (Q, P, K).
        offset: Query minus the token's centre, in tokens, shape (Q, P, K, N).
        log_window: Logarithm of a smooth window, 1 at the token's centre and vanishing at the edge of the
            neighbourhood, so that no value jumps where the neighbours change; -inf beyond the boundary; shape
            (Q, P, K).
    """

    index: Tensor
    offset: Tensor
    log_window: Tensor


class Neighbourhood(nn.Module):
    """Finds the K = (2 radius + 1)^N tokens around each query; the query's own token stands in the middle."""

    counts: Tensor  # tokens along each axis, (N,)
    highest: Tensor  # number of the last token along each axis, (N,)
    has_ends: Tensor  # whether each axis isn't periodic, (N,)
    steps: Tensor  # from the own token to each of the K, (K, N)

    def __init__(self, cut: TokenGrid, periodic: tuple[bool, ...], *, radius: int) -> None:
        super().__init__()
        self.tokens, self.radius = cut.tokens, radius
        if (num := (2 * radius + 1) ** len(cut.tokens)) > _MOST_NEIGHBOURS:
            raise ShapeError(
                "tokens that a query attends to", expected=f"at most {_MOST_NEIGHBOURS:,}", found=num
            )
        steps = list(itertools.product(range(-radius, radius + 1), repeat=len(cut.tokens)))
        for name, values in (
            ("counts", cut.tokens),
            ("highest", [num - 1 for num in cut.tokens]),
            ("has_ends", [not wraps for wraps in periodic]),
            ("steps", steps),
        ):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, query_QPN: Tensor) -> Neighbours:
        """Around points as fractions of the domain, shape (Q, P, N)."""
        position = query_QPN * self.counts  # in tokens
        own = position.floor().long()
        own = torch.where(self.has_ends, self._inside(own), own)  # a query on the upper boundary
        token = own.unsqueeze(-2) + self.steps
        offset = position.unsqueeze(-2) - (token + 0.5)
        inside = self._inside(token)
        beyond = (self.has_ends & (token != inside)).any(-1)
        wrapped = torch.where(self.has_ends, inside, token.remainder(self.counts))
        index = wrapped[..., 0]
        for axis, num in enumerate(self.tokens[1:], start=1):
            index = index * num + wrapped[..., axis]
        window = torch.cos(offset * (math.pi / (2 * self.radius + 1))).square().clamp(min=_LEAST_WINDOW)
        log_window = window.log().sum(-1).masked_fill(beyond, -math.inf)
        return Neighbours(index, offset, log_window)

    def _inside(self, token: Tensor) -> Tensor:
        return token.clamp(min=0).minimum(self.highest)


class Waves(nn.Module):
    """Sines and cosines of offsets in multiples of a frequency."""

    frequencies: Tensor

    def __init__(self, num_waves: int, *, cycles_per_token: float) -> None:
        super().__init__()
        frequencies = 2 * math.pi * cycles_per_token * torch.arange(1, num_waves + 1)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, offset: Tensor) -> Tensor:
        """Shape (..., N) to (..., 2 num_waves N)."""
        angles = (offset.unsqueeze(-1) * self.frequencies).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class AnyPointDecoder(Recomputing):
    """Tokens' patches in a linear basis, interpolated at every query, plus what a network adds to them.

    The network: residual blocks over the tokens, then cross-attention of every query to the tokens around it.
    On top of a basis it starts at zero, in the unit of what the basis leaves out.

    A query knows where it lies relative to each token, never where it lies on a periodic axis; so shifting
    the queries by whole tokens is the same as shifting the tokens. Works for queries of any number and place,
    hence at any resolution.

    Args:
        grid: What is decoded; the number of its points only sets the resolution of the relative positions.
        cut: Patches and tokens, from `cut_grid`.
        latent_dim: D.
        width: W.
        depth: Residual blocks.
        num_heads: H; divides W.
        radius: Tokens to each side that a query attends to, on each axis.
        num_tasks: Tasks that share it.
        num_parameters: Parameters of the equations.
        basis: As of the `GridEncoder`.
        residual: As of the `GridEncoder`.
        isometry: As of the `GridEncoder`; here its inverse, at the beginning.
    """

    def __init__(
        self,
        grid: GridSpec,
        *,
        cut: TokenGrid,
        latent_dim: int,
        width: int,
        depth: int,
        num_heads: int,
        radius: int = 1,
        num_tasks: int = 1,
        num_parameters: int = 0,
        basis: Basis = "none",
        residual: bool = True,
        isometry: bool = False,
    ) -> None:
        super().__init__()
        assert residual or basis != "none"
        self.grid, self.cut, self.latent_dim, self.has_network = grid, cut, latent_dim, residual
        self.basis, self.from_isometry = nn.ModuleDict(), nn.ModuleDict()
        for array, num in grid.channels:
            if basis == "pca":
                self.basis[array] = PatchBasis(grid, cut=cut, num_channels=num, latent_dim=latent_dim)
            if isometry and residual:  # a basis alone is isometric
                self.from_isometry[array] = ChannelMap(latent_dim)
        if not residual:
            return
        self.num_heads = num_heads
        self.near = Neighbourhood(cut, grid.periodic, radius=radius)
        self.condition = ConditionEmbedding(
            num_tasks=num_tasks, arrays=grid.arrays, num_parameters=num_parameters, width=width
        )
        self.tokens_in = pointwise(latent_dim, width, ndim=grid.ndim)
        self.blocks = nn.ModuleList(
            ResidualBlock(width, condition_width=width, periodic=grid.periodic) for _ in range(depth)
        )
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        num_waves = min(max(cut.points_per_token), _MAX_WAVES)
        self.half_waves = Waves(num_waves, cycles_per_token=0.5)
        self.whole_waves = Waves(num_waves, cycles_per_token=1.0)
        # What an offset makes of a token's value.
        self.place = _mlp((1 + 2 * num_waves) * grid.ndim, width, width)
        self.query = _mlp(2 * num_waves * grid.ndim, width, width)
        num_ends = num_boundary_features(grid.periodic)
        self.boundary_in = nn.Linear(num_ends, width) if num_ends else None
        self.hidden = _mlp(width, 2 * width, width)
        self.out = nn.ModuleDict({array: nn.Linear(width, num) for array, num in grid.channels})
        if basis != "none":
            zero_init(self.out)

    def forward(
        self, tokens_BLD: Tensor, query_QPN: Tensor, condition: Condition, *, array: str = FIELDS
    ) -> Tensor:
        """Decode at points.

        Args:
            tokens_BLD: Latent tokens, shape (B, L, D).
            query_QPN: Points as fractions of the domain along each axis, any on periodic axes and 0..1 on
                others, shape (P, N) for all frames or (B, P, N).
            condition: Conditions of the frames.
            array: Which array of the grid is wanted.

        Returns:
            Normalised values, shape (B, P, C).

        Raises:
            ShapeError: If tokens or queries don't fit the grid.
        """
        if not torch.compiler.is_compiling():
            self._check_shapes(tokens_BLD, query_QPN)
        query_QPN = query_QPN.reshape(-1, *query_QPN.shape[-2:])
        if array in self.from_isometry:
            tokens_BLD = self.from_isometry[array](tokens_BLD)
        if array not in self.basis:
            return self._network(tokens_BLD, query_QPN, condition, array)
        basis = self.basis_of(array)
        values_BPC = basis.restore_at(tokens_BLD, query_QPN)
        if self.has_network:
            values_BPC = values_BPC + basis.rest * self._network(tokens_BLD, query_QPN, condition, array)
        return values_BPC

    def basis_of(self, array: str) -> PatchBasis:
        """The basis of an array's patches."""
        basis = self.basis[array]
        assert isinstance(basis, PatchBasis)
        return basis

    def _network(self, tokens_BLD: Tensor, query_QPN: Tensor, condition: Condition, array: str) -> Tensor:
        condition_BE = self.condition(condition, array=array)
        x_BWG = self.tokens_in(tokens_BLD.transpose(1, 2).unflatten(2, self.cut.tokens))
        for block in self.blocks:
            x_BWG = block(x_BWG, condition_BE)
        read_BPW = self._attend(x_BWG.flatten(2).transpose(1, 2), query_QPN)
        return self._values(read_BPW, array)

    @recomputed
    def _values(self, read_BPW: Tensor, array: str) -> Tensor:
        values_BPC: Tensor = self.out[array](read_BPW + self.hidden(read_BPW))
        return values_BPC

    @recomputed
    def _attend(self, tokens_BLW: Tensor, query_QPN: Tensor) -> Tensor:
        near = self.near(query_QPN)
        place_QPKW = self.place(torch.cat([near.offset, self.half_waves(near.offset)], dim=-1))
        # Whole waves are the same for the offset from any token, so that a query's own token doesn't matter.
        own_QPN = near.offset[:, :, near.offset.shape[2] // 2]
        query_QPW = self.query(self.whole_waves(own_QPN))
        query_QPHV = query_QPW.unflatten(-1, (self.num_heads, -1))
        keys_BPKHV = _take(self.keys(tokens_BLW), near.index).unflatten(-1, (self.num_heads, -1))
        scores_BPKH = (keys_BPKHV * query_QPHV.unsqueeze(2)).sum(-1) / math.sqrt(query_QPHV.shape[-1])
        weights_BPKH = (scores_BPKH + near.log_window.unsqueeze(-1)).softmax(dim=2)
        values_BPKW = _take(self.values(tokens_BLW), near.index) * place_QPKW
        values_BPKHV = values_BPKW.unflatten(-1, (self.num_heads, -1))
        read_BPW = (weights_BPKH.unsqueeze(-1) * values_BPKHV).sum(dim=2).flatten(2)
        if self.boundary_in is not None:
            position = query_QPN * self.near.counts
            ends = boundary_features(position, cells=self.cut.tokens, periodic=self.grid.periodic)
            read_BPW = read_BPW + self.boundary_in(ends)
        return read_BPW

    def _check_shapes(self, tokens_BLD: Tensor, query_QPN: Tensor) -> None:
        expected = (math.prod(self.cut.tokens), self.latent_dim)
        if tuple(tokens_BLD.shape[1:]) != expected:
            shown = f"(B, {expected[0]}, {expected[1]})"
            raise ShapeError("latent tokens", expected=shown, found=tuple(tokens_BLD.shape))
        is_batched = query_QPN.ndim == 3 and len(query_QPN) in (1, len(tokens_BLD))
        if query_QPN.shape[-1] != self.grid.ndim or not (query_QPN.ndim == 2 or is_batched):
            shown = f"(P, {self.grid.ndim}) or (B, P, {self.grid.ndim})"
            raise ShapeError("query points", expected=shown, found=tuple(query_QPN.shape))


def grid_queries(points: tuple[int, ...]) -> Tensor:
    """Centres of a grid's cells as fractions of the domain, last axis fastest; shape (prod(points), N)."""
    axes = torch.meshgrid(*((torch.arange(num) + 0.5) / num for num in points), indexing="ij")
    return torch.stack(axes, dim=-1).flatten(0, -2)


def _take(tokens_BLW: Tensor, index_QPK: Tensor) -> Tensor:
    """Tokens by number, shape (B, P, K, W)."""
    if len(index_QPK) == 1:
        flat = tokens_BLW.index_select(1, index_QPK.flatten())
        return flat.unflatten(1, index_QPK.shape[1:])
    rows = torch.arange(len(tokens_BLW), device=tokens_BLW.device)[:, None, None]
    return tokens_BLW[rows, index_QPK]


def _mlp(in_width: int, hidden_width: int, out_width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_width, hidden_width), nn.GELU(), nn.Linear(hidden_width, out_width))
