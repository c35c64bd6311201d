"""What a store is: `describe`, and `shared_samples`, the samples that two stores share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ups_store.check.statistics import ArrayStatistics, Statistics
from ups_store.format.array_spec import ArraySpec
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.checksum import crc32c
from ups_store.format.layout import CHECKSUM_BYTES, slot_nbytes
from ups_store.format.metadata import LARGE_SAMPLE_BYTES, ArrayMeta, dtype_name
from ups_store.read.base import AnyStore
from ups_store.read.partitioned import PartitionedStore, parts_of
from ups_store.read.recovery import building_path, read_building_file
from ups_store.read.spool_store import SpoolStore
from ups_store.read.store import Store
from ups_store.remote.store import RemoteStore
from ups_store.system import files, locks
from ups_store.system.progress import Progress
from ups_store.write.building import read_owner

if TYPE_CHECKING:
    from ups_store.packed.catalog import PackedCatalog
    from ups_store.packed.store import PackedStore

_BLOCK_ELEMENTS = 1 << 20  # 8 MiB as float64
_MIN_SAMPLE_BYTES = 64  # equal parameters are no sign of equal samples


@dataclass(frozen=True)
class ArrayInfo:
    """One array.

    Attributes:
        shape: Whole shape, N first unless it is a constant; None for the rows of a ragged array.
        dtype: Zarr data type name.
        dims: Dimension names.
        sample_nbytes: Payload bytes of one sample, on average if ragged; of the whole array for a constant.
        slot_nbytes: Bytes from one sample to the next in the file; None where samples have no slots.
        attrs: Attributes.
    """

    shape: tuple[int | None, ...]
    dtype: str
    dims: tuple[str, ...]
    sample_nbytes: int
    slot_nbytes: int | None
    attrs: dict[str, Any]


@dataclass(frozen=True)
class BuildInfo:
    """State of an unfinished store.

    Attributes:
        num_committed: Samples that are there.
        durability: "durable" or "lazy"; None once only its renaming is left.
        is_running: Whether a builder holds its lock.
        owner: The process that built it last, "pid 7 on host"; None if it isn't noted.
        is_counted: Whether it is known how many samples there will be.
    """

    num_committed: int
    durability: str | None
    is_running: bool
    owner: str | None
    is_counted: bool = True


@dataclass(frozen=True)
class PackedInfo:
    """How a packed store is packed.

    Attributes:
        codec: "blosc" or "pcodec"; "mixed" of partitions that differ.
        level: Its effort; None of partitions that differ.
        mapped_nbytes: Length of the mapped file, or files, that `unpack` makes.
    """

    codec: str
    level: int | None
    mapped_nbytes: int


@dataclass(frozen=True)
class StoreInfo:
    """What `describe` finds of a store.

    Attributes:
        path: The file, or the pattern of its partitions; under its building name while it isn't finished.
        format_version: "MAJOR.MINOR".
        num_samples: N.
        nbytes: Length of the finished file, or files.
        modified_s: When it was last written, seconds since the epoch.
        resident_share: Share of the file in RAM, 0 to 1.
        reads: How samples are read: "map", "pread", "decode", "remote"; "mixed" of partitions that differ.
        network: Name of the network file system that it lies on, or scheme of its URL; None for local ones.
        config_hash: sha256 of the identity document.
        fingerprint: Digest of the content; None while it isn't finished.
        identity: What it was made from, as its builder said it.
        identity_document: The same with the arrays and the constants' digests around it.
        attrs: Attributes of the root group.
        arrays: Arrays with a sample axis, by name.
        constants: Arrays without one, by name.
        build: State of an unfinished store; None of a finished one.
        packed: How a packed store is packed; None of others.
        partitions: Names of the files of a store in partitions; empty for others.
        statistics: By array, where asked for.
    """

    path: Path
    format_version: str
    num_samples: int
    nbytes: int
    modified_s: float
    resident_share: float
    reads: str
    network: str | None
    config_hash: str
    fingerprint: str | None
    identity: dict[str, Any]
    identity_document: dict[str, Any]
    attrs: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    constants: dict[str, ArrayInfo]
    build: BuildInfo | None
    packed: PackedInfo | None = None
    partitions: tuple[str, ...] = ()
    statistics: dict[str, ArrayStatistics] | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; the time as ISO 8601 in UTC."""
        document = asdict(self)
        modified = datetime.fromtimestamp(document.pop("modified_s"), UTC).isoformat(timespec="seconds")
        return {**document, "path": str(self.path), "modified": modified}


def describe(store: AnyStore, *, statistics: bool = False, progress: Progress | None = None) -> StoreInfo:
    """Describe a store, or what there is of an unfinished one; of a packed one no chunk is decoded.

    Args:
        store: Opened with `partial=True` it may be unfinished.
        statistics: Whether to read all of it, a block at a time, for the statistics of its float arrays.
        progress: Called with the number of bytes that were read for them since the last call.
    """
    partitions = store.partitions if isinstance(store, PartitionedStore) else ()
    parts = parts_of(store)
    is_published = not store.is_partial and (bool(partitions) or _is_there(store))
    path = store.path if is_published else building_path(store.path)
    metas = store.metas.values()
    return StoreInfo(
        path=path,
        format_version=f"{store.version[0]}.{store.version[1]}",
        num_samples=len(store),
        nbytes=store.nbytes,
        modified_s=max(map(_modified_s, parts)) if is_published else files.modified_s(path),
        resident_share=store.residency(),
        reads=store.access,
        network=store.network,
        config_hash=store.config_hash,
        fingerprint=store.fingerprint if is_published else None,
        identity=dict(store.identity),
        identity_document=dict(store.identity_document),
        attrs=dict(store.attrs),
        arrays={meta.name: _array_info(meta, store) for meta in metas if not meta.is_constant},
        constants={meta.name: _array_info(meta, store) for meta in metas if meta.is_constant},
        build=None if is_published else _build_info(path, store),
        packed=_packed_info(store),
        partitions=tuple(part.path.name for part in partitions),
        statistics=_statistics(store, progress or (lambda nbytes: None)) if statistics else None,
    )


def _is_there(store: AnyStore) -> bool:
    return isinstance(store, RemoteStore) or files.exists(store.path)


def _modified_s(store: AnyStore) -> float:
    return store.modified_s if isinstance(store, RemoteStore) else files.modified_s(store.path)


def _array_info(meta: ArrayMeta, store: AnyStore) -> ArrayInfo:
    slot = slot_nbytes(meta.sample_nbytes) if meta.is_sharded and store.codec == "none" else None
    shape: tuple[int | None, ...] = meta.shape
    nbytes = meta.sample_nbytes
    if meta.is_ragged:
        shape, nbytes = (len(store), None, *meta.sample_shape), meta.nbytes // max(1, len(store))
    return ArrayInfo(shape, meta.dtype, meta.axes, nbytes, slot, dict(meta.attrs))


def _packed_info(store: AnyStore) -> PackedInfo | None:
    if store.codec == "none":
        return None
    levels = {_catalog_of(part).packing.level for part in parts_of(store) if part.codec != "none"}
    return PackedInfo(store.codec, levels.pop() if len(levels) == 1 else None, mapped_nbytes(store))


def mapped_nbytes(store: AnyStore) -> int:
    """Length that a finished store's files have where they are mapped."""
    return sum(
        part.nbytes if part.codec == "none" else _catalog_of(part).layout.file_nbytes
        for part in parts_of(store)
    )


def _catalog_of(store: AnyStore) -> PackedCatalog:
    return cast("PackedStore", store).catalog


def _sample_nbytes(spec: ArraySpec) -> int:
    nbytes: int = math.prod(spec.shape[1:]) * spec.dtype.itemsize
    return nbytes


def _build_info(path: Path, store: AnyStore) -> BuildInfo:
    with files.opened(path) as fd:
        header = read_building_file(fd, path).header
        owner = read_owner(fd, path) if header else None
        is_running = locks.is_locked(fd, BUILDER_LOCK)
    return BuildInfo(
        num_committed=int(store.committed.sum()),
        durability=None if header is None else "lazy" if header.is_lazy else "durable",
        is_running=is_running,
        owner=f"pid {owner.pid} on {owner.host}" if owner else None,
        is_counted=not isinstance(store, SpoolStore),
    )


def _statistics(store: AnyStore, progress: Progress) -> dict[str, ArrayStatistics]:
    samples = np.flatnonzero(store.committed)
    statistics = Statistics(with_mean=True)
    for name, spec in store.arrays.items():
        if "float" in dtype_name(spec.dtype):
            statistics.add({name: np.empty(0)})  # an array without values is there too
            for block in _blocks(store, name, samples):
                statistics.add({name: block})
                progress(block.nbytes)
    return statistics.by_array()


def _blocks(store: AnyStore, name: str, samples: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """All values of an array, flat, at most a block at a time: several samples, or a part of one."""
    if store.arrays[name].is_ragged:
        for sample in samples.tolist():
            (rows,) = store.gather([sample], [name])[name]
            yield rows.reshape(-1)
        return
    num_elements = math.prod(store.arrays[name].shape[1:])
    step = _BLOCK_ELEMENTS // max(1, num_elements)
    for first in range(0, len(samples), step) if step else ():
        yield store.gather(samples[first : first + step], [name])[name].reshape(-1)
    for sample in samples.tolist() if not step else ():
        flat = store.sample(sample)[name].reshape(-1)
        for first in range(0, num_elements, _BLOCK_ELEMENTS):
            yield flat[first : first + _BLOCK_ELEMENTS]


def shared_samples(a: Store, b: Store) -> npt.NDArray[np.int64]:
    """Samples of `a` that occur in `b` too, by their largest common array.

    Samples are found by their checksums and then compared byte by byte, since checksums of different bytes
    can be equal. Stores without a common array larger than a few parameters share nothing.

    Args:
        a: A finished store.
        b: Another one.
    Returns:
        Sample numbers in `a`, sorted, shape (M,), int64.
    """
    name = _comparable_array(a, b)
    if name is None:
        return np.empty(0, np.int64)
    left, right = a[name], b[name]
    order = np.argsort(crcs := _checksums(right), kind="stable")
    wanted = _checksums(left)
    first, end = (np.searchsorted(crcs, wanted, side, sorter=order) for side in ("left", "right"))
    found = [
        i
        for i in np.flatnonzero(first < end).tolist()
        if any(_same_bytes(left[i], right[j]) for j in order[first[i] : end[i]].tolist())
    ]
    return np.array(found, np.int64)


def _comparable_array(a: Store, b: Store) -> str | None:
    """Name of the largest array that both stores have with samples of the same shape and dtype."""
    common = {
        name: _sample_nbytes(spec)
        for name, spec in a.arrays.items()
        if (other := b.arrays.get(name))
        and (other.shape[1:], other.dtype) == (spec.shape[1:], spec.dtype)
        and not spec.is_ragged
    }
    largest = max(common, key=lambda name: common[name], default=None)
    return largest if largest is not None and common[largest] >= _MIN_SAMPLE_BYTES else None


def _checksums(view: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """CRC-32C of every sample, shape (N,): those behind the samples where there are slots (spec 5.3)."""
    num, nbytes = len(view), view[:1].nbytes
    if not num:
        return np.empty(0, np.uint32)
    if nbytes < LARGE_SAMPLE_BYTES:
        return np.fromiter((crc32c(sample.tobytes()) for sample in view), np.uint32, num)
    first = view[:1].reshape(-1).view(np.uint8)
    slots = as_strided(first, (num, nbytes + CHECKSUM_BYTES), (view.strides[0], 1), writeable=False)
    return np.ascontiguousarray(slots[:, nbytes:]).view("<u4").reshape(-1)


def _same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
