"""Samples of a known or unknown number into a store: directly, or through a spool.

Where the number is known and no array is ragged, they are committed into the store itself; else they go
through a spool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import IdentityMismatchError, SpecError
from ups_store.format.canonical import plain_json
from ups_store.format.layout import consecutive_ranges
from ups_store.format.metadata import ArraySpec
from ups_store.read.base import AnyStore
from ups_store.read.recovery import read_building_file
from ups_store.system import files
from ups_store.write.commit import take_back
from ups_store.write.create import create
from ups_store.write.progress_line import ProgressLine
from ups_store.write.sample_sources import Columns, Rows
from ups_store.write.sample_specs import SampleCheck, counted_specs, specs_of, uncounted
from ups_store.write.spool import Spool, spool_left
from ups_store.write.writer import StoreWriter

OnMismatch = Literal["raise", "restart"]
OnError = Literal["fail", "skip"]
Sample = Mapping[str, Any]

PROBED_SAMPLES, PROBED_BYTES = 32, 64 << 20  # that specs are found from; never a matter of time
BATCH_BYTES, MAX_BATCH = 16 << 20, 16384  # committed together
COMPARED_SAMPLES = 8  # of those that an interrupted run committed
HOW_TO_REPLACE = "on_mismatch='restart'"


@dataclass(frozen=True)
class Plan:
    """What all ways of writing need; see `ups_store.write`.

    Attributes:
        target: Where the store will be.
        identity: Of the samples.
        is_named: Whether that says what they are: else what another run left is of no use.
    """

    target: Path
    identity: Mapping[str, Any]
    is_named: bool
    ragged: frozenset[str]
    constants: Mapping[str, npt.ArrayLike]
    dims: Mapping[str, Sequence[str]]
    attrs: Mapping[str, Any]
    on_mismatch: OnMismatch
    buffer_bytes: int
    save_every_s: float
    like: AnyStore | None = None  # whose arrays the samples have

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that `create` and `Spool` share."""
        return {
            "constants": self.constants,
            "dims": {name: dims for name, dims in self.dims.items() if name in self.constants},
            "identity": self.identity,
            "attrs": self.attrs,
            "on_mismatch": self.on_mismatch,
        }

    def with_those_of(self, source: Columns) -> Plan:
        """The same with the constants, dimensions and attributes that come with arrays."""
        return replace(
            self,
            constants={**source.constants, **self.constants},
            dims={**source.constant_dims, **self.dims},
            attrs={**source.attrs, **self.attrs},
        )

    def specs_alike(self) -> dict[str, ArraySpec] | None:
        """The arrays of the store that this one is like, where there is one."""
        if self.like is None:
            return None
        return {name: uncounted(spec) for name, spec in self.like.arrays.items()}

    def spool(self, specs: Mapping[str, ArraySpec]) -> Spool:
        """Begin, or continue, what takes samples whose number isn't known."""
        return Spool(
            self.target,
            specs,
            buffer_bytes=self.buffer_bytes,
            save_every_s=self.save_every_s,
            **self.options,
        )

    def named_dims(self, specs: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        """Specs with the names of dimensions that were given.

        Raises:
            SpecError: For names of dimensions of what is neither an array nor a constant.
        """
        unknown = sorted(self.dims.keys() - specs.keys() - self.constants.keys())
        if unknown:
            expected = f"some of {', '.join([*specs, *self.constants])}"
            raise SpecError("dims", kind="names", expected=expected, found=unknown[0])
        return {
            name: replace(spec, dims=("sample", *self.dims[name])) if name in self.dims else spec
            for name, spec in specs.items()
        }


def write_columns(plan: Plan, source: Columns, line: ProgressLine) -> None:
    """Commit arrays block by block, and publish the store."""
    specs = plan.named_dims(source.specs())
    nbytes = sum(array.nbytes for array in source.arrays.values()) // max(1, source.num_samples)
    with _begun(plan, specs) as writer:
        missing = _compared(plan, writer, lambda number: _row_of(source.block(number, number + 1)))
        line.begin_at(source.num_samples - len(missing))
        for run in consecutive_ranges(missing, longest=max(1, min(MAX_BATCH, BATCH_BYTES // max(1, nbytes)))):
            block = source.block(run.start, run.stop)
            writer.commit_many(run, block)
            line.advance(len(run), nbytes * len(run))
        writer.finish()


def write_rows(plan: Plan, source: Rows, line: ProgressLine) -> None:
    """Find specs from the first samples, and write all."""
    left, samples, probed = specs_left(plan), source.begin(0), list[Sample]()
    specs = left or plan.specs_alike()
    if specs is None:
        probed = _probe(samples)
        found = specs_of(probed, ragged=plan.ragged)
        attrs = source.array_attrs
        specs = plan.named_dims({name: replace(spec, attrs=attrs.get(name)) for name, spec in found.items()})
    is_counted = source.num_samples is not None and not any(spec.is_ragged for spec in specs.values())
    if left is None and is_counted:
        _write_directly(plan, source, specs, probed, line)
        return
    check = SampleCheck(specs, num_seen=len(probed))
    with plan.spool(specs) as spool:
        if source.can_skip:
            _compare_found(plan, source, spool, check)
            if spool.num_found:
                spool.begin_at(spool.num_found)
                samples, probed = source.begin(spool.num_found), []
        line.begin_at(spool.num_found)
        for number, sample in enumerate(itertools.chain(probed, samples), spool.num_samples):
            spool.add(check(sample, number))
            if number >= spool.num_found:
                line.advance(1, spool.nbytes_of_last)
        line.say("making the store")
        spool.finish()


def _probe(samples: Iterator[Sample]) -> list[Sample]:
    """The first samples; how many depends on them alone, so that a second run finds the same specs."""
    probed: list[Sample] = []
    nbytes = 0
    for sample in itertools.islice(samples, PROBED_SAMPLES):
        probed.append(sample)
        nbytes += sum(len(v) if isinstance(v, str | bytes) else np.asarray(v).nbytes for v in sample.values())
        if nbytes >= PROBED_BYTES:
            break
    if not probed:
        hint = "`ups_store.create` makes a store of none, from specs"
        raise SpecError("there are no samples to find arrays from", kind="empty", expected="one", hint=hint)
    return probed


def specs_left(plan: Plan) -> dict[str, ArraySpec] | None:
    """What an interrupted run of the same found; None if there was none, or its samples may give way."""
    left = spool_left(plan.target) if plan.is_named and plan.on_mismatch != "restart" else None
    if left is None or left.identity != plain_json(dict(plan.identity), what="identity"):
        return None
    ragged = {name for name, spec in left.arrays.items() if spec.is_ragged}
    return dict(left.arrays) if plan.ragged <= ragged else None


def _write_directly(
    plan: Plan, source: Rows, specs: Mapping[str, ArraySpec], probed: Sequence[Sample], line: ProgressLine
) -> None:
    """Samples of a known number, none ragged, in batches; those that are missing only."""
    assert source.num_samples is not None
    check = SampleCheck(specs, num_seen=len(probed))

    def sample_of(number: int) -> Sample:
        sample = probed[number] if number < len(probed) else next(source.begin(number))
        return check(sample, number)

    arrays = counted_specs(specs, source.num_samples)
    with _begun(plan, arrays) as writer:
        missing = _compared(plan, writer, sample_of)
        line.begin_at(source.num_samples - len(missing))
        for run in consecutive_ranges(missing, longest=source.num_samples):
            samples = itertools.islice(source.begin(run.start), len(run))
            numbered = ((number, check(sample, number)) for number, sample in zip(run, samples, strict=False))
            _commit(writer, numbered, line)
        writer.finish()


def _begun(plan: Plan, arrays: Mapping[str, ArraySpec]) -> StoreWriter:
    """The writer of a store; an unfinished one that was begun with other attributes is refused, or goes."""
    writer = create(plan.target, arrays, durability="lazy", **plan.options)
    path, attrs = writer.building.building_path, plain_json(dict(plan.attrs), what="attrs")
    found = read_building_file(writer.building.fd, path).catalog.root.attrs
    if found == attrs:
        return writer
    with writer:
        if plan.on_mismatch == "raise":
            hint = f"finish it with what it was begun with, or say {HOW_TO_REPLACE}"
            problem = "the unfinished file has other attributes"
            raise IdentityMismatchError(problem, path=path, expected=attrs, found=found, hint=hint)
        files.remove(path)
    return create(plan.target, arrays, durability="lazy", **plan.options)


def _spread(num: int) -> list[int]:
    """The first, the last, and some between, of so many."""
    return sorted({*np.linspace(0, num - 1, COMPARED_SAMPLES).astype(int).tolist()}) if num else []


def _compared(plan: Plan, writer: StoreWriter, sample_of: Callable[[int], Sample]) -> npt.NDArray[np.int64]:
    """The samples that are missing, once a spread of those that an interrupted run committed was compared.

    Raises:
        IdentityMismatchError: If one is another now, unless "restart" takes all of them back.
    """
    missing = writer.missing()
    committed = np.setdiff1d(np.arange(writer.num_samples), missing)
    for place in _spread(len(committed)):
        number = int(committed[place])
        try:
            writer.commit(number, {name: np.asarray(value) for name, value in sample_of(number).items()})
        except SpecError as error:
            if error.kind != "committed":
                raise
            if plan.on_mismatch == "restart":
                take_back(writer.building, committed)
                return writer.missing()
            raise IdentityMismatchError(
                "the samples are others than in the run that this one continues",
                kind="not_repeated",
                path=writer.building.building_path,
                array=error.array,
                sample=number,
                expected="what was committed",
                found="other values",
                hint=f"say another identity, or {HOW_TO_REPLACE}",
            ) from error
    return missing


def _compare_found(plan: Plan, source: Rows, spool: Spool, check: SampleCheck) -> None:
    """As `_compared` does, of samples in a spool."""
    num_samples = source.num_samples or 0
    if num_samples < spool.num_found and plan.on_mismatch == "raise":
        raise spool.not_repeated(num_samples, f"{spool.num_found} samples or more", f"{num_samples} in all")
    for number in _spread(spool.num_found):
        is_there = number < num_samples
        differing = spool.differing(number, check(next(source.begin(number)), number)) if is_there else ""
        if differing is None:
            continue
        if plan.on_mismatch == "raise":
            raise spool.not_repeated(number, "the sample that was committed", f"another {differing!r}")
        spool.drop_found()
        return


def _row_of(block: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {name: rows[0] for name, rows in block.items()}


def _commit(writer: StoreWriter, samples: Iterable[tuple[int, Sample]], line: ProgressLine) -> None:
    """Commit samples in batches; on a failure of the samples, those before it, too."""
    layout = writer.building.layout
    nbytes = sum(array.meta.sample_nbytes for array in layout.per_sample)
    with writer.batched(buffer_bytes=BATCH_BYTES, save_every_s=math.inf) as batch:
        for number, sample in samples:
            num = len(batch.commit(number, {name: np.asarray(value) for name, value in sample.items()}))
            line.advance(num, num * nbytes)
        num = len(batch.flush())
        line.advance(num, num * nbytes)
