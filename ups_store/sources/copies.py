"""The folder of one copy: the file, a record of what it is of, and while it grows one of how far it is.

The names here are those of every run, also of ones that died: what they have left is continued or used again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ups_store.errors import SourceError
from ups_store.sources.origins import Origin, Version, checked_name
from ups_store.system import files
from ups_store.system.replacement import replace_text

_MAX_RECORD_BYTES = 1 << 20
_PART, _PART_RECORD, _RECORD = "{}.part", "part.json", "staged.json"


@dataclass(frozen=True)
class Copy:
    """A whole copy, as the record beside it says.

    Attributes:
        key: Of its origin.
        location: Of its origin, for people.
        name: Of the file.
        size: Bytes.
        tag: Of the version it is of.
        sha256: Of its bytes.
        md5: Of its bytes, if one was expected; else "".
        state: Size and time of modification of the copy itself.
    """

    key: str
    location: str
    name: str
    size: int
    tag: str
    sha256: str
    md5: str
    state: tuple[int, int]

    @property
    def version(self) -> Version:
        """What it is of."""
        return Version(self.size, self.tag, self.name)


def find_copy(folder: Path, origin: Origin, version: Version | None = None) -> Path | None:
    """The copy of an origin in the folder made for it, if it is whole, untouched, and of that version.

    Args:
        folder: Where it would lie.
        origin: What it is of.
        version: What the origin is now; None: any, for one whose digest is expected.
    """
    values = _read_json(folder / _RECORD)
    try:
        copy = Copy(**{**values, "state": tuple(values["state"])})
        path = folder / checked_name(copy.name, location=origin.location)
    except (TypeError, KeyError, AttributeError, SourceError):
        return None
    if copy.key != origin.key or files.last_write(path) != copy.state:
        return None
    if version is not None and (copy.version != version or copy.name != version.name):
        return None
    if origin.digest and origin.digest not in (f"sha256:{copy.sha256}", f"md5:{copy.md5}"):
        return None
    return path


def part_path(folder: Path, version: Version) -> Path:
    """Where the copy of a version grows."""
    return folder / _PART.format(version.name)


def num_there(folder: Path, version: Version) -> int:
    """Bytes of an unfinished copy that needn't be fetched again."""
    found = files.last_write(part_path(folder, version))
    return min(found[0], version.size) if found else 0


@dataclass(frozen=True)
class UnfinishedCopy:
    """An unfinished copy, as the record beside it says.

    Attributes:
        synced: Its first bytes that a power cut leaves as they are.
        is_of_this_boot: Whether the machine has run ever since, so that all bytes are what was written.
        is_same: Whether it is of the version that is wanted.
    """

    synced: int
    is_of_this_boot: bool
    is_same: bool


def find_part(folder: Path, origin: Origin, version: Version) -> UnfinishedCopy:
    """What is known of the unfinished copy in a folder; where nothing is, none of its bytes can be used."""
    values = _read_json(folder / _PART_RECORD)
    synced = values.get("synced")
    return UnfinishedCopy(
        synced=synced if isinstance(synced, int) else 0,
        is_of_this_boot=values.get("boot_id") == files.boot_id().hex(),
        is_same=values.get("key") == origin.key and values.get("version") == asdict(version),
    )


def record_part(folder: Path, origin: Origin, version: Version, *, synced: int) -> None:
    """Write beside an unfinished copy what it is of, and how many of its bytes are durable."""
    boot_id = files.boot_id().hex()
    values = {"key": origin.key, "version": asdict(version), "boot_id": boot_id, "synced": synced}
    replace_text(folder / _PART_RECORD, json.dumps(values), follow=False)


def forget_part(folder: Path) -> None:
    """Remove the record of an unfinished copy, so that none of its bytes is used."""
    files.remove(folder / _PART_RECORD)


def publish(folder: Path, origin: Origin, version: Version, digests: dict[str, str]) -> None:
    """Give an unfinished copy its name, once all of its bytes are durable: what has its name is whole.

    Args:
        folder: Its folder.
        origin: What it is of.
        version: What it is of.
        digests: Of its bytes, by kind; "sha256" is among them.
    """
    part = part_path(folder, version)
    state = files.last_write(part)
    assert state is not None, "it is locked"
    copy = Copy(
        key=origin.key,
        location=origin.location,
        name=version.name,
        size=version.size,
        tag=version.tag,
        sha256=digests["sha256"],
        md5=digests.get("md5", ""),
        state=state,
    )
    replace_text(folder / _RECORD, json.dumps(asdict(copy), indent=1), follow=False)
    files.rename(part, folder / version.name)
    forget_part(folder)
    files.sync_folder(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with files.opened(path) as fd:
            values = json.loads(files.read_at(fd, 0, _MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):  # absent or damaged: the copy is made again
        return {}
    return values if isinstance(values, dict) else {}
