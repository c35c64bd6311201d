"""Which stores a shared cache has, and which of them are meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ups_store.errors import SpecError, StoreNotFoundError
from ups_store.remote.shared_cache import SUFFIX, SharedCache, SharedFile, files_of_store
from ups_store.system.paths import partition_of

_FULL = re.compile(r"(?P<hash>[0-9a-f]{64})/(?P<name>[^/]+)")
_LEAST_DIGITS = 6  # of the beginning of a hash: fewer may be a name
_HASH = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},64}}")
_SHOWN = 8


@dataclass(frozen=True)
class SharedStore:
    """A store in a shared cache.

    Attributes:
        config_hash: Of its identity, by its place.
        name: Of the whole, `NAME.zarr.zip`.
        files: Its file, or all of its partitions, in order.
    """

    config_hash: str
    name: str
    files: tuple[SharedFile, ...]

    @property
    def nbytes(self) -> int:
        """Length of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def modified_s(self) -> float:
        """When the last file was written, in seconds since the epoch."""
        return max(file.modified_s for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "config_hash": self.config_hash,
            "name": self.name,
            "nbytes": self.nbytes,
            "modified_s": self.modified_s,
            "files": [file.key for file in self.files],
        }


def list_stores(cache: SharedCache) -> list[SharedStore]:
    """All whole stores, by name and then by hash."""
    return stores_among(cache.entries()[0])


def stores_among(entries: Sequence[SharedFile]) -> list[SharedStore]:
    """The whole stores among files, by name and then by hash."""
    groups: dict[tuple[str, str], list[SharedFile]] = {}
    for entry in entries:
        partition = partition_of(entry.name)
        name = entry.name if partition is None else partition.whole
        groups.setdefault((name, entry.config_hash), []).append(entry)
    found = []
    for (name, config_hash), some in sorted(groups.items()):
        files = files_of_store(some, name)
        if not files and len(some) == 1:  # a partition that was pushed alone, by the machine that made it
            files = some
        if files:
            found.append(SharedStore(config_hash, name if len(files) > 1 else files[0].name, tuple(files)))
    return found


def choose_stores(cache: SharedCache, wanted: Sequence[str]) -> list[SharedStore]:
    """The stores that words name: NAME, HASH or its beginning, or HASH/NAME; all if there are none.

    Raises:
        StoreNotFoundError: If a word names none.
        SpecError: If a name is one of several hashes, kind "ambiguous".
    """
    if wanted and all(_FULL.fullmatch(word) for word in wanted):  # then nothing has to be listed
        return [_exactly(cache, word) for word in wanted]
    stores = list_stores(cache)
    if not wanted:
        return stores
    chosen: dict[tuple[str, str], SharedStore] = {}
    for word in wanted:
        for store in _matching(cache, stores, word):
            chosen[store.config_hash, store.name] = store
    return list(chosen.values())


def _exactly(cache: SharedCache, word: str) -> SharedStore:
    match = _FULL.fullmatch(word)
    assert match is not None
    name = _with_suffix(match["name"])
    files = files_of_store(cache.look(match["hash"], [name]), name)
    if not files:
        raise _not_there(cache, word, [])
    return SharedStore(match["hash"], name, tuple(files))


def _matching(cache: SharedCache, stores: Sequence[SharedStore], word: str) -> list[SharedStore]:
    first, slash, name = word.rpartition("/")
    if slash:
        found = [
            each for each in stores if each.config_hash.startswith(first) and each.name == _with_suffix(name)
        ]
    elif named := [each for each in stores if each.name == _with_suffix(word)]:
        found = named
    else:
        found = [each for each in stores if _HASH.fullmatch(word) and each.config_hash.startswith(word)]
    if not found:
        raise _not_there(cache, word, stores)
    hashes = sorted({each.config_hash for each in found})
    if len(hashes) > 1:
        raise SpecError(
            f"{word} is the name of {len(hashes)} stores",
            kind="ambiguous",
            path=cache.location,
            expected="one",
            found=", ".join(each[:12] for each in hashes[:_SHOWN]),
            hint="say which one, as HASH/NAME",
        )
    return found


def _with_suffix(name: str) -> str:
    return name if name.endswith(SUFFIX) else f"{name}{SUFFIX}"


def _not_there(cache: SharedCache, word: str, stores: Sequence[SharedStore]) -> StoreNotFoundError:
    names = sorted({store.name.removesuffix(SUFFIX) for store in stores})
    return StoreNotFoundError(
        f"no store {word}",
        path=cache.location,
        found=", ".join(names[:_SHOWN]) or None,
        hint="`ups-store ls-remote` lists what there is",
    )
