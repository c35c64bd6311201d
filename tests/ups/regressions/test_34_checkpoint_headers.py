"""Checkpoints whose header was changed: dtypes, documents that describe another model, or none."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ups
from tools.fuzz.inputs import ModelKind
from ups.errors import CheckpointError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A corrector with its operator on latents and their autoencoder."""
    return ModelKind(tmp_path_factory.mktemp("good")).seeds[1]


def changed(good: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None], *, digest: bool) -> bytes:
    """With another header; `change` is given header and document."""
    (length,) = struct.unpack_from("<Q", good)
    header = json.loads(good[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["ups"])
    change(header, ours["document"])
    header["__metadata__"]["ups"] = json.dumps(ours)
    if not digest:
        del header["__metadata__"]["header_sha256"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


def refused(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        ups.load(path)
    assert caught.value.path == str(path)
    return caught.value


def as_integers(header: dict[str, Any], document: dict[str, Any]) -> None:
    header["corrector.into.weight"]["dtype"] = "I32"


def test_changed_dtype_is_refused_by_the_digest_or_else_by_the_specification(
    good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "corrector.safetensors"
    assert refused(path, changed(good, as_integers, digest=True)).kind == "damaged"
    error = refused(path, changed(good, as_integers, digest=False))
    assert error.kind == "other_weights"
    assert "corrector.into.weight int32 and not float32" in str(error)


def test_file_of_before_the_digest_is_loaded(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "corrector.safetensors"
    path.write_bytes(changed(good, lambda header, document: None, digest=False))
    assert ups.load(path).spec.tasks["wave"].dt == 0.1


def test_changed_document_is_noticed_by_the_digest(good: bytes, tmp_path: Path) -> None:
    def change(header: dict[str, Any], document: dict[str, Any]) -> None:
        document["spec"]["tasks"]["wave"]["statistics"]["fields"]["std"] = [2.0]

    assert refused(tmp_path / "a.safetensors", changed(good, change, digest=True)).kind == "damaged"


DOCUMENTS: dict[str, Any] = {
    "spec.operator.depths": [1_000_000_000],
    "spec.operator.width": 65_536,
    "spec.operator.window": 1 << 40,
    "spec.operator.mixers": [],
    "spec.corrector.size.depths": [1, 1_000_000_000],
    "spec.corrector.sigma": {},
    "spec.corrector.sampling.num_steps": "many",
    "spec.tasks": {},
    "spec.tasks.wave.grid.points": [1 << 40],
    "spec.tasks.wave.grid.periodic": [],
    "spec.tasks.wave.tokens": [4, 4],
    "spec.tasks.wave.dt": float("nan"),
    "spec.tasks.wave.parameters": {"c": [0.0]},
    "spec.tasks.wave.statistics.fields.std": [],
    "spec.parameters": [],
    "spec.states": "fields",
    "spec.extra": 1,
    "autoencoder.spec.latent_dim": 1 << 40,
    "autoencoder.spec.num_tokens": 3,
    "autoencoder.spec.decoder.radius": 1 << 40,
    "autoencoder.spec.encoder.width": None,
    "autoencoder": 3,
    "config": [1],
    "gates": [{"passed": False}],
}


@pytest.mark.parametrize("key", DOCUMENTS)
def test_document_that_describes_no_model_of_the_file_is_refused_before_it_is_built(
    good: bytes, tmp_path: Path, key: str
) -> None:
    def change(header: dict[str, Any], document: dict[str, Any]) -> None:
        *sections, last = key.split(".")
        for section in sections:
            document = document[section]
        document[last] = DOCUMENTS[key]

    refused(tmp_path / "a.safetensors", changed(good, change, digest=False))
