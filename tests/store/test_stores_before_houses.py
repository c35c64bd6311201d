"""Stores of each kind by commit e492260 are read as they were then, and interrupted writes continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from before_houses import unpack_corpus

import ups_store

CLOUD_ROWS = (3, 0, 600, 1, 40)
CLOUD_TEXTS = ("a", "", "über", "\N{SNOWMAN}", "last")
SLOTS = ("fields", "fields_blosc", "fields_pcodec", "saved", "mapped")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def values(corpus: Path) -> dict[str, Any]:
    with np.load(corpus / "stores_expected.npz") as file:
        return dict(file)


def test_every_finished_store_keeps_its_identity_and_verifies(corpus: Path) -> None:
    expected = json.loads((corpus / "expected.json").read_text())
    stores = {f"stores/{name}": hashes["config_hash"] for name, hashes in expected["stores"].items()}
    for name, config_hash in {**stores, **expected["cache"]}.items():
        with ups_store.open(corpus / name) as store:
            assert store.config_hash == config_hash, name
            assert store.verify().ok, name
    for name, hashes in expected["stores"].items():
        with ups_store.open(corpus / "stores" / name) as store:
            assert store.fingerprint == hashes["fingerprint"], name


@pytest.mark.parametrize("name", SLOTS)
def test_values_of_mapped_and_packed_stores_are_those_of_then(
    corpus: Path, values: dict[str, Any], name: str
) -> None:
    with ups_store.open(corpus / "stores" / f"{name}.zarr.zip") as store:
        batch = store.gather(range(8))
    for array in batch.keys() & values.keys():
        np.testing.assert_array_equal(batch[array], values[array])
    assert {"u", "label"} <= batch.keys()


@pytest.mark.parametrize("pattern", ["shared-*.zarr.zip", "packed-*.zarr.zip"])
def test_stores_of_several_files_open_as_one(corpus: Path, values: dict[str, Any], pattern: str) -> None:
    with ups_store.open(corpus / "stores" / pattern) as store:
        batch = store.gather(range(8))
    np.testing.assert_array_equal(batch["u"], values["u"])
    np.testing.assert_array_equal(batch["label"], values["label"])


@pytest.mark.parametrize("name", ["clouds", "generated"])
def test_ragged_arrays_and_text_are_those_of_then(corpus: Path, name: str) -> None:
    with ups_store.open(corpus / "stores" / f"{name}.zarr.zip") as store:
        assert tuple(store[i]["text"] for i in range(5)) == CLOUD_TEXTS
        assert tuple(len(store[i]["points"]) for i in range(5)) == CLOUD_ROWS


def test_bfloat16_is_read_as_torch_and_numpy_read_it_then(corpus: Path, values: dict[str, Any]) -> None:
    with ups_store.open(corpus / "stores" / "bfloat16.zarr.zip") as store:
        batch = store.gather(range(8))["b"]
    np.testing.assert_array_equal(batch.astype(np.float32), values["bfloat16"])


def test_unfinished_file_continues_where_it_stopped(corpus: Path, values: dict[str, Any]) -> None:
    path = corpus / "stores" / "stopped.zarr.zip"
    specs = {
        "u": ups_store.ArraySpec((8, 3, 40), "float32", dims=("sample", "time", "x"), attrs={"units": "m/s"}),
        "label": ups_store.ArraySpec((8,), "int16"),
        "flags": ups_store.ArraySpec((8, 5), "bool"),
    }
    with ups_store.create(
        path,
        specs,
        constants={"x": np.linspace(0, 1, 40)},
        dims={"x": ("x",)},
        identity={"kind": "corpus"},
        attrs={"note": "made before the houses"},
    ) as writer:
        missing = writer.missing()
        assert list(missing) == [3, 4, 5, 6, 7]
        writer.commit_many(missing, {name: values[name][3:] for name in specs})
        writer.finish()
    with ups_store.open(path) as store:
        np.testing.assert_array_equal(store.gather(range(8), ["u"])["u"], values["u"])


def test_set_that_has_grown_is_refused_with_what_makes_stores_of_it(
    corpus: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ups_store.SpecError, match=r"grown\.parts/KKKKK\.zarr\.zip to grown-KKKKK") as caught:
        ups_store.open(corpus / "stores" / "grown.zarr.json")
    assert caught.value.kind == "set"
    for part in sorted((corpus / "stores" / "grown.parts").glob("?????.zarr.zip")):
        part.rename(corpus / "stores" / f"grown-{part.name}")
    with ups_store.open(corpus / "stores" / "grown-*.zarr.zip") as store:
        batch = store.gather(range(8))
    np.testing.assert_array_equal(batch["u"], values["u"])
    np.testing.assert_array_equal(batch["label"], values["label"])


def test_parts_of_an_interrupted_generator_are_refused_with_what_makes_a_store_of_them(corpus: Path) -> None:
    path = corpus / "stores" / "interrupted.zarr.zip"
    with pytest.raises(ups_store.IdentityMismatchError, match=r"interrupted\.parts.*ups-store concat"):
        ups_store.write(path, iter([{"number": 1}]), identity={"kind": "interrupted"})
    parts = sorted((corpus / "stores" / "interrupted.parts").glob("?????.zarr.zip"))
    with ups_store.open(parts[0]) as store:
        assert store[7]["rows"].tolist() == [[7, 7]] * 3


def test_imported_latents_are_those_of_then(corpus: Path, values: dict[str, Any]) -> None:
    with ups_store.open(corpus / "stores" / "imported.zarr.zip") as store:
        np.testing.assert_array_equal(store.gather(range(4))["z"], values["u"][:4])
