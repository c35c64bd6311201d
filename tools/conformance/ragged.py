"""Stores with ragged arrays, valid and broken, made by hand (spec 14)."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.conformance.archive import (
    Builder,
    Document,
    Edit,
    Part,
    document_bytes,
    edit_identity,
    hash_of,
    put_together,
    take_apart,
    with_checksum,
    with_data,
    with_document,
    with_identity,
    with_parts,
)
from tools.conformance.building import Build, cases_of_ragged
from tools.conformance.case import Case, Digest
from tools.conformance.defect import Defect
from ups_store.format.checksum import crc32c
from ups_store.format.zip_records import ROOT_NAME

_ITEMS = {"uint8": 1, "float32": 4, "float64": 8, "int64": 8, "uint32": 4, "bool": 1}


@dataclass(frozen=True)
class Ragged:
    """A ragged array.

    Attributes:
        lengths: Rows of each sample.
        dims: Of the rows, and of their axes.
        dtype: Data type.
        tail: Shape of a row.
        encoding: "utf-8", "bytes" or none.
        rows: The payload; a pattern by default.
    """

    lengths: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str = "float32"
    tail: tuple[int, ...] = ()
    encoding: str | None = None
    rows: bytes | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        nbytes = _ITEMS[self.dtype]
        for length in self.tail:
            nbytes *= length
        return nbytes

    @property
    def offsets(self) -> list[int]:
        """The rows before each sample, and all rows."""
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    @property
    def payload(self) -> bytes:
        """All rows."""
        nbytes = sum(self.lengths) * self.row_nbytes
        return self.rows if self.rows is not None else (bytes(range(61)) * (nbytes // 61 + 1))[:nbytes]

    @property
    def samples(self) -> list[bytes]:
        """The rows of each sample."""
        at = [offset * self.row_nbytes for offset in self.offsets]
        return [self.payload[a:b] for a, b in itertools.pairwise(at)]

    @property
    def chunk_rows(self) -> int:
        """Rows of an inner chunk (spec 14.2)."""
        return max(1, 65536 // self.row_nbytes)


def _bytes(dtype: str) -> Document:
    if _ITEMS[dtype] == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def document(
    shape: Sequence[int],
    dtype: str,
    dims: Sequence[str],
    chunk_shape: Sequence[int] | None = None,
    **values: Any,
) -> Document:
    """A document of spec 4.4, that of a small array where `values` don't say otherwise."""
    return {
        "attributes": {},
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape or [max(1, n) for n in shape])},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [_bytes(dtype), {"name": "crc32c"}],
        "data_type": dtype,
        "dimension_names": list(dims),
        "fill_value": False if dtype == "bool" else 0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
        **values,
    }


def _parts_of(name: str, array: Ragged) -> dict[str, tuple[Document, bytes]]:
    """The three arrays: documents and data, empty where there is no entry (spec 14.1, 14.2, 14.4)."""
    num_rows, rows, nbytes = sum(array.lengths), array.chunk_rows, array.row_nbytes
    num_chunks = -(-num_rows // rows)
    companions = {"crc32c": f"{name}.crc32c", "offsets": f"{name}.offsets"}
    encoding = {"encoding": array.encoding} if array.encoding else {}
    index_codecs = [_bytes("int64"), {"name": "crc32c"}]
    sharding = {
        "chunk_shape": [rows, *array.tail],
        "codecs": [_bytes(array.dtype)],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    main = document(
        [num_rows, *array.tail],
        array.dtype,
        array.dims,
        [max(1, num_chunks) * rows, *array.tail],
        codecs=[{"name": "sharding_indexed", "configuration": sharding}],
        attributes={"ups_store": {"ragged": {**companions, **encoding}}},
    )
    index = [number for i in range(num_chunks) for number in (i * rows * nbytes, rows * nbytes)]
    data = array.payload.ljust(num_chunks * rows * nbytes, b"\0")
    data += with_checksum(struct.pack(f"<{len(index)}Q", *index))
    num_samples = len(array.lengths)
    checksums = struct.pack(f"<{num_samples}I", *map(crc32c, array.samples))
    offsets = struct.pack(f"<{num_samples + 1}q", *array.offsets)
    return {
        name: (main, data if num_rows else b""),
        f"{name}.crc32c": (
            document([num_samples], "uint32", ["sample"]),
            with_checksum(checksums) if num_samples else b"",
        ),
        f"{name}.offsets": (
            document([num_samples + 1], "int64", [f"{name}.offsets"]),
            with_checksum(offsets),
        ),
    }


def store(arrays: dict[str, Ragged], others: dict[str, tuple[Document, bytes]] | None = None) -> bytes:
    """A store of ragged arrays, and of small arrays or constants given by document and payload."""
    found = {key: value for name, array in arrays.items() for key, value in _parts_of(name, array).items()}
    declared: Document = {
        name: {"dims": ["sample", *array.dims], "dtype": array.dtype, "shape": [None, *array.tail]}
        for name, array in arrays.items()
    }
    digests = {}
    for name, (other, payload) in (others or {}).items():
        dims, shape = other["dimension_names"], other["shape"]
        is_sampled = dims[:1] == ["sample"]
        declared[name] = {
            "dims": dims,
            "dtype": other["data_type"],
            "shape": shape[1:] if is_sampled else shape,
        }
        digests |= {} if is_sampled else {name: hash_of(payload)}
        found[name] = (other, with_checksum(payload))
    identity = {"arrays": declared, "constants": digests, "content": {}}
    ours = {
        "config_hash": hash_of(document_bytes(identity)),
        "format_version": "1.0",
        "identity": identity,
        "requires": ["ragged"],
    }
    root = {"attributes": {"ups_store": ours}, "node_type": "group", "zarr_format": 3}
    names = sorted(found, key=str.encode)
    documents = [Part(f"{name}/{ROOT_NAME}", document_bytes(found[name][0])) for name in names]
    data = [
        Part(f"{name}/c" + "/0" * len(found[name][0]["shape"]), found[name][1], True)
        for name in names
        if found[name][1]
    ]
    return put_together([Part(ROOT_NAME, document_bytes(root)), *documents, *data])


POINTS = Ragged((2, 0, 3), ("point", "axis"), "float32", (3,))
TEXT = Ragged((4, 3, 0), ("byte",), "uint8", (), "utf-8", "\u00fcbe\u20ac".encode())
_U = (document([3], "float32", ["sample"]), struct.pack("<3f", 1, 2, 3))


def good_store() -> bytes:
    """The store that the broken ones are made from: points, text, and a small array."""
    return store({"points": POINTS, "text": TEXT}, {"u": _U})


def _digests(**arrays: Ragged) -> dict[str, Digest]:
    return {
        name: {"sha256": hash_of(array.payload), "samples": [hash_of(sample) for sample in array.samples]}
        for name, array in arrays.items()
    }


def _valid() -> list[Case]:
    many = Ragged((9, 0, 7, 1, 0, 4), ("row", "x"), "float64", (1024,))
    long_rows = Ragged((1, 2), ("row", "x"), "float32", (20_000,))
    exact = Ragged((8, 8), ("row", "x"), "float64", (1024,))
    raw_bytes = Ragged((5, 0, 1), ("byte",), "uint8", (), "bytes", bytes([0, 255, 128, 10, 13, 7]))
    flags = Ragged((3, 1), ("row",), "bool", (), None, bytes([1, 0, 1, 1]))
    no_rows, no_samples = Ragged((0, 0), ("row",)), Ragged((), ("row",))
    neighbours: dict[str, tuple[Document, bytes]] = {
        "r-x": (document([2], "float32", ["sample"]), bytes(8)),
        "r.a": (document([4], "float64", ["y"]), bytes(32)),
        "r.d": (document([4], "float64", ["y"]), bytes(32)),
    }
    return [
        _ok(
            "points_and_text", "Points, UTF-8 text and a small array.", good_store(), points=POINTS, text=TEXT
        ),
        _ok("bytes", "Byte strings.", store({"b": raw_bytes}), b=raw_bytes),
        _ok(
            "several_chunks",
            "Rows of 8 KiB in three inner chunks, samples across their edges.",
            store({"r": many}),
            r=many,
        ),
        _ok("chunks_without_fill", "Rows that fill two inner chunks.", store({"r": exact}), r=exact),
        _ok(
            "rows_over_64_kib",
            "Rows longer than an inner chunk would be: one row each.",
            store({"r": long_rows}),
            r=long_rows,
        ),
        _ok("flags", "Rows of bool.", store({"r": flags}), r=flags),
        _ok("no_rows", "Samples, but no rows.", store({"r": no_rows}), r=no_rows),
        _ok("no_samples", "N = 0: offsets are one zero.", store({"r": no_samples}), r=no_samples),
        _ok(
            "neighbours",
            "Names that are sorted among those of the companions.",
            store({"r": exact}, neighbours),
            r=exact,
        ),
        _ok("name_of_120_characters", "The longest name.", store({"r" * 120: exact}), **{"r" * 120: exact}),
    ]


def _ok(name: str, why: str, raw: bytes, **arrays: Ragged) -> Case:
    return Case(
        f"ragged/{name}.zarr.zip", raw, why, verify="ok", digests=_digests(**arrays), has_fingerprint=True
    )


def _doc(name: str, edit: Edit) -> Builder:
    return with_document(f"{name}/{ROOT_NAME}", edit)


def _set(name: str, **values: Any) -> Builder:
    """Set keys of an array's document."""
    return _doc(name, lambda array: array.update(values))


def _attribute(name: str = "points", **values: Any) -> Builder:
    """Set keys of `ragged` in the attribute of a ragged array."""
    return _doc(name, lambda array: array["attributes"]["ups_store"]["ragged"].update(values))


def _sharding(edit: Edit) -> Builder:
    return _doc("points", lambda array: edit(array["codecs"][0]["configuration"]))


def _codec(**values: Any) -> Builder:
    return _sharding(lambda codec: codec.update(values))


def _grid(*chunk_shape: int) -> Builder:
    return _doc(
        "points", lambda array: array["chunk_grid"]["configuration"].update(chunk_shape=list(chunk_shape))
    )


def _requires(*features: str) -> Builder:
    return with_document(
        ROOT_NAME, lambda root: root["attributes"]["ups_store"].update(requires=list(features))
    )


def _identity(name: str, **values: Any) -> Builder:
    return with_identity(lambda identity: identity["arrays"][name].update(values))


def _declared_companion(parts: list[Part]) -> list[Part]:
    entry = {"dims": ["sample"], "dtype": "uint32", "shape": []}
    return edit_identity(parts, lambda identity: identity["arrays"].update({"points.crc32c": entry}))


def _companion_dropped(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not part.name.startswith("points.crc32c/")]


_R = POINTS.chunk_rows


def _ragged_of_no_ragged(good: bytes) -> bytes:
    attribute = {"ups_store": {"ragged": {"crc32c": "u.crc32c", "offsets": "u.offsets"}}}
    return _set("u", attributes=attribute)(good)


REFUSED: dict[str, Defect] = {
    "not_required": Defect("10.3", "There is a ragged array, but 'ragged' isn't required.", _requires()),
    "checksums_of_another_name": Defect(
        "14.2", "The checksums are those of another array.", _attribute(crc32c="text.crc32c")
    ),
    "offsets_of_another_name": Defect(
        "14.2", "The offsets are those of another array.", _attribute(offsets="text.offsets")
    ),
    "offsets_not_named": Defect(
        "14.2",
        "The offsets aren't named.",
        _doc("points", lambda array: array["attributes"]["ups_store"]["ragged"].pop("offsets")),
    ),
    "attribute_missing": Defect(
        "14.2",
        "The attribute ups_store is missing.",
        _doc("points", lambda array: array["attributes"].clear()),
    ),
    "attribute_null": Defect(
        "14.2",
        "The attribute is null.",
        _doc("points", lambda array: array["attributes"]["ups_store"].update(ragged=None)),
    ),
    "attribute_with_another_key": Defect("14.2", "ragged has another key.", _attribute(extra=1)),
    "ups_store_with_another_key": Defect(
        "14.2",
        "ups_store has another key.",
        _doc("points", lambda array: array["attributes"]["ups_store"].update(extra=1)),
    ),
    "encoding_unknown": Defect("14.2", "The encoding is latin-1.", _attribute("text", encoding="latin-1")),
    "encoding_null": Defect("14.2", "The encoding is null.", _attribute("text", encoding=None)),
    "encoding_of_numbers": Defect("14.2", "Rows of float32 have an encoding.", _attribute(encoding="bytes")),
    "inner_chunk_with_checksum": Defect(
        "14.2",
        "Inner chunks have a checksum.",
        _sharding(lambda codec: codec["codecs"].append({"name": "crc32c"})),
    ),
    "inner_chunk_of_other_rows": Defect(
        "14.2", "An inner chunk has a row more.", _codec(chunk_shape=[_R + 1, 3])
    ),
    "index_at_start": Defect("14.2", "The index stands at the start.", _codec(index_location="start")),
    "index_without_checksum": Defect(
        "14.2", "The index has no checksum.", _sharding(lambda codec: codec["index_codecs"].pop())
    ),
    "grid_of_the_rows": Defect("14.2", "The chunk has the shape of the array.", _grid(5, 3)),
    "grid_of_two_chunks": Defect("14.2", "The chunk has an inner chunk more.", _grid(2 * _R, 3)),
    "plain_chunk": Defect(
        "14.2", "The rows are a plain chunk.", _set("points", codecs=[_bytes("float32"), {"name": "crc32c"}])
    ),
    "checksums_with_attributes": Defect(
        "14.2", "The checksums have attributes.", _set("points.crc32c", attributes={"a": 1})
    ),
    "offsets_with_attributes": Defect(
        "14.2", "The offsets have attributes.", _set("points.offsets", attributes={"a": 1})
    ),
    "checksums_signed": Defect("14.1", "The checksums are int32.", _set("points.crc32c", data_type="int32")),
    "checksums_of_another_dimension": Defect(
        "14.1",
        "The dimension of the checksums isn't sample.",
        _set("points.crc32c", dimension_names=["samples"]),
    ),
    "offsets_unsigned": Defect("14.1", "The offsets are uint64.", _set("points.offsets", data_type="uint64")),
    "offsets_of_another_dimension": Defect(
        "14.1",
        "The dimension of the offsets is 'offset'.",
        _set("points.offsets", dimension_names=["offset"]),
    ),
    "offsets_one_too_few": Defect(
        "14.1", "There are N offsets.", with_parts(lambda parts: _fewer_offsets(parts))
    ),
    "rows_of_a_sample_dimension": Defect(
        "4.5", "The rows have the dimension sample.", _set("points", dimension_names=["sample", "axis"])
    ),
    "checksums_missing": Defect("14.1", "There are no checksums.", with_parts(_companion_dropped)),
    "companion_in_identity": Defect(
        "14.3", "The identity names a companion.", with_parts(_declared_companion)
    ),
    "identity_with_number_of_rows": Defect(
        "14.3", "The identity has the number of rows.", _identity("points", shape=[5, 3])
    ),
    "identity_with_two_nulls": Defect(
        "14.3", "The identity has two lengths of null.", _identity("points", shape=[None, None])
    ),
    "identity_with_null_second": Defect(
        "14.3", "The second length is null.", _identity("points", shape=[5, None])
    ),
    "identity_without_sample": Defect(
        "14.3",
        "The dims of a ragged array don't begin with sample.",
        _identity("points", dims=["point", "axis"]),
    ),
    "identity_with_another_tail": Defect(
        "14.3", "The identity has another tail.", _identity("points", shape=[None, 4])
    ),
    "identity_of_no_ragged_array": Defect(
        "14.3",
        "The identity has null for an array that isn't ragged.",
        _identity("u", shape=[None], dims=["sample", "x"]),
    ),
    "attribute_of_no_ragged_array": Defect(
        "14.2", "An array that isn't ragged has the attribute.", _ragged_of_no_ragged
    ),
    "name_of_121_characters": Defect(
        "14.1", "The name has 121 characters.", lambda good: store({"r" * 121: POINTS})
    ),
    "rows_of_no_bytes": Defect("14.1", "Rows have no bytes.", lambda good: put_together(_without_bytes())),
    "companion_of_another_array": Defect(
        "14.1",
        "Another array has the name of a companion.",
        lambda good: store({"r": POINTS, "r.crc32c": POINTS}),
    ),
}


def _fewer_offsets(parts: list[Part]) -> list[Part]:
    raw = put_together(parts)

    def shorter(array: Document) -> None:
        array["shape"] = [3]
        array["chunk_grid"]["configuration"]["chunk_shape"] = [3]

    raw = _doc("points.offsets", shorter)(raw)
    return take_apart(with_data("points.offsets/c/0", lambda data: with_checksum(data[:24]))(raw))


def _without_bytes() -> list[Part]:
    """Rows of shape (0,): the documents of an array without rows, with a tail of 0."""
    parts = take_apart(store({"r": Ragged((0, 0), ("row", "x"), "float32", (3,))}))

    def change(array: Document) -> None:
        array["shape"] = [0, 0]
        array["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1]
        array["codecs"][0]["configuration"]["chunk_shape"] = [1, 1]

    parts = take_apart(_doc("r", change)(put_together(parts)))
    return edit_identity(parts, lambda identity: identity["arrays"]["r"].update(shape=[None, 0]))


def _offsets(*offsets: int) -> Builder:
    return with_data("points.offsets/c/0", lambda data: with_checksum(struct.pack("<4q", *offsets)))


def _points(edit: Callable[[bytearray], None]) -> Builder:
    """Change the data of points; the CRC-32 of the entry follows."""

    def change(data: bytes) -> bytes:
        raw = bytearray(data)
        edit(raw)
        return bytes(raw)

    return with_data("points/c/0/0", change)


def _text(text: bytes) -> Builder:
    """Other text, with the checksums of its samples."""

    def build(good: bytes) -> bytes:
        array = Ragged(TEXT.lengths, TEXT.dims, "uint8", (), "utf-8", text)
        return store({"points": POINTS, "text": array}, {"u": _U})

    return build


def _checksum(sample: int) -> Builder:
    def change(data: bytes) -> bytes:
        raw = bytearray(data[:-4])
        raw[4 * sample] ^= 1
        return with_checksum(bytes(raw))

    return with_data("points.crc32c/c/0", change)


def _flip(at: int) -> Callable[[bytearray], None]:
    return lambda raw: raw.__setitem__(at, raw[at] ^ 1)


_FILL, _END = 60, _R * 12
DAMAGED: dict[str, Defect] = {
    "offsets_begin_with_1": Defect("14.5", "The offsets begin with 1.", _offsets(1, 2, 2, 5)),
    "offsets_fall": Defect("14.5", "The offsets fall.", _offsets(0, 3, 2, 5)),
    "offsets_negative": Defect("14.5", "An offset is negative.", _offsets(0, -1, 2, 5)),
    "offsets_end_early": Defect("14.5", "The last offset isn't the number of rows.", _offsets(0, 2, 2, 4)),
    "offsets_end_late": Defect("14.5", "The last offset is beyond the rows.", _offsets(0, 2, 2, 6)),
    "offsets_of_other_samples": Defect(
        "14.5", "An offset between others is another one.", _offsets(0, 1, 2, 5)
    ),
    "rows": Defect("14.5", "A bit of a row is flipped.", _points(_flip(8))),
    "checksum_of_sample": Defect("14.5", "The checksum of a sample is another one.", _checksum(0)),
    "checksum_of_sample_without_rows": Defect(
        "14.5", "The checksum of a sample without rows isn't 0.", _checksum(1)
    ),
    "first_byte_of_fill": Defect("14.5", "The first byte behind the rows isn't zero.", _points(_flip(_FILL))),
    "last_byte_of_fill": Defect(
        "14.5", "The last byte of the inner chunk isn't zero.", _points(_flip(_END - 1))
    ),
    "index": Defect(
        "5.4",
        "The index has another size.",
        with_data("points/c/0/0", lambda data: data[:_END] + with_checksum(struct.pack("<2Q", 0, 60))),
    ),
    "index_checksum": Defect("5.4", "The CRC-32C of the index is another one.", _points(_flip(_END + 16))),
    "text_not_utf_8": Defect("14.5", "Text isn't UTF-8.", _text(b"\xffbe!\xe2\x82\xac")),
    "text_of_a_surrogate": Defect(
        "14.5", "Text has UTF-8 of half a surrogate pair.", _text(b"abcd\xed\xa0\x80")
    ),
    "text_cut_in_a_character": Defect("14.5", "A character belongs to two samples.", _text(b"abc\xc3\xbcab")),
    "chunk_of_offsets": Defect(
        "5.2",
        "The CRC-32C of the offsets is zeros.",
        with_data("points.offsets/c/0", lambda data: data[:-4] + bytes(4)),
    ),
    "chunk_of_checksums": Defect(
        "5.2",
        "The CRC-32C of the checksums is zeros.",
        with_data("points.crc32c/c/0", lambda data: data[:-4] + bytes(4)),
    ),
}


def _and_wrong_offsets(*builders: Builder) -> Builder:
    return lambda good: functools.reduce(lambda raw, build: build(raw), builders, _offsets(0, 3, 2, 5)(good))


def _flags_without_offsets(good: bytes) -> bytes:
    """A ragged array of bool, one of them 2, whose offsets fall; the samples' checksums are right."""
    flags = Ragged((3, 1), ("row",), "bool", (), None, bytes([1, 2, 1, 1]))
    falling = with_checksum(struct.pack("<3q", 0, 5, 4))
    return with_data("flags.offsets/c/0", lambda data: falling)(store({"flags": flags}))


# Offsets are wrong and something else is: what is checked without them is found, too (spec 14.5).
TWICE: dict[str, tuple[Builder, str, list[str]]] = {
    "offsets_and_fill": (
        _and_wrong_offsets(_points(_flip(_FILL))),
        "The offsets fall, and the first byte behind the rows isn't zero.",
        ["14.5"],
    ),
    "offsets_and_index": (
        _and_wrong_offsets(_points(_flip(_END))),
        "The offsets fall, and the index is another one.",
        ["14.5", "5.4"],
    ),
    "offsets_and_bool": (
        _flags_without_offsets,
        "The offsets fall, and a bool is 2.",
        ["14.5", "4.7"],
    ),
    "offsets_and_checksum_of_sample": (
        _and_wrong_offsets(_checksum(0)),
        "The offsets fall, and the checksum of a sample is another one, which nobody can tell.",
        ["14.5"],
    ),
}


def cases() -> list[Case]:
    """All of them."""
    good = good_store()
    found = _valid()
    for name, defect in REFUSED.items():
        raw = defect.build(good)
        file = f"ragged/refused_{name}.zarr.zip"
        found.append(Case(file, raw, defect.why, opens=False, clause=defect.clause, verify="refused"))
    for name, defect in DAMAGED.items():
        found.append(
            Case(f"ragged/damaged_{name}.zarr.zip", defect.build(good), defect.why, verify=[defect.clause])
        )
    for name, (build, why, clauses) in TWICE.items():
        found.append(Case(f"ragged/damaged_{name}.zarr.zip", build(good), why, verify=clauses))
    return [*found, *cases_of_ragged(Build(good, (0, 2)))]
