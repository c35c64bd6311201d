"""What makes a file or a folder, on a disk that loses its power: the target is absent, old, or whole."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from build_helpers import BURGERS, Recorder
from lossy_disk import Disk, PowerLoss, installed
from pdebench_files import coordinate, write
from small_stores import build, flip, mixed_values

import ups_store
from ups_store.building.config import load_config
from ups_store.building.repair import repair_store
from ups_store.building.stores import build_all
from ups_store.check.doctor import examine, salvage
from ups_store.convert import export_store
from ups_store.packed.pack import pack_store, unpack_store
from ups_store.system.files import replace_file
from ups_store.writing.concat import concat_stores, split_store

Make = Callable[[Path, bool], object]  # a target, and whether to replace it
Content = dict[Path, bytes]  # by path below the target; of a file there is one, "."


@dataclass(frozen=True)
class Maker:
    """What makes a file or a folder.

    Attributes:
        prepare: Given a folder of its own, makes what is needed there, and returns what makes the target.
        old: What may be there before; None if nothing may. A function makes what must be there.
        is_durable: Whether the target is there after a power loss once it was made.
        goes_on: Whether an interrupted run is continued from the files alone.
        name: Of the target.
    """

    prepare: Callable[[Path], Make]
    old: Content | Callable[[Path], Content] | None = field(default_factory=lambda: {Path(): b"old"})
    is_durable: bool = True
    goes_on: bool = True
    name: str = "target"


def _exported(to: str) -> Callable[[Path], Make]:
    def prepare(folder: Path) -> Make:
        store = ups_store.open(build(folder / "source", mixed_values(2)))
        return lambda target, force: export_store(store, target, to=to, force=force, verify=False)

    return prepare


def _packed(folder: Path) -> Make:
    store = ups_store.open(build(folder / "source", mixed_values(2)))
    return lambda target, force: pack_store(store, target, force=force, num_threads=1)


def _unpacked(folder: Path) -> Make:
    store = ups_store.open(build(folder / "source", mixed_values(2)))
    packed = ups_store.open(pack_store(store, folder / "packed").path)
    return lambda target, force: unpack_store(packed, target, force=force)


def _concatenated(folder: Path) -> Make:
    stores = [ups_store.open(build(folder / f"{i}", mixed_values(2, seed=i))) for i in range(2)]
    return lambda target, force: concat_stores(stores, target, force=force, verify=False)


def _split(folder: Path) -> Make:
    store = ups_store.open(build(folder / "source", mixed_values(3)))
    return lambda target, force: split_store(store, [target], samples=[(1, 3)], force=force, verify=False)


def _salvaged(folder: Path) -> Make:
    source = build(folder / "source", {"fields": mixed_values(3)["fields"]})
    flip(source, source.stat().st_size // 2)
    diagnosis = examine(source)
    return lambda target, force: salvage(diagnosis, target)


def _repaired(folder: Path) -> Make:
    """The target is a damaged store, beside it the good one."""
    source, config = folder / "source" / BURGERS, folder / "build.yaml"
    source.parent.mkdir()
    fields = np.random.default_rng(0).random((8, 21, 64), np.float32)
    coordinates = {"x-coordinate": coordinate(64), "t-coordinate": coordinate(22)}
    write(source, {"tensor": fields, **coordinates}, {"Nu": 0.01})
    config.write_text(
        f"data: {{task: burgers1d, split: train, root: {source.parent}}}\n"
        f"cache: {{dir: {folder}}}\nreading: {{num_workers: 0}}\n"
    )
    build_all(load_config(config), watcher=Recorder())
    next(folder.glob("*.zarr.zip")).rename(folder / "good")

    def make(target: Path, force: bool) -> None:
        repair_store(target, config, watcher=Recorder())

    return make


def _half_damaged(folder: Path) -> Content:
    raw = bytearray((folder / "good").read_bytes())
    raw[len(raw) // 2] ^= 1
    return {Path(): bytes(raw)}


def _small_file(folder: Path) -> Make:
    return lambda target, force: replace_file(target, b"new" * 1000)


MAKERS = {
    "safetensors": Maker(_exported("safetensors")),
    "kerchunk": Maker(_exported("kerchunk")),
    "hdf5": Maker(_exported("hdf5"), goes_on=False),
    "zarr": Maker(_exported("zarr"), {Path("zarr.json"): b"{}", Path("c/0"): b"old"}, goes_on=False),
    "pack": Maker(_packed),
    "unpack": Maker(_unpacked, goes_on=False),
    "concat": Maker(_concatenated),
    "split": Maker(_split),
    "salvage": Maker(_salvaged, None),
    "repair": Maker(_repaired, _half_damaged, goes_on=False),
    "small file": Maker(_small_file, is_durable=False),
}


def check_everywhere(
    maker: Maker, folder: Path, *, stride: int = 1, disk_type: Callable[..., Disk] = Disk
) -> tuple[int, int]:
    """Lose the power before every operation, where there was nothing and where there was something.

    Returns:
        Numbers of operations and of images.
    """
    place = folder / "disk"
    place.mkdir()
    make, target = maker.prepare(place), place / maker.name
    numbers = [0, 0]
    for old in _olds(maker, place):
        expected, num_changes = _made(make, place, target, old, disk_type)
        for at in [*range(0, num_changes, stride), num_changes]:
            disk = _begun(place, target, old, disk_type, at)
            with installed(disk), contextlib.suppress(PowerLoss):
                make(target, bool(old))
            images = list(disk.after_power_loss(seed=at))
            for names in images:
                _check(names, target, old, expected, is_made=maker.is_durable and not disk.is_off)
            if maker.goes_on and images:
                _check_going_on(make, random.Random(at).choice(images), target, old, expected)
            numbers = [numbers[0] + 1, numbers[1] + len(images)]
    return numbers[0], numbers[1]


def _olds(maker: Maker, place: Path) -> list[Content]:
    if callable(maker.old):
        return [maker.old(place)]
    return [{}] if maker.old is None else [{}, maker.old]


def _begun(place: Path, target: Path, old: Content, disk_type: Callable[..., Disk], at: int | None) -> Disk:
    _remove(target)
    for below, raw in old.items():
        (target / below).parent.mkdir(parents=True, exist_ok=True)
        (target / below).write_bytes(raw)
    return disk_type(watched=place, lose_power_at=at)


def _made(
    make: Make, place: Path, target: Path, old: Content, disk_type: Callable[..., Disk]
) -> tuple[Content, int]:
    disk = _begun(place, target, old, disk_type, None)
    with installed(disk):
        make(target, bool(old))
        disk.exists(target)
    found = {path: disk.read(path) for path in disk.names() if path == target or target in path.parents}
    return {path.relative_to(target): raw for path, raw in found.items() if raw is not None}, disk.num_changes


def _below(names: dict[Path, bytes], target: Path) -> Content:
    return {
        path.relative_to(target): raw
        for path, raw in names.items()
        if path == target or target in path.parents
    }


def _check(names: dict[Path, bytes], target: Path, old: Content, expected: Content, *, is_made: bool) -> None:
    found = _below(names, target)
    assert found in (({}, old, expected) if not is_made else (expected,))
    if old and not found:  # a folder between its two renames
        others = {target.parent / path.relative_to(target.parent).parts[0] for path in names}
        assert any(_below(names, other) == old for other in others)


def _check_going_on(
    make: Make, names: dict[Path, bytes], target: Path, old: Content, expected: Content
) -> None:
    _remove(target)
    disk = Disk(names)
    with installed(disk):
        if _below(names, target) != expected:
            make(target, bool(old))
    assert disk.read(target) == expected[Path()]


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
