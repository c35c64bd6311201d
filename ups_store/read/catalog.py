"""What a file holds: from its end records (or, while it is built, from its start) to a checked `Layout`.

Every address is checked against the geometry that the metadata gives before anything is used; nothing but
end records, central directory and `zarr.json` documents is read, whatever the number of samples (spec 7.1).
"""

from __future__ import annotations

import hashlib
import reprlib
import stat
from dataclasses import dataclass
from pathlib import Path

from ups_store.errors import FormatError, SpecError, TruncatedError, VersionTooNewError
from ups_store.format.checksum import crc32
from ups_store.format.identity import config_hash, differences
from ups_store.format.layout import FORMAT_VERSION, Layout, plan
from ups_store.format.metadata import (
    MAX_JSON_BYTES,
    SAMPLE_DIM,
    ArrayMeta,
    RootMeta,
    is_name,
    parse_array,
    parse_root,
)
from ups_store.format.zip_records import MAX_LOCAL_HEADER_BYTES, ROOT_NAME, CentralRecord, parse_local_header
from ups_store.read.directory import check_directory, check_num_arrays, read_directory
from ups_store.system import files


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
    directory = read_directory(fd, path)
    root = read_root(fd, directory.root, path)
    _check_not_packed(root, path)
    metas = [(_read_array(fd, record, path), record.nbytes) for record in directory.arrays]
    layout = checked_layout(root, directory.root.nbytes, metas, path)
    check_directory(directory, layout, is_newer=root.version > FORMAT_VERSION, path=path)
    return Catalog(root, layout, tuple(record.crc for record in directory.records[: len(layout.entries)]))


def read_building(fd: int, path: Path) -> Catalog:
    """Read the catalog of a file under construction from its start: it has no directory yet (spec 6.1)."""
    check_regular(fd, path)
    root_record = _next_record(fd, 0, ROOT_NAME, path)
    root = read_root(fd, root_record, path)
    _check_not_packed(root, path)
    records, metas = [root_record], []
    arrays = root.identity.get("arrays")
    names = sorted(arrays) if isinstance(arrays, dict) else []
    check_num_arrays(len(names), path)
    for name in names:
        record = _next_record(fd, records[-1].end, f"{name}/{ROOT_NAME}", path)
        metas.append((_read_array(fd, record, path), record.nbytes))  # checks that it ends within the file
        records.append(record)
    layout = checked_layout(root, root_record.nbytes, metas, path)
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


def read_root(fd: int, record: CentralRecord, path: Path) -> RootMeta:
    """Read the root group's metadata; version and hash are checked (spec 7.1, step 3)."""
    root = parse_root(read_json(fd, record, path), path=path)
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
            "format version",
            path=path,
            kind="root_metadata",
            clause="10.2",
            expected=f"version {FORMAT_VERSION[0]}.x",
            found=f"{root.version[0]}.{root.version[1]}",
            hint="build it again",
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
        raise FormatError(
            error.problem,
            path=path,
            kind="identity_hash",
            clause="8.2",
            expected=error.expected,
            found=error.found,
        ) from error


def _check_not_packed(root: RootMeta, path: Path) -> None:
    if root.packed is not None:
        raise FormatError(
            "it is packed for shipping, so it can't be mapped",
            path=path,
            kind="packed",
            clause="13.2",
            hint="unpack it with `ups-store unpack`; `ups_store.open` reads it as it is",
        )


def _read_array(fd: int, record: CentralRecord, path: Path) -> ArrayMeta:
    return parse_array(array_name(record, path), read_json(fd, record, path), path=path)


def array_name(record: CentralRecord, path: Path) -> str:
    """Name of the array that a metadata entry belongs to."""
    name = record.name.removesuffix(f"/{ROOT_NAME}")
    if not is_name(name):
        raise FormatError("array name", path=path, kind="name", clause="4.2", found=repr(name))
    return name


def read_json(fd: int, record: CentralRecord, path: Path) -> bytes:
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
            clause="7.1",
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


def checked_layout(
    root: RootMeta, root_nbytes: int, metas: list[tuple[ArrayMeta, int]], path: Path
) -> Layout:
    """Geometry of arrays that fit together and are those of the identity document (spec 4.5, 8.1)."""
    lengths: dict[str, int] = {}
    for meta, _ in metas:
        for dim, length in zip(meta.dims, meta.shape, strict=True):
            if lengths.setdefault(dim, length) != length:
                raise FormatError(
                    f"length of dimension {dim!r}",
                    path=path,
                    array=meta.name,
                    kind="dims",
                    clause="4.5",
                    expected=f"{lengths[dim]}, as in the arrays before",
                    found=length,
                )
    geometry = {m.name: {"shape": list(m.shape), "dtype": m.dtype, "dims": list(m.dims)} for m, _ in metas}
    declared = root.identity.get("arrays")
    if declared != geometry:
        differing = differences(declared, geometry)
        where, (declared, found) = next(iter(differing.items()))
        raise FormatError(
            f"arrays don't match the identity document, key 'arrays.{where}'",
            path=path,
            kind="identity_arrays",
            clause="8.1",
            expected=reprlib.repr(declared),
            found=reprlib.repr(found),
        )
    return plan(root_nbytes, metas, lengths.get(SAMPLE_DIM, 0))


def fingerprint_of(catalog: Catalog) -> str:
    """sha256 of the identity's hash and every entry's CRC-32, 32 hexadecimal digits."""
    text = f"{catalog.root.config_hash} {catalog.crcs}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
