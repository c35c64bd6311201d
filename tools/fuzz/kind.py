"""What the fuzzer does with any kind of files."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.fuzz.changes import BLIND, Change

Arrays = dict[str, np.ndarray]


class Input(NamedTuple):
    """A changed file: its number, the good file that it was made from, and how it was changed."""

    number: int
    content: bytes
    good: bytes
    change: str  # "blind", "aware", or a kind's own

    @property
    def is_blind(self) -> bool:
        """Whether the change knows nothing of the format, so that it must be noticed."""
        return self.change == "blind"


class Kind(ABC):
    """One kind of files: good ones, how they are changed, and how the result is read.

    Args:
        folder: An empty folder, for files.
    """

    seeds: Sequence[bytes]  # good files
    aware: Sequence[Change]  # changes that know the kind
    block = 1000  # inputs that one process tries

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_input(self, seed: int, number: int) -> Input:
        """Change a good file; the input is a function of seed and number."""
        chance = random.Random(f"{seed}/{number}")
        good = chance.choice(self.seeds)
        if chance.random() < 0.4:
            return Input(number, chance.choice(BLIND)(good, chance), good, "blind")
        return Input(number, chance.choice(self.aware)(good, chance), good, "aware")

    @abstractmethod
    def read(self, made: Input) -> bool:
        """Read all there is; whether it was found sound.

        Raises:
            StoreError, UpsError: As it should be with what isn't right.
            AssertionError: If what was read isn't right.
        """

    def close(self) -> None:  # noqa: B027
        """End what was started; most start nothing."""


def assert_same(arrays: Arrays, expected: Arrays) -> None:
    """Compare dtypes, shapes and bits."""
    assert arrays.keys() == expected.keys(), f"arrays {sorted(arrays)} instead of {sorted(expected)}"
    for name, array in arrays.items():
        other, sort = expected[name], f"{array.dtype} {array.shape}"
        assert (array.shape, array.dtype) == (other.shape, other.dtype), f"{name} is {sort}"
        assert array.tobytes() == other.tobytes(), f"{name} has other values"
