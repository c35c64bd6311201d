"""Packed stores, valid and broken (spec 13). Chunks stand here as a library wrote them: versions differ."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.conformance.archive import (
    Builder,
    Document,
    Part,
    edit_document,
    find_places,
    overwrite,
    put_together,
    replace_data,
    take_apart,
    with_checksum,
    with_data,
    with_document,
    with_identity,
    with_parts,
)
from tools.conformance.case import Case, fingerprint_of
from tools.conformance.damage import DAMAGED, HEADERS
from tools.conformance.defect import Defect
from tools.conformance.records import CONSTANT_KEY, FLAGS_KEY, LARGE_KEY, SMALL_ARRAY, SMALL_KEY
from tools.conformance.sample_store import CONSTANT, FLAGS, LARGE, SMALL, sample_store
from tools.conformance.texts import with_attribute
from tools.conformance.valid import digests, make
from ups_store.format.zip_records import ROOT_NAME

_BLOSC = {
    LARGE: (
        "0201910400140000001400007d000000140000006500000028b52ffd600013dd02005404000080004080a0c0e0001020304050607080889098"
        "a0a8b0b8c0c8d0d8e0e8f0f80004080c1014181c2024282c3034383c4044484c5054585c6064686c7074787c3f4041420600bd801f4073a032"
        "5c68efcb10fecd1f1fb401"
    ),
    SMALL: "020193081800000018000000280000009a9999999999b93f7b14ae47e17a843ffca9f1d24d62503f",
    FLAGS: "020192010c0000000c0000001c000000010000010000010000010000",
    CONSTANT: (
        "020191080001000000010000f400000014000000dc00000028b52ffd600000950600728d312d704bf249a048ff9fc7737d42282395f3391f06"
        "287862c34f4c68343a172e5cb879e9f5caeff57a3dad56eb4c0100ffe1d1c1b1a19181c12f2c2a28262422f683438366585048403830201810"
        "f88f3adf3a63e8b9d6a974465ce3e7a1e6450fe3fa5d1ab70a83dee36eb3ecb9c61c63ff7d67e83ab45992f8da4a3d5fbac496328d89a6f4df"
        "444c5fb8b2132d73c4b06116259111328a840a84ff1b729ae4ad483f95914e6d2759ba4ae5acaa9652ff91ce2174c605906b032a9d11ae31c4"
        "d6c9b19d78ce0f0200870b081ac5460a"
    ),
}
_PCODEC = {
    LARGE: (
        "70636f2103000a4001040105ff040023119209000360efff7fc00120f8ff3fe000fcffff1f7000ffffff0f38c0ffffff071cf0ffffff030efc"
        "ffffff01c00100000081037f200080000400000000000000200000e00f0000fefb2fa50cefdb82af827639aeeb4b9a55cd160a455bf05710ba"
        "1c41f025b3ab570bb52c2df82a485d8ef7fd92d9d46ea1aeab057b15c4cb81a25ff2ac4ab55041d082af83b3e558962f994dcd5ca8f76dc157"
        "41bb1cd7f525cdaa660b85a22df82b085d8e20f892d9d5ab855a96167c15a42ec7fb7ec96c6ab750d7d582bd0ae2e540d12f7956a55aa82068"
        "c1d7c1d9722ccb97dc1e3f00"
    ),
    SMALL: "70636f210300c1040106020000003200883f355eba490cea17c01e85eb51b81ee12f00cdccccccccccdc5f00090000",
    FLAGS: _BLOSC[FLAGS],
    CONSTANT: (
        "70636f21030005080401061f000010520300c2f7de7befbdf706e41b7befbdf7de7bff7f01fbffffffffffffff27000000000000000080841"
        "042082184a03f00140349f7860d0000000000000000638c31c61863c4ff39e79c73ce39e35fefbdf7de7bef1d7f2333492a490000"
    ),
}
_CHUNKS = {"blosc": _BLOSC, "pcodec": _PCODEC}
_LEVELS = {"blosc": 5, "pcodec": 8}
_ITEMS = {"float32": 4, "float64": 8, "bool": 1, "int16": 2}
_DOUBLES_4 = (
    "020193082000000020000000300000000000000000000000000000000000f03f00000000000000400000000000000840"
)
_PCODEC_2 = "70636f21030081040106010000002100b047e17a14ae47f80ba0999999999999fb0b00010000"


def _chunk(codec: str, array: str) -> bytes:
    return with_checksum(bytes.fromhex(_CHUNKS[codec][array]))


def _chain(codec: str, dtype: str) -> list[Document]:
    """Codecs of a chunk (spec 13.4)."""
    if codec == "pcodec" and dtype != "bool":
        return [{"name": "numcodecs.pcodec", "configuration": {"level": 8}}, {"name": "crc32c"}]
    nbytes = _ITEMS[dtype]
    configuration = {
        "typesize": nbytes,
        "cname": "zstd",
        "clevel": 5,
        "shuffle": "noshuffle" if nbytes == 1 else "shuffle",
        "blocksize": 0,
    }
    plain: Document = {"name": "bytes"}
    if nbytes > 1:
        plain["configuration"] = {"endian": "little"}
    return [plain, {"name": "blosc", "configuration": configuration}, {"name": "crc32c"}]


def _documents(parts: list[Part], codec: str, fingerprint: str) -> list[Part]:
    """The documents of a packed store."""

    def root(document: Document) -> None:
        packed = {"codec": codec, "level": _LEVELS[codec], "fingerprint": fingerprint}
        document["attributes"]["ups_store"].update(packed=packed, requires=["packed"])

    def array(document: Document) -> None:
        chain = _chain(codec, document["data_type"])
        if document["codecs"][0]["name"] == "sharding_indexed":
            document["codecs"][0]["configuration"]["codecs"] = chain
        else:
            document["codecs"] = chain

    for part in parts:
        if part.name.endswith(ROOT_NAME):
            parts = edit_document(parts, part.name, root if part.name == ROOT_NAME else array)
    return parts


def shard(chunks: list[bytes], index: list[int] | None = None) -> bytes:
    """Chunks without gaps, and their index (spec 13.5)."""
    records: list[int] = []
    for i, chunk in enumerate(chunks):
        records += [sum(map(len, chunks[:i])), len(chunk)]
    return b"".join(chunks) + with_checksum(struct.pack(f"<{len(records)}Q", *(index or records)))


def pack(good: bytes, codec: str) -> bytes:
    """The packed form of the sample store, or of one without data entries."""
    parts = _documents(take_apart(good), codec, fingerprint_of(good))
    parts = [replace(part, is_aligned=False) for part in parts]
    names = {part.name for part in parts}
    for key, array in ((SMALL_KEY, SMALL), (FLAGS_KEY, FLAGS), (CONSTANT_KEY, CONSTANT)):
        if key in names:
            parts = replace_data(parts, key, _chunk(codec, array))
    if LARGE_KEY in names:
        parts = replace_data(parts, LARGE_KEY, shard([_chunk(codec, LARGE)] * 3))
    return put_together(parts)


def _packed(**values: Any) -> Builder:
    """Set keys of the key `packed`."""
    return with_document(ROOT_NAME, lambda root: root["attributes"]["ups_store"]["packed"].update(values))


def _ours(edit: Callable[[Document], object]) -> Builder:
    return with_document(ROOT_NAME, lambda root: edit(root["attributes"]["ups_store"]))


def _index(*records: int) -> Builder:
    """Another shard index, with its checksum."""
    return with_data(LARGE_KEY, lambda data: data[: 3 * _SIZE] + with_checksum(struct.pack("<6Q", *records)))


_SIZE = len(_BLOSC[LARGE]) // 2 + 4
_CHAIN_OF_LEVEL_6 = b'"clevel":6'


def _set(**values: Any) -> Builder:
    return _ours(lambda ours: ours.update(values))


def _replaced(old: bytes, new: bytes) -> Builder:
    """Another text in the document of the small array."""
    return with_data(SMALL_ARRAY, lambda text: text.replace(old, new))


def _fingerprint(edit: Callable[[str], object]) -> Builder:
    return _ours(lambda ours: ours["packed"].update(fingerprint=edit(ours["packed"]["fingerprint"])))


REFUSED: dict[str, Defect] = {
    "codec_unknown": Defect("13.2", "The codec is unknown.", _packed(codec="lzma")),
    "codec_zstd": Defect(
        "13.2", "The codec is zstd, which version 1.0 doesn't have.", _packed(codec="zstd", level=3)
    ),
    "codec_null": Defect("13.2", "The codec is null.", _packed(codec=None)),
    "level_of_10": Defect("13.2", "The level is beyond those of blosc.", _packed(level=10)),
    "level_negative": Defect("13.2", "The level is negative.", _packed(level=-1)),
    "level_true": Defect("13.2", "The level is true.", _packed(level=True)),
    "level_a_string": Defect("13.2", "The level is a string.", _packed(level="5")),
    "level_missing": Defect("13.2", "The level is missing.", _ours(lambda ours: ours["packed"].pop("level"))),
    "fingerprint_missing": Defect(
        "13.2", "The fingerprint is missing.", _ours(lambda ours: ours["packed"].pop("fingerprint"))
    ),
    "fingerprint_null": Defect("13.2", "The fingerprint is null.", _fingerprint(lambda text: None)),
    "fingerprint_of_63_digits": Defect(
        "13.2", "The fingerprint lacks its last digit.", _fingerprint(lambda text: text[:-1])
    ),
    "fingerprint_in_capitals": Defect("13.2", "The fingerprint has capitals.", _fingerprint(str.upper)),
    "packed_with_another_key": Defect("13.2", "The key packed has another key.", _packed(extra=1)),
    "packed_null": Defect("13.2", "The key packed is null.", _set(packed=None)),
    "packed_missing": Defect("13.2", "The key packed is missing.", _ours(lambda ours: ours.pop("packed"))),
    "requires_packed_and_ragged": Defect(
        "10.3", "Both features are required.", _set(requires=["packed", "ragged"])
    ),
    "requires_packed_twice": Defect(
        "4.3", "A feature is required twice.", _set(requires=["packed", "packed"])
    ),
    "newer_minor": Defect("10.3", "A packed file of a newer minor version.", _set(format_version="1.1")),
    "document_of_the_mapped_form": Defect(
        "13.4",
        "The codecs of an array are those of the mapped form.",
        with_document(SMALL_ARRAY, lambda array: array["codecs"].pop(1)),
    ),
    "document_of_another_level": Defect(
        "13.4", "The codecs of an array have another level.", _replaced(b'"clevel":5', _CHAIN_OF_LEVEL_6)
    ),
    "document_without_checksum": Defect(
        "13.4",
        "The codecs of an array have no crc32c.",
        with_document(SMALL_ARRAY, lambda array: array["codecs"].pop()),
    ),
    "document_without_shuffle": Defect(
        "13.4",
        "The codecs of an array don't shuffle.",
        _replaced(b'"shuffle":"shuffle"', b'"shuffle":"noshuffle"'),
    ),
    "document_of_another_type_size": Defect(
        "13.4",
        "The codecs of an array have another size of the type.",
        _replaced(b'"typesize":8', b'"typesize":4'),
    ),
    "data_aligned": Defect(
        "13.3",
        "A data entry has padding.",
        with_parts(lambda parts: [replace(part, is_aligned=part.name == SMALL_KEY) for part in parts]),
    ),
    "data_missing": Defect("2.2", "The last data entry is missing.", with_parts(lambda parts: parts[:-1])),
    "unknown_entry": Defect(
        "2.2", "There is an entry that isn't known.", with_parts(lambda p: [*p, Part("notes.txt", b"")])
    ),
    "chunk_of_4_bytes": Defect(
        "13.6", "A plain chunk is a CRC-32C of nothing.", with_data(SMALL_KEY, lambda data: bytes(4))
    ),
    "shard_of_21_n_plus_3_bytes": Defect(
        "13.6", "A shard is a byte too short for its chunks.", with_data(LARGE_KEY, lambda data: data[-66:])
    ),
    "space_behind_root": Defect(
        "4.1", "A space follows the root's document.", with_data(ROOT_NAME, lambda raw: raw + b" ")
    ),
    "record_of_data": Defect(
        "3.5",
        "A central record has a time.",
        lambda good: overwrite(good, find_places(good).central[LARGE_KEY] + 12, "B", 1),
    ),
    "end_of_directory": Defect("3.6", "A zero follows the end records.", lambda good: good + b"\0"),
}

# Found without decoding.
DAMAGE: dict[str, Defect] = {
    **{
        name: HEADERS[name]
        for name in ("root_header_time", "array_header_time", "data_header_time", "data_header_CRC-32")
    },
    "entry_crc": DAMAGED["entry_crc_of_small_array"],
    "digits": Defect(
        "4.1", "A number is 0.10000000000000001, not 0.1.", with_attribute(b"0.10000000000000001")
    ),
    "digest_of_empty_constant": DAMAGED["empty_constant_of_another_identity"],
    "chunk_of_small_array": Defect(
        "5.2",
        "A bit of a plain chunk is flipped.",
        with_data(SMALL_KEY, lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:]),
    ),
    "chunk_of_sample": Defect(
        "5.2",
        "A bit of the chunk of sample 1 is flipped.",
        with_data(LARGE_KEY, lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]),
    ),
    "checksum_of_sample": Defect(
        "5.2",
        "The CRC-32C of a chunk is zeros.",
        with_data(LARGE_KEY, lambda data: data[: _SIZE - 4] + bytes(4) + data[_SIZE:]),
    ),
    "checksum_of_payload": Defect(
        "5.2",
        "The CRC-32C of a chunk is that of the payload.",
        with_data(SMALL_KEY, lambda data: data[:-4] + with_checksum(sample_store()[1][SMALL].tobytes())[-4:]),
    ),
    "index_checksum": Defect(
        "5.4", "The CRC-32C of the index is zeros.", with_data(LARGE_KEY, lambda data: data[:-4] + bytes(4))
    ),
    "index_with_samples_swapped": Defect(
        "5.4", "The index has samples 0 and 1 swapped.", _index(_SIZE, _SIZE, 0, _SIZE, 2 * _SIZE, _SIZE)
    ),
    "index_with_one_sample_twice": Defect(
        "5.4", "The index names a chunk twice.", _index(0, _SIZE, 0, _SIZE, 2 * _SIZE, _SIZE)
    ),
    "index_with_a_gap": Defect(
        "5.4",
        "There is a gap between two chunks.",
        with_data(
            LARGE_KEY,
            lambda data: (
                data[:_SIZE]
                + bytes(8)
                + data[_SIZE : 3 * _SIZE]
                + with_checksum(struct.pack("<6Q", 0, _SIZE, _SIZE + 8, _SIZE, 2 * _SIZE + 8, _SIZE))
            ),
        ),
    ),
    "index_with_a_chunk_of_4_bytes": Defect(
        "5.4",
        "A chunk has 4 bytes, a CRC-32C of nothing.",
        with_data(LARGE_KEY, lambda data: shard([data[:_SIZE], bytes(4), data[_SIZE : 2 * _SIZE]])),
    ),
    "index_beyond_the_shard": Defect(
        "5.4", "The index says that a chunk begins at 2^63.", _index(0, _SIZE, _SIZE, _SIZE, 1 << 63, _SIZE)
    ),
    "index_that_wraps": Defect(
        "5.4",
        "Sizes in the index have the right sum modulo 2^64 only.",
        _index(0, 2 * _SIZE, 2 * _SIZE, 2**64 - _SIZE, _SIZE, 2 * _SIZE),
    ),
}

# Found by decoding.
DECODED: dict[str, Defect] = {
    "chunk_of_no_codec": Defect(
        "5.2",
        "A chunk isn't what the codec writes.",
        with_data(SMALL_KEY, lambda data: with_checksum(bytes(40))),
    ),
    "chunk_of_4_numbers": Defect(
        "5.2",
        "A chunk decodes to 4 numbers, not 3.",
        with_data(SMALL_KEY, lambda data: with_checksum(bytes.fromhex(_DOUBLES_4))),
    ),
    "chunk_by_another_codec": Defect(
        "5.2",
        "A chunk's header says lz4, its document zstd.",
        with_data(SMALL_KEY, lambda data: with_checksum(data[:2] + bytes([data[2] & 31 | 32]) + data[3:-4])),
    ),
    "chunk_of_other_numbers": Defect(
        "5.2",
        "A chunk's header says numbers of 2 bytes, its document of 8.",
        with_data(SMALL_KEY, lambda data: with_checksum(data[:3] + b"\2" + data[4:-4])),
    ),
    "fingerprint_of_another_store": Defect(
        "13.7", "The fingerprint isn't that of the mapped form.", _packed(fingerprint="0123456789abcdef" * 4)
    ),
    "boolean_of_2": Defect(
        "4.7",
        "A bool decodes to 2.",
        with_data(FLAGS_KEY, lambda data: with_checksum(data[:16] + b"\2" + data[17:-4])),
    ),
    "digest_of_constant": DAMAGED["digest_of_another_constant"],
}


def cases() -> list[Case]:
    """All of them."""
    good, *values = sample_store()
    answers = digests(*values)
    blosc, pcodec = pack(good, "blosc"), pack(good, "pcodec")
    empty = make({})
    found = [
        _valid("blosc", "The sample store, packed with blosc.", blosc, answers),
        _valid("pcodec", "The sample store, packed with pcodec; booleans with blosc.", pcodec, answers),
        _valid("without_data", "A store without arrays, packed.", pack(empty, "blosc"), {}),
        _valid(
            "partition",
            "A partition, packed.",
            pack(with_identity(lambda i: i.update(partition=[1, 2]))(good), "blosc"),
            answers,
        ),
    ]
    for name, defect in REFUSED.items():
        raw = defect.build(blosc)
        found.append(
            _broken(f"refused_{name}", defect, raw, opens=False, clause=defect.clause, verify="refused")
        )
    for name, defect in DAMAGE.items():
        found.append(_broken(name, defect, defect.build(blosc), verify=[defect.clause]))
    for name, defect in DECODED.items():
        found.append(_broken(name, defect, defect.build(blosc), verify=[defect.clause], needs="blosc"))
    short = replace_data(take_apart(pcodec), SMALL_KEY, with_checksum(bytes.fromhex(_PCODEC_2)))
    of_two = Defect("5.2", "A chunk decodes to 2 numbers, not 3.", lambda good: good)
    found.append(
        _broken("pcodec_chunk_of_2_numbers", of_two, put_together(short), verify=["5.2"], needs="pcodec")
    )
    return found


def _valid(name: str, why: str, raw: bytes, answers: dict[str, str]) -> Case:
    return Case(f"packed/{name}.packed.zarr.zip", raw, why, kind="packed", verify="ok", digests=answers)


def _broken(name: str, defect: Defect, raw: bytes, **answers: Any) -> Case:
    return Case(f"packed/{name}.packed.zarr.zip", raw, defect.why, kind="packed", **answers)
