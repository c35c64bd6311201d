"""What readers refuse for being beyond a limit a writer doesn't write (spec 4.5, 8.1, 9.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store.errors import FormatError, SpecError

LONG = {"note": "m" * (14 << 20)}
REFUSED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "dimension with a line feed": ("4.5", lambda: arrays((3, 2), dims=("sample", "x\n"))),
    "dimension with U+0085": ("4.5", lambda: arrays((3, 2), dims=("sample", "x\x85"))),
    "dimension of 257 bytes": ("4.5", lambda: arrays((3, 2), dims=("sample", "x" + "\u00fc" * 128))),
    "dimension without a name": ("4.5", lambda: arrays((3, 2), dims=("sample", ""))),
    "2^24 + 1 samples without bytes": ("9.1", lambda: arrays(((1 << 24) + 1, 0))),
    "64 MiB of documents": ("9.1", lambda: {"arrays": {f"u{i}": spec((1,), attrs=LONG) for i in range(5)}}),
    "16 MiB of attributes": ("9.1", lambda: {"arrays": {}, "attrs": {"note": "m" * (16 << 20)}}),
    "partition of 100000": ("8.1", lambda: {"arrays": {}, "partition": (99_999, 100_000)}),
}


def spec(shape: tuple[int, ...], **options: Any) -> ups_store.ArraySpec:
    return ups_store.ArraySpec(shape, "int8", **options)


def arrays(shape: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {"arrays": {"u": spec(shape, **options)}}


@pytest.mark.parametrize("name", REFUSED)
def test_create_refuses_what_open_would(name: str, tmp_path: Path) -> None:
    clause, arguments = REFUSED[name]
    with pytest.raises(SpecError) as caught:
        ups_store.create(tmp_path / "a.zarr.zip", **arguments(), identity={})
    assert caught.value.clause == clause
    assert len(str(caught.value)) < 1000
    assert list(tmp_path.iterdir()) == []


def test_limits_themselves_are_written_and_read(tmp_path: Path) -> None:
    specs = {"u": spec((2, 1), dims=("sample", "\u00fc" * 128))}
    with ups_store.create(tmp_path / "a.zarr.zip", specs, identity={}, partition=(99_998, 99_999)) as writer:
        writer.commit_many([0, 1], {"u": np.zeros((2, 1), np.int8)})
        path = writer.finish()
    with ups_store.open(path) as store:
        assert store.partition == (99_998, 99_999)
        assert store.arrays["u"].dims == ("sample", "\u00fc" * 128)


def test_many_samples_without_bytes_are_bounded_by_those_that_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^24 bounds N only where nothing else does: a byte for each sample is in the file."""
    monkeypatch.setattr("ups_store.format.metadata.MAX_EMPTY_SAMPLES", 100)
    specs = {"empty": spec((101, 0)), "flag": spec((101,))}
    with ups_store.create(tmp_path / "a.zarr.zip", specs, identity={}) as writer:
        assert writer.num_samples == 101
    with pytest.raises(SpecError):
        ups_store.create(tmp_path / "b.zarr.zip", {"empty": specs["empty"]}, identity={})


def test_documents_are_read_up_to_64_mib_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr.zip"
    with ups_store.create(path, {}, constants={"x": np.zeros(1), "y": np.zeros(1)}, identity={}) as writer:
        writer.finish()
    raw = path.read_bytes()
    end = raw.index(b"PK\3\4", raw.index(b"y/zarr.json") + 11)
    monkeypatch.setattr("ups_store.read.catalog.MAX_METADATA_BYTES", end)
    ups_store.open(path).close()
    monkeypatch.setattr("ups_store.read.catalog.MAX_METADATA_BYTES", end - 1)
    with pytest.raises(FormatError) as caught:
        ups_store.open(path)
    assert (caught.value.clause, caught.value.kind) == ("9.1", "limits")
