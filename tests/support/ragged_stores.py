"""Stores with ragged arrays for tests: points of a cloud, text, bytes, beside arrays of equal samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ups_store
from ups_store import ArraySpec

LENGTHS = (3, 0, 6000, 1, 40)  # 6000 rows of 12 bytes: more than an inner chunk
TEXTS = ("a", "", "über " * 9, "\N{SNOWMAN}", "the last one")
IDENTITY = {"kind": "clouds"}


def ragged_values(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> dict[str, Any]:
    """Samples of two ragged arrays, large and small ones, and of arrays with and without slots."""
    rng, num = np.random.default_rng(seed), len(lengths)
    return {
        "points": [rng.standard_normal((n, 3)).astype(np.float32) for n in lengths],
        "text": [TEXTS[i % len(TEXTS)] for i in range(num)],
        "fields": rng.standard_normal((num, 1100)).astype(np.float32),
        "label": np.arange(num, dtype=np.int16),
    }


def ragged_specs(values: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """What `create` needs to hold them."""
    num = len(values["label"])
    texts = [len(text.encode()) for text in values["text"]]
    return {
        "points": ArraySpec(
            (num, None, 3),
            "float32",
            dims=("sample", "point", "xyz"),
            attrs={"units": "m"},
            lengths=list(map(len, values["points"])),
        ),
        "text": ArraySpec((num, None), "uint8", lengths=texts, encoding="utf-8"),
        "fields": ArraySpec((num, 1100), "float32"),
        "label": ArraySpec((num,), "int16"),
    }


def rows_of(values: Mapping[str, Any], samples: Sequence[int]) -> dict[str, Any]:
    """Some of the samples, in this order, as `commit_many` takes them."""
    chosen = list(samples)
    return {
        name: value[chosen] if isinstance(value, np.ndarray) else [value[i] for i in chosen]
        for name, value in values.items()
    }


def build_ragged(path: Path, values: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """A finished store of the values, committed in two batches."""
    values = ragged_values() if values is None else values
    num = len(values["label"])
    options = {"identity": IDENTITY, **options}
    with ups_store.create(path, ragged_specs(values), **options) as writer:
        for batch in (range(1, num), range(min(1, num))):
            writer.commit_many(list(batch), rows_of(values, batch))
        return writer.finish()


def check_same(found: Mapping[str, Any], values: Mapping[str, Any], samples: Sequence[int]) -> None:
    """Compare a batch with the values that it should have."""
    expected = rows_of(values, samples)
    assert list(found["text"]) == expected["text"]
    assert len(found["points"]) == len(samples)
    for got, wanted in zip(found["points"], expected["points"], strict=True):
        np.testing.assert_array_equal(got, wanted)
    for name in ("fields", "label"):
        np.testing.assert_array_equal(found[name], expected[name])
