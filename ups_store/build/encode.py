"""The encode stage of a build: batches of fields in, batches of latents out, each checked."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.array_spec import ArraySpec
from ups_store.encoder import Encoder, check_output
from ups_store.errors import StoreError

Batch = tuple[npt.NDArray[np.int64], Mapping[str, npt.NDArray[Any]]]


class EncodeError(StoreError):
    """An encoder made something that must not be stored."""

    kind = "encode_failed"


def encode_batches(
    batches: Iterable[Batch], encoder: Encoder, *, specs: Mapping[str, ArraySpec]
) -> Generator[Batch]:
    """Encode every batch in the calling thread.

    Args:
        batches: Sample numbers (B,) and arrays (B, ...) of the sources, valid until the next is asked for.
        encoder: Who encodes.
        specs: What `encoder.output_spec` announced.
    Yields:
        The same sample numbers and the store's arrays, in new memory.
    Raises:
        EncodeError: For NaN or Inf in the output where the input had none; names sample and array.
        ConfigError: If the output isn't what was announced.
    """
    for samples, arrays in batches:
        encoded = encoder.encode(arrays, samples=samples)
        check_output(encoded, specs, len(samples))
        for name in specs:
            if name not in arrays:
                _expect_finite(name, encoded[name], samples, arrays)
        yield samples, encoded


def _expect_finite(
    name: str,
    encoded: npt.NDArray[Any],
    samples: npt.NDArray[np.int64],
    arrays: Mapping[str, npt.NDArray[Any]],
) -> None:
    bad = np.flatnonzero(~_is_finite(encoded))
    if not len(bad):
        return
    row = slice(bad[0], bad[0] + 1)
    sources = [source for source, values in arrays.items() if not _is_finite(values[row])[0]]
    raise EncodeError(
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
