"""`verify`: every changed byte is found and placed; forged checksums don't hide what breaks the format."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MakeStore, build, flip, mixed_constants, mixed_values

import ups_store
from tools.conformance import DAMAGED, write_sample_store
from ups_store import ArraySpec, FormatError, StoreNotFoundError, StoreReplacedError
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.layout import Layout
from ups_store.format.zip_records import pack_directory
from ups_store.read import verify
from ups_store.read.verify import Report, verify_file


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    return make_store()


def layout_of(path: Path) -> Layout:
    with ups_store.open(path) as store:
        return store._catalog.layout


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


# --- good files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 4])
def test_progress_adds_up_to_the_file(path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(verify, "_BLOCK_BYTES", 6000)
    steps: list[int] = []
    with ups_store.open(path) as store:
        store.verify(progress=steps.append, num_threads=num_threads)
    assert sum(steps) == path.stat().st_size
    assert min(steps) > 0


# --- every byte ---------------------------------------------------------------------------------------


class InlinePool:
    """Stands in for the pool of threads, whose start takes longer than to check a tiny store."""

    map = staticmethod(map)

    def __init__(self, num_threads: int) -> None:
        assert num_threads == 1

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None: ...


def tiny_store(path: Path, note: str = "") -> Path:
    """One array with a slot, one plain chunk, one constant."""
    arrays = {
        "fields": ArraySpec((1, 1024), "float32", attrs={"note": note}),
        "mask": ArraySpec((1, 3), bool),
    }
    with ups_store.create(path, arrays, constants={"x": [0.0, 0.5]}, identity={}) as writer:
        writer.commit(0, {"fields": np.arange(1024, dtype=np.float32), "mask": [True, False, True]})
        return writer.finish()


def changes(path: Path, step: int) -> Iterator[tuple[int, Report | FormatError]]:
    """What opening and verifying say to one changed bit of every so many bytes in turn."""
    raw = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    try:
        for offset in range(0, len(raw), step):
            byte = raw[offset]
            os.pwrite(fd, bytes([byte ^ 1 << offset % 8]), offset)
            try:
                yield offset, verify_file(path, num_threads=1)
            except FormatError as error:
                yield offset, error
            os.pwrite(fd, bytes([byte]), offset)
    finally:
        os.close(fd)


@pytest.mark.no_cover  # a minute instead of seconds
@pytest.mark.parametrize("step", [149, pytest.param(1, marks=pytest.mark.slow)])
def test_every_changed_byte_is_found_and_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A problem's byte range holds the changed byte; only a changed entry CRC in the directory is told
    from the data and the local header that it doesn't fit to.
    """
    monkeypatch.setattr(verify, "ThreadPoolExecutor", InlinePool)
    padding = layout_of(tiny_store(tmp_path / "a")).arrays["fields"].entry.padding_nbytes
    path = tiny_store(tmp_path / "b", note="-" * (padding - 6))  # spares thousands of padding bytes
    layout = layout_of(path)
    slot = layout.arrays["fields"].slot(0)
    elsewhere = 0
    for offset, outcome in changes(path, step):
        if isinstance(outcome, FormatError):
            assert not slot[0] <= offset < slot[1]
            continue
        assert not outcome.ok, offset
        holding = [p for p in outcome.problems if p.byte_range[0] <= offset < p.byte_range[1]]
        if not holding:
            assert offset > layout.directory_offset
            assert kinds(outcome) == ["local_header", "entry_crc"]
            elsewhere += 1
        if slot[0] <= offset < slot[1]:
            kind = "chunk_crc" if offset < slot[0] + 4100 else "slot_padding"
            assert [(p.kind, p.array, p.sample) for p in holding] == [(kind, "fields", 0)]
    assert elsewhere == 3 * 4 or step > 1
    assert verify_file(path, num_threads=1).ok


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 256 samples of 64 KiB."""
    fields = np.random.default_rng(0).standard_normal((256, 16384)).astype("float32")
    return build(tmp_path_factory.mktemp("large") / "large.zarr.zip", {"fields": fields}, dims={})


@pytest.mark.parametrize(
    "num_bits", [30, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_random_bit_of_a_store_of_16_mib_is_found_and_placed_alone(large: Path, num_bits: int) -> None:
    """Half of the bits lie in the samples, the others in the 6 kB around them."""
    layout = layout_of(large)
    fields, nbytes = layout.arrays["fields"], large.stat().st_size
    first, chance = fields.offset, random.Random(num_bits)
    last = first + 256 * fields.stride
    around = [*range(first), *range(last, nbytes)]
    places = [chance.randrange(first, last) if i % 2 else chance.choice(around) for i in range(num_bits)]
    with large.open("r+b", buffering=0) as file:
        for place in places:
            raw = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([raw[0] ^ 1 << chance.randrange(8)]), place)
            try:
                assert_found(
                    verify_file(large),
                    place,
                    (place - first) // fields.stride,
                    is_sample=first <= place < last,
                )
            except FormatError:
                assert not first <= place < last
            finally:
                os.pwrite(file.fileno(), raw, place)
    assert verify_file(large).ok


def assert_found(report: Report, place: int, sample: int, *, is_sample: bool) -> None:
    """The one changed byte is reported, and nothing else is."""
    problems = [problem for problem in report.problems if problem.kind != "entry_crc"]
    if is_sample:
        assert [(p.array, p.sample) for p in problems] == [("fields", sample)], place
        assert report.damaged == {"fields": [sample]}
    else:
        assert not report.ok, place
        assert not any(report.damaged.values()), place
    if not (is_sample or [p.kind for p in report.problems] == ["local_header", "entry_crc"]):
        assert any(p.byte_range[0] <= place < p.byte_range[1] for p in report.problems), place


# --- where damage is said to be -------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 5123])
def test_damaged_chunk_of_a_slot_names_array_sample_and_bytes(path: Path, at: int) -> None:
    first, _ = layout_of(path).arrays["fields"].slot(2)
    flip(path, first + at)
    with ups_store.open(path) as store:
        report = store.verify()
    assert [(p.kind, p.clause, p.array, p.sample, p.byte_range) for p in report.problems] == [
        ("chunk_crc", "5.2", "fields", 2, (first, first + 5124))
    ]
    assert report.damaged == {"fields": [2]}
    assert str(report.problems[0]).startswith(
        f"array 'fields', sample 2, bytes {first}..{first + 5124}: chunk_crc crc32c stored "
    )


def test_damage_in_several_places_is_said_in_file_order_by_any_number_of_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_BLOCK_BYTES", 6000)  # a slot each
    layout = layout_of(path)
    fields, nu = layout.arrays["fields"], layout.arrays["nu"]
    flip(path, layout.metadata[1].offset + 10, fields.slot(3)[0], fields.slot(1)[0] + 5130, nu.offset)
    one, report = (verify_file(path, num_threads=num) for num in (1, 4))
    assert one == report
    assert kinds(report) == ["local_header", "slot_padding", "chunk_crc", "chunk_crc"]
    assert report.damaged == {"fields": [1, 3], "nu": []}


# --- forged checksums -----------------------------------------------------------------------------------


def reseal(path: Path, layout: Layout) -> None:
    """Make every entry's CRC-32 fit to what lies in the file, as a forger would."""
    raw = path.read_bytes()
    crcs = [crc32(raw[entry.data_offset : entry.end]) for entry in layout.entries]
    for entry, crc in zip(layout.entries, crcs, strict=True):
        overwrite(path, entry.offset, entry.pack_local_header(crc))
    overwrite(path, layout.directory_offset, pack_directory(layout.entries, crcs))


def forge_constant(path: Path, layout: Layout) -> None:
    payload = np.linspace(0, 2, 64).tobytes()
    overwrite(path, layout.arrays["x"].offset, payload + struct.pack("<I", crc32c(payload)))


def forge_boolean(path: Path, layout: Layout) -> None:
    payload = bytes([2] * 256)
    overwrite(path, layout.arrays["mask"].offset, payload + struct.pack("<I", crc32c(payload)))


def only_the_entry(path: Path, layout: Layout) -> None: ...


@pytest.mark.parametrize(
    ("forge", "problems"),
    [
        (forge_constant, [("constant_digest", "8.1", "x")]),
        (forge_boolean, [("bool_value", "4.7", "mask")]),
        (only_the_entry, []),
    ],
)
def test_forged_checksums_do_not_hide_what_breaks_the_format(
    path: Path, forge: Callable[[Path, Layout], None], problems: list[tuple[str, str, str | None]]
) -> None:
    layout = layout_of(path)
    forge(path, layout)
    reseal(path, layout)
    found = dict.fromkeys((p.kind, p.clause, p.array) for p in verify_file(path).problems)
    assert list(found) == problems


def test_digits_of_a_number_that_are_not_the_shortest_are_found(tmp_path: Path) -> None:
    """Spec 4.1, 7.6: opening checks their form only."""
    path = build(tmp_path / "a.zarr.zip", {"u": np.zeros(3)}, dims={}, attrs={"sum": 0.1 + 0.2})
    layout = layout_of(path)
    at = path.read_bytes().index(b"0.30000000000000004")
    overwrite(path, at, b"0.30000000000000005")
    reseal(path, layout)
    (problem,) = verify_file(path).problems
    assert (problem.kind, problem.clause) == ("metadata_text", "4.1")
    assert problem.byte_range == (at + 18, at + 19)


def test_forged_digest_of_a_constant_without_elements_is_found_in_the_root_entry(tmp_path: Path) -> None:
    path = write_sample_store(tmp_path / "a.zarr.zip")
    root = layout_of(path).metadata[0]
    path.write_bytes(DAMAGED["empty_constant_of_another_identity"].build(path.read_bytes()))
    (problem,) = verify_file(path).problems
    assert (problem.kind, problem.array) == ("constant_digest", "y")
    assert problem.byte_range == (root.data_offset, root.end)
    assert problem.detail.startswith(f"sha256 in the identity {'0' * 64}, computed ")


def test_forged_boolean_in_a_slot_is_found(make_store: MakeStore) -> None:
    path = make_store({"mask": np.zeros((2, 5000), bool)}, dims={})
    layout = layout_of(path)
    payload = bytes(4999) + b"\2"
    overwrite(path, layout.arrays["mask"].slot(1)[0], payload + struct.pack("<I", crc32c(payload)))
    reseal(path, layout)
    assert [(p.kind, p.sample) for p in verify_file(path).problems] == [("bool_value", 1)]


def test_entry_crc_that_fits_in_both_headers_but_not_to_the_data_is_found(path: Path) -> None:
    layout = layout_of(path)
    raw = path.read_bytes()
    crcs = [crc32(raw[entry.data_offset : entry.end]) for entry in layout.entries]
    index = layout.entries.index(layout.arrays["fields"].entry)
    crcs[index] ^= 1
    overwrite(path, layout.entries[index].offset, layout.entries[index].pack_local_header(crcs[index]))
    overwrite(path, layout.directory_offset, pack_directory(layout.entries, crcs))
    assert [(p.kind, p.array) for p in verify_file(path).problems] == [("entry_crc", "fields")]


# --- files that change meanwhile ------------------------------------------------------------------------


def test_file_that_is_cut_while_it_is_verified_is_an_error_not_a_signal(path: Path) -> None:
    with ups_store.open(path) as store, pytest.raises(StoreReplacedError, match="cut while") as caught:
        store.verify(progress=lambda nbytes: os.truncate(path, 8000))
    assert caught.value.byte_range is not None
    assert caught.value.byte_range[1] > 8000


def test_replaced_file_is_not_verified_in_place_of_the_open_one(path: Path) -> None:
    with ups_store.open(path) as store:
        build(path, mixed_values(seed=1), constants=mixed_constants())
        with pytest.raises(StoreReplacedError) as caught:
            store.verify()
        assert caught.value.path == str(path)
        build(path, mixed_values(), constants=mixed_constants())
        assert store.verify().ok
        path.unlink()
        with pytest.raises(StoreNotFoundError):
            store.verify()


@pytest.mark.parametrize("values", [{}, {"u": np.zeros((0, 5000), np.int8)}, {"u": np.zeros((3, 0))}])
def test_store_without_elements_verifies(make_store: MakeStore, values: Any) -> None:
    report = verify_file(make_store(values, dims={}))
    assert (report.ok, report.num_chunks) == (True, 0)


def test_shard_index_is_compared_byte_by_byte(path: Path) -> None:
    fields = layout_of(path).arrays["fields"]
    index = fields.slot(4)[0]
    flip(path, index + 3, index + 4, index + 20)
    report = verify_file(path)
    assert [(p.kind, p.array, p.byte_range) for p in report.problems] == [
        ("shard_index", "fields", (index + 3, index + 5)),
        ("shard_index", "fields", (index + 20, index + 21)),
    ]
