"""Data order: which items every step of an epoch takes; pure, without torch.

An order is computed where it is asked for, by permutations with a key: nothing is kept for a whole epoch, and
blocks of positions become items. All of it is exact integer arithmetic, so every machine gets the same.

- `DataOrder`: every step takes items of one source; `MixedOrder`: of all, in the shares of weights.
- `Permutation`, `BlockPermutation`: where positions go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import ConfigError
from ups_store.read.gather import Samples

BLOCK_POSITIONS = 8192  # computed at once: malloc would map and fault in arrays larger than 64 KiB each time

Shuffle = bool | Literal["block"]

Bits = npt.NDArray[np.uint64]

NUM_ROUNDS = 8
SMALL_SIZE = 1024  # below, items mix slowly: fewer rounds show in the frequencies of all orders
SMALL_NUM_ROUNDS = 24
BLOCKS_AHEAD = 4096  # permuted at once: of a few, the calls take most of the time

_HALF = np.uint64(32)
_WHOLE = 1 << 32  # all of a batch, of which shares are whole numbers
_MAX_STEPS = 1 << 31
_COUNTED = 1 << 16  # steps whose counts are added up at once
_GOLDEN = 618_034  # in millionths of an epoch: steps so far apart round to either side in turn


@dataclass(slots=True)  # frozen ones take three times as long to make
class Step:
    """What one rank takes in one step.

    Attributes:
        epoch: Number of the epoch.
        number: Number of the step in its epoch.
        source: Number of the source; the same on all ranks.
        items: Item numbers within the source, int64, shape (b,), b = global batch size / world size, or less
            in the last step of a pass over a source.
        first: Row of the global batch that `items` begin with.
        num_rows: Items of the step over all ranks, padding not counted.
        mask: False where a row only fills up the last batch, bool, shape (b,); None without `pad_last`.
    """

    epoch: int
    number: int
    source: int
    items: Samples
    first: int
    num_rows: int
    mask: npt.NDArray[np.bool_] | None = None


class Order(Protocol):
    """Which samples each step takes: a `DataOrder`, or one that depends on what there is.

    Attributes:
        epoch: Number of the current epoch.
        consumed: Samples of it that the training loop has been given: steps times `global_batch_size`.
        num_steps: Steps of an epoch, equal on all ranks.
        global_batch_size: Samples of a whole step over all ranks.
    """

    epoch: int
    consumed: int
    num_steps: int
    global_batch_size: int

    @property
    def key(self) -> object:
        """Give what the steps of all epochs depend on: batches that were made before it changed are stale."""

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """Give the steps of the current epoch that haven't been consumed; all of `epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """Give what continues from here."""

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was called."""


class EpochOrder:
    """What orders of one rank have in common: arguments, position, and a state that is theirs alone.

    A kind of order adds `num_steps`, and `_steps`, which gives the steps of an epoch from a number on.
    """

    num_steps: int

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = False,
        rank: int = 0,
        world_size: int = 1,
        block_size: int = 64,
        blocks_per_window: int = 64,
        keeps_shuffle: bool = False,
    ) -> None:
        numbers = {"batch_size": global_batch_size, "seed": seed, "rank": rank, "world_size": world_size}
        numbers |= {"block_size": block_size, "blocks_per_window": blocks_per_window}
        for name, number in numbers.items():
            expect(name, isinstance(number, int | np.integer), "a whole number", number)
            if name not in ("seed", "rank"):
                expect(name, number >= 1, "at least 1", number)
        expect("sizes", min(sizes, default=0) >= 1, "at least one item in every source", list(sizes))
        expect("rank", 0 <= rank < world_size, f"0 <= rank < {world_size}", rank)
        multiple = f"the global one a multiple of the {world_size} ranks"
        expect("batch_size", global_batch_size % world_size == 0, multiple, global_batch_size)
        expect("seed", 0 <= seed < 1 << 64, "0 <= seed < 2**64", seed)
        expect("shuffle", shuffle in (True, False, "block"), "True, False or 'block'", shuffle)
        self.sizes = tuple(int(size) for size in sizes)
        self.global_batch_size, self.rank, self.world_size = int(global_batch_size), rank, world_size
        self.seed = int(seed)
        self.shuffle: Shuffle = "block" if shuffle == "block" else bool(shuffle)
        self.block_size, self.blocks_per_window = block_size, blocks_per_window
        self.keeps_shuffle = keeps_shuffle
        self.epoch, self.consumed = 0, 0

    @property
    def key(self) -> tuple[int, Shuffle]:
        """Give what the steps of all epochs depend on and `load_state_dict` may change."""
        return self.seed, self.shuffle

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """The steps of the current epoch that haven't been consumed when this is called; all of `epoch`."""
        if epoch is not None:
            return self._steps(epoch, 0)
        return self._steps(self.epoch, self.consumed // self.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Give what continues the run from here: position, and what the order depends on; equal on all ranks.

        Keys: seed, global_batch_size, shuffle, with shuffle="block" also block_size and blocks_per_window,
        epoch, consumed.
        """
        return {**self._settings(self.shuffle), "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; with `keeps_shuffle` also in the way that it says.

        Raises:
            ConfigError: If the state can't come from an order like this one: it is of another seed, shuffle
                or global batch size, or doesn't say of which, as states that older versions saved.
        """
        saved = state.get("shuffle")
        shuffle: Shuffle = saved if self.keeps_shuffle and saved in (True, "block") else self.shuffle
        settings = self._settings(shuffle)
        for name, setting in settings.items():
            if state.get(name, setting) != setting:
                hint, ranks = f"{name}={state[name]!r} goes on with the same batches", ""
                if name == "global_batch_size":
                    hint, ranks = f"{hint}, on any ranks that divide it", f", on {self.world_size} ranks"
                elif name == "block_size":
                    hint = "a loader's blocks follow from the bytes of an item: names, dtype and window"
                raise ConfigError(
                    f"the state is of another {name.replace('_', ' ')}",
                    kind="state",
                    expected=f"{setting!r}{ranks}",
                    found=state[name],
                    hint=hint,
                )
        keys = [*settings, "epoch", "consumed"]
        if missing := [key for key in keys if key not in state]:
            raise ConfigError(
                f"the state lacks {', '.join(missing)}",
                kind="state",
                expected=f"the keys {', '.join(keys)}",
                found=sorted(state),
                hint="if an older version saved it, add what that run was made with",
            )
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        total = self.num_steps * self.global_batch_size
        fits = epoch >= 0 and 0 <= consumed <= total and consumed % self.global_batch_size == 0
        multiple = f"a multiple of the global batch size {self.global_batch_size}, at most {total}"
        expect("state", fits, f"epoch >= 0, and consumed to be {multiple}", dict(state))
        self.epoch, self.consumed, self.shuffle = epoch, consumed, shuffle

    def _settings(self, shuffle: Shuffle) -> dict[str, Any]:
        """Give what a state has to agree on; blocks only where there are any."""
        settings = {"seed": self.seed, "global_batch_size": self.global_batch_size, "shuffle": shuffle}
        blocks = {"block_size": self.block_size, "blocks_per_window": self.blocks_per_window}
        return settings | blocks if shuffle == "block" else settings

    def _steps(self, epoch: int, begin: int) -> Iterator[Step]:
        raise NotImplementedError

    def _permutation(self, size: int, *key: int) -> Callable[[Samples, Samples | int], Samples]:
        """Compute where positions in an order of `size` items go, as `shuffle` says."""
        if self.shuffle == "block":
            block, window = self.block_size, self.blocks_per_window
            return BlockPermutation(size, *key, block_size=block, blocks_per_window=window)
        return Permutation(size, *key) if self.shuffle else in_order


class DataOrder(EpochOrder):
    """The batches of one rank, epoch after epoch, and how many of them have been consumed.

    One global sequence per epoch is a function of seed and epoch. Step s takes its positions from s * G to
    (s + 1) * G, G the global batch size, and every rank a slice of those: so the samples of a step don't
    depend on the number of ranks. Of several sources one gives all samples of a step; which one is drawn.

    A last batch that isn't full is shorter, and divided among the ranks as evenly as possible, so all ranks
    make equally many steps. It must have an item for each of them, unless it is dropped or padded.

    Args:
        sizes: Number of items of each source.
        global_batch_size: G, items of one step over all ranks.
        drop_last: Whether to leave out a last batch that isn't full.
        pad_last: Whether to fill it up with items of the epoch's beginning; a mask says which rows those are.
        weights: Shares of the steps, one per source; by default every item is taken once.
        options: seed, 0 <= seed < 2**64; shuffle: False for the order of the store, True, or "block" to keep
            neighbours close (cold files), with block_size and blocks_per_window; rank and world_size;
            keeps_shuffle: whether a loaded state decides between True and "block".

    Attributes:
        epoch: Number of the current epoch.
        consumed: What the training loop has been given of it: steps times G.
        num_steps: Steps of an epoch, equal on all ranks.

    Raises:
        ConfigError: For arguments out of range; its `kind` is the argument's name, for both batch sizes
            "batch_size".
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        global_batch_size: int,
        drop_last: bool = False,
        pad_last: bool = False,
        weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(sizes, global_batch_size=global_batch_size, **options)
        full = "False beside drop_last, which leaves out a last batch that isn't full"
        expect("pad_last", not (drop_last and pad_last), full, pad_last)
        self.drop_last, self.pad_last = drop_last, pad_last
        self.weights = None if weights is None else tuple(map(float, weights))
        size, smallest = self.global_batch_size, min(self.sizes)
        fits = size <= smallest or not drop_last
        expect("batch_size", fits, f"at most {smallest}, the items of the smallest source", size)
        self._last_rows = [(num - 1) % size + 1 for num in self.sizes]
        least = min(self._last_rows)
        if least < self.world_size and not (drop_last or pad_last):
            raise ConfigError(
                f"the last batch has {least} items for {self.world_size} ranks: "
                "drop_last=True leaves it out, pad_last=True fills it up",
                kind="drop_last",
                expected=f"at least {self.world_size} items, one for each rank",
                found=least,
            )
        self._pass_steps = np.array([num // size if drop_last else -(-num // size) for num in self.sizes])
        self._share: Samples = self._pass_steps
        if weights is not None:
            shares = checked_weights(len(self.sizes), weights)
            self._share = np.rint(self._pass_steps.sum() * shares / shares.sum()).astype(np.int64).clip(min=1)
        self.num_steps = int(self._share.sum())

    def _steps(self, epoch: int, begin: int) -> Iterator[Step]:
        size = self.global_batch_size
        rows = size // self.world_size
        first = self.rank * rows
        sequences = [self._permutation(n, self.seed, epoch, 1, i) for i, n in enumerate(self.sizes)]
        for numbers, sources, batches in self._schedule(epoch, max(1, BLOCK_POSITIONS // rows)):
            late = numbers >= begin
            numbers, sources, batches = numbers[late], sources[late], batches[late]
            items = np.empty((len(numbers), rows), np.int64)
            is_short = np.zeros(len(numbers), bool)
            for source, mine in _by_source(sources):
                passes, batch = np.divmod(batches[mine], self._pass_steps[source])
                positions = (batch * size + first)[:, None] + np.arange(rows)
                if not self.drop_last:
                    if self._last_rows[source] < size:
                        is_short[mine] = is_last = batch == self._pass_steps[source] - 1
                        positions[is_last] += self._share_of_last(source).start - first
                    positions %= self.sizes[source]
                is_one_pass = passes[0] == passes[-1]  # they never fall
                tweak = int(passes[0]) if is_one_pass else np.repeat(passes, rows)
                items[mine] = sequences[source](positions.ravel(), tweak).reshape(positions.shape)
            for row, (number, source) in enumerate(zip(numbers.tolist(), sources.tolist(), strict=True)):
                if is_short[row]:
                    share, num = self._share_of_last(source), self._last_rows[source]
                    mask = np.array(share) < num if self.pad_last else None
                    yield Step(epoch, number, source, items[row, : len(share)], share.start, num, mask)
                else:
                    mask = np.ones(rows, bool) if self.pad_last else None
                    yield Step(epoch, number, source, items[row], first, size, mask)

    def _share_of_last(self, source: int) -> range:
        """This rank's rows of the last batch of a pass over a source, which isn't full."""
        num, ranks = self._last_rows[source], self.world_size
        if self.pad_last:
            num = self.global_batch_size
        return range(num * self.rank // ranks, num * (self.rank + 1) // ranks)

    def _schedule(self, epoch: int, chunk: int) -> Iterator[tuple[Samples, Samples, Samples]]:
        """Chunks of steps: their numbers, their sources, and how many batches each source gave before."""
        draw = Permutation(self.num_steps, self.seed, epoch, 0) if self.shuffle else in_order
        taken = np.zeros(len(self.sizes), np.int64)
        for first in range(0, self.num_steps, chunk):
            numbers = np.arange(first, min(first + chunk, self.num_steps))
            slots = draw(numbers) if len(taken) > 1 else numbers
            sources = np.searchsorted(np.cumsum(self._share), slots, side="right")
            batches = np.empty_like(numbers)
            for source, mine in _by_source(sources):
                num = len(sources[mine])
                batches[mine] = taken[source] + np.arange(num)
                taken[source] += num
            yield numbers, sources, batches


def _by_source(sources: Samples) -> Iterator[tuple[int, slice | npt.NDArray[np.bool_]]]:
    """Give every source of these steps, and which of them are its."""
    if len(sources) and (sources == sources[0]).all():
        yield int(sources[0]), slice(None)
        return
    for source in np.unique(sources).tolist():
        yield source, sources == source


class MixedOrder(EpochOrder):
    """The batches of one rank where every batch mixes sources, epoch after epoch.

    A step takes from each source its share of the G rows, rounded down in some steps and up in others, so
    that the shares hold over an epoch, to one row for each source. Its rows are spread evenly over the batch,
    and so over the ranks.

    A source is read through, over the ends of epochs, before an item of it comes again; then it begins again,
    in a new order where it is shuffled. So an epoch ends after `epoch_size` items, whatever was read through.
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
        super().__init__(sizes, global_batch_size=global_batch_size, **options)
        self.drop_last = drop_last
        shares = checked_weights(len(self.sizes), self.sizes if weights is None else weights)
        self.weights: tuple[float, ...] = tuple((shares / shares.sum()).tolist())
        self.epoch_size = sum(self.sizes) if epoch_size is None else epoch_size
        is_number = isinstance(self.epoch_size, int | np.integer) and self.epoch_size >= 1
        expect("epoch_size", is_number, "a whole number of at least 1", epoch_size)
        whole, remainder = divmod(int(self.epoch_size), self.global_batch_size)
        self.num_steps = whole if drop_last else whole + (remainder > 0)
        fits = 1 <= self.num_steps < _MAX_STEPS
        expected = f"at least a batch of {global_batch_size}, and fewer than {_MAX_STEPS} of them"
        expect("epoch_size", fits, expected, self.epoch_size)
        self._ends = np.rint(np.cumsum(self.weights) * _WHOLE).astype(np.int64)
        self._ends[-1] = _WHOLE
        # Coprime to their number, it leads through all steps of an epoch, neighbours far apart.
        self._stride = max(1, self.num_steps * _GOLDEN // 1_000_000)
        while math.gcd(self._stride, self.num_steps) > 1:
            self._stride += 1
        self._spreads: dict[tuple[int, ...], tuple[Samples, Samples]] = {}
        self.counts = self._taken(self.num_steps)

    def _settings(self, shuffle: Shuffle) -> dict[str, Any]:
        mix = {"weights": list(self.weights), "epoch_size": int(self.epoch_size)}
        return super()._settings(shuffle) | mix

    def _steps(self, epoch: int, begin: int) -> Iterator[Step]:
        rows = self.global_batch_size // self.world_size
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        chunk = max(1, BLOCK_POSITIONS // rows)
        orders = [self._permutation(n, self.seed, 0, 2, i) for i, n in enumerate(self.sizes)]
        firsts = np.cumsum([0, *self.sizes[:-1]])
        taken = epoch * self.counts + self._taken(begin)
        for first in range(begin, self.num_steps, chunk):
            numbers = np.arange(first, min(first + chunk, self.num_steps))
            counts = self._counts(numbers)
            before = taken + np.cumsum(counts, axis=0) - counts
            taken = before[-1] + counts[-1]
            # Source of each of this rank's rows, and which of all items drawn from it; shape (n, rows).
            spreads = [self._spread(tuple(row)) for row in counts.tolist()]
            sources = np.stack([sources[mine] for sources, _ in spreads])
            positions = np.stack([earlier[mine] for _, earlier in spreads])
            positions += np.take_along_axis(before, sources, axis=1)
            items = np.empty_like(positions)
            for source, order in enumerate(orders):
                where = sources == source
                passes, within = np.divmod(positions[where], self.sizes[source])
                items[where] = firsts[source] + order(within, passes)
            for number, row in zip(numbers.tolist(), items, strict=True):
                yield Step(epoch, number, 0, row, mine.start, self.global_batch_size)

    def _counts(self, numbers: Samples) -> Samples:
        """Count the rows of each source in these steps, int64, shape (n, K); G together."""
        places = numbers * self._stride % self.num_steps
        rounding = ((2 * places + 1) << 31) // self.num_steps  # each of so many parts of `_WHOLE` once
        ends = (self.global_batch_size * self._ends + rounding[:, None]) >> 32
        counts: Samples = np.diff(ends, prepend=0, axis=1)
        return counts

    def _taken(self, num_steps: int) -> Samples:
        """Count the rows of each source in the first steps of an epoch, shape (K,)."""
        taken = np.zeros(len(self.sizes), np.int64)
        for first in range(0, num_steps, _COUNTED):
            taken += self._counts(np.arange(first, min(first + _COUNTED, num_steps))).sum(0)
        return taken

    def _spread(self, counts: tuple[int, ...]) -> tuple[Samples, Samples]:
        """Source of each row of a batch with these counts, evenly spread, and how many of it came before."""
        spread = self._spreads.get(counts)
        if spread is None:
            sources = np.repeat(np.arange(len(counts)), counts)
            earlier = np.concatenate([np.arange(count) for count in counts])
            places = (earlier + 0.5) / np.repeat(np.maximum(counts, 1), counts)
            order = np.lexsort((sources, places))
            spread = self._spreads[counts] = sources[order], earlier[order]
        return spread


def mix(values: Bits) -> Bits:
    """Scramble 64-bit numbers, one to one (splitmix64's finaliser, Steele et al. 2014)."""
    bits = values ^ (values >> np.uint64(30))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def below(bits: Bits, limit: np.uint64 | Bits) -> Bits:
    """Give the numbers from 0 to `limit` - 1 made of the upper 32 bits; `limit` is at most 2**32."""
    scaled: Bits = (bits >> _HALF) * limit
    return scaled >> _HALF


def round_keys(num: int, *key: int) -> Bits:
    """Make independent 64-bit keys, shape (num,), from integers 0 <= k < 2**64: seed, epoch, purpose."""
    words = np.asarray(key, "<u8").view("<u4")  # two words each, so no two keys read alike
    return np.random.SeedSequence(words.tolist()).generate_state(num, np.uint64).astype(np.uint64)


class Permutation:
    """A keyed permutation of `range(size)` that is computed where it is asked for.

    A Feistel network over pairs (left, right) of numbers below `rows` and `columns`, whose product is just
    above `size`; what falls behind `size` goes through again until it doesn't (cycle walking).
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        # An even number of columns: a shift of an odd cycle is an even permutation, so half would be missing.
        self.columns = 2 * max(1, math.isqrt(max(0, size - 1)) // 2 + 1)
        self.rows = max(1, -(-size // self.columns))
        self.keys = round_keys((SMALL_NUM_ROUNDS if size < SMALL_SIZE else NUM_ROUNDS) + 1, *key)

    def __call__(self, positions: Samples, tweak: Samples | int = 0) -> Samples:
        """Compute where `positions` go."""
        tweaks = mix(np.atleast_1d(np.asarray(tweak, np.uint64)) + self.keys[-1])
        values = self._pass(positions.astype(np.uint64), tweaks)
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._pass(values[outside], np.broadcast_to(tweaks, values.shape)[outside])
        return values.astype(np.int64)

    def _pass(self, values: Bits, tweaks: Bits) -> Bits:
        rows, columns = np.uint64(self.rows), np.uint64(self.columns)
        left, right = np.divmod(values, columns)
        for even, odd in self.keys[:-1].reshape(-1, 2):
            left = left + below(mix(right ^ (tweaks + even)), rows)
            left = np.minimum(left, left - rows)  # modulo: below `rows` the difference wraps around
            right = right + below(mix(left ^ (tweaks + odd)), columns)
            right = np.minimum(right, right - columns)
        return left * columns + right


class BlockPermutation:
    """A keyed permutation of `range(size)` that keeps neighbours close: for data on disks.

    Blocks of consecutive items are permuted, then the items within a window of so many blocks. Where blocks
    begin is drawn too, so the items of a partial last block are other ones every time.
    """

    def __init__(self, size: int, *key: int, block_size: int, blocks_per_window: int) -> None:
        self.size = size
        self.block_size = block_size
        self.window_size = min(size, block_size * blocks_per_window)
        self.blocks = Permutation(size // block_size, *key, 0)
        self.within = Permutation(self.window_size, *key, 1)
        self.within_last = Permutation(size % self.window_size, *key, 2)
        self.shift = int(round_keys(1, *key, 3)[0]) % size
        self._known = -1, 0, np.empty(0, np.int64)  # tweak, first, where blocks go

    def __call__(self, positions: Samples, tweak: Samples | int = 0) -> Samples:
        """Compute where `positions` go; arguments as for `Permutation`."""
        tweaks = np.broadcast_to(np.asarray(tweak, np.int64), positions.shape)
        windows, offsets = _divided(positions, self.window_size)
        last = windows == self.size // self.window_size
        window_tweaks = tweaks * (self.size // self.window_size) + windows
        if last.any():
            offsets[~last] = self.within(offsets[~last], window_tweaks[~last])
            offsets[last] = self.within_last(offsets[last], tweaks[last])
        else:
            offsets = self.within(offsets, window_tweaks)
        numbers, offsets = _divided(windows * self.window_size + offsets, self.block_size)
        whole = numbers < self.blocks.size
        if whole.all():
            numbers = self._permute_blocks(numbers, tweaks)
        else:
            numbers[whole] = self._permute_blocks(numbers[whole], tweaks[whole])
        shifted = (numbers * self.block_size + offsets + self.shift).view(np.uint64)
        items: Samples = np.minimum(shifted, shifted - np.uint64(self.size)).view(np.int64)  # as in `_pass`
        return items

    def _permute_blocks(self, numbers: Samples, tweaks: Samples) -> Samples:
        """Compute where blocks go; each is permuted once where many of the items lie in it."""
        if not numbers.size:
            return numbers
        first, last, tweak = int(numbers.min()), int(numbers.max()), int(tweaks[0])
        if last - first >= numbers.size or (tweaks != tweak).any():
            return self.blocks(numbers, tweaks)
        known_tweak, start, known = self._known
        if tweak != known_tweak or first < start or last >= start + len(known):
            start, end = first, min(self.blocks.size, max(last + 1, first + BLOCKS_AHEAD))
            known = self.blocks(np.arange(start, end), tweak)
            self._known = tweak, start, known
        permuted: Samples = known[numbers - start]
        return permuted


def _divided(values: Samples, divisor: int) -> tuple[Samples, Samples]:
    """Compute quotients and remainders of values >= 0, in two thirds of the time of `np.divmod`."""
    quotients = values // divisor
    return quotients, values - quotients * divisor


def in_order(positions: Samples, tweak: Samples | int = 0) -> Samples:
    """Give the permutation that changes nothing."""
    return positions


def checked_weights(num: int, weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Check the weights of so many sources, which have to be positive numbers."""
    shares = np.asarray(weights, np.float64)
    fits = shares.shape == (num,) and bool(np.all(np.isfinite(shares) & (shares > 0)))
    expect("weights", fits, f"{num} positive numbers", list(weights))
    return shares


def expect(name: str, fits: bool, expected: str, found: object) -> None:
    """Refuse an argument, whose name is the error's kind, unless it fits."""
    if not fits:
        raise ConfigError(name, kind=name, expected=expected, found=found)
