"""The encoder protocol: what a build asks of whoever turns fields into latents.

This package brings no encoder. One is named as `module:callable`, or by an entry point of the group
`ups_store.encoders`; the callable gets the checkpoint's path and the options of the build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ups_store.errors import ConfigError
from ups_store.format.array_spec import ArraySpec
from ups_store.format.metadata import dtype_of

ENTRY_POINTS = "ups_store.encoders"

Arrays = Mapping[str, npt.NDArray[Any]]


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

        The bytes of a sample depend on it and its number in the store, never on what lies beside it.

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


def expect_size(encoder: Encoder, *, dim: int | None, tokens: int | None, checkpoint: Path) -> None:
    """Fail if a configuration names another size than the encoder has.

    Raises:
        ConfigError: Names both.
    """
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
    """Fail if an encoder returned something else than it announced.

    Raises:
        ConfigError: Names the array, what was announced and what came.
    """
    for name, spec in specs.items():
        found = arrays.get(name)
        expected = f"{dtype_of(spec.dtype)} {(num, *spec.shape[1:])}"
        shown = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else type(found).__name__
        if shown != expected:
            raise ConfigError(f"the encoder's output {name!r}", expected=expected, found=shown)
