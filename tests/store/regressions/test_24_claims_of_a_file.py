"""Point 24: what a small file claims takes no memory that its own size doesn't account for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups_store.writing.plan import plan_of


@pytest.mark.parametrize("num_samples", [2**24 + 1, 3_000_000_000, 2**53 - 1])
def test_samples_without_bytes_take_no_memory(num_samples: int) -> None:
    """A file that claims them is `refused` in the conformance corpus; here none is made."""
    with pytest.raises(ups_store.SpecError, match="at most 16777216 where no array has bytes"):
        plan_of({"a": ups_store.ArraySpec((num_samples, 0), "int8")}, identity={})


_OPEN = """
import sys, ups_store

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

ups_store.open(sys.argv[2]).close()  # loads what is needed, and leaves room that one document took
before = resident()
store = ups_store.open(sys.argv[1])
print(resident() - before)
"""


def test_long_attributes_take_the_memory_of_one_document_at_opening(tmp_path: Path) -> None:
    num, count = 32, 1 << 14
    spec = ups_store.ArraySpec((1,), "int8", attrs={"a": [[]] * count})
    paths = [tmp_path / "many.zarr.zip", tmp_path / "one.zarr.zip"]
    for path, repeated in zip(paths, (num, 1), strict=True):
        specs = {f"u{i}": spec for i in range(repeated)}
        with ups_store.create(path, specs, identity={}) as writer:
            writer.commit_many([0], {name: np.ones(1, "i1") for name in specs})
            writer.finish()
    with ups_store.open(paths[1]) as store:
        assert store.arrays["u0"].attrs == spec.attrs
    command = [sys.executable, "-c", _OPEN, *map(str, paths)]
    grown = 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    objects = 64 * count  # of the lists of one document, whose text has 3 bytes for each
    assert grown < num / 2 * objects


def test_long_attributes_are_what_was_written(tmp_path: Path) -> None:
    attrs = {"names": [f"channel {i}" for i in range(1000)], "units": "m"}
    path = tmp_path / "a.zarr.zip"
    specs = {
        "fixed": ups_store.ArraySpec((2, 3), "float32", attrs=attrs),
        "rows": ups_store.ArraySpec((2, None), "int8", lengths=[1, 2], attrs=attrs),
    }
    with ups_store.create(path, specs, identity={}) as writer:
        rows = [np.ones(1, "i1"), np.ones(2, "i1")]
        writer.commit_many([0, 1], {"fixed": np.ones((2, 3), "f4"), "rows": rows})
        writer.finish()
    with ups_store.open(path) as store:
        assert store.verify().ok
        for name in specs:
            assert dict(store.arrays[name].attrs or {}) == attrs
    copy = tmp_path / "b.zarr.zip"
    ups_store.write(copy, ups_store.open(path))
