"""`pack` and `unpack`: byte-identical both ways, readable by zarr-python, every damaged byte told."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from command_line import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import (
    MakeStore,
    StopAt,
    assert_same_bits,
    build,
    damage,
    mixed_constants,
    mixed_values,
    names_in,
    samples_of,
)
from zarr.storage import ZipStore

import ups_store
import ups_store.format.bfloat16
from tools.conformance import DAMAGED, NEWER_MINOR, write_sample_store
from tools.conformance.archive import data_offset, find_places
from ups_store.check.doctor import Status, examine
from ups_store.errors import (
    CorruptChunkError,
    DiskFullError,
    FormatError,
    IdentityMismatchError,
    MissingExtraError,
    SpecError,
    StoreError,
    VersionTooNewError,
)
from ups_store.format.checksum import crc32c
from ups_store.format.metadata import DTYPE_NAMES, dtype_of
from ups_store.packed import codecs, pack
from ups_store.packed.codecs import LEVELS, ChunkCodec, Packing
from ups_store.packed.pack import pack_store, unpack_store
from ups_store.read.open import open_store

HAS_PCODEC = importlib.util.find_spec("pcodec") is not None
CODECS = [
    "blosc",
    pytest.param("pcodec", marks=pytest.mark.skipif(not HAS_PCODEC, reason="package pcodec is missing")),
]
pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")

ATTRS = {"task": "burgers1d", "channels": ["u", "v"]}


def packed_at(path: Path, target: Path, **options: Any) -> Path:
    with ups_store.open(path) as store:
        return pack_store(store, target, **options).path


def unpacked_at(path: Path, target: Path, **options: Any) -> Path:
    with ups_store.open(path) as packed:
        return unpack_store(packed, target, **options)


# --- round trips


@pytest.mark.parametrize("codec", CODECS)
def test_unpack_gives_the_same_file(make_store: MakeStore, tmp_path: Path, codec: str) -> None:
    path = make_store(attrs=ATTRS)
    packed = packed_at(path, tmp_path / "a.packed.zarr.zip", codec=codec)
    assert unpacked_at(packed, tmp_path / "b.zarr.zip").read_bytes() == path.read_bytes()
    assert names_in(tmp_path) == ["a.packed.zarr.zip", "b.zarr.zip", path.name]


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=8)
@given(data=st.data(), dtype=st.sampled_from(DTYPE_NAMES))
def test_pack_and_unpack_keep_any_bits(codec: str, dtype: str, data: st.DataObject) -> None:
    """NaN payloads and signed zeros too; slots, plain chunks, constants, no elements, no samples."""
    num = data.draw(st.integers(0, 3), label="N")
    shape = data.draw(st.sampled_from([(), (3,), (2, 0), (4100,), (3, 1400)]), label="shape")
    level = data.draw(st.sampled_from([LEVELS[codec].start, 5]), label="level")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    kind = dtype_of(dtype)

    def bits(*shape: int) -> npt.NDArray[Any]:
        raw = rng.integers(0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
        return raw.view(kind).reshape(shape)

    values, constants = {"u": bits(num, *shape), "nu": bits(num)}, {"c": bits(*shape)}
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        path = build(where / "a", values, constants=constants, dims={})
        packed = packed_at(path, where / "p", codec=codec, level=level)
        with ups_store.open(packed) as store:
            assert store.verify().ok
            order = list(rng.permutation(num))
            assert_same_bits(store.gather(order), samples_of(values, order))
            assert_same_bits(store.constants, constants)
        assert unpacked_at(packed, where / "b").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_reads_packed_stores(make_store: MakeStore, tmp_path: Path, codec: str) -> None:
    packed = packed_at(make_store(), tmp_path / "p.zip", codec=codec)
    with ZipStore(packed, mode="r") as archive:
        group = zarr.open_group(archive, mode="r")
        found = {name: np.asarray(array[...]) for name, array in group.arrays()}
    assert_same_bits(found, mixed_values() | mixed_constants())
    with zipfile.ZipFile(packed) as file:
        assert file.testzip() is None


def test_pack_twice_gives_the_same_bytes(make_store: MakeStore, tmp_path: Path) -> None:
    """Blosc with threads of its own would write its blocks in any order."""
    path = make_store(mixed_values(16))
    first = packed_at(path, tmp_path / "a", num_threads=1).read_bytes()
    assert packed_at(path, tmp_path / "b", num_threads=4).read_bytes() == first


# --- reading


def test_packed_store_to_be_mapped_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    packed = packed_at(make_store(), tmp_path / "p")
    for refuse in (open_store, partial(ups_store.open, access="map")):
        with pytest.raises(FormatError, match="ups-store unpack") as caught:
            refuse(packed)
        assert caught.value.kind == "packed"


# --- targets, interruptions


@pytest.mark.parametrize("change", [packed_at, unpacked_at])
def test_existing_target_is_replaced_with_force_only(
    make_store: MakeStore, tmp_path: Path, change: Callable[..., Path]
) -> None:
    path = make_store()
    source = path if change is packed_at else packed_at(path, tmp_path / "p")
    (tmp_path / "out").write_text("old")
    with pytest.raises(SpecError) as caught:
        change(source, tmp_path / "out")
    assert caught.value.kind == "exists"
    assert (tmp_path / "out").read_text() == "old"
    assert change(source, tmp_path / "out", force=True).stat().st_size > 1000


@pytest.mark.parametrize("change", [packed_at, unpacked_at])
def test_source_is_no_target_even_with_force(
    make_store: MakeStore, tmp_path: Path, change: Callable[..., Path]
) -> None:
    path = make_store()
    source = path if change is packed_at else packed_at(path, tmp_path / "p")
    before = source.read_bytes()
    (tmp_path / "alias").hardlink_to(source)
    for target in (source, tmp_path / "alias"):
        with pytest.raises(SpecError) as caught:
            change(source, target, force=True)
        assert caught.value.kind == "same_file"
    assert source.read_bytes() == before


def test_pack_without_room_leaves_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    path = make_store()

    def full(nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskFullError):
        packed_at(path, tmp_path / "p", progress=full)
    assert names_in(tmp_path) == [path.name]


def test_interrupted_unpack_continues(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_store()
    packed = packed_at(path, tmp_path / "p")
    monkeypatch.setattr(pack, "BLOCK_BYTES", 1)
    stop = StopAt(2)
    with pytest.raises(KeyboardInterrupt):
        unpacked_at(packed, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists()
    assert unpacked_at(packed, tmp_path / "out", progress=stop).read_bytes() == path.read_bytes()
    assert stop.num_calls == 4


def test_forced_unpack_replaces_what_an_interrupted_other_one_left(
    make_store: MakeStore, tmp_path: Path
) -> None:
    stores = [make_store(mixed_values(2, seed=i), name=f"{i}", identity={"seed": i}) for i in range(2)]
    a, b = (packed_at(path, tmp_path / f"{path.name}.packed") for path in stores)
    with pytest.raises(KeyboardInterrupt):
        unpacked_at(a, tmp_path / "out", progress=StopAt(1))
    with pytest.raises(IdentityMismatchError, match="--force"):
        unpacked_at(b, tmp_path / "out")
    assert unpacked_at(b, tmp_path / "out", force=True).read_bytes() == stores[1].read_bytes()
    assert not [name for name in names_in(tmp_path) if "unpacking" in name]


def test_unpack_that_gives_other_bytes_is_not_published(make_store: MakeStore, tmp_path: Path) -> None:
    packed = ups_store.open(packed_at(make_store(), tmp_path / "p"))
    object.__setattr__(packed.catalog.packing, "fingerprint", "0" * 32)
    with pytest.raises(CorruptChunkError) as caught:
        unpack_store(packed, tmp_path / "out")
    assert caught.value.kind == "fingerprint"
    assert "out" not in " ".join(names_in(tmp_path))


# --- refusals


@pytest.mark.parametrize(
    "options",
    [{"codec": "gzip"}, {"codec": "pcodec", "level": 13}, {"level": -1}],
)
def test_pack_refuses_unknown_codecs_and_levels(
    make_store: MakeStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as caught:
        packed_at(make_store(), tmp_path / "p", **options)
    assert caught.value.kind == "codec"


def test_pack_without_the_package_pcodec_says_what_to_install(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numcodecs

    codecs._numcodecs.cache_clear()
    monkeypatch.setitem(sys.modules, "pcodec", None)
    monkeypatch.delitem(sys.modules, "numcodecs.pcodec", raising=False)
    monkeypatch.delattr(numcodecs, "pcodec", raising=False)
    path = make_store()
    with pytest.raises(MissingExtraError, match=r"pip install 'ups-store\[pack\]'"):
        packed_at(path, tmp_path / "p", codec="pcodec")
    assert names_in(tmp_path) == [path.name]


def test_pack_of_a_damaged_store_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    path = make_store()
    damage(path, "fields", 1)
    with pytest.raises(CorruptChunkError):
        packed_at(path, tmp_path / "p")
    assert names_in(tmp_path) == [path.name]


def test_pack_refuses_chunks_over_the_limit(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ups_store.packed.store.MAX_CHUNK_BYTES", 4096)
    with pytest.raises(FormatError) as caught:
        packed_at(make_store(), tmp_path / "p")
    assert (caught.value.kind, caught.value.array) == ("limits", "fields")
    assert caught.value.hint == "ship the store as it is, without packing it"


# --- damage


@pytest.fixture(scope="module", params=CODECS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    where = tmp_path_factory.mktemp("packed")
    return packed_at(write_sample_store(where / "a"), where / "p", codec=request.param).read_bytes()


def problems_of(path: Path) -> list[str]:
    """Kinds of what opening or verifying finds."""
    try:
        with ups_store.open(path) as store:
            return [problem.kind for problem in store.verify().problems]
    except StoreError as error:
        return [error.kind]


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_is_reported(tmp_path: Path, codec: str, step: int) -> None:
    values = {"u": np.arange(2048, dtype=np.int64).reshape(2, 1024) // 64, "nu": np.array([0.1, 0.2])}
    path = packed_at(build(tmp_path / "a", values, dims={}), tmp_path / "p", codec=codec)
    small = path.read_bytes()
    assert problems_of(path) == []
    with ups_store.open(path) as store:
        root, text = store.catalog.metadata[0], store.catalog.root.to_json().rstrip()
    spaces = range(root.data_offset + len(text) + 8, root.end - 8)  # one CRC-32 for all of them
    with path.open("r+b") as file:
        for at in (at for at in range(0, len(small), step) if at not in spaces):
            file.seek(at)
            file.write(bytes([small[at] ^ 0x40]))
            file.flush()
            assert problems_of(path), at
            file.seek(at)
            file.write(small[at : at + 1])


@given(data=st.data())
def test_mutated_packed_store_only_raises_typed_errors(small: bytes, data: st.DataObject) -> None:
    """Checksums are repaired half of the time, so that what lies behind them is reached."""
    raw = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "p")
        path.write_bytes(raw)
        try:
            with ups_store.open(path) as store:
                store.gather(range(len(store)))
                store.verify()
        except StoreError:
            pass


CASES = {
    "blosc_claims_more": ("blosc", lambda raw: raw[:4] + struct.pack("<I", 1 << 30) + raw[8:]),
    "blosc_of_another_codec": ("blosc", lambda raw: raw[:2] + bytes([raw[2] & 0x1F | 1 << 5]) + raw[3:]),
    "blosc_not_shuffled": ("blosc", lambda raw: raw[:2] + bytes([raw[2] & ~1]) + raw[3:]),
    "blosc_cut": ("blosc", lambda raw: raw[:-1]),
    "blosc_short": ("blosc", lambda raw: raw[:7]),
    "blosc_garbage": ("blosc", lambda raw: raw[:16] + b"\xff" * (len(raw) - 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_chunk_whose_header_lies_is_refused_before_it_is_decoded(case: str) -> None:
    codec, change = CASES[case]
    chain = ChunkCodec(codec, "float32", 5)
    payload = np.sin(np.arange(20_000, dtype=np.float32))
    out = np.zeros(payload.nbytes, np.uint8)
    with pytest.raises((ValueError, RuntimeError)):
        chain.decode(change(chain.encode(payload)), out)


@pytest.mark.skipif(not HAS_PCODEC, reason="package pcodec is missing")
@pytest.mark.parametrize("num", [99, 101])
def test_pcodec_chunk_of_another_length_is_refused(num: int) -> None:
    chain = ChunkCodec("pcodec", "float32", 8)
    packed = chain.encode(np.arange(100, dtype=np.float32))
    with pytest.raises(ValueError, match="expected"):
        chain.decode(packed, np.zeros(4 * num, np.uint8))


INDEX_DEFECTS: dict[str, Callable[[npt.NDArray[Any]], None]] = {
    "gap": lambda index: index.__setitem__((1, 0), index[1, 0] + 1),
    "overlap": lambda index: index.__setitem__((1, 1), index[1, 1] + 8),
    "outside": lambda index: index.__setitem__((2, 1), 1 << 62),
    "wraps": lambda index: index.__setitem__((0, 0), (1 << 64) - 1),
    "missing": lambda index: index.__setitem__((0, slice(None)), (1 << 64) - 1),
    "empty_chunk": lambda index: index.__setitem__((0, 1), 0),
}


@pytest.mark.parametrize("defect", INDEX_DEFECTS)
def test_shard_index_that_lies_is_refused(small: bytes, tmp_path: Path, defect: str) -> None:
    """Its own checksum is right: only the rule that chunks follow one another finds it."""
    path = tmp_path / "p"
    path.write_bytes(small)
    with ups_store.open(path) as store:
        array = store.catalog.arrays["u"]
    assert array.entry is not None
    start = array.entry.end - array.index_nbytes
    index = np.frombuffer(small[start : array.entry.end - 4], "<u8").reshape(-1, 2).copy()
    INDEX_DEFECTS[defect](index)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(index.tobytes() + struct.pack("<I", crc32c(index.tobytes())))
    with ups_store.open(path) as store, pytest.raises(CorruptChunkError) as caught:
        store.sample(0)
    assert caught.value.kind == "shard_index"


def test_verify_of_a_packed_store_reports_in_file_order(small: bytes, tmp_path: Path) -> None:
    """Spec 13.9: hash and CRC-32s fit to what was changed."""
    path = tmp_path / "p"
    small = DAMAGED["digits_integer_beyond_2_53"].build(small)
    small = DAMAGED["empty_constant_of_another_identity"].build(small)
    raw, local = bytearray(small), find_places(small).local
    raw[data_offset(small, "mask/c/0/0")] ^= 1
    raw[local["u/c/0/0/0"] + 10] ^= 1  # the header's time, in a later entry
    path.write_bytes(raw)
    with ups_store.open(path) as store:
        problems = store.verify().problems
    kinds = dict.fromkeys(problem.kind for problem in problems)
    assert list(kinds) == ["constant_digest", "metadata_text", "corrupt_chunk", "local_header"]


@pytest.mark.parametrize("name", ["newer_minor_version", "newer_minor_with_a_key"])
def test_packed_store_of_a_newer_minor_version_is_too_new_not_damaged(
    small: bytes, tmp_path: Path, name: str
) -> None:
    """Spec 10.3."""
    path = tmp_path / "p"
    path.write_bytes(NEWER_MINOR[name](small))
    with pytest.raises(VersionTooNewError) as caught:
        ups_store.open(path)
    error = caught.value
    assert (error.clause, error.expected, error.found) == ("10.3", "at most 1.0", "1.7")
    assert error.hint == "upgrade ups-store"
    assert examine(path).status is Status.TOO_NEW


def test_verify_compares_what_was_decoded_with_the_fingerprint(tmp_path: Path) -> None:
    """All else of a file with another's mark is sound."""
    values = {name: {"u": np.full((2, 4096), name, np.float32)} for name in (1, 2)}
    stores = [build(tmp_path / str(name), of, dims={}) for name, of in values.items()]
    with ups_store.open(stores[0]) as first, ups_store.open(stores[1]) as second:
        packing = Packing("blosc", 5, first.fingerprint)
        packed = pack._pack(second, tmp_path / "p", packing, False, None, None).path
    with ups_store.open(packed) as store:
        report = store.verify()
        assert np.array_equal(store.gather([1])["u"], values[2]["u"][1:])
    assert [problem.kind for problem in report.problems] == ["fingerprint"]


# --- command lines


def test_commands_pack_verify_and_unpack(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, packed, out = make_store(), tmp_path / "a.packed.zarr.zip", tmp_path / "out"
    assert run_command(monkeypatch, "pack", path, packed, "--codec", "blosc", "--level", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["mapped_nbytes"] == path.stat().st_size
    assert run_command(monkeypatch, "pack", path, packed) == 2
    assert run_command(monkeypatch, "pack", path, packed, "--force") == 0
    assert "times smaller" in capsys.readouterr().out
    assert run_command(monkeypatch, "verify", packed) == 0
    assert "ok" in capsys.readouterr().out
    assert run_command(monkeypatch, "unpack", packed, out) == 0
    assert out.read_bytes() == path.read_bytes()
    told = capsys.readouterr()
    assert told.out == f"{out}\n"
    assert told.err.startswith(f"{out}: wrote 4 samples, ")
    assert run_command(monkeypatch, "unpack", path, tmp_path / "c") == 1


def test_command_info_tells_what_a_packed_store_holds(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_store()
    packed = packed_at(path, tmp_path / "p", codec="pcodec", level=4)
    assert run_command(monkeypatch, "info", path, packed, "--json") == 0
    mapped, told = map(json.loads, capsys.readouterr().out.splitlines())
    assert told["packed"] == {"codec": "pcodec", "level": 4, "mapped_nbytes": path.stat().st_size}
    assert (told["nbytes"], told["reads"]) == (packed.stat().st_size, "decode")
    for key in ("num_samples", "config_hash", "fingerprint", "identity", "attrs", "format_version"):
        assert told[key] == mapped[key], key
    for name, array in mapped["arrays"].items():
        assert told["arrays"][name] == {**array, "slot_nbytes": None}
    assert told["constants"] == mapped["constants"]
    assert run_command(monkeypatch, "info", packed) == 0
    out = capsys.readouterr().out
    assert "packed by pcodec, level 4" in out
    assert told["config_hash"] in out
    assert run_command(monkeypatch, "info", path, packed, "--stats", "--json") == 0
    mapped, told = map(json.loads, capsys.readouterr().out.splitlines())
    assert told["statistics"] == mapped["statistics"] != {}


def test_failure_of_one_sample_ends_packing_and_begins_no_more(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, encoded = make_store({"fields": mixed_values(40)["fields"]}), []

    def fail(codec: object, value: npt.NDArray[Any]) -> bytes:
        encoded.append(value)
        raise CorruptChunkError("it decodes to other bytes")

    monkeypatch.setattr(pack, "BLOCK_BYTES", 1)
    monkeypatch.setattr(pack, "_encode", fail)
    with pytest.raises(CorruptChunkError):
        packed_at(path, tmp_path / "p", num_threads=1)
    assert len(encoded) <= 2
    assert names_in(tmp_path) == [path.name]


@pytest.mark.parametrize("keep", [0, 100, 4000, -1])
def test_truncated_packed_store_is_refused(small: bytes, tmp_path: Path, keep: int) -> None:
    (tmp_path / "p").write_bytes(small[:keep])
    with pytest.raises(FormatError):
        ups_store.open(tmp_path / "p")
