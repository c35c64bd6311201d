"""`StoreSet`: the parts that a manifest names, read as one store, as of its opening (spec 15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups_store.errors import FormatError, StoreNotFoundError
from ups_store.format.manifest import MAX_MANIFEST_BYTES, SetPart, parse_manifest
from ups_store.format.root import describe_differences, differences
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.catalog import check_regular
from ups_store.read.several import PartitionedStore
from ups_store.read.store_file import read_at
from ups_store.system import files
from ups_store.system.paths import MANIFEST_SUFFIX

PARTS_SUFFIX = ".parts"
_STORE_SUFFIX = ".zarr.zip"


class StoreSet(PartitionedStore):
    """A set of parts as one store; what is appended later belongs to the set when it is opened again.

    Parts were made from the same, or each from its own: they have the same arrays and constants.

    Args:
        pattern: Path of the manifest.
        partitions: The open parts, in order.

    Attributes:
        path: Path of the manifest.
        partitions: The open parts, in order.
    """

    def _summary(self) -> list[str]:
        return [counted(len(self.partitions), "part"), f"{self.nbytes:,} bytes"]

    @staticmethod
    def _document(path: Path, parts: Sequence[AnyStore]) -> dict[str, Any]:
        """The identity document of all parts: theirs if they are equal, else one that names them."""
        first = dict(parts[0].identity_document)
        for part in parts[1:]:
            differing = differences(_geometry(part), _geometry(parts[0]))
            if differing:
                raise FormatError(
                    f"another set's part:\n{describe_differences(differing)}",
                    path=part.path,
                    kind="set",
                    clause="15.2",
                    hint=f"remove {path.name} and write the set again",
                )
        hashes = list(dict.fromkeys(part.config_hash for part in parts))
        return first if len(hashes) == 1 else {**first, "content": {"kind": "set", "parents": hashes}}


def _geometry(part: AnyStore) -> dict[str, Any]:
    document: Mapping[str, Any] = part.identity_document
    return {key: document.get(key) for key in ("arrays", "constants")}


def stem_of(path: Path) -> str:
    """NAME of `NAME.zarr.zip`, of its manifest `NAME.zarr.json`, and of its folder `NAME.parts`."""
    for suffix in (_STORE_SUFFIX, MANIFEST_SUFFIX, PARTS_SUFFIX):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def manifest_path(path: Path) -> Path:
    """Where the manifest of the set lies that has this name."""
    return path.with_name(stem_of(path) + MANIFEST_SUFFIX)


def whole_path(path: Path) -> Path:
    """Where the parts of this name are merged to: the path, unless it is that of a set or its parts."""
    is_store = not path.name.endswith((MANIFEST_SUFFIX, PARTS_SUFFIX))
    return path if is_store else path.with_name(stem_of(path) + _STORE_SUFFIX)


def parts_folder(path: Path) -> Path:
    """Where the parts of the set, or of the store, lie that has this name."""
    return path.with_name(stem_of(path) + PARTS_SUFFIX)


def is_manifest(path: Path) -> bool:
    """Whether a path is that of a set, by its name."""
    return path.name.endswith(MANIFEST_SUFFIX)


def read_manifest(path: Path) -> tuple[SetPart, ...]:
    """The parts that a manifest names, in order.

    Raises:
        StoreNotFoundError: If there is none.
        FormatError: If it isn't one, kind "manifest".
    """
    with files.opened(path) as fd:
        check_regular(fd, path)
        raw = read_at(fd, 0, MAX_MANIFEST_BYTES + 1)
    if len(raw) > MAX_MANIFEST_BYTES:
        expected = f"at most {MAX_MANIFEST_BYTES} bytes"
        raise FormatError("manifest too long", path=path, kind="manifest", clause="15.3", expected=expected)
    return parse_manifest(raw, path=path)


def check_part(store: AnyStore, part: SetPart, manifest: Path) -> None:
    """Compare an open part with what the manifest says of it."""
    found = SetPart(part.name, len(store), store.config_hash, store.fingerprint)
    if found != part:
        raise FormatError(
            "it isn't the part that the manifest names",
            path=store.path,
            kind="set",
            clause="15.3",
            expected=f"{counted(part.count, 'sample')}, fingerprint {part.fingerprint}",
            found=f"{counted(found.count, 'sample')}, fingerprint {found.fingerprint}",
            hint=f"it was replaced: write {manifest.name} again",
        )


def missing_part(error: StoreNotFoundError, manifest: Path) -> StoreNotFoundError:
    """The error for a part that isn't there."""
    error.hint = f"{manifest.name} names it: copy the folder of parts, too, or write the set again"
    return error
