"""The encode stage of a build: a batch of fields in, a batch of latents out, checked; the encoder's protocol.

This package brings no encoder. One is named as `module:callable`, or by an entry point of the group
`ups_store.encoders`; the callable gets the checkpoint's path and the options of the build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ups_store.errors import ConfigError, MissingExtraError, StoreError
from ups_store.format.metadata import ArraySpec, dtype_of
from ups_store.sources.values import CastLoss, ValueRange, cast_values, holding, largest_finite

ENTRY_POINTS = "ups_store.encoders"

Arrays = Mapping[str, npt.NDArray[Any]]
Ranges = Mapping[str, ValueRange]


@runtime_checkable
class Encoder(Protocol):
    """Turns the arrays of samples into those that the store holds.

    Making one, `identity` and `output_spec` need no torch: a second run asks only for these.
    """

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, D): tokens and channels of one frame's latent state."""

    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the output's bytes, as JSON values; part of the store's identity.

        Class, configuration, sha256 of the weights, normalisation statistics, precision, micro-batch.
        """

    def output_spec(self, arrays: Mapping[str, ArraySpec]) -> Mapping[str, ArraySpec]:
        """Arrays of the store, shapes (N, ...), for those of the sources; what passes unchanged included.

        Raises:
            ConfigError: If it can't encode these: other channels, another grid.
        """

    def encode(self, batch: Arrays, *, samples: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Arrays of B samples, by name, shape (B, ...), in memory that the caller owns.

        The bytes of a sample depend on it and its number in the store, never on what lies beside it. What was
        announced as float16 or bfloat16 may be float32: the build casts it, and reports what that loses.

        Args:
            batch: Arrays of the sources by name, shape (B, ...).
            samples: Numbers of the samples in the store, shape (B,).
        """


@runtime_checkable
class OverlappingEncoder(Encoder, Protocol):
    """An encoder that can begin a batch while it still works on the one before; none has to be."""

    def prepare(self) -> None:
        """Do once what the first batch would wait for, such as loading the weights."""

    def begin(
        self, batch: Arrays, *, samples: npt.NDArray[np.int64]
    ) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """Begin to encode; returns a function that waits for the arrays, as soon as `batch` isn't needed."""

    def group_size(self, arrays: Mapping[str, ArraySpec]) -> int:
        """Tell how many samples, from a multiple of this number on, are encoded together."""


@runtime_checkable
class DescribingEncoder(Encoder, Protocol):
    """An encoder that can say how its device is, for a build that stalls; none has to."""

    def device_state(self) -> str:
        """Lines for people, such as what is allocated there; called from another thread."""


class EncodeError(StoreError):
    """An encoder made something that must not be stored."""

    kind = "encode_failed"


def load_encoder(name: str, checkpoint: Path, **options: Any) -> Encoder:
    """Make an encoder, by `module:callable` or the name of an entry point; options are the callable's."""
    points = metadata.entry_points(group=ENTRY_POINTS)
    module, colon, attribute = next((p.value for p in points if p.name == name), name).partition(":")
    hint = "check latent.encoder"
    if not colon:
        expected = f"module:callable, or one of {sorted(point.name for point in points)}"
        raise ConfigError("no such encoder", expected=expected, found=name, hint=hint)
    try:
        factory = getattr(import_module(module), attribute)
    except MissingExtraError:
        raise
    except (ImportError, AttributeError) as error:
        reason = f"{module}:{attribute} ({error})"
        raise ConfigError("the encoder can't be imported", found=reason, hint=hint) from error
    if not callable(factory):
        expected = "something to call with the checkpoint"
        raise ConfigError("encoder", expected=expected, found=f"{module}:{attribute}")
    encoder = factory(checkpoint, **options)
    if not isinstance(encoder, Encoder):
        expected = "an object with identity, output_spec and encode"
        raise ConfigError(f"encoder {name}", expected=expected, found=type(encoder).__name__)
    return encoder


def check_size(encoder: Encoder, *, dim: int | None, tokens: int | None, checkpoint: Path) -> None:
    """Fail if a configuration names another size than the encoder has."""
    shape = encoder.latent_shape
    configured = (tokens or shape[0], dim or shape[1])
    if shape != configured:
        raise ConfigError(
            "latent.tokens, latent.dim",
            path=checkpoint,
            expected=f"{configured[0]} tokens x {configured[1]} channels, as configured",
            found=f"{shape[0]} x {shape[1]} in the checkpoint",
            hint="train the autoencoder again, or configure the size that it has",
        )


class Encoded(NamedTuple):
    """The store's arrays of a batch, in memory of their own, and ranges of those that were encoded."""

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
    """Begin to encode a batch; returns a function that waits for the rest and checks what comes."""
    # What passes through unchanged lies in the reader's memory.
    fields = {**arrays, **{name: np.array(arrays[name]) for name in specs if name in arrays}}
    # Samples of the sources with NaN or Inf, looked for now: once `begin` returns, their memory isn't ours.
    unsure = (name for name in arrays if name not in (ranges or {}) or not (ranges or {})[name].is_finite)
    spoilt = {name: mask for name in unsure if (mask := ~_are_finite(arrays[name])).any()}
    if isinstance(encoder, OverlappingEncoder):
        wait = encoder.begin(fields, samples=samples)
    else:
        wait = partial(dict, encoder.encode(fields, samples=samples))

    def finish() -> Encoded:
        encoded, losses = dict(wait()), dict[str, CastLoss]()
        for name, spec in specs.items():
            values: Any = encoded.get(name)
            is_array, dtype = isinstance(values, np.ndarray), dtype_of(spec.dtype)
            if name not in arrays and is_array and values.dtype == np.float32 and dtype.itemsize == 2:
                wide, values = values, np.empty(values.shape, dtype)
                losses[name] = cast_values(values, wide, channel_axes=int(values.ndim > 2))
                encoded[name] = values
            expected = f"{dtype} {(len(samples), *spec.shape[1:])}"
            geometry = f"{values.dtype} {values.shape}" if is_array else type(values).__name__
            if geometry != expected:
                raise ConfigError(f"the encoder's output {name!r}", expected=expected, found=geometry)
        made = {}
        for name in [name for name in specs if name not in arrays]:
            of_values, loss = ValueRange.of(encoded[name]), losses.get(name, CastLoss())
            if not of_values.is_finite:
                raise _not_finite(name, encoded[name], samples, spoilt, loss)
            made[name] = replace(of_values, num_underflow=loss.num_zero, num_flat=loss.num_flat)
        return Encoded({name: encoded[name] for name in specs}, made)

    return finish


def _not_finite(
    name: str,
    values: npt.NDArray[Any],
    samples: npt.NDArray[np.int64],
    spoilt: Mapping[str, npt.NDArray[np.bool_]],
    loss: CastLoss,
) -> EncodeError:
    """Say which sample isn't finite, and whether a source, the cast or the encoder made it so."""
    bad = np.flatnonzero(~_are_finite(values))
    sources = [source for source, mask in spoilt.items() if mask[bad[0]]]
    if loss.num_inf and not sources:
        dtype = holding(loss.low, loss.high)
        return EncodeError(
            f"the cast to {values.dtype} made {loss.num_inf} latent numbers infinite",
            array=name,
            sample=int(samples[bad[0]]),
            expected=f"values within {largest_finite(values.dtype):.6g}",
            found=f"{loss.low:.6g} to {loss.high:.6g}",
            hint=f"cache.dtype={dtype} holds them, of a run training.latent_cache_dtype",
        )
    return EncodeError(
        f"NaN or Inf in {name!r}" + (f", from NaN or Inf in {sources[0]!r}" if sources else ""),
        array=name,
        sample=int(samples[bad[0]]),
        expected="finite latents",
        found=f"{len(bad)} of {len(samples)} samples of the batch",
        hint="check the field, the normalisation statistics, and whether the precision holds such values",
    )


def _are_finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which samples hold only finite numbers, shape (B,)."""
    if values.dtype.kind in "biu":
        return np.ones(len(values), bool)
    finite: npt.NDArray[np.bool_] = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    return finite
