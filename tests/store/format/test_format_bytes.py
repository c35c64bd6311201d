"""The bytes of a store, clause by clause of `docs/format/spec.md`: `zipfile`, `struct` and `json` only.

`spec_reader` is what a newcomer writes from the spec; nothing of the package's reading side is used here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import socket
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spec_reader
from small_stores import build
from spec_reader import ITEM_BYTES, Entries, align, crc32c, read_entries, read_store

import ups_store
from ups_store import ArraySpec
from ups_store.format.metadata import dtype_of
from ups_store.system import files

N = 3
SPEC = Path(__file__).parents[3] / "docs" / "format" / "spec.md"
HEXDUMP = Path(__file__).parents[3] / "tools" / "make_hexdump.py"

Document = dict[str, Any]


# --- the store ----------------------------------------------------------------------------------------


def values() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "fields": rng.standard_normal((N, 5, 8, 32)).astype(np.float32),
        "mask": rng.random((N, 4)) < 0.5,
        "none": np.zeros((N, 0), np.int16),
        "nu": rng.random(N),
        "raw": rng.integers(0, 256, (N, 4096), np.uint8),
    }


def constants() -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.linspace(0, 1, 32), "length": np.array(2.5, np.float32), "gone": np.zeros((2, 0))}


DIMS = {"fields": ("sample", "time", "y", "x"), "nu": ("sample",)}
ATTRS = {"nu": {"units": "m2 s-1"}}
LARGE, SMALL = ["fields", "raw"], ["mask", "nu"]
NAMES = ["fields", "gone", "length", "mask", "none", "nu", "raw", "x"]
IDENTITY = {"task": "burgers1d", "ν": 0.01, "files": ["a.hdf5"]}


def begin(path: Path, **options: Any) -> ups_store.StoreWriter:
    arrays = {
        name: ArraySpec(v.shape, v.dtype, dims=DIMS.get(name), attrs=ATTRS.get(name))
        for name, v in values().items()
    }
    return ups_store.create(
        path, arrays, constants=constants(), identity=IDENTITY, attrs={"title": "Bürgers"}, **options
    )


def write_store(path: Path, order: list[int], **options: Any) -> Path:
    with begin(path, **options) as writer:
        for i in order:
            writer.commit(i, {name: value[i] for name, value in values().items()})
        return writer.finish()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("bytes") / "burgers1d_train.zarr.zip", [0, 1, 2])


@pytest.fixture(scope="module")
def raw(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture(scope="module")
def entries(raw: bytes) -> Entries:
    return read_entries(raw)


@pytest.fixture(scope="module")
def infos(path: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return archive.infolist()


def document_of(raw: bytes, name: str) -> Document:
    _, at, size = read_entries(raw)[name]
    document: Document = json.loads(raw[at : at + size])
    return document


def text_of(document: Document) -> bytes:
    """RFC 8785 for documents without unusual numbers or keys."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# --- 1, 2: the file -----------------------------------------------------------------------------------


def test_crc32c_of_the_reader_gives_published_values() -> None:
    """Spec 1.3; RFC 3720, B.4."""
    assert (crc32c(bytes(32)), crc32c(b"\xff" * 32)) == (0x8A9136AA, 0x62A8AB43)


def test_reader_from_the_spec_imports_nothing_of_ours() -> None:
    source = Path(spec_reader.__file__).read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported == {"__future__", "json", "math", "pathlib", "struct", "typing", "zlib"}


def test_reader_from_the_spec_reads_every_array(path: Path) -> None:
    """Spec 7.2 and section 5: a few lines without this package give the same bits."""
    expected = {name: value.tobytes() for name, value in {**values(), **constants()}.items()}
    assert read_store(path) == expected


def test_file_begins_with_the_first_entry_and_ends_with_the_comment(raw: bytes) -> None:
    """Spec 2.1."""
    assert raw.startswith(b"PK\3\4")
    assert raw.endswith(b"ups_store: a Zarr v3 hierarchy")


def test_entries_are_in_order_without_gaps(raw: bytes, entries: Entries) -> None:
    """Spec 2.2."""
    keys = {"fields": "c/0/0/0/0", "length": "c", "mask": "c/0/0", "nu": "c/0", "raw": "c/0/0", "x": "c/0"}
    expected = ["zarr.json", *(f"{name}/zarr.json" for name in NAMES)]
    expected += [f"{name}/{keys[name]}" for name in NAMES if name in keys]
    assert list(entries) == expected
    ends = [data + size for _, data, size in entries.values()]
    assert [header for header, _, _ in entries.values()] == [0, *ends[:-1]]
    assert struct.unpack_from("<Q", raw, raw.rindex(b"PK\5\6") - 76 + 48)[0] == ends[-1]


def test_same_arguments_give_the_same_bytes(raw: bytes, tmp_path: Path) -> None:
    """Spec 2.3: at another place, in another order, lazily."""
    other = write_store(tmp_path / "elsewhere.zarr.zip", [2, 0, 1], durability="lazy")
    assert other.read_bytes() == raw


def test_file_holds_no_path_and_no_host(raw: bytes, path: Path) -> None:
    """Spec 2.3."""
    host = socket.gethostname()
    assert str(path.parent).encode() not in raw
    assert path.name.encode() not in raw
    assert len(host) < 4 or host.encode() not in raw


# --- 3: ZIP -------------------------------------------------------------------------------------------


def test_archive_is_stored_plain_and_sound(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    """Spec 3.1."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
    assert {info.flag_bits for info in infos} == {1 << 11}
    assert {info.comment for info in infos} == {b""}
    assert all(info.filename.isascii() and not info.is_dir() for info in infos)
    assert len({info.filename for info in infos}) == len(infos)


def test_crc_of_header_and_record_is_that_of_the_data(
    raw: bytes, entries: Entries, infos: list[zipfile.ZipInfo]
) -> None:
    """Spec 3.2."""
    for info in infos:
        header, data, size = entries[info.filename]
        crc = zlib.crc32(raw[data : data + size])
        assert crc == info.CRC
        assert struct.unpack_from("<I", raw, header + 14)[0] == crc


def test_local_headers_have_the_bytes_of_the_table(raw: bytes, entries: Entries) -> None:
    """Spec 3.3."""
    for name, (header, data, size) in entries.items():
        n, crc = len(name), zlib.crc32(raw[data : data + size])
        num_padding = data - header - 50 - n
        fixed = struct.pack(
            "<4s5H3I2H",
            b"PK\3\4", 45, 2048, 0, 0, 33, crc, 2**32 - 1, 2**32 - 1, n, 20 + num_padding,
        )  # fmt: skip
        zip64 = struct.pack("<2H2Q", 1, 16, size, size)
        assert raw[header : header + 50 + n] == fixed + name.encode() + zip64


def test_padding_aligns_the_data_of_arrays(raw: bytes, entries: Entries) -> None:
    """Spec 3.4."""
    for name, (header, data, _) in entries.items():
        padding = raw[header + 50 + len(name) : data]
        if name.endswith("zarr.json"):
            assert padding == b""
            continue
        z = len(padding) - 6
        assert padding == struct.pack("<3H", 0xD935, 2 + z, 4096) + bytes(z)
        assert (data % 4096, z < 4096) == (0, True)


def test_central_records_have_the_bytes_of_the_table(raw: bytes, entries: Entries) -> None:
    """Spec 3.5."""
    at = list(entries.values())[-1][1] + list(entries.values())[-1][2]
    for name, (header, data, size) in entries.items():
        n, crc = len(name), zlib.crc32(raw[data : data + size])
        fixed = struct.pack(
            "<4s6H3I5H2I",
            b"PK\1\2", 813, 45, 2048, 0, 0, 33, crc, 2**32 - 1, 2**32 - 1,
            n, 28, 0, 0, 0, 0o100644 << 16, 2**32 - 1,
        )  # fmt: skip
        record = fixed + name.encode() + struct.pack("<2H3Q", 1, 24, size, size, header)
        assert len(record) == 74 + n
        assert raw[at : at + len(record)] == record
        at += len(record)
    assert raw[at : at + 4] == b"PK\6\6"


def test_end_records_have_the_bytes_of_the_table(raw: bytes, entries: Entries) -> None:
    """Spec 3.6."""
    last = list(entries.values())[-1]
    comment, directory = b"ups_store: a Zarr v3 hierarchy", last[1] + last[2]
    end64 = len(raw) - 128
    num, nbytes = len(entries), end64 - directory
    assert raw[end64:] == (
        struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 813, 45, 0, 0, num, num, nbytes, directory)
        + struct.pack("<4sIQI", b"PK\6\7", 0, end64, 1)
        + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[2**32 - 1] * 2, len(comment))
        + comment
    )


# --- 4: metadata --------------------------------------------------------------------------------------


def test_documents_are_canonical_json_without_consolidated_metadata(raw: bytes, entries: Entries) -> None:
    """Spec 4.1."""
    for name, (_, at, size) in entries.items():
        if name.endswith("zarr.json"):
            text = raw[at : at + size]
            assert text == text_of(json.loads(text))
            assert "consolidated_metadata" not in json.loads(text)
    assert all(name.count("/") == 1 for name in entries if name.endswith("/zarr.json"))


@pytest.mark.parametrize("name", ["", ".u", "-u", "__u", "zarr.json", "a/b", "ü", "x" * 129])
def test_create_refuses_other_names(name: str, tmp_path: Path) -> None:
    """Spec 4.2."""
    with pytest.raises(ups_store.SpecError):
        ups_store.create(tmp_path / "a.zarr.zip", {name: ArraySpec((1,), "int8")}, identity={})
    assert list(tmp_path.iterdir()) == []


def test_root_document_has_these_keys_and_nothing_behind_it(raw: bytes, entries: Entries) -> None:
    """Spec 4.3."""
    _, at, size = entries["zarr.json"]
    document = document_of(raw, "zarr.json")
    assert document.keys() == {"zarr_format", "node_type", "attributes"}
    assert (document["zarr_format"], document["node_type"]) == (3, "group")
    assert document["attributes"].keys() == {"title", "ups_store"}
    ours = document["attributes"]["ups_store"]
    assert ours.keys() == {"format_version", "config_hash", "identity", "requires"}
    assert ours["requires"] == []
    assert raw[at : at + size] == text_of(document)


def bytes_codec(dtype: str) -> Document:
    order = {"configuration": {"endian": "little"}} if ITEM_BYTES[dtype] > 1 else {}
    return {"name": "bytes", **order}


@pytest.mark.parametrize("name", NAMES)
def test_array_documents_have_these_values_and_no_others(name: str, raw: bytes) -> None:
    """Spec 4.4."""
    value = {**values(), **constants()}[name]
    dtype, shape = value.dtype.name, list(value.shape)
    chunk_shape = [max(1, n) for n in shape]
    codecs: list[Document] = [bytes_codec(dtype), {"name": "crc32c"}]
    if name in LARGE:
        sharding = {
            "chunk_shape": [1, *chunk_shape[1:]],
            "codecs": codecs,
            "index_codecs": [bytes_codec("uint64"), {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    document = document_of(raw, f"{name}/zarr.json")
    assert len(document.pop("dimension_names")) == len(shape)
    assert document == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if dtype == "bool" else 0,
        "codecs": codecs,
        "attributes": ATTRS.get(name, {}),
    }


def test_sample_is_the_first_dimension_of_arrays_and_of_no_constant(raw: bytes) -> None:
    """Spec 4.5; a dimension has one length in the whole store."""
    lengths: dict[str, int] = {}
    for name in NAMES:
        document = document_of(raw, f"{name}/zarr.json")
        dims = document["dimension_names"]
        assert (dims[:1] == ["sample"]) == (name in values())
        assert "sample" not in dims[1:]
        assert len(set(dims)) == len(dims)
        for dim, length in zip(dims, document["shape"], strict=True):
            assert lengths.setdefault(dim, length) == length
    assert lengths["sample"] == N
    assert document_of(raw, "fields/zarr.json")["dimension_names"] == ["sample", "time", "y", "x"]
    assert document_of(raw, "x/zarr.json")["dimension_names"] == ["x"]


@pytest.mark.parametrize(
    ("arrays", "fixed", "dims"),
    [
        ({"a": ArraySpec((2,), "int8"), "b": ArraySpec((3,), "int8")}, {}, {}),
        ({"a": ArraySpec((2, 3), "int8", dims=("sample", "sample"))}, {}, {}),
        ({"a": ArraySpec((2, 3), "int8", dims=("x", "sample"))}, {}, {}),
        ({"a": ArraySpec((2, 3), "int8", dims=("sample", "x"))}, {"x": np.zeros(4)}, {}),
        ({}, {"x": np.zeros(4)}, {"x": ("sample",)}),
        ({}, {"x": np.zeros((4, 4))}, {"x": ("x", "x")}),
    ],
)
def test_create_refuses_contradicting_dimensions(arrays: Any, fixed: Any, dims: Any, tmp_path: Path) -> None:
    """Spec 4.5."""
    with pytest.raises(ups_store.SpecError):
        ups_store.create(tmp_path / "a.zarr.zip", arrays, constants=fixed, dims=dims, identity={})


def test_arrays_without_elements_have_no_data_entry(entries: Entries) -> None:
    """Spec 4.6."""
    assert {"none/zarr.json", "gone/zarr.json"} < entries.keys()
    assert not [name for name in entries if name.startswith(("none/c", "gone/c"))]


def test_booleans_are_stored_as_0_and_1(tmp_path: Path) -> None:
    """Spec 4.7: NumPy tolerates other bytes."""
    odd = np.array([[0, 1, 2, 255]], np.uint8).view(bool)
    assert read_store(build(tmp_path / "a.zarr.zip", {"b": odd})) == {"b": b"\0\1\1\1"}


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_is_stored_little_endian_bit_by_bit(dtype: str, tmp_path: Path) -> None:
    """Spec 4.7 and 5.2."""
    highest = 2 if dtype == "bool" else 256
    payload = np.random.default_rng(1).integers(0, highest, 6 * ITEM_BYTES[dtype], np.uint8)
    path = build(tmp_path / "a.zarr.zip", {"u": payload.view(dtype_of(dtype)).reshape(2, 3)})
    assert read_store(path) == {"u": payload.tobytes()}


# --- 5: data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "is_large"), [(4095, False), (4096, True), (4097, True)])
def test_array_is_a_shard_from_4096_bytes_a_sample_on(nbytes: int, is_large: bool, tmp_path: Path) -> None:
    """Spec 5.1."""
    raw = build(tmp_path / "a.zarr.zip", {"u": np.ones((1, nbytes), np.uint8)}).read_bytes()
    codec = document_of(raw, "u/zarr.json")["codecs"][0]["name"]
    assert codec == ("sharding_indexed" if is_large else "bytes")
    assert read_entries(raw)["u/c/0/0"][2] == (4160 + 16 + 4 if is_large else nbytes + 4)


def test_constants_are_plain_chunks_of_any_size(tmp_path: Path) -> None:
    """Spec 5.1."""
    raw = build(tmp_path / "a.zarr.zip", {}, constants={"x": np.zeros(5000)}).read_bytes()
    assert [codec["name"] for codec in document_of(raw, "x/zarr.json")["codecs"]] == ["bytes", "crc32c"]


@pytest.mark.parametrize("name", [*SMALL, "x", "length"])
def test_chunk_is_payload_and_its_checksum(name: str, raw: bytes, entries: Entries) -> None:
    """Spec 5.2 and 5.6."""
    value = {**values(), **constants()}[name]
    _, d, size = next(entry for key, entry in entries.items() if key.startswith(f"{name}/c"))
    payload = value.tobytes()
    assert raw[d : d + size] == payload + struct.pack("<I", crc32c(payload))


@pytest.mark.parametrize(("name", "s", "slot"), [("fields", 5120, 5184), ("raw", 4096, 4160)])
def test_slot_is_chunk_and_zeros(name: str, s: int, slot: int, raw: bytes, entries: Entries) -> None:
    """Spec 5.3 and 5.5: sample i starts at d + i S."""
    _, d, _ = next(entry for key, entry in entries.items() if key.startswith(f"{name}/c"))
    for i in range(N):
        payload = values()[name][i].tobytes()
        assert len(payload) == s
        chunk = payload + struct.pack("<I", crc32c(payload))
        assert raw[d + i * slot : d + (i + 1) * slot] == chunk.ljust(slot, b"\0")


def test_slots_are_whole_pages_from_1_mib_on(tmp_path: Path) -> None:
    """Spec 5.3."""
    s = 1 << 20
    payload = np.random.default_rng(2).integers(0, 256, (2, s), np.uint8)
    path = build(tmp_path / "a.zarr.zip", {"u": payload})
    _, d, size = read_entries(path.read_bytes())["u/c/0/0"]
    assert (d % 4096, size) == (0, 2 * (s + 4096) + 2 * 16 + 4)
    assert read_store(path) == {"u": payload.tobytes()}


@pytest.mark.parametrize(("name", "s", "slot"), [("fields", 5120, 5184), ("raw", 4096, 4160)])
def test_shard_index_follows_the_slots(name: str, s: int, slot: int, raw: bytes, entries: Entries) -> None:
    """Spec 5.4."""
    _, d, size = next(entry for key, entry in entries.items() if key.startswith(f"{name}/c"))
    assert size == N * slot + 16 * N + 4
    index = b"".join(struct.pack("<2Q", i * slot, s + 4) for i in range(N))
    assert raw[d + N * slot : d + size] == index + struct.pack("<I", crc32c(index))


# --- 6: building --------------------------------------------------------------------------------------


@pytest.fixture
def building(tmp_path: Path) -> bytes:
    """A building file with sample 1 of 3 committed, and nobody at work."""
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.commit(1, {name: value[1] for name, value in values().items()})
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr.zip.building"]
    return (tmp_path / "a.zarr.zip.building").read_bytes()


def test_building_file_has_the_finished_layout_and_the_tail(
    building: bytes, raw: bytes, entries: Entries
) -> None:
    """Spec 6.1: what finishing writes is still zero, and so are samples that are not committed."""
    t, num_arrays = align(len(raw), 4096), len(values())
    assert len(building) == align(t + 4096 + N * 4 * (num_arrays + 2), 4096)
    last = list(entries.values())[-1]
    assert not any(building[last[1] + last[2] : t])
    for name, (header, data, size) in entries.items():
        array = name.split("/")[0]
        if name.endswith("zarr.json"):
            assert building[header : data + size] == raw[header : data + size]
            continue
        assert not any(building[header:data])
        if array in constants():
            assert building[data : data + size] == raw[data : data + size]
            continue
        stride = {"fields": 5184, "raw": 4160, "nu": 8, "mask": 4}[array]
        committed = raw[data + stride : data + 2 * stride]
        assert building[data : data + size] == (bytes(stride) + committed).ljust(size, b"\0")


@pytest.mark.parametrize(("durability", "flags"), [("durable", 0), ("lazy", 1)])
def test_tail_header_has_the_bytes_of_the_table(
    durability: str, flags: int, raw: bytes, tmp_path: Path
) -> None:
    """Spec 6.2."""
    begin(tmp_path / "a.zarr.zip", durability=durability).close()
    t = align(len(raw), 4096)
    header = (tmp_path / "a.zarr.zip.building").read_bytes()[t : t + 128]
    assert header[:8] == b"UPSBUILD"
    assert struct.unpack_from("<2HI", header, 8) == (1, flags, len(values()))
    assert header[16:32] != bytes(16)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    assert header[32:48].hex() == boot_id
    assert struct.unpack_from("<2Q", header, 48) == (N, len(raw))
    assert header[64:124] == bytes(60)
    assert struct.unpack_from("<I", header, 124)[0] == crc32c(header[:124])


def test_build_ids_of_two_builds_differ(tmp_path: Path, raw: bytes) -> None:
    """Spec 6.2: so a record of an earlier build at the same place doesn't check."""
    t = align(len(raw), 4096)
    found = set()
    for name in ("a.zarr.zip", "b.zarr.zip"):
        begin(tmp_path / name).close()
        found.add((tmp_path / f"{name}.building").read_bytes()[t + 16 : t + 32])
    assert len(found) == 2


def test_owner_is_noted_behind_the_header(tmp_path: Path, raw: bytes) -> None:
    """Spec 6.3."""
    begin(tmp_path / "a.zarr.zip").close()
    at, host = align(len(raw), 4096) + 2048, socket.gethostname().encode()
    owner = (tmp_path / "a.zarr.zip.building").read_bytes()[at : at + 256]
    assert owner == (struct.pack("<QI", os.getpid(), len(host)) + host).ljust(256, b"\0")


def test_commit_record_has_the_bytes_of_the_table(building: bytes, raw: bytes) -> None:
    """Spec 6.4."""
    t, nbytes = align(len(raw), 4096), 4 * (len(values()) + 2)
    crcs = []
    for name in sorted(values()):
        payload = values()[name][1].tobytes()
        slot = {"fields": 5184, "raw": 4160}.get(name)
        chunk = payload + struct.pack("<I", crc32c(payload))
        crcs.append(zlib.crc32(chunk.ljust(slot, b"\0") if slot else payload))
    body = b"CMIT" + struct.pack(f"<{len(crcs)}I", *crcs)
    seal = crc32c(building[t + 16 : t + 32] + struct.pack("<Q", 1) + body)
    table = building[t + 4096 :]
    assert table[: 3 * nbytes] == bytes(nbytes) + body + struct.pack("<I", seal) + bytes(nbytes)
    assert not any(table[3 * nbytes :])


def test_finishing_cuts_the_tail_and_renames(tmp_path: Path, raw: bytes) -> None:
    """Spec 6.8: nothing but the finished file is left."""
    path = write_store(tmp_path / "a.zarr.zip", [1, 0, 2])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr.zip"]
    assert path.read_bytes() == raw


# --- 7 to 12 ------------------------------------------------------------------------------------------


def test_opening_reads_as_many_bytes_whatever_the_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec 7.1."""
    read_at, nbytes_read = files.read_at, []

    def counting(fd: int, offset: int, nbytes: int) -> bytes:
        nbytes_read.append(nbytes)
        return read_at(fd, offset, nbytes)

    paths = [build(tmp_path / f"{n}.zarr.zip", {"u": np.ones((n, 4), np.float32)}) for n in (1000, 9000)]
    monkeypatch.setattr(files, "read_at", counting)
    for path in paths:
        ups_store.open(path).close()
    half = len(nbytes_read) // 2
    assert nbytes_read[:half] == nbytes_read[half:]
    assert sum(nbytes_read[:half]) < 16_000


def test_identity_document_says_what_the_content_was_made_from(raw: bytes) -> None:
    """Spec 8.1."""
    identity = document_of(raw, "zarr.json")["attributes"]["ups_store"]["identity"]
    documents = {name: document_of(raw, f"{name}/zarr.json") for name in NAMES}
    assert identity == {
        "arrays": {
            name: {
                "shape": d["shape"][1:] if d["dimension_names"][:1] == ["sample"] else d["shape"],
                "dtype": d["data_type"],
                "dims": d["dimension_names"],
            }
            for name, d in documents.items()
        },
        "constants": {name: hashlib.sha256(v.tobytes()).hexdigest() for name, v in constants().items()},
        "content": IDENTITY,
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 << 53, b"bytes", {1: 2}])
def test_create_refuses_an_identity_without_canonical_form(value: Any, tmp_path: Path) -> None:
    """Spec 8.2."""
    with pytest.raises(ups_store.SpecError, match=r"identity\.content\.a"):
        ups_store.create(tmp_path / "a.zarr.zip", {}, identity={"a": value})


def test_config_hash_is_sha256_of_the_canonical_identity(raw: bytes) -> None:
    """Spec 8.3."""
    ours = document_of(raw, "zarr.json")["attributes"]["ups_store"]
    assert ours["config_hash"] == hashlib.sha256(text_of(ours["identity"])).hexdigest()


def test_attributes_are_not_part_of_the_identity(tmp_path: Path) -> None:
    """Spec 8.1 and 8.4."""
    hashes = set()
    for attrs in ({}, {"title": "other"}):
        spec = ArraySpec((0,), "int8", attrs=attrs)
        with ups_store.create(tmp_path / "a.zarr.zip", {"u": spec}, identity={}, attrs=attrs) as writer:
            root = document_of(writer.finish().read_bytes(), "zarr.json")
        hashes.add(root["attributes"]["ups_store"]["config_hash"])
    assert len(hashes) == 1


def test_large_numbers_of_the_identity_survive_the_file(tmp_path: Path) -> None:
    """Spec 8.2: RFC 8785 writes doubles below 1e21 as integers, which must be read as doubles."""
    content = {"n": 1e20, "m": -9756481173063566.0, "k": 2**53 - 1, "e": 1e300}
    with ups_store.create(tmp_path / "a.zarr.zip", {}, identity=content, attrs=content) as writer:
        path = writer.finish()
    with ups_store.open(path) as store:
        assert store.identity == store.attrs == content
        assert store.verify().ok


@pytest.mark.parametrize(
    "shape", [(1,) * 33, (1 << 60,), (1 << 30, 1 << 30), (0, 1 << 30, 1 << 30), (-1,), ()]
)
def test_create_refuses_shapes_beyond_the_limits(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Spec 9.1."""
    with pytest.raises(ups_store.SpecError):
        ups_store.create(tmp_path / "a.zarr.zip", {"u": ArraySpec(shape, "int8")}, identity={})


def test_create_refuses_too_many_arrays_and_too_long_documents(tmp_path: Path) -> None:
    """Spec 9.1."""
    arrays = {f"a{i}": ArraySpec((0,), "int8") for i in range(4097)}
    with pytest.raises(ups_store.SpecError, match="4096"):
        ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={})
    with pytest.raises(ups_store.SpecError, match="too long"):
        ups_store.create(tmp_path / "a.zarr.zip", {}, identity={"a": "x" * (16 << 20)})


def test_format_version_is_1_0(raw: bytes) -> None:
    """Spec 10.1."""
    assert document_of(raw, "zarr.json")["attributes"]["ups_store"]["format_version"] == "1.0"
    assert ups_store.FORMAT_VERSION == (1, 0)


def smallest_store(folder: Path) -> Path:
    return build(folder / "smallest.zarr.zip", {"u": np.array([7], np.int8)}, identity={})


def test_hex_dump_of_the_spec_is_the_smallest_store(tmp_path: Path) -> None:
    """Spec 12: the bytes that the page shows, a star for repeated rows of zeros."""
    raw = smallest_store(tmp_path).read_bytes()
    shown = bytearray(len(raw))
    for line in SPEC.read_text().split("<!-- hexdump -->")[1].split("<!-- /hexdump -->")[0].splitlines():
        if row := re.match(r"([0-9a-f]{6})  ((?:[0-9a-f]{2} ?){1,16})(?: |$)", line):
            data = bytes.fromhex(row[2])
            shown[int(row[1], 16) : int(row[1], 16) + len(data)] = data
    assert bytes(shown) == raw
    assert read_store(tmp_path / "smallest.zarr.zip") == {"u": b"\7"}


def test_page_of_the_spec_is_what_the_script_prints(tmp_path: Path) -> None:
    """Spec 12."""
    spec = importlib.util.spec_from_file_location("make_hexdump", HEXDUMP)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["make_hexdump"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert f"```\n{module.dump(smallest_store(tmp_path))}\n```\n" in SPEC.read_text()
