"""The encode stage of a build: a batch of fields in, a batch of latents out, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ups_store.encoder import Encoder, check_output
from ups_store.errors import StoreError
from ups_store.format.array_spec import ArraySpec
from ups_store.sources.parameters import ValueRange

Arrays = Mapping[str, npt.NDArray[Any]]
Ranges = Mapping[str, ValueRange]


class EncodeError(StoreError):
    """An encoder made something that must not be stored."""

    kind = "encode_failed"


@runtime_checkable
class OverlappingEncoder(Encoder, Protocol):
    """An encoder that can begin a batch while it still works on the one before; nobody has to be one."""

    def prepare(self) -> None:
        """Do once what the first batch would wait for, such as loading the weights."""

    def begin(
        self, batch: Arrays, *, samples: npt.NDArray[np.int64]
    ) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """As `encode`, but returns a function that waits for the arrays, as soon as `batch` isn't needed."""

    def group_size(self, arrays: Mapping[str, ArraySpec]) -> int:
        """How many samples, from a multiple of this number on, are encoded together."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What became of a batch.

    Attributes:
        arrays: The store's arrays, in memory of their own.
        ranges: Ranges of those that were encoded.
    """

    arrays: dict[str, npt.NDArray[Any]]
    ranges: dict[str, ValueRange]


def begin_batch(
    arrays: Arrays,
    encoder: Encoder,
    *,
    samples: npt.NDArray[np.int64],
    specs: Mapping[str, ArraySpec],
    ranges: Ranges | None = None,
) -> Callable[[], Encoded]:
    """Begin to encode a batch, at once as a whole if the encoder can't overlap.

    Args:
        arrays: Arrays of the sources, shape (B, ...); needed no longer when this returns.
        encoder: Who encodes.
        samples: Sample numbers, shape (B,).
        specs: What `encoder.output_spec` announced.
        ranges: Ranges of those sources for which a reader has found them.
    Returns:
        A function that waits for the rest, checks what comes, and raises as `encode_batch`.
    """
    # What passes through unchanged lies in the reader's memory.
    given = {**arrays, **{name: np.array(arrays[name]) for name in specs if name in arrays}}
    spoilt = _spoilt(arrays, ranges or {})
    if isinstance(encoder, OverlappingEncoder):
        wait = encoder.begin(given, samples=samples)
    else:
        wait = partial(_same, encoder.encode(given, samples=samples))

    def finish() -> Encoded:
        done = wait()
        check_output(done, specs, len(samples))
        made = {name: ValueRange.of(done[name]) for name in specs if name not in arrays}
        for name, found in made.items():
            if not found.is_finite:
                raise _not_finite(name, done[name], samples, spoilt)
        return Encoded({name: done[name] for name in specs}, made)

    return finish


def _same(encoded: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return encoded


def encode_batch(
    arrays: Arrays, encoder: Encoder, *, samples: npt.NDArray[np.int64], specs: Mapping[str, ArraySpec]
) -> dict[str, npt.NDArray[Any]]:
    """Encode a batch and check what comes; arguments as those of `begin_batch`.

    Returns:
        The store's arrays, in memory of their own.
    Raises:
        EncodeError: For NaN or Inf in what was encoded; names sample and array.
        ConfigError: If the output isn't what was announced.
    """
    return begin_batch(arrays, encoder, samples=samples, specs=specs)().arrays


def _spoilt(arrays: Arrays, ranges: Ranges) -> dict[str, npt.NDArray[np.bool_]]:
    """By array of the sources that holds NaN or Inf, which samples do, shape (B,)."""
    unknown = (name for name in arrays if name not in ranges or not ranges[name].is_finite)
    return {name: mask for name in unknown if (mask := ~_is_finite(arrays[name])).any()}


def _not_finite(
    name: str,
    encoded: npt.NDArray[Any],
    samples: npt.NDArray[np.int64],
    spoilt: Mapping[str, npt.NDArray[np.bool_]],
) -> EncodeError:
    bad = np.flatnonzero(~_is_finite(encoded))
    sources = [source for source, mask in spoilt.items() if mask[bad[0]]]
    return EncodeError(
        f"NaN or Inf in {name!r}" + (f", from NaN or Inf in {sources[0]!r}" if sources else ""),
        array=name,
        sample=int(samples[bad[0]]),
        expected="finite latents",
        found=f"{len(bad)} of {len(samples)} samples of the batch",
        hint="check the field, the normalisation statistics, and whether the precision holds such values",
    )


def _is_finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which samples hold only finite numbers, shape (B,)."""
    if values.dtype.kind in "biu":
        return np.ones(len(values), bool)
    finite: npt.NDArray[np.bool_] = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    return finite
