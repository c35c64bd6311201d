"""What the fuzzer does with any kind of files that isn't a store."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.fuzz.changes import BLIND, Change

Arrays = dict[str, np.ndarray]


class InputKind(ABC):
    """One kind of files: good ones, how they are changed, and how the result is read.

    Args:
        folder: An empty folder, for files.
    Attributes:
        seeds: Good files.
        aware: Changes that know the kind.
    """

    seeds: Sequence[bytes]
    aware: Sequence[Change]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_input(self, seed: int, number: int) -> tuple[bytes, bytes, bool]:
        """An input, the good file that it was made from, and whether the change was blind."""
        chance = random.Random(f"{seed}/{number}")
        good = chance.choice(self.seeds)
        if chance.random() < 0.4:
            return chance.choice(BLIND)(good, chance), good, True
        return chance.choice(self.aware)(good, chance), good, False

    @abstractmethod
    def read(self, content: bytes, good: bytes, *, is_blind: bool) -> None:
        """Read all there is.

        Raises:
            StoreError, CheckpointError: As it should be with what isn't right.
            AssertionError: If what was read isn't right.
        """

    def close(self) -> None:  # noqa: B027
        """End what was started; most start nothing."""


def assert_same(found: Arrays, expected: Arrays) -> None:
    """Compare dtypes, shapes and bits."""
    assert found.keys() == expected.keys(), f"arrays {sorted(found)} instead of {sorted(expected)}"
    for name, array in found.items():
        other = expected[name]
        assert (array.shape, array.dtype) == (other.shape, other.dtype), (
            f"{name} is {array.dtype} {array.shape}"
        )
        assert array.tobytes() == other.tobytes(), f"{name} has other values"
