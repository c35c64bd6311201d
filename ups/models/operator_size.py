"""How large operators and baselines are, and what their blocks are; no weights, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from ups.errors import ConfigError
from ups.grid import MAX_WINDOW, halved_axes
from ups.parsing import Count, Fraction, NotNegative, Parsed, Positive, Window
from ups.section import Section, key

Mixer = Literal["spectral", "convolution", "attention", "hybrid"]
TOKEN_UNET = "token_unet"  # `operator.name` of the package's own operator
GROUPS = 4  # of the U-Net's group norm; they divide its width
_FNO_MODES = {1: 16, 2: 12}  # along each axis
_UNET_LEVELS = 4
NORMALISED = ("attention", "hybrid")  # their blocks always normalise what they are given


@dataclass(frozen=True)
class OperatorSize(Parsed):
    """Architecture.

    Attributes:
        width: W of the finest level, doubled at each coarser one.
        depths: Blocks of each level, finest first; the last is the bottom of the U.
        mixers: What mixes the tokens of each level, or of all where it is one.
        num_heads: Attention heads of the finest level, doubled at each coarser one.
        window: Tokens of a window along an axis, at most.
        mlp_ratio: Hidden over outer channels of the MLPs.
        drop_path: Share of residual branches that training drops.
        dropout: Share of hidden channels of the MLPs that training drops.
        modes: Fourier modes along each axis; None for all.
        padding: Zeros behind an axis with ends before a Fourier transform, over its length.
        has_norm: Whether spectral and convolution blocks normalise what they are given.
        adds_input: Whether the input of a steady task is added to what is computed, as a state is to its
            change; so it was until 2026-11-23.
    """

    width: Count = 96
    depths: tuple[Count, ...] = (2, 2, 2)
    mixers: tuple[Mixer, ...] = ("spectral",)
    num_heads: Count = 4
    window: Window = MAX_WINDOW
    mlp_ratio: Positive = 4.0
    drop_path: Fraction = 0.0
    dropout: Fraction = 0.0
    modes: Count | None = None
    padding: NotNegative = 0.125
    has_norm: bool = False
    adds_input: bool = False

    def mixer(self, level: int) -> Mixer:
        """What mixes the tokens of a level."""
        return self.mixers[level if len(self.mixers) > 1 else 0]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return {**asdict(self), "depths": list(self.depths), "mixers": list(self.mixers)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """As `Parsed.from_json`; a file of before that date lacks `adds_input`."""
        size = super().from_json({"adds_input": True, **values})
        if not size.depths or len(size.mixers) not in (1, len(size.depths)):
            raise ValueError(f"mixers: {len(size.mixers)} of {len(size.depths)} levels")
        return size


# With attention, parameter counts of S, B and L are of the order of the paper's 33, 130 and 518 million.
SIZES = {
    "tiny": OperatorSize(width=64, depths=(2, 2), num_heads=4),
    "small": OperatorSize(width=96, depths=(2, 2, 2), num_heads=4),
    "S": OperatorSize(width=128, depths=(2, 4, 6), num_heads=4),
    "B": OperatorSize(width=256, depths=(2, 4, 6), num_heads=8),
    "L": OperatorSize(width=512, depths=(2, 4, 6), num_heads=16),
}


@dataclass(frozen=True)
class TokenAxis:
    """An axis of the token grids that an operator is built for.

    Attributes:
        length: Tokens along it, the most of any task.
        has_ends: Whether it isn't periodic in some task.
    """

    length: int
    has_ends: bool

    def halved(self) -> TokenAxis:
        """The same axis a level further down, where it is long and even enough."""
        is_halved = bool(halved_axes((self.length,)))
        return TokenAxis(self.length // 2 if is_halved else self.length, self.has_ends)


def token_axes(grids: Iterable[tuple[tuple[int, ...], tuple[bool, ...]]]) -> tuple[TokenAxis, ...]:
    """The axes that serve all grids of a model.

    Args:
        grids: Tokens along each axis, and whether each is periodic, of every task. Grids of fewer axes than
            others are taken as ones whose last axes have length 1.
    """
    grids = list(grids)
    axes = []
    for axis in range(max(len(tokens) for tokens, _ in grids)):
        found = [(tokens[axis], periodic[axis]) for tokens, periodic in grids if axis < len(tokens)]
        axes.append(TokenAxis(max(num for num, _ in found), not all(wraps for _, wraps in found)))
    return tuple(axes)


class FnoConfig(Section):
    """Size of an FNO."""

    width: Count = key(32, "channels of its layers", tune=(16, 24, 32, 48, 64))
    modes: Count | None = key(
        None,
        "Fourier modes along each axis; by default 16 in 1D, 12 in 2D, or what the grid has",
        tune=(8, 12, 16, 24, 32),
    )
    depth: Count = key(4, "layers")

    def on(self, points: tuple[int, ...], *, key: str) -> dict[str, Any]:
        """Arguments of the network on a grid; what is left open is no more than it has room for.

        Raises:
            ConfigError: Kind "size", of which `key` is the section.
        """
        check_axes(points)
        room = min(points) // 2
        if self.modes is not None and self.modes > room:
            raise _too_large(f"{key}.modes", room, self.modes, points)
        modes = self.modes or min(_FNO_MODES[len(points)], room)
        return {"width": self.width, "modes": modes, "depth": self.depth}


class UnetConfig(Section):
    """Size of the U-Net."""

    width: Count = key(24, "channels of the finest level; a multiple of 4", tune=(8, 16, 24, 32, 48))
    levels: Count | None = key(
        None, "resolutions; by default 4, or as often as the grid can be halved", tune=(2, 3, 4, 5)
    )

    def on(self, points: tuple[int, ...], *, key: str) -> dict[str, Any]:
        """As `FnoConfig.on`; kind "size" of a width that groups don't divide, too."""
        check_axes(points)
        if self.width % GROUPS:
            raise ConfigError(
                f"{key}.width", kind="size", expected=f"a multiple of {GROUPS}", found=self.width
            )
        levels = 1
        while levels < (self.levels or _UNET_LEVELS) and math.gcd(*points) % 2**levels == 0:
            levels += 1
        if self.levels is not None and self.levels > levels:
            raise _too_large(f"{key}.levels", levels, self.levels, points)
        return {"width": self.width, "levels": levels}


def check_axes(points: tuple[int, ...]) -> None:
    """Refuse a grid that networks on its points aren't made for."""
    if len(points) not in _FNO_MODES:
        raise ConfigError("baselines are made for 1D and 2D fields", found=f"{len(points)} axes")


def _too_large(key: str, most: int, found: int, points: tuple[int, ...]) -> ConfigError:
    grid = " x ".join(map(str, points))
    return ConfigError(f"{key} on a grid of {grid}", kind="size", expected=f"at most {most}", found=found)
