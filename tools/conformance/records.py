"""Files whose ends, directory or entries are wrong (spec 2, 3 and 7.1)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace

from tools.conformance.archive import (
    Builder,
    Part,
    Places,
    data_offset,
    find_places,
    overwrite,
    put_together,
    with_parts,
)
from tools.conformance.defect import Defect, Field, changed_fields
from tools.conformance.sample_store import CONSTANT, FLAGS, LARGE, SMALL
from ups_store.format.zip_records import ROOT_NAME, EndRecords

LARGE_KEY, SMALL_KEY = f"{LARGE}/c/0/0/0", f"{SMALL}/c/0"
FLAGS_KEY, CONSTANT_KEY = f"{FLAGS}/c/0/0", f"{CONSTANT}/c/0"
SMALL_ARRAY, LARGE_ARRAY = f"{SMALL}/{ROOT_NAME}", f"{LARGE}/{ROOT_NAME}"

_END_FIELDS = [
    Field("zip64 signature", 0, 4),
    Field("zip64 size of the rest", 4, 8),
    Field("zip64 version made by", 12, 2),
    Field("zip64 version needed", 14, 2),
    Field("zip64 disk", 16, 4),
    Field("zip64 disk of directory", 20, 4),
    Field("zip64 entries on this disk", 24, 8),
    Field("zip64 entries in total", 32, 8),
    Field("zip64 directory size", 40, 8),
    Field("zip64 directory offset", 48, 8),
    Field("locator signature", 56, 4),
    Field("locator disk", 60, 4),
    Field("locator offset", 64, 8),
    Field("locator disks", 72, 4),
    Field("end signature", 76, 4),
    Field("end disk", 80, 2),
    Field("end disk of directory", 82, 2),
    Field("end entries on this disk", 84, 2),
    Field("end entries in total", 86, 2),
    Field("end directory size", 88, 4),
    Field("end directory offset", 92, 4),
    Field("comment length", 96, 2),
    Field("first byte of the comment", 98, 1),
    Field("last byte of the comment", 127, 1),
]


def _central_fields(name: str) -> list[Field]:
    n = 46 + len(name)
    return [
        Field("signature", 0, 4),
        Field("version made by", 4, 2),
        Field("version needed", 6, 2),
        Field("flags", 8, 2),
        Field("method", 10, 2),
        Field("time", 12, 2),
        Field("date", 14, 2),
        Field("compressed size", 20, 4),
        Field("size", 24, 4),
        Field("name length", 28, 2),
        Field("extra length", 30, 2),
        Field("comment length", 32, 2),
        Field("disk", 34, 2),
        Field("internal attributes", 36, 2),
        Field("external attributes", 38, 4),
        Field("offset", 42, 4),
        Field("name", 46, 1),
        Field("extra field id", n, 2),
        Field("extra field length", n + 2, 2),
        Field("zip64 size", n + 4, 8),
        Field("zip64 compressed size", n + 12, 8),
        Field("zip64 offset", n + 20, 8),
    ]


def _in_end(offset: Callable[[Places], int], layout: str, *values: object) -> Builder:
    """Overwrite fields of the end records."""
    return lambda good: overwrite(good, offset(find_places(good)), layout, *values)


def _in_central(name: str, offset: int, layout: str, *values: object) -> Builder:
    """Overwrite fields of an entry's central record, `offset` bytes from its start."""
    return lambda good: overwrite(good, find_places(good).central[name] + offset, layout, *values)


def _in_zip64(name: str, offset: int, layout: str, *values: object) -> Builder:
    """Overwrite fields of the ZIP64 extra field of an entry's central record."""
    return _in_central(name, 46 + len(name) + offset, layout, *values)


def _with_end(change: Callable[[EndRecords], EndRecords], between: bytes = b"") -> Builder:
    """Other end records, which agree with each other; `between` stands before them."""

    def build(good: bytes) -> bytes:
        places = find_places(good)
        begin = places.central[ROOT_NAME]
        end = EndRecords(len(places.records), begin, places.end64 - begin)
        return good[: places.end64] + between + change(end).pack()

    return build


def _renamed(old: str, new: str) -> Builder:
    return with_parts(lambda parts: [replace(p, name=new) if p.name == old else p for p in parts])


def _in_order(key: Callable[[Part], object]) -> Builder:
    """The entries in another order; the root stays the first."""
    return with_parts(lambda parts: [parts[0], *sorted(parts[1:], key=key)])  # type: ignore[arg-type]


def _swapped(first: str, second: str) -> Builder:
    """Two entries in each other's place."""

    def swap(parts: list[Part]) -> list[Part]:
        by_name = {part.name: part for part in parts}
        other = {first: second, second: first}
        return [by_name[other.get(part.name, part.name)] for part in parts]

    return with_parts(swap)


def _records_swapped(good: bytes) -> bytes:
    """The directory's last two records in each other's place; the entries stay."""
    places = find_places(good)
    *_, first, second = sorted(places.central.values())
    return good[:first] + good[second : places.end64] + good[first:second] + good[places.end64 :]


def _gap_before(name: str, nbytes: int) -> Builder:
    """Zeros before an entry; offsets follow."""

    def build(good: bytes) -> bytes:
        places = find_places(good)
        at, begin = places.local[name], places.central[ROOT_NAME]
        raw = bytearray(good[:at] + bytes(nbytes) + good[at:begin])
        central = bytearray(good[begin : places.end64])
        for record in places.records:
            if record.offset >= at:
                where = places.central[record.name] - begin + 66 + len(record.name)
                central[where : where + 8] = (record.offset + nbytes).to_bytes(8, "little")
        return bytes(raw + central) + EndRecords(len(places.records), len(raw), len(central)).pack()

    return build


def _gap_before_directory(good: bytes) -> bytes:
    places = find_places(good)
    begin = places.central[ROOT_NAME]
    central = good[begin : places.end64]
    return good[:begin] + bytes(8) + central + EndRecords(len(places.records), begin + 8, len(central)).pack()


def _unaligned(parts: list[Part]) -> list[Part]:
    return [replace(part, is_aligned=False) for part in parts]


def _a_page_more(good: bytes) -> bytes:
    """The last entry has a page of padding more than it needs; its data start on a page, too."""
    places = find_places(good)
    last = places.records[-1]
    header, data = last.offset, data_offset(good, last.name)
    extra = int.from_bytes(good[header + 28 : header + 30], "little") + 4096
    field = data_offset(good, last.name) - (extra - 4096 - 20)
    begin, end = places.central[ROOT_NAME], places.end64
    raw = bytearray(good[:data] + bytes(4096) + good[data:begin])
    raw[header + 28 : header + 30] = extra.to_bytes(2, "little")
    raw[field + 2 : field + 4] = (extra - 24).to_bytes(2, "little")
    return bytes(raw) + good[begin:end] + EndRecords(len(places.records), len(raw), end - begin).pack()


def _padding_in_central_record(good: bytes) -> bytes:
    """The last central record has a padding field, too."""
    places = find_places(good)
    begin, last = places.central[ROOT_NAME], places.central[places.records[-1].name]
    central = bytearray(good[begin : places.end64] + bytes.fromhex("35d902000010"))
    central[last - begin + 30 : last - begin + 32] = (28 + 6).to_bytes(2, "little")
    return good[:begin] + bytes(central) + EndRecords(len(places.records), begin, len(central)).pack()


def _entry_comment(good: bytes) -> bytes:
    """The last central record has a comment of two bytes."""
    places = find_places(good)
    begin, last = places.central[ROOT_NAME], places.central[places.records[-1].name]
    central = bytearray(good[begin : places.end64] + b"hi")
    central[last - begin + 32 : last - begin + 34] = (2).to_bytes(2, "little")
    return good[:begin] + bytes(central) + EndRecords(len(places.records), begin, len(central)).pack()


def _zip(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


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


def _long_directory(good: bytes) -> bytes:
    """A central directory of 2 MiB and a byte, all zeros."""
    nbytes = (2 << 20) + 1
    return bytes(nbytes) + EndRecords(1, 0, nbytes).pack()


def _more(**values: int) -> Callable[[EndRecords], EndRecords]:
    return lambda end: replace(end, **{key: getattr(end, key) + value for key, value in values.items()})


NOT_A_STORE: dict[str, Defect] = {
    "empty_file": Defect("7.1", "The file is empty.", lambda good: b""),
    "file_of_127_bytes": Defect(
        "7.1", "The file is a byte shorter than the end records.", lambda good: good[-127:]
    ),
    "text_file": Defect("3.6", "The file is a table in text.", lambda good: b"x,u\n0.0,1.0\n" * 100),
    "zeros": Defect("3.6", "The file is all zeros.", lambda good: bytes(8192)),
    "hdf5_renamed": Defect(
        "3.6",
        "The file begins like an HDF5 file.",
        lambda good: b"\x89HDF\r\n\x1a\n\0\0\0\0\0\10\10\0\4\0\20\0".ljust(2048, b"\0"),
    ),
    "end_record_cut_short": Defect(
        "3.6", "The file is 17 bytes of an end record.", lambda good: b"PK\5\6" + bytes(13)
    ),
    "zip_of_another_program": Defect(
        "3.6", "The file is a ZIP file without ZIP64.", lambda good: _zip({"notes.txt": b"not a store"})
    ),
    "zarr_zip_of_zarr_python": Defect(
        "3.6", "The file is a Zarr hierarchy in another ZIP.", _zarr_zip_of_zarr_python
    ),
    "only_end_records": Defect("2.2", "There are no entries.", lambda good: EndRecords(0, 0, 0).pack()),
    "entry_of_another_name": Defect(
        "2.2", "The only entry is notes.txt.", lambda good: put_together([Part("notes.txt", b"not a store")])
    ),
    "file_from_before_1_0": Defect(
        "3.6",
        "The comment is that of files from before version 1.0.",
        lambda good: good[:-32] + b'&\0{"format":"ups_store","version":"1.0"}',
    ),
}

END_RECORDS: dict[str, Defect] = {
    **changed_fields("end", _END_FIELDS, lambda good: len(good) - 128, "3.6", "End records"),
    "byte_behind_the_end": Defect("3.6", "A zero follows the end records.", lambda good: good + b"\0"),
    "newline_behind_the_end": Defect(
        "3.6", "A line feed follows the end records.", lambda good: good + b"\n"
    ),
    "end_twice": Defect("3.6", "The end records stand there twice.", lambda good: good + good[-128:]),
    "bytes_before_the_start": Defect("3.6", "16 zeros precede the file.", lambda good: bytes(16) + good),
    "comment_of_40_bytes": Defect(
        "3.6",
        "The comment is 10 bytes longer.",
        lambda good: good[:-32] + b"\x28\0" + good[-30:] + b", longer.."[:10],
    ),
    "locator_offset_2_63": Defect(
        "3.6", "The locator points to 2^63.", _in_end(lambda at: at.locator + 8, "Q", 1 << 63)
    ),
    "directory_offset_2_63": Defect(
        "3.6", "The directory begins at 2^63.", _in_end(lambda at: at.end64 + 48, "Q", 1 << 63)
    ),
    "directory_offset_wraps": Defect(
        "3.6",
        "Offset and size of the directory have the right sum modulo 2^64 only.",
        lambda good: overwrite(
            good, find_places(good).end64 + 40, "QQ", 2**64 - 4096, find_places(good).end64 + 4096
        ),
    ),
    "entries_2_60": Defect(
        "2.2",
        "The end records count 2^60 entries.",
        _in_end(lambda at: at.end64 + 24, "QQ", 1 << 60, 1 << 60),
    ),
    "one_entry_more": Defect("2.2", "The end records count one entry more.", _with_end(_more(num_entries=1))),
    "one_entry_fewer": Defect(
        "2.2", "The end records count one entry fewer.", _with_end(_more(num_entries=-1))
    ),
    "directory_begins_earlier": Defect(
        "2.2",
        "The directory begins 8 bytes earlier, in the last entry.",
        _with_end(_more(directory_offset=-8, directory_nbytes=8)),
    ),
    "directory_begins_later": Defect(
        "2.2",
        "The directory begins with its second record.",
        _with_end(_more(directory_offset=83, directory_nbytes=-83, num_entries=-1)),
    ),
    "zeros_behind_the_directory": Defect(
        "2.2", "8 zeros belong to the directory.", _with_end(_more(directory_nbytes=8), bytes(8))
    ),
    "directory_too_long": Defect("9.1", "The directory has more than 2 MiB.", _long_directory),
}

DIRECTORY: dict[str, Defect] = {
    **changed_fields(
        "root_record",
        _central_fields(ROOT_NAME),
        lambda good: find_places(good).central[ROOT_NAME],
        "3.5",
        "Central record of zarr.json",
    ),
    **changed_fields(
        "array_record",
        _central_fields(SMALL_ARRAY),
        lambda good: find_places(good).central[SMALL_ARRAY],
        "3.5",
        f"Central record of {SMALL_ARRAY}",
    ),
    **changed_fields(
        "data_record",
        _central_fields(LARGE_KEY),
        lambda good: find_places(good).central[LARGE_KEY],
        "3.5",
        f"Central record of {LARGE_KEY}",
    ),
    "entry_deflated": Defect("3.5", "An entry claims to be deflated.", _in_central(LARGE_KEY, 10, "H", 8)),
    "entry_with_descriptor": Defect(
        "3.5", "An entry claims to have a data descriptor.", _in_central(LARGE_KEY, 8, "H", 2056)
    ),
    "entry_with_comment": Defect("3.5", "A record has a comment.", _entry_comment),
    "sizes_in_32_bits": Defect(
        "3.5", "The sizes stand in the fields of 32 bits.", _in_central(SMALL_KEY, 20, "II", 28, 28)
    ),
    "name_past_the_directory": Defect(
        "3.5", "The name of a record is longer than the directory.", _in_central(SMALL_KEY, 28, "H", 0xFFFF)
    ),
    "name_not_ascii": Defect(
        "3.5", "The name in a record isn't ASCII.", _in_central(SMALL_KEY, 46, "2s", b"\xc3\xbc")
    ),
    "metadata_past_the_end": Defect(
        "7.1",
        "A metadata entry claims 4 MiB, more than the file has.",
        _in_zip64(SMALL_ARRAY, 4, "QQ", 4 << 20, 4 << 20),
    ),
    "metadata_of_2_60_bytes": Defect(
        "9.1", "A metadata entry claims 2^60 bytes.", _in_zip64(SMALL_ARRAY, 4, "QQ", 1 << 60, 1 << 60)
    ),
    "root_past_the_end": Defect(
        "7.1",
        "The root's entry claims 4 MiB, more than the file has.",
        _in_zip64(ROOT_NAME, 4, "QQ", 4 << 20, 4 << 20),
    ),
    "data_of_2_40_bytes": Defect(
        "3.5", "A data entry claims 2^40 bytes.", _in_zip64(LARGE_KEY, 4, "QQ", 1 << 40, 1 << 40)
    ),
    "data_of_16_bytes": Defect("3.5", "A data entry claims 16 bytes.", _in_zip64(LARGE_KEY, 4, "QQ", 16, 16)),
    "offset_2_63": Defect(
        "3.5", "A data entry claims to begin at 2^63.", _in_zip64(LARGE_KEY, 20, "Q", 1 << 63)
    ),
    "offset_2_64": Defect(
        "3.5", "A metadata entry claims to begin at 2^64 - 1.", _in_zip64(SMALL_ARRAY, 20, "Q", (1 << 64) - 1)
    ),
    "entries_overlap": Defect("3.5", "Two entries claim to begin at 0.", _in_zip64(SMALL_ARRAY, 20, "Q", 0)),
    "records_in_another_order": Defect("2.2", "The last two records have changed places.", _records_swapped),
    "padding_in_central_record": Defect(
        "3.4", "A central record has the padding field.", _padding_in_central_record
    ),
}

ENTRIES: dict[str, Defect] = {
    "root_not_first": Defect(
        "2.2", "The root's document is the second entry.", _swapped(ROOT_NAME, "empty/zarr.json")
    ),
    "documents_not_sorted": Defect(
        "2.2", "Two documents have changed places.", _swapped(SMALL_ARRAY, LARGE_ARRAY)
    ),
    "data_not_sorted": Defect(
        "2.2", "Two data entries have changed places.", _swapped(SMALL_KEY, CONSTANT_KEY)
    ),
    "data_beside_documents": Defect(
        "2.2", "The data of each array follow its document.", _in_order(lambda part: part.name.split("/")[0])
    ),
    "data_before_documents": Defect(
        "2.2",
        "The data entries precede the documents of arrays.",
        _in_order(lambda part: part.name.endswith("json")),
    ),
    "document_missing": Defect(
        "2.2",
        "An array has data, but no document.",
        with_parts(lambda parts: [p for p in parts if p.name != SMALL_ARRAY]),
    ),
    "data_missing": Defect("2.2", "The last data entry is missing.", with_parts(lambda parts: parts[:-1])),
    "data_of_an_array_without_elements": Defect(
        "4.6",
        "An array without elements has a data entry.",
        with_parts(lambda parts: [*parts[:7], Part("empty/c/0/0", bytes(4), True), *parts[7:]]),
    ),
    "unknown_entry": Defect(
        "2.2", "There is an entry that isn't known.", with_parts(lambda p: [*p, Part("notes.txt", b"")])
    ),
    "unknown_entry_in_the_middle": Defect(
        "2.2",
        "There is an entry between documents and data.",
        with_parts(lambda p: [*p[:7], Part("notes.txt", b""), *p[7:]]),
    ),
    "entry_for_a_folder": Defect(
        "3.1", "There is an entry for a folder.", with_parts(lambda p: [*p, Part("u/", b"")])
    ),
    "two_entries_of_one_name": Defect(
        "3.1", "The last entry is there twice.", with_parts(lambda p: [*p, p[-1]])
    ),
    "consolidated_metadata_entry": Defect(
        "2.2", "There is a .zmetadata entry.", with_parts(lambda p: [p[0], Part(".zmetadata", b"{}"), *p[1:]])
    ),
    "key_without_chunk_coordinates": Defect(
        "4.6", "The data entry is named nu/c.", _renamed(SMALL_KEY, "nu/c")
    ),
    "key_of_another_chunk": Defect("4.6", "The data entry is named nu/c/1.", _renamed(SMALL_KEY, "nu/c/1")),
    "key_with_dots": Defect("4.6", "The data entry is named nu/c.0.", _renamed(SMALL_KEY, "nu/c.0")),
    "key_with_a_slash_before": Defect(
        "4.6", "The data entry is named /nu/c/0.", _renamed(SMALL_KEY, "/nu/c/0")
    ),
    "gap_before_metadata": Defect(
        "2.2", "8 zeros precede the document of an array.", _gap_before(SMALL_ARRAY, 8)
    ),
    "gap_before_data": Defect("2.2", "A page of zeros precedes a data entry.", _gap_before(SMALL_KEY, 4096)),
    "gap_before_directory": Defect("2.2", "8 zeros precede the directory.", _gap_before_directory),
    "data_not_aligned": Defect("3.4", "Data entries have no padding.", with_parts(_unaligned)),
    "a_page_too_much_padding": Defect("3.4", "An entry has a page of padding more.", _a_page_more),
    "documents_aligned": Defect(
        "3.4",
        "The documents of arrays are aligned, too.",
        with_parts(lambda parts: [parts[0], *(replace(p, is_aligned=True) for p in parts[1:])]),
    ),
    "data_a_byte_longer": Defect(
        "5.6",
        "A zero follows a plain chunk.",
        with_parts(
            lambda parts: [replace(p, data=p.data + b"\0") if p.name == SMALL_KEY else p for p in parts]
        ),
    ),
    "data_a_sample_shorter": Defect(
        "5.6",
        "A plain chunk lacks its last sample.",
        with_parts(
            lambda parts: [
                replace(p, data=p.data[:-12] + p.data[-4:]) if p.name == SMALL_KEY else p for p in parts
            ]
        ),
    ),
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


_CUTS = ("before_central_record_of_zarr.json", "in_data_of_u_c_0_0_0", "before_zip64_end", "in_comment")
TRUNCATED: dict[str, Defect] = {
    f"truncated_{cut}": Defect(
        "3.6",
        f"The file ends {cut.replace('_', ' ')}.",
        lambda good, cut=cut: truncations(good)[f"truncated_{cut}"],
    )
    for cut in _CUTS
}
