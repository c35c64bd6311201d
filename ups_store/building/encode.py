"""The encode stage of a build: a batch of fields in, a batch of latents out, checked; the encoder's protocol.

This package brings no encoder. One is named as `module:callable`, or by an entry point of the group
`ups_store.encoders`; the callable gets the checkpoint's path and the options of the build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ups_store.errors import ConfigError, MissingExtraError, StoreError
from ups_store.format.metadata import ArraySpec, dtype_of
from ups_store.sources.values import CastLoss, ValueRange, cast_into, holding, largest

ENTRY_POINTS = "ups_store.encoders"


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


def load_encoder(name: str, checkpoint: Path, **options: Any) -> Encoder:
    """Make an encoder.

    Args:
        name: `module:callable`, or the name of an entry point.
        checkpoint: File with its weights.
        **options: Device, precision and so on; keyword arguments of the callable.
    Raises:
        ConfigError: If there is none of that name, or what it makes isn't an encoder.
    """
    encoder = _factory(name)(checkpoint, **options)
    if not isinstance(encoder, Encoder):
        expected = "an object with identity, output_spec and encode"
        raise ConfigError(f"encoder {name}", expected=expected, found=type(encoder).__name__)
    return encoder


def _factory(name: str) -> Callable[..., Any]:
    for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
        name = entry.value
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return _callable(getattr(import_module(module), attribute), name)
    except MissingExtraError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "the encoder can't be imported", found=f"{name} ({error})", hint="check latent.encoder"
        ) from error
    known = sorted(entry.name for entry in metadata.entry_points(group=ENTRY_POINTS))
    raise ConfigError(
        "no such encoder",
        expected=f"module:callable, or one of {known}",
        found=name,
        hint="check latent.encoder",
    )


def _callable(value: object, name: str) -> Callable[..., Any]:
    if not callable(value):
        raise ConfigError("encoder", expected="something to call with the checkpoint", found=name)
    return value


def check_size(encoder: Encoder, *, dim: int | None, tokens: int | None, checkpoint: Path) -> None:
    """Fail if a configuration names another size than the encoder has."""
    found = encoder.latent_shape
    expected = (tokens or found[0], dim or found[1])
    if found != expected:
        raise ConfigError(
            "latent.tokens, latent.dim",
            path=checkpoint,
            expected=f"{expected[0]} tokens x {expected[1]} channels, as configured",
            found=f"{found[0]} x {found[1]} in the checkpoint",
            hint="train the autoencoder again, or configure the size that it has",
        )


def check_output(arrays: Arrays, specs: Mapping[str, ArraySpec], num: int) -> None:
    """Fail if an encoder returned something else than it announced."""
    for name, spec in specs.items():
        found = arrays.get(name)
        expected = f"{dtype_of(spec.dtype)} {(num, *spec.shape[1:])}"
        shown = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
        if shown != expected:
            raise ConfigError(f"the encoder's output {name!r}", expected=expected, found=shown)


Arrays = Mapping[str, npt.NDArray[Any]]

Ranges = Mapping[str, ValueRange]


class EncodeError(StoreError):
    """An encoder made something that must not be stored."""

    kind = "encode_failed"


@runtime_checkable
class OverlappingEncoder(Encoder, Protocol):
    """An encoder that can begin a batch while it still works on the one before; none has to be."""

    def prepare(self) -> None:
        """Do once what the first batch would wait for, such as loading the weights."""

    def begin(
        self, batch: Arrays, *, samples: npt.NDArray[np.int64]
    ) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """As `encode`, but returns a function that waits for the arrays, as soon as `batch` isn't needed."""

    def group_size(self, arrays: Mapping[str, ArraySpec]) -> int:
        """How many samples, from a multiple of this number on, are encoded together."""


@runtime_checkable
class DescribingEncoder(Encoder, Protocol):
    """An encoder that can say how its device is, for a build that stalls; none has to."""

    def device_state(self) -> str:
        """Lines for people, such as what is allocated there; called from another thread."""


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
    """Begin to encode a batch; returns a function that waits for the rest and checks what comes."""
    # What passes through unchanged lies in the reader's memory.
    given = {**arrays, **{name: np.array(arrays[name]) for name in specs if name in arrays}}
    spoilt = _spoilt(arrays, ranges or {})
    if isinstance(encoder, OverlappingEncoder):
        wait = encoder.begin(given, samples=samples)
    else:
        wait = partial(dict, encoder.encode(given, samples=samples))

    def finish() -> Encoded:
        new = [name for name in specs if name not in arrays]
        done, losses = _cast(wait(), {name: specs[name] for name in new})
        check_output(done, specs, len(samples))
        made = {}
        for name in new:
            found, loss = ValueRange.of(done[name]), losses.get(name, CastLoss())
            if not found.is_finite:
                raise _not_finite(name, done[name], samples, spoilt, loss)
            made[name] = replace(found, num_underflow=loss.num_zero, num_flat=loss.num_flat)
        return Encoded({name: done[name] for name in specs}, made)

    return finish


def _cast(made: Arrays, specs: Mapping[str, ArraySpec]) -> tuple[dict[str, Any], dict[str, CastLoss]]:
    """What an encoder has made, with float32 in the store's dtype, and what these casts lost."""
    done, losses = dict(made), dict[str, CastLoss]()
    for name, spec in specs.items():
        values, dtype = done.get(name), dtype_of(spec.dtype)
        if isinstance(values, np.ndarray) and values.dtype == np.float32 and dtype.itemsize == 2:
            done[name] = np.empty(values.shape, dtype)
            losses[name] = cast_into(done[name], values, channel_axes=int(values.ndim > 2))
    return done, losses


def _spoilt(arrays: Arrays, ranges: Ranges) -> dict[str, npt.NDArray[np.bool_]]:
    """By array of the sources that holds NaN or Inf, which samples do, shape (B,)."""
    unknown = (name for name in arrays if name not in ranges or not ranges[name].is_finite)
    return {name: mask for name in unknown if (mask := ~_is_finite(arrays[name])).any()}


def _not_finite(
    name: str,
    encoded: npt.NDArray[Any],
    samples: npt.NDArray[np.int64],
    spoilt: Mapping[str, npt.NDArray[np.bool_]],
    loss: CastLoss,
) -> EncodeError:
    bad = np.flatnonzero(~_is_finite(encoded))
    sources = [source for source, mask in spoilt.items() if mask[bad[0]]]
    if loss.num_inf and not sources:
        return EncodeError(
            f"the cast to {encoded.dtype} made {loss.num_inf} latent numbers infinite",
            array=name,
            sample=int(samples[bad[0]]),
            expected=f"values within {largest(encoded.dtype):.6g}",
            found=f"{loss.low:.6g} to {loss.high:.6g}",
            hint=f"cache.dtype={holding(loss.low, loss.high)} holds them, of a run "
            "training.latent_cache_dtype",
        )
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
