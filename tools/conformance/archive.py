"""A store taken apart and put together again: to change one thing and keep everything else right."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ups_store.format.checksum import crc32, crc32c
from ups_store.format.zip_records import END_BYTES, ROOT_NAME, EndRecords, Entry, central_nbytes, parse_end

Document = dict[str, Any]
Edit = Callable[[Document], object]
Builder = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Part:
    """One entry of an archive.

    Attributes:
        name: Zarr key.
        data: Its bytes.
        is_aligned: Whether the data start on a page.
        claimed_nbytes: Size that the records say, where it isn't the true one.
    """

    name: str
    data: bytes
    is_aligned: bool = False
    claimed_nbytes: int | None = None


@dataclass(frozen=True)
class Places:
    """Where the records of an archive stand, in bytes from its start.

    Attributes:
        records: The entries by the central directory, in order.
        local: First byte of every local header, by name.
        central: First byte of every central record, by name.
        end64: ZIP64 end record.
        locator: ZIP64 end locator.
        end: End record.
    """

    records: tuple[Entry, ...]
    local: dict[str, int]
    central: dict[str, int]
    end64: int
    locator: int
    end: int


def find_places(good: bytes) -> Places:
    """Where the records of a well-formed store stand."""
    end = parse_end(good[-END_BYTES:], len(good), path="store")
    at, end64 = end.directory_offset, end.directory_offset + end.directory_nbytes
    records, central = [], {}
    while at < end64:
        (name_nbytes,) = struct.unpack_from("<H", good, at + 28)
        name = good[at + 46 :][:name_nbytes].decode()
        nbytes, offset = struct.unpack_from("<Q8xQ", good, at + 50 + name_nbytes)
        central[name] = at
        is_aligned = "/c" in name and _data_behind(good, offset) % 4096 == 0
        records.append(Entry(name, offset, nbytes, is_aligned))
        at += central_nbytes(name)
    local = {record.name: record.offset for record in records}
    return Places(tuple(records), local, central, end64, end64 + 56, end64 + 76)


def data_offset(good: bytes, name: str) -> int:
    """First byte of an entry's data, as its local header says."""
    return _data_behind(good, find_places(good).local[name])


def _data_behind(good: bytes, header: int) -> int:
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", good, header + 26)
    return int(header + 30 + name_nbytes + extra_nbytes)


def take_apart(good: bytes) -> list[Part]:
    """The entries of a well-formed store, in file order."""
    parts = []
    for record in find_places(good).records:
        start = _data_behind(good, record.offset)
        parts.append(Part(record.name, good[start : start + record.nbytes], record.is_aligned))
    return parts


def put_together(parts: Sequence[Part]) -> bytes:
    """An archive of these entries: offsets, paddings, CRC-32s and end records as the format wants them."""
    body, central, offset = bytearray(), bytearray(), 0
    for part in parts:
        nbytes = len(part.data) if part.claimed_nbytes is None else part.claimed_nbytes
        entry, crc = Entry(part.name, offset, nbytes, part.is_aligned), crc32(part.data)
        body += entry.pack_local_header(crc) + part.data
        central += entry.pack_central_record(crc)
        offset = entry.end
    end = EndRecords(len(parts), len(body), len(central))
    return bytes(body + central) + end.pack()


def overwrite(good: bytes, offset: int, layout: str, *values: object) -> bytes:
    """A copy with `values`, packed by `struct` as little-endian `layout`, at `offset`."""
    changed = bytearray(good)
    struct.pack_into(f"<{layout}", changed, offset, *values)
    return bytes(changed)


def read_document(parts: Sequence[Part], name: str) -> Document:
    """The JSON document of a metadata entry."""
    document: Document = json.loads(next(part.data for part in parts if part.name == name))
    return document


def replace_data(parts: Sequence[Part], name: str, data: bytes) -> list[Part]:
    """The same parts with other data in one of them."""
    return [replace(part, data=data) if part.name == name else part for part in parts]


def edit_data(parts: Sequence[Part], name: str, edit: Callable[[bytes], bytes]) -> list[Part]:
    """The same parts with data in one of them that are made from the right ones."""
    return replace_data(parts, name, edit(next(part.data for part in parts if part.name == name)))


def with_parts(change: Callable[[list[Part]], list[Part]]) -> Builder:
    """A builder of files with other entries, everything else as it should be."""
    return lambda good: put_together(change(take_apart(good)))


def with_data(name: str, edit: Callable[[bytes], bytes]) -> Builder:
    """A builder of files with other data of an entry; its CRC-32 follows, so only the data can tell."""
    return with_parts(lambda parts: edit_data(parts, name, edit))


def edit_document(parts: Sequence[Part], name: str, edit: Edit) -> list[Part]:
    """The same parts with an edited JSON document; whatever `json` can write, also what no store may hold."""
    document = read_document(parts, name)
    edit(document)
    return replace_data(parts, name, document_bytes(document))


def with_document(name: str, edit: Edit) -> Builder:
    """A builder of files with an edited document."""
    return with_parts(lambda parts: edit_document(parts, name, edit))


def document_bytes(document: object) -> bytes:
    """Canonical text of a document without numbers that Python and ECMAScript write differently."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def hash_of(text: bytes) -> str:
    """sha256 in hexadecimal digits: of an identity's text, of a constant's payload."""
    return hashlib.sha256(text).hexdigest()


def edit_identity(parts: Sequence[Part], edit: Edit) -> list[Part]:
    """The same parts with an edited identity document, and the hash that belongs to it."""

    def edit_both(root: Document) -> None:
        ours = root["attributes"]["ups_store"]
        edit(ours["identity"])
        ours["config_hash"] = hash_of(document_bytes(ours["identity"]))

    return edit_document(parts, ROOT_NAME, edit_both)


def with_identity(edit: Edit) -> Builder:
    """A builder of files with an edited identity document; its hash follows."""
    return with_parts(lambda parts: edit_identity(parts, edit))


def with_root_text(found: bytes, replaced: bytes) -> Builder:
    """A builder of files with other text in the root's document; the hash of the identity's text follows."""

    def edit(raw: bytes) -> bytes:
        assert raw.count(found) == 1, found
        raw = raw.replace(found, replaced)
        first = raw.index(b'"identity":') + len(b'"identity":')
        end = raw.rindex(b',"requires"')
        at = raw.index(b'"config_hash":"') + len(b'"config_hash":"')
        return raw[:at] + hash_of(raw[first:end]).encode() + raw[at + 64 :]

    return with_data(ROOT_NAME, edit)


def with_checksum(payload: bytes) -> bytes:
    """A chunk: a payload and its CRC-32C."""
    return payload + struct.pack("<I", crc32c(payload))


def edit_shape(parts: Sequence[Part], array: str, shape: Sequence[int]) -> list[Part]:
    """The same parts with another shape of an array, in its `zarr.json` and in the identity."""

    def edit_metadata(document: Document) -> None:
        chunk_shape = [max(1, n) for n in shape]
        document["shape"] = list(shape)
        document["chunk_grid"]["configuration"]["chunk_shape"] = chunk_shape
        for codec in document["codecs"]:
            if codec["name"] == "sharding_indexed":
                codec["configuration"]["chunk_shape"] = [1, *chunk_shape[1:]]

    edited = edit_document(parts, f"{array}/{ROOT_NAME}", edit_metadata)
    return edit_identity(
        edited, lambda identity: identity["arrays"][array].update(shape=_sample_shape(edited, array))
    )


def _sample_shape(parts: Sequence[Part], array: str) -> list[int]:
    """Shape of one sample, as the identity has it."""
    document = read_document(parts, f"{array}/{ROOT_NAME}")
    shape: list[int] = document["shape"]
    return shape[1:] if document["dimension_names"][:1] == ["sample"] else shape
