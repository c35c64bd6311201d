"""The encode loop: a sample's latents depend on nothing but the sample and its place in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from burgers_encoder import T, X, make_checkpoint

from ups.trained.encode_loop import BatchEncoder, MicroBatches, make_encoder
from ups_store import ArraySpec
from ups_store.building.encode import Encoder, load_encoder

N = 7
FIELDS = ArraySpec((N, T, X, 1), "float32", dims=("sample", "time", "x", "channel"))
NU = ArraySpec((N,), "float64", dims=("sample",))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def batch() -> dict[str, npt.NDArray[Any]]:
    random = np.random.default_rng(0)
    fields = random.standard_normal((N, T, X, 1)).astype(np.float32)
    return {"fields": fields, "nu": random.uniform(0.001, 0.01, N)}


def encode(
    encoder: BatchEncoder, batch: dict[str, npt.NDArray[Any]], samples: list[int]
) -> dict[str, npt.NDArray[Any]]:
    rows = np.array(samples)
    return encoder.encode({name: values[rows] for name, values in batch.items()}, samples=rows)


def splits() -> Iterator[list[list[int]]]:
    yield [list(range(N))]
    yield [[sample] for sample in range(N)]
    yield [[0, 1, 2], [3, 4], [5, 6]]
    yield [[6, 2, 4], [0], [5, 1, 3]]


@pytest.mark.parametrize("micro_batch", [2, 10])
def test_latents_are_the_same_bytes_however_the_samples_are_batched(
    checkpoint: Path, batch: dict[str, npt.NDArray[Any]], micro_batch: int
) -> None:
    encoder = make_encoder(checkpoint, task="burgers1d", micro_batch=micro_batch)
    found = []
    for split in splits():
        out = np.empty((N, T, 4, 4), np.float32)
        for samples in split:
            out[samples] = encode(encoder, batch, samples)["latent"]
        found.append(out.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("micro_batch", [2, 256])
def test_latents_are_those_of_the_model(
    checkpoint: Path, batch: dict[str, npt.NDArray[Any]], micro_batch: int
) -> None:
    encoder = make_encoder(checkpoint, task="burgers1d", latent_dtype="float32", micro_batch=micro_batch)
    encoded = encode(encoder, batch, list(range(N)))
    np.testing.assert_array_equal(encoded["nu"], batch["nu"])
    expected = encoder.encoder.encode(batch)["latent"]
    np.testing.assert_allclose(encoded["latent"], expected, rtol=1e-4, atol=1e-5)


def test_a_constant_field_is_encoded_beside_the_solution(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, channels=(("fields", 1), ("coefficient", 1)))
    encoder = make_encoder(path, task="burgers1d", micro_batch=4)
    specs = encoder.output_spec(
        {"fields": ArraySpec((N, 1, X, 1), "float32"), "coefficient": ArraySpec((N, X), "float32"), "nu": NU}
    )
    assert {name: tuple(spec.shape) for name, spec in specs.items()} == {
        "latent": (N, 1, 4, 4),
        "latent_input": (N, 4, 4),
        "nu": (N,),
    }
    random = np.random.default_rng(0)
    batch = {
        "fields": random.random((N, 1, X, 1), np.float32),
        "coefficient": random.random((N, X), np.float32),
        "nu": np.ones(N),
    }
    whole = encode(encoder, batch, list(range(N)))
    assert whole["latent_input"].shape == (N, 4, 4)
    alone = encode(encoder, batch, [3])
    np.testing.assert_array_equal(alone["latent_input"][0], whole["latent_input"][3])


@pytest.mark.parametrize(
    ("num_frames", "largest", "expected"),
    [
        (5, 256, (51, 1, 5)),
        (41, 256, (6, 1, 41)),
        (201, 64, (1, 4, 51)),
        (1, 8, (8, 1, 1)),
        (8, 8, (1, 1, 8)),
    ],
)
def test_micro_batches_hold_whole_samples_or_equal_pieces(
    num_frames: int, largest: int, expected: tuple[int, int, int]
) -> None:
    cut = MicroBatches(num_frames, largest=largest)
    assert (cut.num_samples, cut.num_pieces, cut.piece) == expected
    frames = [frame for piece in cut.pieces() for frame in range(piece.start, piece.stop)]
    assert frames == list(range(num_frames))


def test_identity_holds_weights_micro_batch_and_dtypes_and_no_path(checkpoint: Path, tmp_path: Path) -> None:
    def identity(path: Path, **options: Any) -> dict[str, Any]:
        return make_encoder(path, task="burgers1d", **options).identity()

    plain = identity(checkpoint)
    copy = tmp_path / "other name.safetensors"
    copy.write_bytes(checkpoint.read_bytes())
    assert identity(copy, device="cuda") == plain
    for options in ({"micro_batch": 7}, {"latent_dtype": "float32"}, {"compute_dtype": "bfloat16"}):
        assert identity(checkpoint, **options) != plain


def test_make_encoder_is_found_by_its_name(checkpoint: Path) -> None:
    encoder = load_encoder("ups.trained.encode_loop:make_encoder", checkpoint, task="burgers1d")
    assert isinstance(encoder, Encoder)
    assert tuple(encoder.output_spec({"fields": FIELDS, "nu": NU})["latent"].shape) == (N, T, 4, 4)


def test_latents_that_do_not_compress_are_told(tmp_path: Path, notes: list[str]) -> None:
    encoder = make_encoder(make_checkpoint(tmp_path, latent_dim=8), task="burgers1d")
    encoder.output_spec({"fields": FIELDS, "nu": NU})
    assert len(notes) == 1
    assert "1.00x compression" in notes[0]
