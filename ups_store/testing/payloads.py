"""Files that open, and that `verify` finds damage in: every address is right, some byte isn't (spec 7.6)."""

from __future__ import annotations

import struct

from ups_store.format.checksum import crc32c
from ups_store.format.layout import PAGE_BYTES
from ups_store.format.zip_records import ROOT_NAME
from ups_store.testing.archive import (
    Builder,
    Document,
    Part,
    data_offset,
    edit_document,
    find_places,
    overwrite,
    put_together,
    take_apart,
    with_data,
    with_identity,
)
from ups_store.testing.sample_store import CONSTANT, EMPTY_CONSTANT, FLAGS, LARGE, NUM_SAMPLES, SMALL

_SMALL_ARRAY = f"{SMALL}/{ROOT_NAME}"
_LARGE_KEY, _SMALL_KEY = f"{LARGE}/c/0/0/0", f"{SMALL}/c/0"
_FLAGS_KEY, _CONSTANT_KEY = f"{FLAGS}/c/0/0", f"{CONSTANT}/c/0"
_SAMPLE_NBYTES, _SLOT_NBYTES = 5120, 5184
_INDEX = NUM_SAMPLES * _SLOT_NBYTES


def _byte(name: str, at: int, value: int) -> Builder:
    """Overwrite one byte of an entry's data in place; nothing follows."""
    return lambda good: overwrite(good, data_offset(good, name) + at, "B", value)


def _with_checksum(payload: bytes) -> bytes:
    return payload + struct.pack("<I", crc32c(payload))


def _in_header(name: str, offset: int, layout: str, *values: object) -> Builder:
    """Overwrite fields of a local header, which only streaming readers look at."""

    return lambda good: overwrite(good, find_places(good).local[name] + offset, layout, *values)


def _index_of_sample_0_twice(data: bytes) -> bytes:
    index = struct.pack("<6Q", *(0, _SAMPLE_NBYTES + 4) * 2, 2 * _SLOT_NBYTES, _SAMPLE_NBYTES + 4)
    return data[:_INDEX] + _with_checksum(index)


def _bool_of_2(data: bytes) -> bytes:
    return _with_checksum(b"\2" + data[1:-4])


def _another_constant(data: bytes) -> bytes:
    return _with_checksum(bytes(len(data) - 4))


DAMAGED: dict[str, Builder] = {
    "payload_of_large_array": _byte(_LARGE_KEY, _SLOT_NBYTES + 100, 0xFF),
    "payload_of_small_array": _byte(_SMALL_KEY, 0, 0xFF),
    "payload_with_crc_of_entry": with_data(_LARGE_KEY, lambda data: b"\xff" + data[1:]),
    "slot_checksum": _byte(_LARGE_KEY, _SAMPLE_NBYTES, 0xFF),
    "slot_padding": with_data(_LARGE_KEY, lambda data: data[:5124] + b"\1" + data[5125:]),
    "index_checksum": _byte(_LARGE_KEY, _INDEX + 16 * NUM_SAMPLES, 0xFF),
    "index_with_one_sample_twice": with_data(_LARGE_KEY, _index_of_sample_0_twice),
    "chunk_checksum": with_data(_SMALL_KEY, lambda data: data[:-4] + b"\0\0\0\0"),
    "boolean_of_2": with_data(_FLAGS_KEY, _bool_of_2),
    "constant_of_another_identity": with_data(_CONSTANT_KEY, _another_constant),
    "empty_constant_of_another_identity": with_identity(
        lambda identity: identity["constants"].update({EMPTY_CONSTANT: "0" * 64})
    ),
    "magic_of_root_header": _in_header(ROOT_NAME, 0, "4s", b"PK\0\0"),
    "magic_of_data_header": _in_header(_LARGE_KEY, 0, "4s", b"PK\0\0"),
    "time_in_header": _in_header(_LARGE_KEY, 10, "H", 1),
    "padding_not_zero": _in_header(_SMALL_KEY, 30 + len(_SMALL_KEY) + 20 + 6, "B", 1),
    "crc_in_directory": lambda good: overwrite(good, find_places(good).central[_LARGE_KEY] + 16, "I", 0),
    "attributes_with_integer_of_60_bits": with_data(
        _SMALL_ARRAY, lambda text: text.replace(b'"m2 s-1"', b"1152921504606846976")
    ),
    "metadata_with_white_space": with_data(_SMALL_ARRAY, lambda text: text.replace(b":", b": ", 1)),
    "metadata_with_a_key_twice": with_data(
        _SMALL_ARRAY, lambda text: text.replace(b"{", b'{"zarr_format":3,', 1)
    ),
    "metadata_with_spaces_behind": with_data(_SMALL_ARRAY, lambda text: text + b"  "),
    "root_metadata_with_a_page_of_spaces": with_data(
        ROOT_NAME, lambda text: text.ljust(len(text) + PAGE_BYTES)
    ),
    "identity_with_another_key": with_identity(lambda identity: identity.update(extra=1)),
    "identity_without_content": with_identity(lambda identity: identity.pop("content")),
    "identity_of_format_2": with_identity(lambda identity: identity.update(format=2)),
    "identity_with_digest_of_no_constant": with_identity(
        lambda identity: identity["constants"].update(u="0")
    ),
}


def _newer(good: bytes) -> list[Part]:
    return edit_document(
        take_apart(good), ROOT_NAME, lambda root: root["attributes"]["ups_store"].update(format_version="1.7")
    )


def _newer_with_key(good: bytes) -> bytes:
    def add_key(root: Document) -> None:
        root["attributes"]["ups_store"]["statistics"] = {LARGE: {"max": 1}}

    return put_together(edit_document(_newer(good), ROOT_NAME, add_key))


NEWER_MINOR: dict[str, Builder] = {
    "newer_minor_version": lambda good: put_together(_newer(good)),
    "newer_minor_with_a_key": _newer_with_key,
    "newer_minor_with_an_entry": lambda good: put_together([*_newer(good), Part("v/zarr.json", b"{}")]),
}
