"""The documents and the geometry of ragged arrays: literal bytes, and what opening refuses (spec 14)."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups_store import ArraySpec
from ups_store.errors import FormatError
from ups_store.format.checksum import crc32, crc32_before, crc32c
from ups_store.format.metadata import ArrayMeta, parse_array
from ups_store.format.ragged import RowGeometry

ROWS = ArrayMeta("points", (6000, 3), "float32", ("point", "xyz"), {"units": "m"}, part="rows")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two samples of text: 3 bytes and none."""
    spec = ArraySpec((2, None), "uint8", dims=("sample", "byte"), lengths=[3, 0], encoding="utf-8")
    with ups_store.create(tmp_path / "a.zarr.zip", {"t": spec}, identity={}) as writer:
        writer.commit_many([0, 1], {"t": ["abc", ""]})
        return writer.finish()


@pytest.mark.parametrize(
    ("num_rows", "row_nbytes", "per_chunk", "num_chunks", "nbytes"),
    [
        (6000, 12, 5461, 2, 2 * 5461 * 12 + 2 * 16 + 4),
        (1, 1, 65536, 1, 65536 + 16 + 4),
        (3, 65536, 1, 3, 3 * 65536 + 3 * 16 + 4),
        (3, 65537, 1, 3, 3 * 65537 + 3 * 16 + 4),
        (0, 8, 8192, 0, 4),
    ],
)
def test_inner_chunks_have_about_64_kib(
    num_rows: int, row_nbytes: int, per_chunk: int, num_chunks: int, nbytes: int
) -> None:
    """Spec 14.2, 14.4: R = max(1, 65536 // r)."""
    rows = RowGeometry(num_rows, row_nbytes)
    assert (rows.rows_per_chunk, rows.num_chunks, rows.shard_nbytes) == (per_chunk, num_chunks, nbytes)
    assert len(rows.pack_trailer()) == nbytes - num_rows * row_nbytes
    assert rows.chunk_rows == max(1, num_chunks) * per_chunk


def test_document_of_rows_is_a_shard_without_inner_checksums() -> None:
    """Spec 14.2, as a literal."""
    document = json.loads(ROWS.to_json())
    assert document["shape"] == [6000, 3]
    assert document["chunk_grid"]["configuration"] == {"chunk_shape": [2 * 5461, 3]}
    assert document["codecs"] == [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [5461, 3],
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "index_codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
                "index_location": "end",
            },
        }
    ]
    assert document["dimension_names"] == ["point", "xyz"]
    assert document["attributes"] == {
        "units": "m",
        "ups_store": {"ragged": {"crc32c": "points.crc32c", "offsets": "points.offsets"}},
    }
    assert parse_array("points", ROWS.to_json(), path="x") == ROWS


def test_data_of_a_ragged_array_are_these_bytes(path: Path) -> None:
    """Spec 14.1, 14.4: rows, fill, index; offsets; checksums."""
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [
            "zarr.json",
            "t/zarr.json",
            "t.crc32c/zarr.json",
            "t.offsets/zarr.json",
            "t/c/0",
            "t.crc32c/c/0",
            "t.offsets/c/0",
        ]
        index = struct.pack("<QQ", 0, 65536)
        expected = b"abc" + bytes(65533) + index + struct.pack("<I", crc32c(index))
        assert archive.read("t/c/0") == expected
        checks = struct.pack("<II", crc32c(b"abc"), 0)
        assert archive.read("t.crc32c/c/0") == checks + struct.pack("<I", crc32c(checks))
        offsets = struct.pack("<qqq", 0, 3, 3)
        assert archive.read("t.offsets/c/0") == offsets + struct.pack("<I", crc32c(offsets))
        root = json.loads(archive.read("zarr.json"))["attributes"]["ups_store"]
    assert root["requires"] == ["ragged"]
    assert root["identity"]["arrays"] == {
        "t": {"dims": ["sample", "byte"], "dtype": "uint8", "shape": [None]}
    }
    assert root["identity"]["constants"] == {}


def test_names_like_those_of_companions_are_free_without_a_ragged_array(tmp_path: Path) -> None:
    """Spec 14.1."""
    arrays = {name: ArraySpec((1,), "int8") for name in ("u", "u.offsets", "u.crc32c")}
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit(0, dict.fromkeys(arrays, 1))
        path = writer.finish()
    with ups_store.open(path) as store:
        assert set(store.arrays) == set(arrays)


def test_wrong_offsets_of_a_file_without_rows_are_found_by_verify(tmp_path: Path) -> None:
    """Spec 14.5: with M = 0 offsets and checksums are checked all the same."""
    spec = ArraySpec((2, None), "int8", lengths=[0, 0])
    with ups_store.create(tmp_path / "a.zarr.zip", {"u": spec}, identity={}) as writer:
        writer.commit_many([0, 1], {"u": [[], []]})
        path = writer.finish()
    raw = path.read_bytes()
    for wrong, kind in ((struct.pack("<qqq", 0, 1, 0), "offsets"), (struct.pack("<qqq", 0, 0, 1), "offsets")):
        right = bytes(24) + struct.pack("<I", crc32c(bytes(24)))
        assert raw.count(right) == 1
        path.write_bytes(raw.replace(right, wrong + struct.pack("<I", crc32c(wrong))))
        with ups_store.open(path) as store:
            assert kind in {problem.kind for problem in store.verify().problems}
    checks, wrong_checks = bytes(8), struct.pack("<II", 0, 7)
    right = checks + struct.pack("<I", crc32c(checks))
    path.write_bytes(raw.replace(right, wrong_checks + struct.pack("<I", crc32c(wrong_checks))))
    with ups_store.open(path) as store:
        found = [(p.kind, p.array, p.sample) for p in store.verify().problems]
    assert ("chunk_crc", "u", 1) in found


def test_checksum_of_what_stands_before_a_suffix() -> None:
    """Spec 15.5."""
    rng = np.random.default_rng(0)
    for sizes in ((0, 0), (0, 9), (9, 0), (1, 1), (1000, 70_000)):
        a, b = (rng.integers(0, 256, size, np.uint8).tobytes() for size in sizes)
        assert crc32_before(crc32(a + b), crc32(b), len(b)) == crc32(a)


def test_changed_bytes_of_a_ragged_store_are_refused_or_found_by_verify(path: Path) -> None:
    """Spec 7.6, 14.5: some bytes that are not zero, and zeros of headers, fill and padding."""
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    zeros = rng.choice(np.flatnonzero(np.frombuffer(raw, np.uint8) == 0), 60).tolist()
    missed = []
    for at in [*np.flatnonzero(np.frombuffer(raw, np.uint8))[::37].tolist(), *zeros]:
        changed = bytearray(raw)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        try:
            with ups_store.open(path) as store:
                if store.verify(num_threads=1).ok:
                    missed.append(at)
        except FormatError:
            pass
    assert missed == []
