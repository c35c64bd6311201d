"""The plan of one store: which samples of which files, what they become, and the identity that gives."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ups_store.building.config import BuildConfig, Codec
from ups_store.building.digests import DIGEST_CHARACTERS, DigestKind, Digests, FileSignature
from ups_store.building.encode import Encoder, OverlappingEncoder, check_size, load_encoder
from ups_store.building.progress import Stopwatch, Watcher
from ups_store.building.ranks import BuildRank
from ups_store.building.readers import Readers, given_or_own
from ups_store.building.staging import Sources
from ups_store.format.metadata import ArraySpec, dtype_of
from ups_store.format.root import config_hash
from ups_store.sources.contents import OuterFile, Selection, SourceInfo, changed, check_same_grid
from ups_store.sources.reader import describe_request
from ups_store.sources.source_files import SourceFile, SourceSamples
from ups_store.sources.tasks import Task
from ups_store.system.files import Progress
from ups_store.write.blueprint import blueprint_of
from ups_store.write.create import identity_of

ENCODED_DTYPE = "float32"  # in which encoders get their fields


@dataclass(frozen=True, eq=False)
class StorePlan:
    """Everything that is known before the first sample is read.

    Attributes:
        task: The task.
        split: "train", "val" or "test".
        path: Where the store goes.
        parts: Samples of the sources, in the order of the split.
        selected: Samples of the split that the store holds: all, unless it is a partition.
        infos: What each part's file holds.
        signatures: Each part's file as it was found, to notice a change.
        outer: Signatures of the other files that each part's file takes data from, as in its info.
        follow: Folder below which those may lie.
        selection: Reduction while reading.
        arrays: Arrays of the store.
        source_arrays: Arrays that the sources give; those of the store unless an encoder makes these.
        encoder: What makes the store's arrays of the sources'; None where a store holds fields.
        constants: Coordinates.
        attrs: Attributes of the root group.
        content: The content part of the identity, without digests of the sources.
        batch_size: Samples that are read and committed at a time; chosen by their size where None.
        partition: Number of the partition, and of partitions; None for a store of the whole split.
        codec: How the finished store is packed; "none" for a mapped one.
        num_files: In how many files it is to be built; None: chosen by its size.
        is_limited: Whether `data.limit` decides how many samples there are.
    """

    task: Task
    split: str
    path: Path
    parts: tuple[SourceSamples, ...]
    selected: range
    infos: tuple[SourceInfo, ...]
    signatures: tuple[FileSignature, ...]
    outer: tuple[tuple[FileSignature, ...], ...]
    follow: Path | None
    selection: Selection
    arrays: Mapping[str, ArraySpec]
    source_arrays: Mapping[str, ArraySpec]
    encoder: Encoder | None
    constants: Mapping[str, npt.NDArray[Any]]
    attrs: Mapping[str, Any]
    content: Mapping[str, Any]
    batch_size: int | None = None
    partition: tuple[int, int] | None = None
    codec: Codec = "none"
    num_files: int | None = None
    is_limited: bool = False

    @property
    def num_samples(self) -> int:
        """N; 0 for a split that would be empty."""
        return len(self.selected)

    @property
    def is_partition(self) -> bool:
        """Whether it is the plan of one file of several."""
        return self.partition is not None

    @property
    def is_empty(self) -> bool:
        """Whether the split, and not only this machine's partition of it, has no samples."""
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
        return payload_nbytes(self.arrays)

    @property
    def source_sample_nbytes(self) -> int:
        """Payload of one sample as the sources give it."""
        return payload_nbytes(self.source_arrays)

    @property
    def stored_sample_nbytes(self) -> int:
        """Bytes that a sample takes in its file: of a reduced one more is read than it has."""
        num_samples = sum(info.num_samples for info in self.infos)
        return self.source_nbytes // max(1, num_samples)

    def identity(self, digests: Digests, progress: Progress) -> dict[str, Any]:
        """The identity's content, with the digests of the sources; reads those that aren't known."""
        kind = self.content["source_digest"]
        return {
            **self.content,
            "sources": [
                {
                    "name": _as_text(part.path.name),
                    "size": signature.size,
                    "digest": digests.digest(part.path, kind, progress),
                    "samples": [part.indices.start, part.indices.stop],
                    **({"external": self._identity_of_outer(i, digests, progress)} if self.outer[i] else {}),
                }
                for i, (part, signature) in enumerate(zip(self.parts, self.signatures, strict=True))
            ],
        }

    def _identity_of_outer(self, index: int, digests: Digests, progress: Progress) -> list[dict[str, Any]]:
        """The files that a part's file takes data from: their names there, and where they lie from there."""
        folder = os.path.dirname(os.path.realpath(self.parts[index].path))
        return [
            {
                "name": _as_text(file.name),
                "path": _as_text(os.path.relpath(file.path, folder)),
                "size": signature.size,
                "digest": digests.digest(file.path, self.content["source_digest"], progress),
            }
            for file, signature in zip(self.infos[index].outer, self.outer[index], strict=True)
        ]

    def document(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The whole identity document of the store, with what `identity` gave."""
        return identity_of(
            self.arrays,
            constants=self.constants,
            dims=self.dims,
            identity=content,
            partition=self.partition,
        )

    def check_sources(self) -> None:
        """Fail with `SourceError` if a source isn't the file that it was when the plan was made."""
        outer = [file.path for info in self.infos for file in info.outer]
        paths = itertools.chain((part.path for part in self.parts), outer)
        for path, signature in zip(paths, itertools.chain(self.signatures, *self.outer), strict=True):
            if FileSignature.of(path) != signature:
                raise changed(path)

    @property
    def file_nbytes(self) -> int:
        """Length of the finished file; all digests are as long, so the sources needn't be read for it."""
        content = self.identity(_AnyDigest(), lambda nbytes: None)
        blueprint = blueprint_of(self.arrays, self.constants, self.dims, content, self.attrs)
        return blueprint.layout.file_nbytes


class _AnyDigest:
    """Stands for digests that aren't known."""

    def digest(self, path: Path, kind: DigestKind, progress: Progress) -> str:
        return "0" * DIGEST_CHARACTERS


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
    found = (sources or Sources(config)).of(task, split)
    signatures = [FileSignature.of(source.path) for source in found]  # before anything is read
    requests = [describe_request(source.path, task, selection, data.follow_external) for source in found]
    with given_or_own(readers, config.reading) as opening:
        infos = list(opening.pool.ask_each(requests))
    outer = [tuple(map(_signature_of, info.outer)) for info in infos]
    check_same_grid(infos)
    parts = _parts(found, infos, config, task, split)
    # A file without samples for the split, or beyond the limit, has no share in the store or its identity.
    used = [i for i, part in enumerate(parts) if len(part.indices)] or range(len(parts))
    num_samples = sum(len(part.indices) for part in parts)
    encoder = _encoder(config, task)
    source_arrays = arrays_of(infos, num_samples, ENCODED_DTYPE if encoder else config.cache.dtype)
    content = _content(config, task, split, infos, any(not source.whole for source in found))
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
        attrs=attrs_of(infos[0], task, split),
        content={**content, "kind": "latents", "encoder": dict(encoder.identity())} if encoder else content,
        batch_size=None if config.reading.batch_size == "auto" else config.reading.batch_size,
        codec=config.cache.codec,
        num_files=config.cache.partitions,
        is_limited=num_samples == data.limit,
    )


def _signature_of(file: OuterFile) -> FileSignature:
    signature = FileSignature.of(file.path)
    if signature.state != file.state:
        raise changed(file.path)
    return signature


def partition_of(plan: StorePlan, rank: BuildRank) -> StorePlan:
    """The plan of this machine's partition of the split; the plan itself where one machine builds all."""
    if not rank.is_partitioned:
        return plan
    selected = rank.samples(plan.num_samples)
    return replace(
        plan,
        path=rank.path(plan.path),
        selected=selected,
        arrays=_with_num_samples(plan.arrays, len(selected)),
        source_arrays=_with_num_samples(plan.source_arrays, len(selected)),
        partition=(rank.machine, rank.num_machines),
    )


def _with_num_samples(arrays: Mapping[str, ArraySpec], num_samples: int) -> dict[str, ArraySpec]:
    return {name: replace(spec, shape=(num_samples, *spec.shape[1:])) for name, spec in arrays.items()}


def _encoder(config: BuildConfig, task: Task) -> Encoder | None:
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


def _parts(
    sources: Sequence[SourceFile], infos: Sequence[SourceInfo], config: BuildConfig, task: Task, split: str
) -> list[SourceSamples]:
    """The samples of each file that are of the split, at most `limit` of them together."""
    parts, left = [], config.data.limit
    for source, info in zip(sources, infos, strict=True):
        part = source.samples_of(
            info.num_samples, split=split, fractions=config.data.fractions, test_part=task.test_part
        )
        if left is not None:
            part = SourceSamples(part.path, part.indices[:left])
            left -= len(part.indices)
        parts.append(part)
    return parts


def _content(
    config: BuildConfig, task: Task, split: str, infos: Sequence[SourceInfo], is_shared: bool
) -> dict[str, Any]:
    data, info = config.data, infos[0]
    decoded = sorted({name for each in infos for name in each.decoded})
    return {
        "kind": "fields",
        "task": task.name,
        "split": split,
        "split_fractions": list(data.split_fractions) if is_shared else None,
        "reduce_space": data.reduce_space,
        "reduce_time": data.reduce_time,
        "layout": {"name": info.layout, "version": info.layout_version, **task.declaration},
        "source_digest": data.source_digest,
        **({"decoded": decoded} if decoded else {}),
    }


def _as_text(file_name: str) -> str:
    """A file name as valid Unicode, whatever bytes it is made of."""
    return os.fsencode(file_name).decode(errors="backslashreplace")


PARAMETER_DTYPE = "float64"  # parameters are attributes of float64 in PDEBench's files


def arrays_of(infos: Sequence[SourceInfo], num_samples: int, dtype: str) -> dict[str, ArraySpec]:
    """Arrays of N samples of some files, those in space in one dtype."""
    arrays = {}
    for name, array in infos[0].arrays.items():
        attrs = {"channels": list(infos[0].channels)} if name == "fields" else {}
        is_in_space = not {"x", "y", "z"}.isdisjoint(array.dims)  # else it is a parameter, or the time
        arrays[name] = ArraySpec(
            (num_samples, *array.shape),
            dtype if is_in_space else PARAMETER_DTYPE,
            dims=("sample", *array.dims),
            attrs=attrs,
        )
    for name in sorted(infos[0].parameters):
        arrays[name] = ArraySpec((num_samples,), PARAMETER_DTYPE, dims=("sample",))
    return arrays


def attrs_of(info: SourceInfo, task: Task, split: str) -> dict[str, Any]:
    """Attributes of the root group."""
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


def payload_nbytes(arrays: Mapping[str, ArraySpec]) -> int:
    """Bytes of one sample of all arrays."""
    return sum(
        int(np.prod(spec.shape[1:], dtype=np.int64)) * dtype_of(spec.dtype).itemsize
        for spec in arrays.values()
    )


class PlannedStore:
    """A store before it is there: its plan, its path, and the identity that its file will have."""

    def __init__(
        self,
        plan: StorePlan,
        config: BuildConfig,
        *,
        digests: Digests,
        readers: Readers | None,
        watcher: Watcher,
        rank: BuildRank,
    ) -> None:
        self.plan, self.rank, self.clock = plan, rank, Stopwatch(watcher.waits)
        self.title, self.path, self.num_samples = plan.title, plan.path, plan.num_samples
        self._config, self._digests, self._readers, self._watcher = config, digests, readers, watcher
        self._content: Mapping[str, Any] | None = None
        self._is_part = False

    def identify(self) -> Mapping[str, Any]:
        """Return what `ups_store.create` takes as identity; the first call digests the sources.

        Raises:
            SourceError: If one can't be read, or changes meanwhile.
        """
        if self._content is None:
            self._watcher.stage(f"{self.title}: sources", self.plan.source_nbytes, unit="bytes")
            self._content = self.plan.identity(self._digests, self._watcher.advance)
        return self._content

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The whole identity document; raises as `identify`."""
        return self.plan.document(self.identify())

    @cached_property
    def config_hash(self) -> str:
        """Hash of the identity, as the store will have it; raises as `identify`."""
        return config_hash(self.document)

    def part(self, number: int, count: int) -> Self:
        """Return the build of one of several files that hold the store together, on this one's clock."""
        place = replace(self.rank, machine=number, num_machines=count)
        plan = replace(partition_of(self.plan, place), batch_size=self.plan.batch_size)
        options: dict[str, Any] = {"digests": self._digests, "readers": self._readers, "rank": self.rank}
        part = type(self)(plan, self._config, watcher=self._watcher, **options)
        part.title = f"{self.title}, file {number + 1} of {count}"
        part._content, part.clock, part._is_part = self.identify(), self.clock, True
        return part
