"""What a file holds: from its end records (or, while it is built, from its start) to a checked `Layout`.

Every address is checked against the geometry that the metadata gives before anything is used; nothing but
end records, central directory and `zarr.json` documents is read, whatever the number of samples (spec 7.1).
"""

from __future__ import annotations

import hashlib
import reprlib
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ups_store.errors import FormatError, StoreReplacedError, TruncatedError, VersionTooNewError
from ups_store.format.canonical import canonical_json
from ups_store.format.checksum import crc32
from ups_store.format.layout import Layout, plan
from ups_store.format.metadata import (
    MAX_ARRAYS,
    MAX_EMPTY_SAMPLES,
    MAX_JSON_BYTES,
    MAX_METADATA_BYTES,
    SAMPLE_DIM,
    ArrayMeta,
    is_name,
    names_in_file,
    parse_array,
    too_many_empty,
    with_companions_marked,
)
from ups_store.format.root import (
    FORMAT_VERSION,
    RootMeta,
    differences,
    identity_flaw,
    identity_of_array,
    parse_root,
)
from ups_store.format.zip_records import (
    END_BYTES,
    MAX_DIRECTORY_BYTES,
    ROOT_NAME,
    EndRecords,
    Entry,
    central_nbytes,
    pack_records,
    parse_central_record,
    parse_end,
    parse_local_header,
)
from ups_store.read.store_file import mode, read_at, size

ReadAt: TypeAlias = Callable[[int, int], bytes]  # a file's bytes from an offset on; fewer where it ends
Claim: TypeAlias = tuple[Entry, int]  # an entry by what the file says, and the CRC-32 of its data
NextClaim: TypeAlias = Callable[[str, int], Claim]  # by name and offset
ParseArray: TypeAlias = Callable[[str, bytes], ArrayMeta]


@dataclass(frozen=True)
class Catalog:
    """What a store holds and where."""

    root: RootMeta
    layout: Layout  # geometry, checked against the file
    # CRC-32 of every entry in file order; of the metadata entries only while it is being built
    crcs: tuple[int, ...]

    def check_still(self, fd: int, path: Path) -> None:
        """Refuse an open file that holds something else, as it took the path since this was read."""
        if fingerprint_of(self._read_again(fd, path)) != fingerprint_of(self):
            problem = "another file took the path since it was opened"
            raise StoreReplacedError(problem, path=path, hint="open it again")

    def _read_again(self, fd: int, path: Path) -> Catalog:
        return read_finished(fd, path)


@dataclass
class Documents:
    """The `zarr.json` documents of a file's arrays."""

    metas: list[tuple[ArrayMeta, int]]  # every array with the bytes of its document, sorted by name
    entries: list[Entry]  # entries of all documents, the root's first
    crcs: list[int]  # CRC-32 of the data of each entry


def fingerprint_of(catalog: Catalog) -> str:
    """sha256 of the identity's hash and every entry's CRC-32, 64 hexadecimal digits (spec 8.5)."""
    content = canonical_json([catalog.root.config_hash, *catalog.crcs], what="fingerprint")
    return hashlib.sha256(content).hexdigest()


def reads_of(fd: int) -> ReadAt:
    """Make what reads an open file."""
    return partial(read_at, fd)


def check_regular(fd: int, path: Path) -> None:
    """Refuse folders, FIFOs and devices: only regular files have a length and can be mapped."""
    bits = mode(fd)
    if not stat.S_ISREG(bits):
        raise FormatError(
            f"it is {'a folder' if stat.S_ISDIR(bits) else 'not a regular file'}",
            path=path,
            kind="not_a_file",
            clause="2.1",
            hint="a store is one file, <task>_<split>.zarr.zip; a Zarr folder opens with zarr-python",
        )


def read_finished(fd: int, path: Path) -> Catalog:
    """Read and check the catalog of a finished file (spec 7.1)."""
    check_regular(fd, path)
    read = reads_of(fd)
    return catalog_of(read_directory(read, size(fd), path), read, path)


def catalog_of(directory: Directory, read: ReadAt, path: Path) -> Catalog:
    """Read the rest of a catalog, also of what is no file of this machine, once the directory was read."""
    root, documents = _read_metadata(read, path, directory.next_claim)
    return finish_catalog(root, documents, directory, path)


def finish_catalog(root: RootMeta, documents: Documents, directory: Directory, path: Path) -> Catalog:
    """Compute the geometry and compare the directory with it (spec 7.1, step 7)."""
    layout = plan(documents.entries[0].nbytes, documents.metas, num_samples_of(documents, path))
    data = layout.entries[len(documents.entries) :]
    crcs = [*documents.crcs, *(directory.next_claim(entry.name, entry.offset)[1] for entry in data)]
    directory.check(layout.entries, crcs, is_newer=root.version > FORMAT_VERSION)
    return Catalog(root, layout, tuple(crcs))


def read_building(fd: int, path: Path) -> Catalog:
    """Read the catalog of a file under construction from its start: it has no directory yet (spec 6.5)."""
    check_regular(fd, path)

    def claim(name: str, offset: int) -> Claim:
        raw = read_at(fd, offset, Entry(name, offset, 0).header_nbytes)
        nbytes, crc = parse_local_header(raw, name, offset, path=path)
        entry = Entry(name, offset, nbytes)
        if entry.end > size(fd):
            raise TruncatedError(
                f"{name} lies past the end",
                path=path,
                clause="6.1",
                byte_range=(offset, entry.end),
                expected=f"a file of {entry.end} bytes or more",
                found=f"{size(fd)} bytes",
            )
        return entry, crc

    root, documents = _read_metadata(reads_of(fd), path, claim)
    if root.version != FORMAT_VERSION:  # its geometry may be another
        raise VersionTooNewError("a newer version builds it", path=path, clause="6.5")
    layout = plan(documents.entries[0].nbytes, documents.metas, num_samples_of(documents, path))
    return Catalog(root, layout, tuple(documents.crcs))


def _read_metadata(read: ReadAt, path: Path, next_claim: NextClaim) -> tuple[RootMeta, Documents]:
    """Read the documents of a mapped store, checked one by one and together (spec 7.1, steps 2 to 6)."""
    claim = next_claim(ROOT_NAME, 0)
    root = read_root(read, path, claim)
    if root.packed is not None:
        raise FormatError(
            "it is packed for shipping, so it can't be mapped",
            path=path,
            kind="packed",
            clause="13.2",
            hint="unpack it with `ups-store unpack`; `ups_store.open` reads it as it is",
        )
    documents = read_arrays(read, path, next_claim, claim, names_in_file(root.identity["arrays"]))
    check_arrays(root, documents, path)
    return root, documents


def read_root(read: ReadAt, path: Path, claim: Claim) -> RootMeta:
    """Read the root's document and check it with the identity in it (spec 7.1, steps 2 to 4; 8.1)."""
    root = parse_root(_read_json(read, *claim, path), path=path)
    flaw = identity_flaw(root.identity)
    if flaw is not None:
        raise FormatError(f"identity document, {flaw}", path=path, kind="identity", clause="8.1")
    names = names_in_file(root.identity["arrays"])
    if len(names) > MAX_ARRAYS:
        raise _beyond("too many arrays", path, f"at most {MAX_ARRAYS}", len(names))
    for name in names:
        if not is_name(name):
            raise FormatError("array name", path=path, kind="name", clause="4.2", found=reprlib.repr(name))
    return root


def read_arrays(
    read: ReadAt,
    path: Path,
    next_claim: NextClaim,
    root: Claim,
    names: Iterable[str],
    parse: ParseArray | None = None,
) -> Documents:
    """Read the documents of arrays (spec 7.1, step 5)."""
    documents = Documents([], [root[0]], [root[1]])
    for name in sorted(names):
        entry, crc = next_claim(f"{name}/{ROOT_NAME}", documents.entries[-1].end)
        raw = _read_json(read, entry, crc, path)
        meta = parse_array(name, raw, path=path) if parse is None else parse(name, raw)
        documents.metas.append((meta, entry.nbytes))
        documents.entries.append(entry)
        documents.crcs.append(crc)
    return documents


def _read_json(read: ReadAt, entry: Entry, crc: int, path: Path) -> bytes:
    """Read a metadata entry; its size and CRC-32 are checked."""
    where = (entry.data_offset, entry.end)
    if entry.nbytes > MAX_JSON_BYTES or entry.end > MAX_METADATA_BYTES:
        expected = f"at most {MAX_JSON_BYTES} bytes, before byte {MAX_METADATA_BYTES} of the file"
        raise _beyond(f"{entry.name} too long", path, expected, entry.nbytes, byte_range=where)
    raw = read(entry.data_offset, entry.nbytes)
    if crc32(raw) != crc:
        raise FormatError(
            f"{entry.name} is damaged",
            path=path,
            kind="metadata_crc",
            clause="3.2",
            byte_range=where,
            expected=f"CRC-32 {crc:08x}",
            found=f"{crc32(raw):08x}",
        )
    return raw


def _beyond(problem: str, path: Path, expected: str, found: object, **where: Any) -> FormatError:
    """Make the error for a file beyond a limit (spec 9.1)."""
    return FormatError(
        problem, path=path, kind="limits", clause="9.1", expected=expected, found=found, **where
    )


def check_arrays(root: RootMeta, documents: Documents, path: Path) -> None:
    """Refuse arrays that aren't those of the identity document (spec 8.1); mark companions (spec 14)."""
    mark_companions(documents, path)
    metas = [meta for meta, _ in documents.metas]
    declared = root.identity["arrays"]
    geometry = {meta.name: identity_of_array(meta) for meta in metas if not meta.is_companion}
    constants = sorted(meta.name for meta in metas if meta.is_constant)
    mismatch: tuple[str, object, object] | None = None
    if declared != geometry or any(n is True for array in declared.values() for n in array["shape"]):
        differing = differences(declared, geometry) or {"": (declared, geometry)}
        where, (expected, actual) = next(iter(differing.items()))
        mismatch = f"arrays.{where}", expected, actual
    elif sorted(root.identity["constants"]) != constants:
        mismatch = "constants", sorted(root.identity["constants"]), constants
    if mismatch is not None:
        raise FormatError(
            f"arrays don't match the identity document, key {mismatch[0]!r}",
            path=path,
            kind="identity_arrays",
            clause="8.1",
            expected=reprlib.repr(mismatch[1]),
            found=reprlib.repr(mismatch[2]),
        )
    if ("ragged" in root.requires) is not any(meta.is_ragged for meta in metas):
        problem = "a ragged array goes with the feature 'ragged' in `requires`, and only it does"
        actual = list(root.requires)
        raise FormatError(problem, path=path, kind="requires", clause="10.3", found=actual)


def mark_companions(documents: Documents, path: Path) -> None:
    """Have the metadata of arrays that belong to a ragged one say so (spec 14.1)."""
    metas = with_companions_marked([meta for meta, _ in documents.metas], path=path)
    documents.metas = [(meta, nbytes) for meta, (_, nbytes) in zip(metas, documents.metas, strict=True)]


def num_samples_of(documents: Documents, path: Path) -> int:
    """N of arrays whose dimensions fit together (spec 4.5)."""
    lengths: dict[str, int] = {}
    for meta, _ in documents.metas:
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
    num_samples = lengths.get(SAMPLE_DIM, 0)
    if too_many_empty([meta for meta, _ in documents.metas], num_samples):
        problem = "too many samples for a store that holds no byte for any"
        raise _beyond(problem, path, f"at most {MAX_EMPTY_SAMPLES}", num_samples)
    return num_samples


@dataclass
class Directory:
    """End records and central directory of a finished file; records are taken one after the other.

    They only claim: sizes and checksums are taken from them where the metadata says that a record must lie,
    and in the end all their bytes are compared with those that the computed geometry gives.
    """

    end: EndRecords
    raw: bytes  # bytes of the directory
    path: Path  # for messages
    position: int = 0  # where the next record begins in `raw`

    def next_claim(self, name: str, offset: int) -> tuple[Entry, int]:
        """The next entry, which must bear this name and be at this offset, and the CRC-32 of its data."""
        record = parse_central_record(self.raw, self.position, name)
        if record is None:
            raise self._bad("is missing", name)
        nbytes, crc = record
        entry = Entry(name, offset, nbytes)
        if entry.end > self.end.directory_offset:
            raise self._bad("says that the data reach past the entries", name)
        self.position += central_nbytes(name)
        return entry, crc

    def array_names(self) -> list[str]:
        """Give the names of the arrays by the records alone, where the root's document can't be read."""
        suffix = f"/{ROOT_NAME}"
        return [name.removesuffix(suffix) for name, _ in self._records() if name.endswith(suffix)]

    def metadata_end(self) -> int:
        """First byte past the documents by the records alone: what to read of them at once."""
        end = 0
        for name, at in self._records():
            record = parse_central_record(self.raw, at, name)
            if record is None or name.rpartition("/")[2] != ROOT_NAME:
                break
            end = Entry(name, end, min(record[0], MAX_JSON_BYTES)).end
        return min(end, self.end.directory_offset)

    def _records(self) -> Iterator[tuple[str, int]]:
        """Name of every entry, and where in `raw` its record begins."""
        at = 0
        while at + central_nbytes("") <= len(self.raw):
            (nbytes,) = struct.unpack_from("<H", self.raw, at + 28)
            name = self.raw[at + 46 : at + 46 + nbytes].decode("ascii", "replace")
            yield name, at
            at += central_nbytes(name)

    def check(self, entries: Sequence[Entry], crcs: Sequence[int], *, is_newer: bool) -> None:
        """Compare everything, byte for byte, with what the entries give (spec 7.1, step 7)."""
        records = pack_records(entries, crcs)
        if not self.raw.startswith(records):
            at = 0
            for entry, crc in zip(entries, crcs, strict=True):
                if self.raw[at : at + entry.central_nbytes] != entry.pack_central_record(crc):
                    raise self._bad("isn't the one that the metadata gives", entry.name, at)
                at += entry.central_nbytes
        stored, end = self.end, EndRecords(len(entries), entries[-1].end, len(records))
        is_right = stored == end
        if is_newer:
            is_right = (
                stored.num_entries >= end.num_entries
                and stored.directory_offset >= end.directory_offset
                and stored.directory_nbytes >= end.directory_nbytes
            )
        if not is_right:
            raise FormatError(
                "end records don't fit the metadata, or there is an unknown entry",
                path=self.path,
                kind="geometry",
                clause="7.1",
                expected=end,
                found=stored,
            )

    def _bad(self, problem: str, name: str, at: int | None = None) -> FormatError:
        first = self.end.directory_offset + (self.position if at is None else at)
        return FormatError(
            f"central directory: the record of {name} {problem}",
            path=self.path,
            kind="directory",
            clause="3.5",
            byte_range=(first, first + central_nbytes(name)),
        )


def read_directory(read: ReadAt, file_nbytes: int, path: Path) -> Directory:
    """Read end records and central directory (spec 7.1, steps 1 and 2)."""
    nbytes = min(file_nbytes, END_BYTES)
    try:
        end = parse_end(read(file_nbytes - nbytes, nbytes), file_nbytes, path=path)
    except FormatError as error:
        if error.kind not in ("no_end_record", "foreign"):
            raise
        # A first local header of ours, its CRC-32 and sizes apart, says that it was a store.
        header = Entry(ROOT_NAME, 0, 0).pack_local_header(0)
        first = read(0, len(header))
        if first[:14] != header[:14] or first[26:43] != header[26:43]:
            raise
        raise TruncatedError(
            "it begins like a store, but does not end like one",
            path=path,
            clause="3.6",
            expected="end records in the last bytes",
            found=f"{file_nbytes} bytes in all",
            hint="it was cut off or appended to, or is still being copied: copy it again",
        ) from error
    if end.directory_nbytes > MAX_DIRECTORY_BYTES:
        expected, actual = f"at most {MAX_DIRECTORY_BYTES} bytes", f"{end.directory_nbytes} bytes"
        raise _beyond("central directory too long", path, expected, actual)
    return Directory(end, read(end.directory_offset, end.directory_nbytes), path)
