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
from collections.abc import Iterator
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
from tools.fuzz.changes import BLIND, NUMBERS, Chance, change_value, erase, flip_bits, splice
from tools.fuzz.kind import Input, Kind
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


# --- reading --------------------------------------------------------------------------------------------

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


class StoreKind(Kind):
    """Stores, finished and under construction; `seeds` are the sample store and one under construction."""

    aware = (record_field, json_value, json_value, identity_value, entry_data, entries)
    block = 2000

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
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
        self.seeds = (good, building_path(folder / "half.zarr.zip").read_bytes())
        self._fd = os.memfd_create("fuzz")
        self._path = folder / "input.zarr.zip"
        self._building = folder / "unfinished.zarr.zip.building"  # beside a link it would be elsewhere
        for link in (self._path, self._building):
            link.symlink_to(f"/proc/{os.getpid()}/fd/{self._fd}")

    def make_input(self, seed: int, number: int) -> Input:
        """Change a store; "building" is one under construction, changed blindly."""
        chance = random.Random(f"{seed}/{number}")
        good, building = chance.choice(self.seeds[:1]), self.seeds[1]  # drawn, as when there were several
        roll = chance.random()
        if roll < 0.1:
            return Input(number, chance.choice(BLIND)(building, chance), building, "building")
        if roll < 0.4:
            return Input(number, chance.choice(BLIND)(good, chance), good, "blind")
        if roll < 0.45:  # a defect of the corpus, changed once more
            changed = REFUSED[chance.choice(_SMALL_DEFECTS)].build(good)
            changed = chance.choice(BLIND)(changed, chance) if len(changed) > 8 else changed
            return Input(number, changed, good, "aware")
        changed = good
        for _ in range(chance.choice((1, 1, 2))):
            try:
                changed = chance.choice(self.aware)(changed, chance)
            except Exception:  # what was changed first can't be taken apart any more
                break
        return Input(number, changed, good, "aware")

    def read(self, made: Input) -> bool:
        """Read it from a file in memory."""
        is_building = made.change == "building"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, made.content, 0)
        with naming_the_file(passes=True):
            if is_building or made.number % 16 == 0:
                examine(self._building if is_building else self._path)
            if is_building:
                with ups_store.open(self._building, partial=True, verify="touch") as store:
                    if store.committed[:1].any():
                        store.gather([0])
                return False
            is_sound = read_everything(self._path, made.number)
        if made.is_blind and is_sound and made.content != made.good:
            raise AssertionError("a changed byte was not noticed")
        return is_sound

    def close(self) -> None:
        """Close the file in memory."""
        for link in (self._path, self._building):
            link.unlink()
        os.close(self._fd)
