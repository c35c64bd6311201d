"""Files that open, and in which verifying finds one thing (spec 7.6); checksums above it are right."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

from tools.conformance.archive import (
    Builder,
    Part,
    data_offset,
    edit_data,
    edit_identity,
    find_places,
    hash_of,
    overwrite,
    put_together,
    take_apart,
    with_checksum,
    with_data,
    with_identity,
)
from tools.conformance.defect import Defect, Field, changed_fields
from tools.conformance.records import CONSTANT_KEY, FLAGS_KEY, LARGE_KEY, SMALL_ARRAY, SMALL_KEY
from tools.conformance.sample_store import CONSTANT, EMPTY_CONSTANT, NUM_SAMPLES
from tools.conformance.texts import with_attribute, with_content, with_title
from ups_store.format.zip_records import ROOT_NAME

_SAMPLE_NBYTES, _SLOT_NBYTES = 5120, 5184
_INDEX = NUM_SAMPLES * _SLOT_NBYTES


def _local_fields(name: str) -> list[Field]:
    n = 30 + len(name)
    return [
        Field("signature", 0, 4),
        Field("version needed", 4, 2),
        Field("flags", 6, 2),
        Field("method", 8, 2),
        Field("time", 10, 2),
        Field("date", 12, 2),
        Field("CRC-32", 14, 4),
        Field("compressed size", 18, 4),
        Field("size", 22, 4),
        Field("name length", 26, 2),
        Field("extra length", 28, 2),
        Field("name", 30, 1),
        Field("extra field id", n, 2),
        Field("extra field length", n + 2, 2),
        Field("zip64 size", n + 4, 8),
        Field("zip64 compressed size", n + 12, 8),
    ]


def _padding_fields(name: str) -> list[Field]:
    n = 50 + len(name)
    return [
        Field("padding id", n, 2),
        Field("padding length", n + 2, 2),
        Field("padding alignment", n + 4, 2),
        Field("padding first zero", n + 6, 1),
    ]


def _local(name: str) -> Callable[[bytes], int]:
    return lambda good: find_places(good).local[name]


def _byte(name: str, at: int) -> Builder:
    """Flip a bit of an entry's data; the entry's CRC-32 follows."""
    return with_data(name, lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def _index(*records: int) -> Builder:
    """Another shard index, with its checksum."""
    return with_data(
        LARGE_KEY, lambda data: data[:_INDEX] + with_checksum(struct.pack(f"<{len(records)}Q", *records))
    )


def _entry_crc(name: str) -> Builder:
    """Another CRC-32 of an entry, in local header and central record."""

    def build(good: bytes) -> bytes:
        places = find_places(good)
        for at in (places.local[name] + 14, places.central[name] + 16):
            good = overwrite(good, at, "B", good[at] ^ 1)
        return good

    return build


def _flags_of(edit: Callable[[bytes], bytes]) -> Builder:
    return with_data(FLAGS_KEY, lambda data: with_checksum(edit(data[:-4])))


def _boolean_constant(good: bytes) -> bytes:
    """The constant is 256 booleans, one of them 2; document, digest and hash follow."""
    payload = bytes([2]) + bytes(255)

    def document(data: bytes) -> bytes:
        little = b'{"configuration":{"endian":"little"},"name":"bytes"}'
        data = data.replace(b"[32]", b"[256]").replace(little, b'{"name":"bytes"}')
        data = data.replace(b'"fill_value":0', b'"fill_value":false').replace(b'"float64"', b'"bool"')
        return data.replace(b'["x"]', b'["flag"]')

    def identity(content: dict[str, dict[str, object]]) -> None:
        content["arrays"][CONSTANT] = {"dims": ["flag"], "dtype": "bool", "shape": [256]}
        content["constants"][CONSTANT] = hash_of(payload)

    parts: list[Part] = edit_data(take_apart(good), f"{CONSTANT}/{ROOT_NAME}", document)
    parts = edit_data(parts, CONSTANT_KEY, lambda data: with_checksum(payload))
    return put_together(edit_identity(parts, identity))


def _digest(constant: str) -> Builder:
    return with_identity(lambda identity: identity["constants"].update({constant: "0" * 64}))


def _raw_byte(name: str, at: int) -> Builder:
    """Flip a bit of an entry's data; nothing follows."""

    def build(good: bytes) -> bytes:
        first = data_offset(good, name)
        return overwrite(good, first + at, "B", good[first + at] ^ 1)

    return build


_SLOT = _SAMPLE_NBYTES + 4
HEADERS: dict[str, Defect] = {
    f"{prefix}_{key}": defect
    for prefix, name, fields in (
        ("root_header", ROOT_NAME, _local_fields(ROOT_NAME)),
        ("array_header", SMALL_ARRAY, _local_fields(SMALL_ARRAY)),
        ("data_header", LARGE_KEY, [*_local_fields(LARGE_KEY), *_padding_fields(LARGE_KEY)]),
    )
    for key, defect in (
        (key.removeprefix("_"), defect)
        for key, defect in changed_fields("", fields, _local(name), "3.3", f"Local header of {name}").items()
    )
}

DATA: dict[str, Defect] = {
    "entry_crc_of_large_array": Defect("3.2", "The CRC-32 of a shard is another one.", _entry_crc(LARGE_KEY)),
    "entry_crc_of_small_array": Defect(
        "3.2", "The CRC-32 of a plain chunk is another one.", _entry_crc(SMALL_KEY)
    ),
    "entry_crc_of_constant": Defect(
        "3.2", "The CRC-32 of a constant is another one.", _entry_crc(CONSTANT_KEY)
    ),
    "payload_of_large_array": Defect(
        "5.2", "A bit of sample 1 is flipped.", _byte(LARGE_KEY, _SLOT_NBYTES + 100)
    ),
    "payload_of_first_sample": Defect("5.2", "The first bit of sample 0 is flipped.", _byte(LARGE_KEY, 0)),
    "payload_of_last_sample": Defect(
        "5.2",
        "The last byte of the last sample is changed.",
        _byte(LARGE_KEY, 2 * _SLOT_NBYTES + _SAMPLE_NBYTES - 1),
    ),
    "payload_of_small_array": Defect("5.2", "A bit of a small array is flipped.", _byte(SMALL_KEY, 8)),
    "payload_of_constant": Defect(
        "5.2", "A bit of a constant is flipped, and its digest follows.", lambda good: _constant(good)
    ),
    "slot_checksum": Defect(
        "5.2", "The CRC-32C of sample 0 is another one.", _byte(LARGE_KEY, _SAMPLE_NBYTES)
    ),
    "chunk_checksum": Defect("5.2", "The CRC-32C of a small array is another one.", _byte(SMALL_KEY, 24)),
    "chunk_checksum_of_constant": Defect(
        "5.2", "The CRC-32C of a constant is another one.", _byte(CONSTANT_KEY, 256)
    ),
    "chunk_checksum_big_endian": Defect(
        "5.2",
        "The CRC-32C of a small array is big-endian.",
        with_data(SMALL_KEY, lambda data: data[:-4] + data[:-5:-1]),
    ),
    "first_byte_of_slot_padding": Defect(
        "5.3", "The first byte behind a chunk isn't zero.", _byte(LARGE_KEY, _SLOT)
    ),
    "last_byte_of_slot_padding": Defect(
        "5.3", "The last byte of the last slot isn't zero.", _byte(LARGE_KEY, _INDEX - 1)
    ),
    "index_checksum": Defect(
        "5.4", "The CRC-32C of the index is another one.", _byte(LARGE_KEY, _INDEX + 16 * NUM_SAMPLES)
    ),
    "index_with_one_sample_twice": Defect(
        "5.4", "The index names slot 0 twice.", _index(0, _SLOT, 0, _SLOT, 2 * _SLOT_NBYTES, _SLOT)
    ),
    "index_with_samples_swapped": Defect(
        "5.4",
        "The index has slots 0 and 1 swapped.",
        _index(_SLOT_NBYTES, _SLOT, 0, _SLOT, 2 * _SLOT_NBYTES, _SLOT),
    ),
    "index_with_payload_sizes": Defect(
        "5.4",
        "The sizes in the index are those of the payloads.",
        _index(0, _SLOT - 4, _SLOT_NBYTES, _SLOT - 4, 2 * _SLOT_NBYTES, _SLOT - 4),
    ),
    "index_with_slot_sizes": Defect(
        "5.4",
        "The sizes in the index are those of the slots.",
        _index(0, _SLOT_NBYTES, _SLOT_NBYTES, _SLOT_NBYTES, 2 * _SLOT_NBYTES, _SLOT_NBYTES),
    ),
    "index_without_a_chunk": Defect(
        "5.4",
        "The index says that sample 2 has no chunk.",
        _index(0, _SLOT, _SLOT_NBYTES, _SLOT, 2**64 - 1, 2**64 - 1),
    ),
    "index_beyond_the_shard": Defect(
        "5.4",
        "The index says that sample 2 begins at 2^63.",
        _index(0, _SLOT, _SLOT_NBYTES, _SLOT, 1 << 63, _SLOT),
    ),
    "boolean_of_2": Defect("4.7", "The first bool is 2.", _flags_of(lambda payload: b"\2" + payload[1:])),
    "boolean_of_255": Defect(
        "4.7", "The last bool is 255.", _flags_of(lambda payload: payload[:-1] + b"\xff")
    ),
    "boolean_of_2_in_constant": Defect("4.7", "A bool of a constant is 2.", _boolean_constant),
    "constant_of_another_identity": Defect(
        "8.1",
        "A constant isn't the one of its digest.",
        with_data(CONSTANT_KEY, lambda data: with_checksum(bytes(len(data) - 4))),
    ),
    "digest_of_another_constant": Defect(
        "8.1", "The digest of a constant is another one.", _digest(CONSTANT)
    ),
    "empty_constant_of_another_identity": Defect(
        "8.1", "The digest of a constant without elements is another one.", _digest(EMPTY_CONSTANT)
    ),
}


def _constant(good: bytes) -> bytes:
    """A bit of a constant's payload and the digest that belongs to it; the CRC-32C stays."""
    parts = take_apart(_byte(CONSTANT_KEY, 8)(good))
    payload = next(part.data for part in parts if part.name == CONSTANT_KEY)[:-4]
    return put_together(
        edit_identity(parts, lambda identity: identity["constants"].update({CONSTANT: hash_of(payload)}))
    )


# Name: text of a number, the double that it stands for.
_DIGITS = {
    "17_digits_of_a_tenth": (b"0.10000000000000001", "0.1"),
    "integer_beyond_2_53": (b"9007199254740993", "9007199254740992"),
    "integer_of_60_bits_plus_1": (b"1152921504606846977", "1152921504606847000"),
    "integer_of_21_digits": (b"123456789012345678901", "123456789012345680000"),
    "smallest_double_with_two_digits": (b"4.9e-324", "5e-324"),
    "exponent_with_too_many_digits": (b"1.0000000000000000001e+22", "1e+22"),
    "rounds_to_an_exponent": (b"999999999999999999999", "1e+21"),
    "rounds_down_to_zero": (b"1e-324", "0"),
}
_IN_ROOT = ("17_digits_of_a_tenth", "integer_beyond_2_53")

NUMBERS: dict[str, Defect] = {
    **{
        f"digits_{name}": Defect("4.1", f"A number is {text.decode()}, not {value}.", with_attribute(text))
        for name, (text, value) in _DIGITS.items()
    },
    **{
        f"digits_in_identity_{name}": Defect(
            "4.1", f"A number in the identity is {_DIGITS[name][0].decode()}.", with_content(_DIGITS[name][0])
        )
        for name in _IN_ROOT
    },
    **{
        f"digits_in_root_attributes_{name}": Defect(
            "4.1",
            f"A number in the root's attributes is {_DIGITS[name][0].decode()}.",
            with_title(_DIGITS[name][0]),
        )
        for name in _IN_ROOT
    },
}
# What a flipped bit does when nothing is repaired: two checksums find it.
FLIPPED: dict[str, Defect] = {
    "flipped_bit_of_a_sample": Defect(
        "5.2", "A bit of sample 1 is flipped on the disk.", _raw_byte(LARGE_KEY, _SLOT_NBYTES)
    ),
    "flipped_bit_of_padding": Defect(
        "5.3", "A bit of a slot's padding is flipped on the disk.", _raw_byte(LARGE_KEY, _SLOT)
    ),
    "flipped_bit_of_an_index": Defect(
        "5.4", "A bit of a shard index is flipped on the disk.", _raw_byte(LARGE_KEY, _INDEX)
    ),
    "flipped_bit_of_a_small_array": Defect(
        "5.2", "A bit of a small array is flipped on the disk.", _raw_byte(SMALL_KEY, 0)
    ),
    "flipped_bit_of_a_bool": Defect(
        "5.2", "A bit of a bool is flipped on the disk.", _raw_byte(FLAGS_KEY, 1)
    ),
}
DAMAGED: dict[str, Defect] = {**HEADERS, **DATA, **NUMBERS}


def _both(*builders: Builder) -> Builder:
    return lambda good: functools.reduce(lambda raw, build: build(raw), builders, good)


# Two things are wrong, and each is found: what is wrong, the clauses.
TWICE: dict[str, tuple[Builder, str, list[str]]] = {
    "both_chunk_and_digest_of_constant": (
        _byte(CONSTANT_KEY, 8),
        "A bit of a constant is flipped; neither checksum nor digest follows.",
        ["5.2", "8.1"],
    ),
    "both_checksum_and_padding_of_slot": (
        _both(_byte(LARGE_KEY, _SAMPLE_NBYTES), _byte(LARGE_KEY, _SLOT)),
        "The CRC-32C of sample 0 is another one, and a byte behind it isn't zero.",
        ["5.2", "5.3"],
    ),
    "both_bool_and_checksum": (
        with_data(FLAGS_KEY, lambda data: b"\2" + data[1:]),
        "The first bool is 2, and the CRC-32C doesn't follow.",
        ["4.7", "5.2"],
    ),
    "both_sample_and_index": (
        _both(_byte(LARGE_KEY, 0), _byte(LARGE_KEY, _INDEX)),
        "A bit of sample 0 is flipped, and one of the index.",
        ["5.2", "5.4"],
    ),
    "both_digits_and_bool": (
        _both(with_attribute(_DIGITS["17_digits_of_a_tenth"][0]), _flags_of(lambda data: b"\2" + data[1:])),
        "A number has 17 digits where one is enough, and the first bool is 2.",
        ["4.1", "4.7"],
    ),
}
