"""The plan of one store: which samples of which files, what they become, and the identity that gives.

Digests of the sources stand in the identity, so they are kept beside the stores: the next run needn't read
the sources.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.building.config import BuildConfig, Codec
from ups_store.building.encode import Encoder, OverlappingEncoder, check_size, load_encoder
from ups_store.building.ranks import BuildRank
from ups_store.building.readers import Readers, given_or_own
from ups_store.building.staging import Sources
from ups_store.errors import FormatError, SourceError
from ups_store.format.metadata import ArraySpec, dtype_of
from ups_store.sources.contents import FileState, Selection, SourceInfo, changed, check_same_grid
from ups_store.sources.reader_process import DigestKind, describe_request, digest_request
from ups_store.sources.source_files import SourceSamples
from ups_store.sources.tasks import Task
from ups_store.system.files import Progress, replace_text
from ups_store.writing.plan import plan_of

ENCODED_DTYPE = "float32"  # in which encoders get their fields
PARAMETER_DTYPE = "float64"  # parameters are attributes of float64 in PDEBench's files
_DIGEST_CHARACTERS = 64  # of blake3 in hexadecimal digits
_CACHE_NAME = ".source_digests.json"


class Digests(Protocol):
    """Something that knows the digests of sources."""

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        """Return the digest of a source; see `DigestCache.digest`."""


@dataclass(frozen=True, eq=False)
class StorePlan:
    """Everything that is known of a store before its first sample is read."""

    task: Task
    split: str
    path: Path
    parts: tuple[SourceSamples, ...]  # samples of the sources, in the order of the split
    selected: range  # samples of the split that the store holds: all, unless it is a partition
    infos: tuple[SourceInfo, ...]  # of each part's file
    signatures: tuple[FileSignature, ...]  # of each part's file as it was found, to notice a change
    outer: tuple[tuple[FileSignature, ...], ...]  # of the other files that each part's file takes data from
    follow: Path | None  # folder below which those may lie
    selection: Selection  # how samples are reduced while they are read
    arrays: Mapping[str, ArraySpec]
    source_arrays: Mapping[str, ArraySpec]  # what the sources give; `arrays` unless an encoder makes these
    encoder: Encoder | None  # None where a store holds fields
    constants: Mapping[str, npt.NDArray[Any]]  # coordinates
    attrs: Mapping[str, Any]  # of the root group
    content: Mapping[str, Any]  # of the identity, without digests of the sources
    batch_size: int | None = None  # samples read and committed at a time; None: chosen by their size
    partition: tuple[int, int] | None = None  # its number, and of how many
    codec: Codec = "none"  # by which the finished store is packed
    num_files: int | None = None  # None: chosen by size
    is_limited: bool = False  # whether `data.limit` decides how many samples there are

    @property
    def num_samples(self) -> int:
        """Count the samples; 0 for a split that would be empty."""
        return len(self.selected)

    @property
    def is_empty(self) -> bool:
        """Tell whether the split, and not only this machine's partition of it, has no samples."""
        return not any(len(part.indices) for part in self.parts)

    @property
    def title(self) -> str:
        """Task and split, for people."""
        return f"{self.task.name} {self.split}"

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of the constants: "t" lies along "time", others along what they are named."""
        return {name: ("time",) if name == "t" else (name,) for name in self.constants}

    @property
    def source_nbytes(self) -> int:
        """Size of all sources, with the files that they take data from."""
        return sum(signature.size for signature in itertools.chain(self.signatures, *self.outer))

    @property
    def group_size(self) -> int:
        """Samples that the encoder encodes together, counted from the first of the split; 1 if it doesn't."""
        if not isinstance(self.encoder, OverlappingEncoder):
            return 1
        return self.encoder.group_size(self.source_arrays)

    @property
    def sample_nbytes(self) -> int:
        """Payload of one sample in the store."""
        return sample_nbytes_of(self.arrays)

    @property
    def source_sample_nbytes(self) -> int:
        """Payload of one sample as the sources give it."""
        return sample_nbytes_of(self.source_arrays)

    @property
    def stored_sample_nbytes(self) -> int:
        """Bytes that a sample takes in its file: of a reduced one more is read than it has."""
        return self.source_nbytes // max(1, sum(info.num_samples for info in self.infos))

    @property
    def file_nbytes(self) -> int:
        """Length of the finished file; all digests are as long, so the sources needn't be read for it."""
        content = self.identity(_AnyDigest(), lambda nbytes: None)
        plan = plan_of(
            self.arrays, identity=content, constants=self.constants, dims=self.dims, attrs=self.attrs
        )
        return plan.layout.file_nbytes

    def identity(self, digests: Digests, progress: Progress) -> dict[str, Any]:
        """Return the identity's content, with the digests of the sources; reads those that aren't known."""
        kind = self.content["source_digest"]
        sources = []
        for part, info, signature, outer in zip(
            self.parts, self.infos, self.signatures, self.outer, strict=True
        ):
            source: dict[str, Any] = {
                "name": _as_text(part.path.name),
                "size": signature.size,
                "digest": digests.digest(part.path, kind, progress),
                "samples": [part.indices.start, part.indices.stop],
            }
            folder = os.path.dirname(os.path.realpath(part.path))
            if outer:
                source["external"] = [
                    {
                        "name": _as_text(file.name),
                        "path": _as_text(os.path.relpath(file.path, folder)),
                        "size": of_file.size,
                        "digest": digests.digest(file.path, kind, progress),
                    }
                    for file, of_file in zip(info.outer, outer, strict=True)
                ]
            sources.append(source)
        return {**self.content, "sources": sources}

    def check_sources(self) -> None:
        """Fail with `SourceError` if a source isn't the file that it was when the plan was made."""
        paths = [part.path for part in self.parts] + [file.path for info in self.infos for file in info.outer]
        for path, signature in zip(paths, itertools.chain(self.signatures, *self.outer), strict=True):
            if FileSignature.of(path) != signature:
                raise changed(path)

    def partition_of(self, rank: BuildRank) -> StorePlan:
        """Return the plan of a machine's partition of the split; the plan itself where one builds all."""
        if not rank.is_partitioned:
            return self
        selected = rank.samples(self.num_samples)

        def of_these(arrays: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
            return {n: replace(spec, shape=(len(selected), *spec.shape[1:])) for n, spec in arrays.items()}

        return replace(
            self,
            path=rank.path(self.path),
            selected=selected,
            arrays=of_these(self.arrays),
            source_arrays=of_these(self.source_arrays),
            partition=(rank.machine, rank.num_machines),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a dry run shows of it as JSON values."""
        return {
            "path": str(self.path),
            "num_samples": self.num_samples,
            "nbytes": self.file_nbytes,
            "codec": self.codec,
            "arrays": {
                name: {"shape": list(spec.shape), "dtype": str(spec.dtype), "dims": list(spec.dims or ())}
                for name, spec in self.arrays.items()
            },
            "constants": {name: list(np.shape(values)) for name, values in self.constants.items()},
            "sources": {str(part.path): [part.indices.start, part.indices.stop] for part in self.parts},
            "external": sorted({str(file.path) for info in self.infos for file in info.outer}),
        }


def sample_nbytes_of(arrays: Mapping[str, ArraySpec]) -> int:
    """Return the bytes of one sample of all arrays."""
    return sum(math.prod(spec.shape[1:]) * dtype_of(spec.dtype).itemsize for spec in arrays.values())


def _as_text(file_name: str) -> str:
    """Return a file name as valid Unicode, whatever bytes it is made of."""
    return os.fsencode(file_name).decode(errors="backslashreplace")


def plan_store(
    config: BuildConfig,
    task_name: str,
    split: str,
    *,
    readers: Readers | None = None,
    sources: Sources | None = None,
) -> StorePlan:
    """Find the sources of a split and decide what becomes of them; reads no samples."""
    data, task = config.data, config.get_task(task_name)
    selection = Selection(data.reduce_space, data.reduce_time)
    files = (sources or Sources(config)).of(task, split)
    signatures = [FileSignature.of(file.path) for file in files]  # before anything is read
    requests = [describe_request(file.path, task, selection, data.follow_external) for file in files]
    with given_or_own(readers, config.reading) as opening:
        infos = list(opening.pool.ask_each(requests))
    outer = [tuple(FileSignature.of(file.path) for file in info.outer) for info in infos]
    for info, of_outer in zip(infos, outer, strict=True):
        for file, signature in zip(info.outer, of_outer, strict=True):
            if signature.state != file.state:
                raise changed(file.path)
    check_same_grid(infos)

    parts, limit = [], data.limit
    for file, info in zip(files, infos, strict=True):
        part = file.samples_of(
            info.num_samples, split=split, fractions=data.fractions, test_part=task.test_part
        )
        if limit is not None:
            part = SourceSamples(part.path, part.indices[:limit])
            limit -= len(part.indices)
        parts.append(part)
    # A file without samples for the split, or beyond the limit, has no share in the store or its identity.
    used = [i for i, part in enumerate(parts) if len(part.indices)] or range(len(parts))
    num_samples = sum(len(part.indices) for part in parts)

    encoder = _encoder_of(config, task)
    source_arrays = _arrays_of(infos[0], num_samples, ENCODED_DTYPE if encoder else config.cache.dtype)
    decoded = sorted({name for info in infos for name in info.decoded})
    is_shared_out = any(not file.whole for file in files)  # then the fractions decide what a split holds
    content = {
        "kind": "fields",
        "task": task.name,
        "split": split,
        "split_fractions": list(data.split_fractions) if is_shared_out else None,
        "reduce_space": data.reduce_space,
        "reduce_time": data.reduce_time,
        "layout": {"name": infos[0].layout, "version": infos[0].layout_version, **task.declaration},
        "source_digest": data.source_digest,
        **({"decoded": decoded} if decoded else {}),
    }
    if encoder:
        content |= {"kind": "latents", "encoder": dict(encoder.identity())}
    return StorePlan(
        task=task,
        split=split,
        path=config.cache.dir / f"{task.name}_{split}.zarr.zip",
        parts=tuple(parts[i] for i in used),
        selected=range(num_samples),
        infos=tuple(infos[i] for i in used),
        signatures=tuple(signatures[i] for i in used),
        outer=tuple(outer[i] for i in used),
        follow=data.follow_external,
        selection=selection,
        arrays=encoder.output_spec(source_arrays) if encoder else source_arrays,
        source_arrays=source_arrays,
        encoder=encoder,
        constants=dict(infos[0].constants),
        attrs=_attrs_of(infos[0], task, split),
        content=content,
        batch_size=None if config.reading.batch_size == "auto" else config.reading.batch_size,
        codec=config.cache.codec,
        num_files=config.cache.partitions,
        is_limited=num_samples == data.limit,
    )


def _encoder_of(config: BuildConfig, task: Task) -> Encoder | None:
    latent = config.latent
    if latent is None:
        return None
    encoder = load_encoder(
        latent.encoder,
        latent.checkpoint,
        task=task.name,
        device=latent.device,
        compute_dtype=latent.compute_dtype,
        latent_dtype=config.cache.dtype,
        micro_batch=latent.micro_batch,
        **({} if latent.pin_memory else {"pin_memory": False}),  # not every encoder has heard of it
        **({"compile": True} if latent.compile else {}),
    )
    check_size(encoder, dim=latent.dim, tokens=latent.tokens, checkpoint=latent.checkpoint)
    return encoder


def _arrays_of(info: SourceInfo, num_samples: int, dtype: str) -> dict[str, ArraySpec]:
    """Return the arrays of N samples as a source gives them, those in space in one dtype."""
    arrays = {}
    for name, array in info.arrays.items():
        is_in_space = not {"x", "y", "z"}.isdisjoint(array.dims)  # else it is a parameter, or the time
        arrays[name] = ArraySpec(
            (num_samples, *array.shape),
            dtype if is_in_space else PARAMETER_DTYPE,
            dims=("sample", *array.dims),
            attrs={"channels": list(info.channels)} if name == "fields" else {},
        )
    for name in sorted(info.parameters):
        arrays[name] = ArraySpec((num_samples,), PARAMETER_DTYPE, dims=("sample",))
    return arrays


def _attrs_of(info: SourceInfo, task: Task, split: str) -> dict[str, Any]:
    """Return the attributes of the root group."""
    axes = {axis: points for axis, points in info.constants.items() if axis != "t" and len(points) > 1}
    # Coordinates are cell centres: n cells of the grid's spacing make the domain.
    lengths = {
        axis: round(float(len(points) * abs(points[-1] - points[0]) / (len(points) - 1)), 6)
        for axis, points in axes.items()
    }
    return {
        "task": task.name,
        "split": split,
        "channels": list(info.channels),
        "boundary": dict(info.boundary),
        "domain_lengths": lengths,
        **info.attrs,
    }


# --- digests ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSignature:
    """What changes when a file does, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def state(self) -> FileState:
        """The part of it that readers compare."""
        return self.device, self.inode, self.size, self.mtime_ns

    @classmethod
    def of(cls, path: Path) -> FileSignature:
        """Return the signature of the file at a path; SourceError if there is none."""
        try:
            status = os.stat(path)
        except OSError as error:
            problem = f"source can't be read ({error.strerror})"
            raise SourceError(problem, kind="missing_file", path=path) from error
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class DigestCache:
    """Digests by real path, valid as long as the file's signature is the same.

    Args:
        folder: Folder of the stores; the cache is one small JSON file in it.
        rehash: Whether to ignore what is there.
        save: Whether to write what is found to the folder.
        readers: Read the files; by default one of its own for each.

    Attributes:
        known: Signatures and digests by kind and real path.
    """

    def __init__(
        self, folder: Path, *, rehash: bool = False, save: bool = True, readers: Readers | None = None
    ) -> None:
        self._path, self._is_saved, self._readers = folder / _CACHE_NAME, save, readers
        known = None
        if not rehash:  # unreadable or damaged: digests are taken again
            with contextlib.suppress(OSError, ValueError, RecursionError):
                known = json.loads(self._path.read_text()) if self._path.is_file() else None
        self.known: dict[str, Any] = known if isinstance(known, dict) else {}

    @property
    def paths(self) -> list[Path]:
        """List where the sources were that it knows, sorted; they may be gone."""
        return sorted({Path(key.partition(":")[2]) for key in self.known})

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        """Return the digest of a source, from the cache if the file didn't change.

        Args:
            path: Source file.
            kind: "full" for blake3 of all bytes; "sampled" for blake3 of size, HDF5 structure and 64 evenly
                spaced blocks of 64 KiB.
            progress: Called with numbers of bytes as they are read.
        """
        key, signature = f"{kind}:{os.path.realpath(path)}", FileSignature.of(path)
        entry = self.known.get(key)
        if isinstance(entry, dict) and entry.get("signature") == vars(signature) and "digest" in entry:
            progress(signature.size)
            return str(entry["digest"])
        with given_or_own(self._readers) as readers:
            request = digest_request(path, kind, signature.size)
            digest = str(readers.pool.ask(request, progress=progress))
        if FileSignature.of(path) != signature:
            raise changed(path)
        self.known[key] = {"signature": vars(signature), "digest": digest}
        if self._is_saved:  # where it can't be written, the digests are taken again next time
            with contextlib.suppress(OSError, FormatError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._path, json.dumps(self.known, indent=1, sort_keys=True))
        return digest


class _AnyDigest:
    """Stands for digests that aren't known."""

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        return "0" * _DIGEST_CHARACTERS
