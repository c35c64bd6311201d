"""Mixed order: every step takes items of several sources, in the shares of weights; pure, without torch.

How many of a step's rows are a source's follows from the step's number alone, in whole numbers, so that every
rank and every machine gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ups_store.read.gather import Samples
from ups_store.read.order import BLOCK_POSITIONS, EpochOrder, Shuffle, Step, checked_weights, expect, sizes_of

_WHOLE = 1 << 32  # all of a batch, of which shares are whole numbers
_MAX_STEPS = 1 << 31
_COUNTED = 1 << 16  # steps whose counts are added up at once
_GOLDEN = 618_034  # in millionths of an epoch: steps so far apart round to either side in turn


class MixedOrder(EpochOrder):
    """The batches of one rank where every batch mixes sources, epoch after epoch.

    A step takes from each source its share of the G rows, rounded down in some steps and up in others, so
    that the shares hold over an epoch, to one row for each source. Its rows are spread evenly over the batch,
    and so over the ranks.

    A source is read through, over the ends of epochs, before an item of it comes again; then it begins again,
    in a new order where it is shuffled. So an epoch ends after `epoch_size` items, whatever was read through.

    Args:
        sizes: Number of items of each source; the items of all are numbered through.
        global_batch_size: G, items of one step over all ranks.
        weights: Shares of the items, one per source; by default in proportion to the sizes.
        epoch_size: Items of an epoch, in whole steps; by default as many as the sources have together.
        drop_last: Whether a last step that would not be full is left out, or filled up by default.
        options: Of `EpochOrder`, which has the other attributes, too.

    Attributes:
        counts: Items of each source in an epoch, int64, shape (K,).

    Raises:
        ConfigError: As `EpochOrder`; likewise for `weights` and `epoch_size`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        global_batch_size: int,
        weights: Sequence[float] | None = None,
        epoch_size: int | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(global_batch_size=global_batch_size, **options)
        self.sizes, self.drop_last = sizes_of(sizes), drop_last
        shares = checked_weights(len(self.sizes), self.sizes if weights is None else weights)
        self.weights: tuple[float, ...] = tuple((shares / shares.sum()).tolist())
        self.epoch_size = sum(self.sizes) if epoch_size is None else epoch_size
        is_number = isinstance(self.epoch_size, int | np.integer) and self.epoch_size >= 1
        expect("epoch_size", is_number, "a whole number of at least 1", epoch_size)
        whole, rest = divmod(int(self.epoch_size), self.global_batch_size)
        self.num_steps = whole if drop_last else whole + (rest > 0)
        fits = 1 <= self.num_steps < _MAX_STEPS
        expected = f"at least a batch of {global_batch_size}, and fewer than {_MAX_STEPS} of them"
        expect("epoch_size", fits, expected, self.epoch_size)
        self._ends = np.rint(np.cumsum(self.weights) * _WHOLE).astype(np.int64)
        self._ends[-1] = _WHOLE
        self._stride = _coprime(self.num_steps)
        self._spreads: dict[tuple[int, ...], tuple[Samples, Samples]] = {}
        self.counts = self._taken(self.num_steps)

    def _settings(self, shuffle: Shuffle) -> dict[str, Any]:
        mix = {"weights": list(self.weights), "epoch_size": int(self.epoch_size)}
        return super()._settings(shuffle) | mix

    def _steps(self, epoch: int, begin: int) -> Iterator[Step]:
        rows = self.global_batch_size // self.world_size
        chunk = max(1, BLOCK_POSITIONS // rows)
        orders = [self._permutation(n, self.seed, 0, 2, i) for i, n in enumerate(self.sizes)]
        firsts = np.cumsum([0, *self.sizes[:-1]])
        taken = epoch * self.counts + self._taken(begin)
        for first in range(begin, self.num_steps, chunk):
            numbers = np.arange(first, min(first + chunk, self.num_steps))
            counts = self._counts(numbers)
            before = taken + np.cumsum(counts, axis=0) - counts
            taken = before[-1] + counts[-1]
            sources, positions = self._rows(counts, before)
            items = np.empty_like(positions)
            for source, order in enumerate(orders):
                mine = sources == source
                passes, within = np.divmod(positions[mine], self.sizes[source])
                items[mine] = firsts[source] + order(within, passes)
            for number, row in zip(numbers.tolist(), items, strict=True):
                yield Step(epoch, number, 0, row, self.rank * rows, self.global_batch_size)

    def _counts(self, numbers: Samples) -> Samples:
        """Rows of each source in these steps, int64, shape (n, K); G together."""
        places = numbers * self._stride % self.num_steps
        rounding = ((2 * places + 1) << 31) // self.num_steps  # each of so many parts of `_WHOLE` once
        ends = (self.global_batch_size * self._ends + rounding[:, None]) >> 32
        counts: Samples = np.diff(ends, prepend=0, axis=1)
        return counts

    def _taken(self, num_steps: int) -> Samples:
        """Rows of each source in the first steps of an epoch, shape (K,)."""
        taken = np.zeros(len(self.sizes), np.int64)
        for first in range(0, num_steps, _COUNTED):
            taken += self._counts(np.arange(first, min(first + _COUNTED, num_steps))).sum(0)
        return taken

    def _rows(self, counts: Samples, before: Samples) -> tuple[Samples, Samples]:
        """Source of each of this rank's rows, and which of all items drawn from it; shape (n, rows)."""
        rows = self.global_batch_size // self.world_size
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        spreads = [self._spread(tuple(row)) for row in counts.tolist()]
        sources = np.stack([sources[mine] for sources, _ in spreads])
        numbers = np.stack([numbers[mine] for _, numbers in spreads])
        return sources, numbers + np.take_along_axis(before, sources, axis=1)

    def _spread(self, counts: tuple[int, ...]) -> tuple[Samples, Samples]:
        """Source of each row of a batch with these counts, evenly spread, and how many of it came before."""
        spread = self._spreads.get(counts)
        if spread is None:
            sources = np.repeat(np.arange(len(counts)), counts)
            numbers = np.concatenate([np.arange(count) for count in counts])
            places = (numbers + 0.5) / np.repeat(np.maximum(counts, 1), counts)
            order = np.lexsort((sources, places))
            spread = self._spreads[counts] = sources[order], numbers[order]
        return spread


def _coprime(num_steps: int) -> int:
    """A number of steps that leads through all steps of an epoch, neighbours far apart."""
    stride = max(1, num_steps * _GOLDEN // 1_000_000)
    while math.gcd(stride, num_steps) > 1:
        stride += 1
    return stride
