"""What a file holds: from its end records (or, while it is built, from its start) to a checked `Layout`.

Every address is checked against the geometry that the metadata gives before anything is used; nothing but
end records, central directory and `zarr.json` documents is read, whatever the number of samples (spec 7.1).
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path

from ups_store import files
from ups_store.checksum import crc32
from ups_store.errors import FormatError, SpecError, TruncatedError, VersionTooNewError
from ups_store.identity import config_hash
from ups_store.layout import FORMAT_VERSION, Layout, plan
from ups_store.metadata import (
    MAX_ARRAYS,
    MAX_JSON_BYTES,
    ArrayMeta,
    RootMeta,
    is_name,
    parse_array,
    parse_root,
)
from ups_store.zip_records import (
    MAX_DIRECTORY_BYTES,
    MAX_END_BYTES,
    MAX_LOCAL_HEADER_BYTES,
    ROOT_NAME,
    CentralRecord,
    parse_directory,
    parse_end,
    parse_local_header,
)


@dataclass(frozen=True)
class Catalog:
    """What a store holds and where.

    Attributes:
        root: The root group's metadata.
        layout: Geometry, checked against the file.
        crcs: CRC-32 of every entry in file order; of the metadata entries only while it is being built.
    """

    root: RootMeta
    layout: Layout
    crcs: tuple[int, ...]


def check_regular(fd: int, path: Path) -> None:
    """Refuse folders, FIFOs and devices: only regular files have a length and can be mapped."""
    mode = files.mode(fd)
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FormatError(
            f"it is {what}",
            path=path,
            kind="not_a_file",
            clause="2.1",
            hint="a store is one file, <task>_<split>.zarr.zip; a Zarr folder opens with zarr-python",
        )


def read_finished(fd: int, path: Path) -> Catalog:
    """Read and check the catalog of a finished file (spec 7.1).

    Raises:
        FormatError: Says what is wrong where, with the clause.
    """
    check_regular(fd, path)
    file_nbytes = files.size(fd)
    tail_nbytes = min(file_nbytes, MAX_END_BYTES)
    end = parse_end(files.read_at(fd, file_nbytes - tail_nbytes, tail_nbytes), file_nbytes, path=path)
    if end.directory_nbytes > MAX_DIRECTORY_BYTES:
        raise FormatError(
            "central directory too long",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_DIRECTORY_BYTES}",
            found=end.directory_nbytes,
        )
    directory = files.read_at(fd, end.directory_offset, end.directory_nbytes)
    records = parse_directory(directory, end.num_entries, path=path)
    root = _read_root(fd, records[0] if records else None, path)
    metas = [
        (_read_array(fd, record, path), record.nbytes)
        for record in records[1:]
        if record.name.endswith(f"/{ROOT_NAME}")
    ]
    layout = _plan(root, records[0].nbytes, metas, path)
    _check_addresses(layout, records, root, file_nbytes, path)
    return Catalog(root, layout, tuple(record.crc for record in records[: len(layout.entries)]))


def read_building(fd: int, path: Path) -> Catalog:
    """Read the catalog of a file under construction from its start: it has no directory yet (spec 6.1)."""
    check_regular(fd, path)
    root_record = _next_record(fd, 0, ROOT_NAME, path)
    root = _read_root(fd, root_record, path)
    records, end = [root_record], root_record.end
    arrays = root.identity.get("arrays")
    for name in sorted(arrays) if isinstance(arrays, dict) else []:
        records.append(_next_record(fd, end, f"{name}/{ROOT_NAME}", path))
        end = records[-1].end
    metas = [(_read_array(fd, record, path), record.nbytes) for record in records[1:]]
    layout = _plan(root, root_record.nbytes, metas, path)
    return Catalog(root, layout, tuple(record.crc for record in records))


def _next_record(fd: int, offset: int, name: str, path: Path) -> CentralRecord:
    raw = files.read_at(fd, offset, MAX_LOCAL_HEADER_BYTES)
    record = parse_local_header(raw, offset, path=path)
    if record.name != name:
        raise FormatError(
            "metadata entry",
            path=path,
            kind="foreign",
            clause="6.1",
            byte_range=(offset, record.end),
            expected=name,
            found=record.name,
            hint="it isn't a store under construction",
        )
    return record


def _read_root(fd: int, record: CentralRecord | None, path: Path) -> RootMeta:
    if record is None or record.name != ROOT_NAME or record.offset != 0:
        raise FormatError(
            "first entry",
            path=path,
            kind="foreign",
            clause="2.2",
            expected=f"{ROOT_NAME} at byte 0",
            found=f"{record.name} at byte {record.offset}" if record else "no entry",
            hint="it is a ZIP file of another program",
        )
    root = parse_root(_read_json(fd, record, path), path=path)
    if root.version[0] > FORMAT_VERSION[0]:
        raise VersionTooNewError(
            "written for a newer format",
            path=path,
            clause="10.2",
            expected=f"version {FORMAT_VERSION[0]}.x",
            found=f"{root.version[0]}.{root.version[1]}",
            hint="upgrade ups-store, or read it with any Zarr v3 reader",
        )
    if root.version[0] < FORMAT_VERSION[0]:
        raise FormatError(
            "format version", path=path, kind="root_metadata", clause="10.2", found=root.version
        )
    found = _hash_of(root, path)
    if found != root.config_hash:
        raise FormatError(
            "identity document and its hash disagree",
            path=path,
            kind="identity_hash",
            clause="8.3",
            expected=root.config_hash,
            found=found,
            hint="the metadata was edited or damaged: rebuild it",
        )
    return root


def _hash_of(root: RootMeta, path: Path) -> str:
    try:
        return config_hash(root.identity)
    except SpecError as error:
        raise FormatError(error.problem, path=path, kind="identity_hash", clause="8.2") from error


def _read_array(fd: int, record: CentralRecord, path: Path) -> ArrayMeta:
    name = record.name.removesuffix(f"/{ROOT_NAME}")
    if not is_name(name):
        raise FormatError("array name", path=path, kind="name", clause="4.2", found=repr(name))
    return parse_array(name, _read_json(fd, record, path), path=path)


def _read_json(fd: int, record: CentralRecord, path: Path) -> bytes:
    """The bytes of a metadata entry, its size and CRC-32 checked."""
    if record.nbytes > MAX_JSON_BYTES:
        raise FormatError(
            f"{record.name} too long",
            path=path,
            kind="limits",
            clause="9.1",
            expected=f"at most {MAX_JSON_BYTES}",
            found=record.nbytes,
        )
    where = (record.data_offset, record.end)
    if record.end > files.size(fd):
        raise TruncatedError(
            f"{record.name} lies past the end",
            path=path,
            byte_range=where,
            expected=f"a file of {record.end} bytes or more",
            found=f"{files.size(fd)} bytes",
        )
    raw = files.read_at(fd, record.data_offset, record.nbytes)
    if crc32(raw) != record.crc:
        raise FormatError(
            f"{record.name} is damaged",
            path=path,
            kind="metadata_crc",
            clause="3.2",
            byte_range=where,
            expected=f"CRC-32 {record.crc:08x}",
            found=f"{crc32(raw):08x}",
        )
    return raw


def _plan(root: RootMeta, root_nbytes: int, metas: list[tuple[ArrayMeta, int]], path: Path) -> Layout:
    lengths = {meta.shape[0] for meta, _ in metas if not meta.is_constant}
    if len(lengths) > 1 or len(metas) > MAX_ARRAYS:
        raise FormatError(
            "arrays",
            path=path,
            kind="limits",
            clause="4.5",
            expected=f"at most {MAX_ARRAYS} arrays with one number of samples",
            found=f"{len(metas)} arrays with {sorted(lengths)} samples",
        )
    declared = root.identity.get("arrays")
    geometry = {m.name: {"shape": list(m.shape), "dtype": m.dtype, "dims": list(m.dims)} for m, _ in metas}
    if declared != geometry:
        raise FormatError(
            "arrays don't match the identity document",
            path=path,
            kind="identity_arrays",
            clause="8.1",
            expected=sorted(declared) if isinstance(declared, dict) else declared,
            found=sorted(geometry),
        )
    return plan(root_nbytes, metas, lengths.pop() if lengths else 0)


def _check_addresses(
    layout: Layout, records: list[CentralRecord], root: RootMeta, file_nbytes: int, path: Path
) -> None:
    """Compare the directory, entry by entry, with the geometry that the metadata gives (spec 7.1, step 5)."""
    entries = layout.entries
    for i, entry in enumerate(entries):
        record = records[i] if i < len(records) else None
        found = (record.name, record.offset, record.nbytes) if record else "no entry"
        if found != (entry.name, entry.offset, entry.nbytes):
            raise FormatError(
                f"central directory record {i} (name, offset, bytes)",
                path=path,
                kind="geometry",
                clause="2.2",
                expected=(entry.name, entry.offset, entry.nbytes),
                found=found,
            )
    newer_minor = root.version > FORMAT_VERSION
    if len(records) > len(entries) and not newer_minor:  # a newer minor version may add entries (spec 10.3)
        name = records[len(entries)].name
        raise FormatError("unknown entry", path=path, kind="unknown_entry", clause="2.2", found=name)
    if file_nbytes != layout.file_nbytes and not newer_minor:
        raise TruncatedError(
            "file length", path=path, clause="2.1", expected=layout.file_nbytes, found=file_nbytes
        )


def fingerprint_of(catalog: Catalog) -> str:
    """sha256 of the identity's hash and every entry's CRC-32, 32 hexadecimal digits."""
    text = f"{catalog.root.config_hash} {catalog.crcs}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
