"""What a store holds whose root `zarr.json` is damaged: arrays and geometry without the identity."""

from __future__ import annotations

from pathlib import Path

from ups_store.errors import FormatError
from ups_store.format.identity import identity_document
from ups_store.format.layout import FORMAT_VERSION
from ups_store.format.metadata import RootMeta, parse_array
from ups_store.read.catalog import Catalog, array_name, checked_layout, read_json
from ups_store.read.directory import check_directory, read_directory
from ups_store.system import files

_NO_HASH = ""  # no identity has it: a hash is 64 digits


def read_without_root(fd: int, path: Path) -> Catalog:
    """Read the catalog of a finished file by its directory and its arrays' metadata (spec 2.2, 4.4).

    Everything but the root group's text is checked as when a store is opened. Of the identity there is what
    the arrays tell, the geometry; digests of constants, content and attributes of the root are lost.

    Raises:
        FormatError: If these can't be read either, or don't fit together.
    """
    directory = read_directory(fd, path)
    found = [
        (parse_array(array_name(record, path), read_json(fd, record, path), path=path), record.nbytes)
        for record in directory.arrays
    ]
    identity = identity_document([meta for meta, _ in found], {}, {})
    root = RootMeta(FORMAT_VERSION, _NO_HASH, identity, {})
    layout = checked_layout(root, directory.root.nbytes, found, path)
    check_directory(directory, layout, is_newer=False, path=path)
    if layout.num_samples > files.size(fd):  # spec 11.1: no memory in proportion to what a file claims
        raise FormatError(
            "number of samples",
            path=path,
            kind="limits",
            clause="11.1",
            expected=f"at most {files.size(fd)}, the bytes of the file",
            found=layout.num_samples,
        )
    return Catalog(root, layout, tuple(record.crc for record in directory.records))


def is_identity_lost(catalog: Catalog) -> bool:
    """Whether the catalog is one of `read_without_root`."""
    return catalog.root.config_hash == _NO_HASH
