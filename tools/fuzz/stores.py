"""The fuzzer's stores, finished and under construction.

Changes are blind (bits, cuts, splices), or know the format (fields of ZIP records, JSON documents, payloads,
with all checksums made right again, so that they get past them). Blind changes must also be noticed: by
opening, or by `verify`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ups_store
from tools.conformance import REFUSED, write_sample_store
from tools.conformance.archive import (
    Part,
    document_bytes,
    edit_identity,
    find_places,
    put_together,
    read_document,
    replace_data,
    take_apart,
)
from tools.conformance.sample_store import NUM_SAMPLES
from tools.fuzz.changes import BLIND, NUMBERS, Chance, Change, change_value, erase, flip_bits, splice
from tools.fuzz.fuzzer import Fuzzer
from ups_store.check.doctor import examine
from ups_store.read.recovery import building_path

# --- changes that know the format -----------------------------------------------------------------------

_places_of = functools.lru_cache(maxsize=4)(find_places)


@functools.lru_cache(maxsize=4)
def _parts_of(good: bytes) -> tuple[Part, ...]:
    return tuple(take_apart(good))


def record_field(good: bytes, chance: Chance) -> bytes:
    """A number in a ZIP record or the end records."""
    places = _places_of(good)
    starts = [*places.local.values(), *places.central.values(), places.end64, places.locator, places.end]
    at = chance.choice(starts) + chance.randrange(80)
    layout = chance.choice(("<H", "<I", "<Q"))
    nbytes = struct.calcsize(layout)
    at = min(at, len(good) - nbytes)
    (old,) = struct.unpack_from(layout, good, at)
    number = chance.choice((*NUMBERS, old + 1, old - 1, old * 2, len(good)))
    return good[:at] + struct.pack(layout, number & ((1 << 8 * nbytes) - 1)) + good[at + nbytes :]


def json_value(good: bytes, chance: Chance) -> bytes:
    """A value of a metadata document; its entry's checksums are made right."""
    parts = _parts_of(good)
    part = chance.choice([part for part in parts if part.name.endswith("zarr.json")])
    document = read_document(parts, part.name)
    for _ in range(chance.choice((1, 1, 2, 5))):
        change_value(document, chance)
    return put_together(replace_data(parts, part.name, document_bytes(document)))


def identity_value(good: bytes, chance: Chance) -> bytes:
    """A value of the identity, with its hash made right."""
    return put_together(edit_identity(_parts_of(good), lambda identity: change_value(identity, chance)))


def entry_data(good: bytes, chance: Chance) -> bytes:
    """Bytes of one entry, by a blind change; its records are made right."""
    parts = _parts_of(good)
    part = chance.choice([part for part in parts if part.data])
    change = chance.choice((flip_bits, splice, erase)) if len(part.data) > 8 else flip_bits
    return put_together(replace_data(parts, part.name, change(part.data, chance)))


def entries(good: bytes, chance: Chance) -> bytes:
    """Entries left out, repeated, or in another order."""
    parts = list(_parts_of(good))
    first, second = chance.randrange(len(parts)), chance.randrange(len(parts))
    action = chance.randrange(3)
    if action == 0:
        del parts[first]
    elif action == 1:
        parts.insert(second, parts[first])
    else:
        parts[first], parts[second] = parts[second], parts[first]
    return put_together(parts)


AWARE: tuple[Change, ...] = (record_field, json_value, json_value, identity_value, entry_data, entries)


# --- reading --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seeds:
    """Good files to start from: finished stores, and one under construction."""

    finished: tuple[bytes, ...]
    building: bytes


def make_seeds(folder: Path) -> Seeds:
    """Write and read them: the sample store, malformed ones made from it, an unfinished one."""
    good = write_sample_store(folder / "seed.zarr.zip").read_bytes()
    with ups_store.open(folder / "seed.zarr.zip") as store:
        constants = store.constants
        with ups_store.create(
            folder / "half.zarr.zip",
            store.arrays,
            constants=constants,
            dims={name: store.dims[name] for name in constants},
            identity={"task": "half"},
        ) as writer:
            writer.commit_many([0, 2], store.gather([0, 2]))
    half = building_path(folder / "half.zarr.zip").read_bytes()
    return Seeds((good,), half)


def make_input(seeds: Seeds, seed: int, number: int) -> tuple[bytes, str]:
    """An input and what it is: "blind", "aware" or "building"."""
    chance = random.Random(f"{seed}/{number}")
    good = chance.choice(seeds.finished)
    roll = chance.random()
    if roll < 0.1:
        return chance.choice(BLIND)(seeds.building, chance), "building"
    if roll < 0.4:
        return chance.choice(BLIND)(good, chance), "blind"
    if roll < 0.45:  # a defect of the corpus, changed once more
        malformed = REFUSED[chance.choice(_SMALL_DEFECTS)].build(good)
        return (chance.choice(BLIND)(malformed, chance) if len(malformed) > 8 else malformed), "aware"
    changed = good
    for _ in range(chance.choice((1, 1, 2))):
        try:
            changed = chance.choice(AWARE)(changed, chance)
        except Exception:  # what was changed first can't be taken apart any more
            break
    return changed, "aware"


_SMALL_DEFECTS = sorted(
    name
    for name in REFUSED
    if not any(word in name for word in ("mib", "too_long", "arrays_4097", "depth", "deep", "digits"))
)


@contextlib.contextmanager
def naming_the_file(*, passes: bool = False) -> Iterator[None]:
    """Inside, errors are typed and say which file they are about; they go on to the caller or end here."""
    try:
        yield
    except ups_store.StoreError as error:
        if error.path is None:
            raise AssertionError(f"an error that names no file: {error}") from error
        if passes:
            raise


def read_everything(path: Path, number: int) -> bool:
    """Open a store and read all there is, in one of the ways there are; returns whether it verifies."""
    access, verify = (("map", None), ("pread", None), ("map", "touch"), ("pread", "touch"))[number % 4]
    with ups_store.open(path, access=access, verify=verify) as store:  # type: ignore[arg-type]
        _ = repr(store), store.attrs, store.fingerprint
        for work in (
            lambda: store.constants,
            lambda: store.sample(len(store) - 1) if len(store) else None,
            lambda: store.gather([0, min(len(store), NUM_SAMPLES) - 1]) if len(store) else None,
            lambda: store.gather([0], start=1, length=1) if len(store) else None,
            lambda: [store[name].tobytes() for name in store.arrays if store[name].size < 1 << 20],
        ):
            with naming_the_file():
                work()
        return store.verify(num_threads=1).ok


class StoreFuzzer(Fuzzer):
    """Stores, finished and under construction."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._seeds = make_seeds(folder)
        self._fd = os.memfd_create("fuzz")
        file = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._path = folder / "input.zarr.zip"
        self._building = folder / "unfinished.zarr.zip.building"  # beside a link it would be elsewhere
        for link in (self._path, self._building):
            link.symlink_to(file)

    def prepare(self, number: int) -> Callable[[], None]:
        """Put an input into the file in memory."""
        content, what = make_input(self._seeds, self._seed, number)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)
        is_changed = content not in self._seeds.finished

        def read() -> None:
            with naming_the_file(passes=True):
                self._read(number, what, is_changed=is_changed)

        return read

    def _read(self, number: int, what: str, *, is_changed: bool) -> None:
        if what == "building" or number % 16 == 0:
            examine(self._building if what == "building" else self._path)
        if what == "building":
            with ups_store.open(self._building, partial=True, verify="touch") as store:
                self.outcome.num_opened += 1
                if store.committed[:1].any():
                    store.gather([0])
            return
        is_sound = read_everything(self._path, number)
        self.outcome.num_opened += 1
        self.outcome.num_sound += is_sound
        if what == "blind" and is_sound and is_changed:
            raise AssertionError("a changed byte was not noticed")

    def close(self) -> None:
        """Close the file in memory."""
        super().close()
        for link in (self._path, self._building):
            link.unlink()
        os.close(self._fd)
