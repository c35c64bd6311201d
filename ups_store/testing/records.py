"""Files whose ZIP records are wrong: ends, directories, extents, entries (spec 2 and 3)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

from ups_store.format.zip_records import ROOT_NAME, EndRecords
from ups_store.testing.archive import (
    Builder,
    Part,
    Places,
    data_offset,
    find_places,
    overwrite,
    put_together,
    take_apart,
)
from ups_store.testing.sample_store import CONSTANT, EMPTY_CONSTANT, LARGE, SMALL

_LARGE_KEY = f"{LARGE}/c/0/0/0"
_SMALL_KEY = f"{SMALL}/c/0"


def _in_end(offset: Callable[[Places], int], layout: str, *values: object) -> Builder:
    """Overwrite fields of the end records."""
    return lambda good: overwrite(good, offset(find_places(good)), layout, *values)


def _in_central(name: str, offset: int, layout: str, *values: object) -> Builder:
    """Overwrite fields of an entry's central record, `offset` bytes from its start."""
    return lambda good: overwrite(good, find_places(good).central[name] + offset, layout, *values)


def _in_zip64(name: str, offset: int, layout: str, *values: object) -> Builder:
    """Overwrite fields of the ZIP64 extra field of an entry's central record."""
    return _in_central(name, 46 + len(name) + offset, layout, *values)


def _with_parts(change: Callable[[list[Part]], list[Part]]) -> Builder:
    """Other entries, everything else as it should be."""
    return lambda good: put_together(change(take_apart(good)))


def _renamed(old: str, new: str) -> Builder:
    def rename(parts: list[Part]) -> list[Part]:
        return [Part(new, p.data, p.is_aligned) if p.name == old else p for p in parts]

    return _with_parts(rename)


def _reordered(first: str, second: str) -> Builder:
    """Two entries in each other's place."""

    def swap(parts: list[Part]) -> list[Part]:
        by_name = {part.name: part for part in parts}
        other = {first: second, second: first}
        return [by_name[other.get(part.name, part.name)] for part in parts]

    return _with_parts(swap)


def _overlapping(good: bytes) -> bytes:
    """The second data entry claims to begin where the first one does."""
    first, second = [r for r in find_places(good).records if "/c" in r.name][:2]
    return _in_zip64(second.name, 20, "Q", first.offset)(good)


def _non_ascii(good: bytes) -> bytes:
    places = find_places(good)
    at = places.central[_SMALL_KEY] + 46
    return overwrite(good, at, "2s", b"\xc3\xbc")


def _directory_in_data(good: bytes) -> bytes:
    """The last record is 8 bytes longer than it should be, so the directory begins inside the last entry."""
    places = find_places(good)
    begin, last = places.central[ROOT_NAME], places.central[places.records[-1].name]
    extra_nbytes = int.from_bytes(good[last + 30 : last + 32], "little")
    central = overwrite(good, last + 30, "H", extra_nbytes + 8)[begin : places.end64] + bytes(8)
    end = EndRecords(len(places.records), begin - 8, len(central))
    return good[: begin - 8] + central + end.pack()


def _zip_of_another_program(good: bytes) -> bytes:
    return _zip({"notes.txt": b"not a store"})


def _zarr_zip_of_zarr_python(good: bytes) -> bytes:
    """A Zarr v3 group with one array in the form that zarr-python's ZipStore writes."""
    group = b'{"attributes": {}, "zarr_format": 3, "node_type": "group"}'
    array = (
        b'{"shape": [2], "data_type": "int8", "chunk_grid": {"name": "regular", "configuration": '
        b'{"chunk_shape": [2]}}, "chunk_key_encoding": {"name": "default", "configuration": {"separator": '
        b'"/"}}, "fill_value": 0, "codecs": [{"name": "bytes"}], "attributes": {}, "zarr_format": 3, '
        b'"node_type": "array", "storage_transformers": []}'
    )
    return _zip({ROOT_NAME: group, "a/zarr.json": array, "a/c/0": b"\1\2"})


def _zip(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def _long_directory(good: bytes) -> bytes:
    """A central directory of 3 MiB, all zeros; the file is that long too."""
    nbytes = 3 << 20
    return bytes(nbytes) + EndRecords(1, 0, nbytes).pack()


def _many_entries(good: bytes) -> bytes:
    """More arrays than the limit: 5000 entries that a directory of half a megabyte names."""
    extra = [Part(f"a{i:04}/{ROOT_NAME}", b"") for i in range(5000)]
    parts = take_apart(good)
    return put_together([parts[0], *extra, *parts[1:]])


RECORD_DEFECTS: dict[str, Builder] = {
    # not a store at all
    "empty_file": lambda good: b"",
    "text_file": lambda good: b"x,u\n0.0,1.0\n" * 100,
    "zeros": lambda good: bytes(8192),
    "hdf5_renamed": lambda good: b"\x89HDF\r\n\x1a\n\0\0\0\0\0\10\10\0\4\0\20\0".ljust(2048, b"\0"),
    "end_record_cut_short": lambda good: b"PK\5\6" + bytes(13),
    "zip_of_another_program": _zip_of_another_program,
    "zip64_of_another_program": lambda good: put_together([Part("notes.txt", b"not a store")]),
    "zarr_zip_of_zarr_python": _zarr_zip_of_zarr_python,
    "no_entries": lambda good: EndRecords(0, 0, 0).pack(),
    # the end of the file
    "bytes_after_the_end": lambda good: good + b"\0",
    "bytes_before_the_start": lambda good: bytes(16) + good,
    "magic_of_end_record": _in_end(lambda at: at.end, "4s", b"PK\0\0"),
    "magic_of_zip64_locator": _in_end(lambda at: at.locator, "4s", b"PK\0\0"),
    "magic_of_zip64_end": _in_end(lambda at: at.end64, "4s", b"PK\0\0"),
    "locator_points_elsewhere": _in_end(lambda at: at.locator + 8, "Q", 0),
    "locator_offset_2_63": _in_end(lambda at: at.locator + 8, "Q", 1 << 63),
    "directory_offset_2_63": _in_end(lambda at: at.end64 + 48, "Q", 1 << 63),
    "directory_offset_wraps": _in_end(lambda at: at.end64 + 40, "QQ", (1 << 64) - 1, 1),
    "directory_too_long": _long_directory,
    "num_entries_2_60": _in_end(lambda at: at.end64 + 24, "QQ", 1 << 60, 1 << 60),
    "num_entries_one_too_many": lambda good: overwrite(
        good, find_places(good).end64 + 24, "QQ", *[len(find_places(good).records) + 1] * 2
    ),
    "num_entries_differ": _in_end(lambda at: at.end64 + 24, "Q", 1),
    "num_entries_too_few": _in_end(lambda at: at.end64 + 24, "QQ", 2, 2),
    "num_entries_in_16_bits": _in_end(lambda at: at.end + 8, "HH", 1, 1),
    "comment_of_another_format": _in_end(lambda at: at.end + 22, "9s", b"hand_made"),
    "end_of_a_file_before_1_0": lambda good: good[:-32] + b'&\0{"format":"ups_store","version":"1.0"}',
    "comment_length_wrong": _in_end(lambda at: at.end + 20, "H", 4),
    # records of the central directory
    "magic_of_central_record": _in_central(_SMALL_KEY, 0, "4s", b"PK\0\0"),
    "compressed_entry": _in_central(_LARGE_KEY, 10, "H", 8),
    "encrypted_entry": _in_central(_LARGE_KEY, 8, "H", 1),
    "strongly_encrypted_entry": _in_central(_LARGE_KEY, 8, "H", 1 << 6),
    "entry_with_comment": _in_central(_SMALL_KEY, 32, "H", 8),
    "name_past_the_directory": _in_central(_SMALL_KEY, 28, "H", 0xFFFF),
    "name_not_ascii": _non_ascii,
    "no_room_for_zip64_field": _in_central(_SMALL_KEY, 30, "H", 4),
    "zip64_field_of_another_kind": _in_zip64(_SMALL_KEY, 0, "H", 2),
    "zip64_field_too_short": _in_zip64(_SMALL_KEY, 2, "H", 16),
    "sizes_differ": _in_zip64(_LARGE_KEY, 4, "Q", 1),
    "sizes_in_32_bits": _in_central(_LARGE_KEY, 20, "II", 16, 16),
    "offset_in_32_bits": _in_central(_LARGE_KEY, 42, "I", 0),
    "two_entries_of_one_name": _with_parts(lambda parts: [*parts, parts[-1]]),
    # extents
    "entries_overlap": _overlapping,
    "directory_overlaps_data": _directory_in_data,
    "metadata_entries_overlap": _in_zip64(f"{SMALL}/{ROOT_NAME}", 20, "Q", 0),
    "entry_offset_outside_file": _in_zip64(_LARGE_KEY, 20, "Q", 1 << 40),
    "entry_offset_2_63": _in_zip64(_LARGE_KEY, 20, "Q", 1 << 63),
    "metadata_offset_2_64": _in_zip64(f"{EMPTY_CONSTANT}/{ROOT_NAME}", 20, "Q", (1 << 64) - 1),
    "entry_past_end": _in_zip64(_LARGE_KEY, 4, "QQ", 1 << 40, 1 << 40),
    "entry_too_short": _in_zip64(_LARGE_KEY, 4, "QQ", 16, 16),
    "root_past_end": _in_zip64(ROOT_NAME, 4, "QQ", 4 << 20, 4 << 20),
    "metadata_past_end": _in_zip64(f"{EMPTY_CONSTANT}/{ROOT_NAME}", 4, "QQ", 4 << 20, 4 << 20),
    "metadata_of_2_60_bytes": _in_zip64(f"{EMPTY_CONSTANT}/{ROOT_NAME}", 4, "QQ", 1 << 60, 1 << 60),
    "root_not_at_0": _in_zip64(ROOT_NAME, 20, "Q", 59),
    # entries
    "root_not_first": _reordered(ROOT_NAME, f"{SMALL}/{ROOT_NAME}"),
    "arrays_not_sorted": _reordered(f"{SMALL}/{ROOT_NAME}", f"{CONSTANT}/{ROOT_NAME}"),
    "data_not_sorted": _reordered(_SMALL_KEY, f"{CONSTANT}/c/0"),
    "data_entry_missing": _with_parts(lambda parts: parts[:-1]),
    "unknown_entry": _with_parts(lambda parts: [*parts, Part("notes.txt", b"")]),
    "entry_for_a_folder": _with_parts(lambda parts: [*parts, Part("u/", b"")]),
    "too_many_arrays": _many_entries,
    "name_not_allowed": _renamed(f"{SMALL}/{ROOT_NAME}", f"__nu/{ROOT_NAME}"),
    "name_leaves_the_folder": _renamed(f"{SMALL}/{ROOT_NAME}", f"../nu/{ROOT_NAME}"),
    "data_misaligned": _with_parts(lambda parts: [Part(part.name, part.data) for part in parts]),
}


def truncations(good: bytes) -> dict[str, bytes]:
    """The file cut at every structural boundary, named after it."""
    places = find_places(good)
    ends: dict[str, int] = {}
    for record in places.records:
        name, start = record.name.replace("/", "_"), data_offset(good, record.name)
        ends[f"before_header_of_{name}"] = record.offset
        ends[f"in_header_of_{name}"] = record.offset + 15
        ends[f"before_data_of_{name}"] = start
        ends[f"in_data_of_{name}"] = start + record.nbytes // 2
        ends[f"after_data_of_{name}"] = start + record.nbytes
        ends[f"before_central_record_of_{name}"] = places.central[record.name]
        ends[f"in_central_record_of_{name}"] = places.central[record.name] + 23
    for name, at, nbytes in (
        ("zip64_end", places.end64, 56),
        ("zip64_locator", places.locator, 20),
        ("end_record", places.end, 22),
        ("comment", places.end + 22, len(good) - places.end - 22),
    ):
        ends[f"before_{name}"], ends[f"in_{name}"] = at, at + nbytes // 2
    return {f"truncated_{name}": good[:end] for name, end in ends.items()}
