"""Permutations with a key, computed where they are asked for; pure, exact integer arithmetic.

Nothing is kept for a whole epoch, and every machine gets the same.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ups_store.read.gather import Samples

Bits = npt.NDArray[np.uint64]

NUM_ROUNDS = 8
SMALL_SIZE = 1024  # below, items mix slowly: fewer rounds show in the frequencies of all orders
SMALL_NUM_ROUNDS = 24
BLOCKS_AHEAD = 4096  # permuted at once: of a few, the calls take most of the time

_HALF = np.uint64(32)


def mix(values: Bits) -> Bits:
    """Scramble 64-bit numbers, one to one (splitmix64's finaliser, Steele et al. 2014)."""
    bits = values ^ (values >> np.uint64(30))
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def below(bits: Bits, limit: np.uint64 | Bits) -> Bits:
    """Numbers from 0 to `limit` - 1 made of the upper 32 bits; `limit` is at most 2**32."""
    scaled: Bits = (bits >> _HALF) * limit
    return scaled >> _HALF


def round_keys(num: int, *key: int) -> Bits:
    """Independent 64-bit keys, shape (num,), from integers 0 <= k < 2**64: seed, epoch, purpose."""
    words = np.asarray(key, "<u8").view("<u4")  # two words each, so no two keys read alike
    return np.random.SeedSequence(words.tolist()).generate_state(num, np.uint64).astype(np.uint64)


class Permutation:
    """A keyed permutation of `range(size)` that is computed where it is asked for.

    A Feistel network over pairs (left, right) of numbers below `rows` and `columns`, whose product is just
    above `size`; what falls behind `size` goes through again until it doesn't (cycle walking).

    Args:
        size: How many numbers are permuted, from 0 to 2**62.
        key: Integers >= 0; other keys give unrelated permutations.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        # An even number of columns: a shift of an odd cycle is an even permutation, so half would be missing.
        self.columns = 2 * max(1, math.isqrt(max(0, size - 1)) // 2 + 1)
        self.rows = max(1, -(-size // self.columns))
        self.keys = round_keys((SMALL_NUM_ROUNDS if size < SMALL_SIZE else NUM_ROUNDS) + 1, *key)

    def __call__(self, positions: Samples, tweak: Samples | int = 0) -> Samples:
        """Where `positions` go.

        Args:
            positions: Numbers from 0 to `size` - 1, shape (B,).
            tweak: Chooses among unrelated permutations of the same key, one or one per position.
        Returns:
            Numbers from 0 to `size` - 1, shape (B,), new memory.
        """
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

    Args:
        size: How many numbers are permuted.
        key: Integers >= 0.
        block_size: Samples that lie together in the store.
        blocks_per_window: Blocks whose items are mixed.
    """

    def __init__(self, size: int, *key: int, block_size: int, blocks_per_window: int) -> None:
        self.size = size
        self.block_size = block_size
        self.window_size = min(size, block_size * blocks_per_window)
        self.blocks = Permutation(size // block_size, *key, 0)
        self.within = Permutation(self.window_size, *key, 1)
        self.within_last = Permutation(size % self.window_size, *key, 2)
        self.shift = int(round_keys(1, *key, 3)[0]) % size
        self._known: tuple[int, int, Samples] = (
            -1,
            0,
            np.empty(0, np.int64),
        )  # tweak, first, where blocks go

    def __call__(self, positions: Samples, tweak: Samples | int = 0) -> Samples:
        """Where `positions` go; arguments as for `Permutation`."""
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
        """Where blocks go; each is permuted once where many items lie in it, as in consecutive positions."""
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
    """Quotients and remainders of values >= 0, in two thirds of the time of `np.divmod`."""
    quotients = values // divisor
    return quotients, values - quotients * divisor


def in_order(positions: Samples, tweak: Samples | int = 0) -> Samples:
    """The permutation that changes nothing."""
    return positions
