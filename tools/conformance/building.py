"""Building files in every state of spec 6.5, made by hand from finished stores."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.conformance.archive import (
    Document,
    data_offset,
    find_places,
    overwrite,
    read_document,
    take_apart,
    with_checksum,
)
from tools.conformance.case import Case
from tools.conformance.newer import with_version
from tools.conformance.packed import pack
from tools.conformance.sample_store import LARGE, sample_store
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.zip_records import ROOT_NAME

BUILD_ID = bytes(range(16))
BOOT_ID = bytes(range(16, 32))
_OTHER_BOOT = bytes(range(32, 48))
_ITEM_NBYTES = {"float32": 4, "float64": 8, "bool": 1, "int16": 2, "uint8": 1, "uint32": 4, "int64": 8}


@dataclass(frozen=True)
class Place:
    """Where the samples of an array lie in the file: `(first, past_last)` each, and where the samples end."""

    extents: tuple[tuple[int, int], ...]
    header: int
    end: int
    entry_end: int


@dataclass(frozen=True)
class Build:
    """A building file in the making.

    Attributes:
        good: The finished store.
        is_lazy: Bit 0 of the flags.
        boot_id: As the tail has it.
        committed: Samples with a record; the bytes of the others are zeros.
    """

    good: bytes
    committed: Sequence[int] = ()
    is_lazy: bool = False
    boot_id: bytes = BOOT_ID

    @property
    def places(self) -> list[Place]:
        """Of the arrays with samples, in file order."""
        parts = take_apart(self.good)
        documents = [read_document(parts, part.name) for part in parts if part.name.endswith(f"/{ROOT_NAME}")]
        names = [
            part.name.removesuffix(f"/{ROOT_NAME}") for part in parts if part.name.endswith(f"/{ROOT_NAME}")
        ]
        return [
            self._place(name, document)
            for name, document in zip(names, documents, strict=True)
            if document["dimension_names"][:1] == ["sample"] or "ups_store" in document["attributes"]
        ]

    def _place(self, name: str, document: Document) -> Place:
        shape = document["shape"]
        key = f"{name}/c" + "/0" * len(shape)
        nbytes = _ITEM_NBYTES[document["data_type"]]
        for length in shape[1:]:
            nbytes *= length
        records = {record.name: record for record in find_places(self.good).records}
        if key not in records:
            return Place(((0, 0),) * self.num_samples, 0, 0, 0)
        data = data_offset(self.good, key)
        if "ups_store" in document["attributes"]:
            edges = [data + nbytes * offset for offset in self._offsets(name)]
        else:
            step = -(-(nbytes + 4) // 64) * 64 if nbytes >= 4096 else nbytes
            edges = [data + i * step for i in range(shape[0] + 1)]
        extents = tuple(itertools.pairwise(edges))
        return Place(extents, records[key].offset, edges[-1], data + records[key].nbytes)

    def _offsets(self, name: str) -> Sequence[int]:
        data = next(part.data for part in take_apart(self.good) if part.name == f"{name}.offsets/c/0")
        return struct.unpack(f"<{len(data) // 8}q", data[:-4])

    @property
    def num_samples(self) -> int:
        """N."""
        shapes: list[int] = [
            document["shape"][0]
            for part in take_apart(self.good)
            if part.name.endswith(f"/{ROOT_NAME}")
            for document in [read_document(take_apart(self.good), part.name)]
            if document["dimension_names"][:1] == ["sample"]
        ]
        return shapes[0]

    @property
    def tail_offset(self) -> int:
        """Where the build tail begins."""
        return -(-len(self.good) // 4096) * 4096

    @property
    def table_offset(self) -> int:
        """Where the commit table begins."""
        return self.tail_offset + 4096

    @property
    def record_nbytes(self) -> int:
        """Bytes of a commit record."""
        return 4 * (len(self.places) + 2)

    def header(self) -> bytes:
        """The tail header (spec 6.2)."""
        counts = struct.pack("<HHI", 1, int(self.is_lazy), len(self.places))
        sizes = struct.pack("<QQ", self.num_samples, len(self.good))
        body = (b"UPSBUILD" + counts + BUILD_ID + self.boot_id + sizes).ljust(124, b"\0")
        return body + struct.pack("<I", crc32c(body))

    def record(self, sample: int, build_id: bytes = BUILD_ID) -> bytes:
        """The commit record of a sample (spec 6.4)."""
        crcs = [crc32(self.good[slice(*place.extents[sample])]) for place in self.places]
        body = b"CMIT" + struct.pack(f"<{len(crcs)}I", *crcs)
        return body + struct.pack("<I", crc32c(build_id + struct.pack("<Q", sample) + body))

    def to_bytes(self) -> bytes:
        """The file."""
        ends = find_places(self.good)
        nbytes = -(-(self.table_offset + self.num_samples * self.record_nbytes) // 4096) * 4096
        raw = bytearray(self.good[: ends.central[ROOT_NAME]].ljust(nbytes, b"\0"))
        for record in ends.records:
            if "/c" in record.name:
                start = data_offset(self.good, record.name)
                raw[record.offset : start] = bytes(start - record.offset)
        for place in self.places:
            raw[place.end : place.entry_end] = bytes(place.entry_end - place.end)
            for sample, (first, end) in enumerate(place.extents):
                if sample not in self.committed:
                    raw[first:end] = bytes(end - first)
        raw[self.tail_offset : self.tail_offset + 128] = self.header()
        owner = struct.pack("<QI", 4711, 4) + b"host"
        raw[self.tail_offset + 2048 : self.tail_offset + 2048 + len(owner)] = owner
        for sample in self.committed:
            at = self.table_offset + sample * self.record_nbytes
            raw[at : at + self.record_nbytes] = self.record(sample)
        return bytes(raw)


def _ranges(samples: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for sample in samples:
        if found and found[-1][1] == sample:
            found[-1] = (found[-1][0], sample + 1)
        else:
            found.append((sample, sample + 1))
    return found


def _case(name: str, why: str, raw: bytes, state: str, committed: Sequence[int] = (), **options: Any) -> Case:
    is_foreign = state == FOREIGN
    return Case(  # a reader of committed samples refuses headless files, too
        f"building/{name}.zarr.zip.building",
        raw,
        why,
        kind="building",
        opens=state not in (HEADLESS, FOREIGN),
        state=state,
        committed=None if is_foreign else _ranges(committed),
        **options,
    )


RESUMABLE, LAZY, FINISHED = "resumable", "resumable, lazy, of another boot", "finished"
HEADLESS, FOREIGN = "headless", "foreign or damaged"


def cases() -> list[Case]:
    """All of them."""
    good = sample_store()[0]
    return [*_resumable(good), *_lazy(good), *_headless(good), *_foreign(good)]


def cases_of_ragged(build: Build) -> list[Case]:
    """Building files of a store with ragged arrays, whose offsets stand there from the start (spec 14.6)."""
    lazy = replace(build, is_lazy=True)
    committed = tuple(build.committed)
    return [
        _case("ragged", "Ragged arrays, samples 0 and 2 committed.", build.to_bytes(), RESUMABLE, committed),
        _case(
            "ragged_lazy_of_another_boot",
            "Ragged arrays in a lazy build of another boot.",
            lazy.to_bytes(),
            LAZY,
            committed,
            boot_id=_OTHER_BOOT.hex(),
        ),
        _case(
            "ragged_offset_beyond_the_rows",
            "The rows of sample 2 end at row 2^60, so its record doesn't count.",
            _other_offsets(build, 0, 2, 2, 1 << 60),
            RESUMABLE,
            committed[:-1],
        ),
        _case(
            "ragged_offsets_fall",
            "The offsets fall between samples 1 and 2; those of samples 0 and 2 are possible.",
            _other_offsets(build, 0, 3, 2, 5),
            RESUMABLE,
            committed,
        ),
        _case(
            "ragged_lazy_offset_beyond_the_rows",
            "The same in a lazy build of another boot.",
            _other_offsets(lazy, 0, 2, 2, 1 << 60),
            LAZY,
            committed[:-1],
            boot_id=_OTHER_BOOT.hex(),
        ),
    ]


def _other_offsets(build: Build, *offsets: int) -> bytes:
    """Other offsets of the points, with their checksum."""
    at = data_offset(build.good, "points.offsets/c/0")
    chunk = with_checksum(struct.pack(f"<{len(offsets)}q", *offsets))
    return overwrite(build.to_bytes(), at, f"{len(chunk)}s", chunk)


def _resumable(good: bytes) -> list[Case]:
    build = Build(good, (0, 2))
    raw, table, nbytes = build.to_bytes(), build.table_offset, build.record_nbytes
    whole = Build(good, (0, 1, 2))

    def record(sample: int, record: bytes) -> bytes:
        at = table + sample * nbytes
        return raw[:at] + record + raw[at + nbytes :]

    marker = record(0, b"SMIT" + build.record(0)[4:])
    return [
        _case("nothing_committed", "No sample is committed.", Build(good).to_bytes(), RESUMABLE),
        _case("some_committed", "Samples 0 and 2 are committed.", raw, RESUMABLE, (0, 2)),
        _case(
            "all_committed",
            "All samples are committed; finishing hasn't begun.",
            whole.to_bytes(),
            RESUMABLE,
            (0, 1, 2),
        ),
        _case(
            "finishing",
            "Finishing was interrupted before the file was cut to its length.",
            good + whole.to_bytes()[len(good) :],
            RESUMABLE,
            (0, 1, 2),
        ),
        _case("finished", "The file is finished, but not renamed.", good, FINISHED, (0, 1, 2)),
        _case(
            "finished_newer_minor",
            "A newer minor version finished the file, but didn't rename it.",
            with_version("1.7")(good),
            FINISHED,
            (0, 1, 2),
        ),
        _case(
            "finished_with_another_header",
            "The file is finished; the root's local header has a time, which only verifying finds.",
            overwrite(good, 10, "B", 1),
            FINISHED,
            (0, 1, 2),
        ),
        _case(
            "owner_of_zeros",
            "Nobody noted the owner.",
            overwrite(raw, build.tail_offset + 2048, "16s", b""),
            RESUMABLE,
            (0, 2),
        ),
        _case(
            "boot_id_unknown",
            "The boot id is zeros.",
            replace(build, boot_id=bytes(16)).to_bytes(),
            RESUMABLE,
            (0, 2),
        ),
        _case(
            "record_of_zeros", "The record of sample 0 is zeros.", record(0, bytes(nbytes)), RESUMABLE, (2,)
        ),
        _case(
            "record_with_another_marker", "The marker of a record is another one.", marker, RESUMABLE, (2,)
        ),
        _case(
            "record_with_a_flipped_crc",
            "A CRC-32 of a record is flipped.",
            overwrite(raw, table + 8, "B", raw[table + 8] ^ 1),
            RESUMABLE,
            (2,),
        ),
        _case(
            "record_torn",
            "Half of a record is there.",
            record(0, build.record(0)[:12].ljust(nbytes, b"\0")),
            RESUMABLE,
            (2,),
        ),
        _case(
            "record_of_another_sample",
            "The record of sample 0 stands in the place of 1.",
            record(1, build.record(0)),
            RESUMABLE,
            (0, 2),
        ),
        _case(
            "record_of_another_build",
            "A record is that of another build.",
            record(2, build.record(2, BOOT_ID)),
            RESUMABLE,
            (0,),
        ),
        _case(
            "committed_bytes_damaged",
            "A committed sample is damaged: a record that checks is the commit.",
            _flipped_sample(good, build),
            RESUMABLE,
            (0, 2),
        ),
        _case(
            "bytes_behind_the_table",
            "Bytes behind the commit table aren't zeros.",
            raw[:-1] + b"\1",
            RESUMABLE,
            (0, 2),
        ),
    ]


def _flipped_sample(good: bytes, build: Build) -> bytes:
    at = data_offset(good, f"{LARGE}/c/0/0/0") + 8
    return overwrite(build.to_bytes(), at, "B", good[at] ^ 1)


def _lazy(good: bytes) -> list[Case]:
    build = Build(good, (0, 2), is_lazy=True)
    unknown = replace(build, boot_id=bytes(16))
    damaged = _flipped_sample(good, build)
    same, other = BOOT_ID.hex(), _OTHER_BOOT.hex()
    return [
        _case(
            "lazy", "A lazy build, of the present boot.", build.to_bytes(), RESUMABLE, (0, 2), boot_id=same
        ),
        _case(
            "lazy_damaged",
            "A lazy build of the present boot isn't read.",
            damaged,
            RESUMABLE,
            (0, 2),
            boot_id=same,
        ),
        _case(
            "lazy_of_another_boot",
            "A lazy build of another boot, whole.",
            build.to_bytes(),
            LAZY,
            (0, 2),
            boot_id=other,
        ),
        _case(
            "lazy_of_another_boot_damaged",
            "Sample 0 didn't reach the disk.",
            damaged,
            LAZY,
            (2,),
            boot_id=other,
        ),
        _case(
            "lazy_of_an_unknown_boot",
            "The boot of the build is unknown.",
            unknown.to_bytes(),
            LAZY,
            (0, 2),
            boot_id=other,
        ),
        _case(
            "lazy_in_an_unknown_boot",
            "The present boot is unknown, too.",
            unknown.to_bytes(),
            LAZY,
            (0, 2),
            boot_id="0" * 32,
        ),
    ]


def _headless(good: bytes) -> list[Case]:
    build = Build(good, (0, 2))
    raw, tail = build.to_bytes(), build.tail_offset

    def header(edit: Callable[[bytearray], None], *, repaired: bool = True) -> bytes:
        body = bytearray(build.header())
        edit(body)
        if repaired:
            body[124:] = struct.pack("<I", crc32c(bytes(body[:124])))
        return raw[:tail] + bytes(body) + raw[tail + 128 :]

    def at(offset: int, value: int) -> Callable[[bytearray], None]:
        return lambda body: body.__setitem__(offset, value)

    return [
        _case(
            "tail_of_zeros",
            "The tail header is zeros.",
            raw[:tail] + bytes(128) + raw[tail + 128 :],
            HEADLESS,
        ),
        _case("tail_magic", "The magic is another one.", header(at(0, 0x75)), HEADLESS),
        _case("tail_version", "The version is 2.", header(at(8, 2)), HEADLESS),
        _case("tail_flags", "Bit 1 of the flags is set.", header(at(10, 2)), HEADLESS),
        _case("tail_arrays", "The number of arrays is another one.", header(at(12, 9)), HEADLESS),
        _case("tail_samples", "The number of samples is another one.", header(at(48, 9)), HEADLESS),
        _case("tail_length", "The length is another one.", header(at(56, 9)), HEADLESS),
        _case("tail_reserved", "A reserved byte isn't zero.", header(at(100, 1)), HEADLESS),
        _case(
            "tail_checksum",
            "The checksum is another one.",
            header(at(124, build.header()[124] ^ 1), repaired=False),
            HEADLESS,
        ),
        _case(
            "tail_build_id", "A bit of the build id is flipped.", header(at(20, 0), repaired=False), HEADLESS
        ),
    ]


def _foreign(good: bytes) -> list[Case]:
    raw = Build(good, (0, 2)).to_bytes()
    document = raw.index(b"nu/zarr.json") - 30
    text = raw.index(b'"m2 s-1"')
    found = {
        "building_empty": ("The file is empty.", b"", "6.5"),
        "building_zeros": ("The file is zeros.", bytes(len(raw)), "6.5"),
        "building_cut_in_root": ("The file ends in the root's document.", raw[:300], "6.5"),
        "building_cut_in_data": ("The file ends in the data.", raw[:20_000], "6.5"),
        "building_cut_at_the_tail": ("The build tail is missing.", raw[: Build(good).tail_offset], "6.5"),
        "building_a_byte_shorter": ("A byte is missing.", raw[:-1], "6.5"),
        "building_a_byte_longer": ("There is a byte more.", raw + b"\0", "6.5"),
        "building_a_page_longer": ("There is a page more.", raw + bytes(4096), "6.5"),
        "building_root_header": ("The root's local header has a time.", overwrite(raw, 10, "B", 1), "3.3"),
        "building_array_header": (
            "An array's local header has a time.",
            overwrite(raw, document + 10, "B", 1),
            "3.3",
        ),
        "building_array_of_another_name": (
            "The local header is that of an array that the identity lacks.",
            overwrite(raw, document + 30, "B", ord("m")),
            "3.3",
        ),
        "building_crc": (
            "The CRC-32 of a document is another one.",
            overwrite(raw, text + 1, "B", ord("n")),
            "3.2",
        ),
        "building_newer_minor": (
            "A newer minor version builds it.",
            Build(with_version("1.7")(good)).to_bytes(),
            "6.5",
        ),
        "building_packed": (
            "It is the start of a packed store.",
            pack(good, "blosc").ljust(len(raw), b"\0"),
            "6.5",
        ),
        "building_size_2_60": (
            "A document claims 2^60 bytes.",
            overwrite(raw, document + 46, "QQ", 1 << 60, 1 << 60),
            "9.1",
        ),
        "finished_with_another_record": (
            "The file has its final length, but a record of its directory is another one.",
            overwrite(good, find_places(good).central["x/c/0"] + 14, "B", 0),
            "3.5",
        ),
        "finished_without_end": (
            "The file has its final length, but no end records.",
            good[:-128] + bytes(128),
            "3.6",
        ),
    }
    return [
        _case(name.removeprefix("building_"), why, broken, FOREIGN, clause=clause)
        for name, (why, broken, clause) in found.items()
    ]
