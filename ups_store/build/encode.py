"""The encode stage of a build: a batch of fields in, a batch of latents out, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.array_spec import ArraySpec
from ups_store.encoder import Encoder, check_output
from ups_store.errors import StoreError

Arrays = Mapping[str, npt.NDArray[Any]]


class EncodeError(StoreError):
    """An encoder made something that must not be stored."""

    kind = "encode_failed"


def encode_batch(
    arrays: Arrays, encoder: Encoder, *, samples: npt.NDArray[np.int64], specs: Mapping[str, ArraySpec]
) -> dict[str, npt.NDArray[Any]]:
    """Encode a batch and check what comes.

    Args:
        arrays: Arrays of the sources, shape (B, ...); needed no longer afterwards.
        encoder: Who encodes.
        samples: Sample numbers, shape (B,).
        specs: What `encoder.output_spec` announced.
    Returns:
        The store's arrays, in memory of their own.
    Raises:
        EncodeError: For NaN or Inf in what was encoded; names sample and array.
        ConfigError: If the output isn't what was announced.
    """
    encoded = encoder.encode(arrays, samples=samples)
    check_output(encoded, specs, len(samples))
    for name in specs:
        if name in arrays:  # passes through: the memory is the reader's
            encoded[name] = np.array(encoded[name])
        else:
            _expect_finite(name, encoded[name], samples, arrays)
    return encoded


def _expect_finite(
    name: str,
    encoded: npt.NDArray[Any],
    samples: npt.NDArray[np.int64],
    arrays: Arrays,
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
