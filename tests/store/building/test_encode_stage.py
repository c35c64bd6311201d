"""The encode stage of a build: what an encoder returns is checked before anybody stores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ups_store import ArraySpec, ConfigError
from ups_store.building.encode import EncodeError, Encoder, begin_batch, load_encoder

N, T, X = 6, 3, 8

SPECS = {"latent": ArraySpec((N, T, X // 2, 1), "float16"), "nu": ArraySpec((N,), "float64")}


class Pairs:
    """Averages neighbouring points; a test may have it spoil what it returns."""

    def __init__(self, checkpoint: Path, *, spoil: Any = None) -> None:
        self.checkpoint, self.spoil = checkpoint, spoil

    latent_shape = (X // 2, 1)

    def identity(self) -> Mapping[str, Any]:
        return {"class": "Pairs", "weights": "0" * 64}

    def output_spec(self, arrays: Mapping[str, ArraySpec]) -> Mapping[str, ArraySpec]:
        return SPECS

    def encode(
        self, batch: Mapping[str, npt.NDArray[Any]], *, samples: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        fields = batch["fields"]
        latent = fields.reshape(len(fields), T, X // 2, 2).mean(-1, keepdims=True).astype(np.float16)
        out = {"latent": latent, "nu": batch["nu"]}
        return self.spoil(out) if self.spoil else out


def encode_all(given: Any, encoder: Pairs) -> list[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
    return [
        (samples, begin_batch(arrays, encoder, samples=samples, specs=SPECS)().arrays)
        for samples, arrays in given
    ]


def batches(size: int = 2) -> list[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
    fields = np.arange(N * T * X, dtype=np.float32).reshape(N, T, X, 1)
    split = np.array_split(np.arange(N), N // size)
    return [(samples, {"fields": fields[samples], "nu": np.full(len(samples), 0.01)}) for samples in split]


def test_begin_batch_encodes_every_batch_under_its_sample_numbers() -> None:
    out = encode_all(batches(), Pairs(Path()))
    np.testing.assert_array_equal(np.concatenate([samples for samples, _ in out]), np.arange(N))
    latent = np.concatenate([arrays["latent"] for _, arrays in out])
    expected = np.arange(0.5, N * T * X, 2, dtype=np.float16).reshape(N, T, X // 2, 1)
    np.testing.assert_array_equal(latent, expected)


def test_begin_batch_copies_what_passes_through() -> None:
    samples, arrays = batches()[0]
    encoded = begin_batch(arrays, Pairs(Path()), samples=samples, specs=SPECS)().arrays
    arrays["nu"][:] = -1  # the reader fills its memory again
    assert (encoded["nu"] == 0.01).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_begin_batch_of_latents_that_are_not_finite_names_the_sample(bad: float) -> None:
    def spoil(out: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        out["latent"][1, 2, 3] = bad
        return out

    with pytest.raises(EncodeError) as caught:
        encode_all(batches(), Pairs(Path(), spoil=spoil))
    assert (caught.value.array, caught.value.sample) == ("latent", 1)


def test_float32_latents_are_cast_and_what_that_loses_is_counted() -> None:
    def widen(out: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        wide = out["latent"].astype(np.float32)
        wide[:, 0, 0] = 1e-9
        return {**out, "latent": wide}

    samples, arrays = batches()[0]
    encoded = begin_batch(arrays, Pairs(Path(), spoil=widen), samples=samples, specs=SPECS)()
    assert encoded.arrays["latent"].dtype == np.float16
    assert encoded.ranges["latent"].num_underflow == len(samples)


def test_latents_that_overflow_name_the_cast_and_a_dtype_that_holds_them() -> None:
    def widen(out: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        wide = out["latent"].astype(np.float32)
        wide[1, 2, 3] = 1e5
        return {**out, "latent": wide}

    with pytest.raises(EncodeError, match="the cast to float16 made 1 latent numbers infinite") as caught:
        encode_all(batches(), Pairs(Path(), spoil=widen))
    assert (caught.value.array, caught.value.sample) == ("latent", 1)
    assert str(caught.value.found).endswith("to 100000")
    assert "cache.dtype=float32" in str(caught.value.hint)


def test_begin_batch_of_fields_that_are_not_finite_names_the_field() -> None:
    spoilt = batches()
    spoilt[2][1]["fields"][0, 0, 0] = np.nan
    with pytest.raises(EncodeError, match="from NaN or Inf in 'fields'") as caught:
        encode_all(spoilt, Pairs(Path()))
    assert caught.value.sample == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: {"nu": out["nu"]},
        lambda out: {**out, "latent": out["latent"][:1]},
        lambda out: {**out, "latent": out["latent"].astype(np.float64)},
        lambda out: {**out, "latent": out["latent"].tolist()},
    ],
    ids=["missing", "rows", "dtype", "no array"],
)
def test_begin_batch_of_another_output_than_announced_is_refused(spoil: Any) -> None:
    with pytest.raises(ConfigError, match="output 'latent'"):
        encode_all(batches(), Pairs(Path(), spoil=spoil))


def test_load_encoder_by_module_and_name_makes_one() -> None:
    encoder = load_encoder(f"{__name__}:Pairs", Path("weights.safetensors"), spoil=None)
    assert isinstance(encoder, Encoder)
    assert encoder.checkpoint == Path("weights.safetensors")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Encoder", "can't be imported"),
        (f"{__name__}:NoSuch", "can't be imported"),
        (f"{__name__}:N", "something to call"),
        ("pathlib:Path", "an object with identity"),
        ("nobody", "no such encoder"),
    ],
)
def test_load_encoder_that_is_none_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_encoder(name, Path("weights.safetensors"))
