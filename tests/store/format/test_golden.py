"""Golden files: stores of every dtype and rank, read and compared bit by bit with their JSON twins.

`tools/make_golden.py` wrote them once; they are never written again while their format version stands.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from spec_reader import read_store

import ups_store
from ups_store.format.metadata import DTYPE_NAMES, dtype_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "v1.0"
SCRIPT = Path(__file__).parents[3] / "tools" / "make_golden.py"
NAMES = sorted(path.name.removesuffix(".zarr.zip") for path in GOLDEN.glob("*.zarr.zip"))
RANKS = ("no_samples", "one_sample", "scalar", "2d", "5d")
MAX_TOTAL_BYTES = 600_000


@pytest.fixture(scope="module")
def make_golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_golden"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def twin_of(name: str) -> dict[str, Any]:
    twin: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return twin


def payload_of(array: dict[str, Any]) -> bytes:
    """The bytes that a twin describes, checked against its digest."""
    pattern = bytes.fromhex(array["repeated_bytes"])
    nbytes = int(np.prod(array["shape"], dtype=int)) * dtype_of(array["dtype"]).itemsize
    payload = (pattern * (nbytes // max(1, len(pattern)) + 1))[:nbytes]
    assert hashlib.sha256(payload).hexdigest() == array["sha256"]
    return payload


def test_no_dtype_and_no_rank_is_forgotten() -> None:
    """Spec 4.7."""
    assert {f"{dtype}_{rank}" for dtype in DTYPE_NAMES for rank in RANKS} <= set(NAMES)
    assert {twin_of(f"{dtype}_2d")["arrays"]["u"]["dtype"] for dtype in DTYPE_NAMES} == set(DTYPE_NAMES)
    in_slots = [name.removesuffix("_slots") for name in NAMES if name.endswith("_slots")]
    assert {dtype_of(dtype).itemsize for dtype in in_slots} == {1, 2, 4, 8}
    assert "no_arrays" in NAMES


def test_golden_files_are_small_and_have_twins() -> None:
    files = list(GOLDEN.iterdir())
    assert {path.name.removesuffix(".json") for path in files if path.suffix == ".json"} == set(NAMES)
    assert sum(path.stat().st_size for path in files) < MAX_TOTAL_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_golden_file_is_read_bit_by_bit(name: str) -> None:
    """As arrays, by samples, gathered backwards, by `verify`, and by a reader made from the spec alone."""
    twin, path = twin_of(name), GOLDEN / f"{name}.zarr.zip"
    raw = path.read_bytes()
    assert twin["file"] == {"nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    payloads = {array_name: payload_of(array) for array_name, array in twin["arrays"].items()}
    assert read_store(path) == payloads
    with ups_store.open(path) as store:
        assert store.version == (1, 0)
        assert store.identity == {"golden": name}
        assert store.attrs == twin["attrs"]
        assert {*store.arrays, *store.constants} == twin["arrays"].keys()
        backwards = store.gather(np.arange(len(store))[::-1])
        for array_name, array in twin["arrays"].items():
            view = store[array_name]
            assert (list(view.shape), view.dtype) == (array["shape"], dtype_of(array["dtype"])), array_name
            assert list(store.dims[array_name]) == array["dims"], array_name
            assert view.tobytes() == payloads[array_name], array_name
            if array["dims"][:1] == ["sample"]:
                whole = np.frombuffer(payloads[array_name], view.dtype).reshape(array["shape"])
                assert backwards[array_name].tobytes() == whole[::-1].tobytes()
                for i in range(len(store)):
                    assert store.sample(i)[array_name].tobytes() == whole[i].tobytes()
        assert store.verify(num_threads=1).problems == ()


@pytest.mark.parametrize("dtype", [name for name in DTYPE_NAMES if "float" in name])
def test_golden_floats_hold_nan_payloads_and_signed_zeros(dtype: str) -> None:
    with ups_store.open(GOLDEN / f"{dtype}_one_sample.zarr.zip") as store, np.errstate(invalid="ignore"):
        values = store["u"][0]
        bits = values.view(f"u{values.itemsize}")
        assert len(np.unique(bits[np.isnan(values)])) >= 4
        assert len(np.unique(bits[np.isinf(values)])) == 2
        assert {0, 1 << (8 * values.itemsize - 1)} <= set(bits.tolist())


def test_creating_again_gives_the_same_bytes(make_golden: ModuleType, tmp_path: Path) -> None:
    """Spec 2.3: whatever wrote it, and when."""
    make_golden.write_golden(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in GOLDEN.iterdir())
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes(), path.name


def test_script_asked_for_help_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "Usage" in done.stdout


def test_every_case_of_the_script_has_its_files(make_golden: ModuleType) -> None:
    assert sorted(make_golden.cases()) == NAMES
