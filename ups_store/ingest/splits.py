"""The splits, and which samples of a file are of which (for the files of a split see `source_files`)."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Literal

from ups_store.errors import ConfigError

SPLITS = ("train", "val", "test")
# What files, folders and configurations may call them.
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class SplitFractions:
    """How the samples of each file are shared out where PDEBench's rule decides.

    Raises:
        ConfigError: If one isn't within 0..1, or they add up to more than 1.
    """

    train: float = 0.8
    val: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        fractions = astuple(self)
        if not all(0 <= fraction <= 1 for fraction in fractions) or sum(fractions) > 1 + 1e-9:
            raise ConfigError(
                "split fractions train, val, test",
                kind="bad_fractions",
                expected="three numbers within 0..1 that add up to at most 1",
                found=fractions,
            )


def canonical_split(name: str) -> str:
    """The split of a name; "valid" and "validation" mean "val".

    Raises:
        ConfigError: If there is none; `kind` is "unknown_split".
    """
    if name not in SPLIT_NAMES:
        raise ConfigError(
            "unknown split", kind="unknown_split", expected=f"one of {SPLITS}", found=repr(name)
        )
    return SPLIT_NAMES[name]


def split_range(
    num_samples: int, *, split: str, fractions: SplitFractions, test_part: Literal["first", "last"]
) -> range:
    """Samples of one file that are of a split.

    Test is the first, or last, floor(n * test) of the file, as PDEBench has it; validation the last
    floor(n * val) of the remaining ones; train what is left, or its first floor(n * train) where the
    fractions add up to less than 1. Every file is cut alike: PDEBench's files of different parameters
    start from the same initial conditions, which so stay within one split.
    """
    split = canonical_split(split)
    num_test = _floor(num_samples * fractions.test)
    num_val = _floor(num_samples * fractions.val)
    test, rest = range(num_samples)[:num_test], range(num_samples)[num_test:]
    if test_part == "last":
        test, rest = (
            range(num_samples)[num_samples - num_test :],
            range(num_samples)[: num_samples - num_test],
        )
    train, val = rest[: len(rest) - num_val], rest[len(rest) - num_val :]
    if sum(astuple(fractions)) < 1 - 1e-9:
        train = train[: _floor(num_samples * fractions.train)]
    return {"train": train, "val": val, "test": test}[split]


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)  # 100 * 0.29 is 28.999999999999996
