"""Samples of a known or unknown number into a store: directly, or through a spool.

Where the number is known and no array is ragged, they are committed into the store itself; else they go
through a spool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import IdentityMismatchError, SpecError
from ups_store.format.canonical import plain_json
from ups_store.format.layout import consecutive_ranges
from ups_store.format.metadata import SAMPLE_DIM, ArraySpec
from ups_store.read.base import AnyStore
from ups_store.read.recovery import read_building_file
from ups_store.system import files
from ups_store.writing.commit import take_back
from ups_store.writing.create import create
from ups_store.writing.samples import (
    Columns,
    Rows,
    Sample,
    SampleCheck,
    nbytes_of,
    specs_of,
    uncounted,
    with_counts,
)
from ups_store.writing.spool import Spool, spool_left
from ups_store.writing.wait_for_maker import ProgressLine
from ups_store.writing.writer import StoreWriter

OnMismatch = Literal["raise", "restart"]
OnError = Literal["fail", "skip"]

PROBED_SAMPLES, PROBED_BYTES = 32, 64 << 20  # that specs are found from; never a matter of time
BATCH_BYTES, MAX_BATCH = 16 << 20, 16384  # committed together
COMPARED_SAMPLES = 8  # of those that an interrupted run committed
HOW_TO_REPLACE = "on_mismatch='restart'"
SKIPPED = "skipped_inputs"  # attribute of a store: what `on_error="skip"` left out


@dataclass(frozen=True)
class Arguments:
    """What all ways of writing need; see `ups_store.write`."""

    target: Path
    identity: Mapping[str, Any]
    is_named: bool  # the identity says what the samples are: else what another run left is of no use
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

    def specs_left(self) -> dict[str, ArraySpec] | None:
        """Return specs of an interrupted run of the same; None if there is none, or they may give way."""
        spool = spool_left(self.target) if self.is_named and self.on_mismatch != "restart" else None
        if spool is None or spool.identity != plain_json(dict(self.identity), what="identity"):
            return None
        ragged = {name for name, spec in spool.arrays.items() if spec.is_ragged}
        return dict(spool.arrays) if self.ragged <= ragged else None

    def specs_alike(self) -> dict[str, ArraySpec] | None:
        """Return the arrays of the store that this one is like, where there is one."""
        if self.like is None:
            return None
        return {name: uncounted(spec) for name, spec in self.like.arrays.items()}

    def spool(self, specs: Mapping[str, ArraySpec]) -> Spool:
        """Begin, or continue, what takes samples whose number isn't known."""
        rhythm: dict[str, Any] = {"buffer_bytes": self.buffer_bytes, "save_every_s": self.save_every_s}
        return Spool(self.target, specs, **rhythm, **self.options)

    def named_dims(self, specs: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        """Return specs with the dimensions' names that were given; `SpecError` for those of no array."""
        unknown = sorted(self.dims.keys() - specs.keys() - self.constants.keys())
        if unknown:
            expected = f"some of {', '.join([*specs, *self.constants])}"
            raise SpecError("dims", kind="names", expected=expected, found=unknown[0])
        return {
            name: replace(spec, dims=(SAMPLE_DIM, *self.dims[name])) if name in self.dims else spec
            for name, spec in specs.items()
        }


def write_columns(arguments: Arguments, source: Columns, line: ProgressLine) -> None:
    """Commit arrays block by block, and publish the store."""
    specs = arguments.named_dims(source.specs())
    nbytes = sum(array.nbytes for array in source.arrays.values()) // max(1, source.num_samples)

    def sample_of(number: int) -> Sample:
        return {name: rows[0] for name, rows in source.block(number, number + 1).items()}

    with _create(arguments, specs) as writer:
        missing = _compare_committed(arguments, writer, sample_of)
        line.begin_at(source.num_samples - len(missing))
        for run in consecutive_ranges(missing, longest=max(1, min(MAX_BATCH, BATCH_BYTES // max(1, nbytes)))):
            block = source.block(run.start, run.stop)
            writer.commit_many(run, block)
            line.advance(len(run), nbytes * len(run))
        writer.finish()


def write_rows(arguments: Arguments, source: Rows, line: ProgressLine) -> None:
    """Find specs from the first samples, and write all."""
    unfinished, samples, probed = arguments.specs_left(), source.begin(0), list[Sample]()
    specs = unfinished or arguments.specs_alike()
    if specs is None:
        nbytes = 0
        for early in itertools.islice(samples, PROBED_SAMPLES):  # a second run finds the same
            probed.append(early)
            nbytes += sum(map(nbytes_of, early.values()))
            if nbytes >= PROBED_BYTES:
                break
        if not probed:
            hint = "`ups_store.create` makes a store of none, from specs"
            raise SpecError(
                "there are no samples to find arrays from", kind="empty", expected="one", hint=hint
            )
        specs = {
            name: replace(spec, attrs=source.array_attrs.get(name))
            for name, spec in specs_of(probed, ragged=arguments.ragged).items()
        }
        specs = arguments.named_dims(specs)
    check = SampleCheck(specs, num_seen=len(probed))
    is_counted = source.num_samples is not None and not any(spec.is_ragged for spec in specs.values())
    if is_counted and unfinished is None:
        _write_counted(arguments, source, specs, check, probed, line)
        return
    with arguments.spool(specs) as spool:
        if source.can_skip:
            _compare_spooled(arguments, source, spool, check)
            if spool.num_found:
                spool.num_samples = spool.num_found
                samples, probed = source.begin(spool.num_found), []
        line.begin_at(spool.num_found)
        for number, sample in enumerate(itertools.chain(probed, samples), spool.num_samples):
            spool.add(check(sample, number))
            if number >= spool.num_found:
                line.advance(1, spool.nbytes_of_last)
        line.say("making the store")
        spool.finish()


def _write_counted(
    arguments: Arguments,
    source: Rows,
    specs: Mapping[str, ArraySpec],
    check: SampleCheck,
    probed: Sequence[Sample],
    line: ProgressLine,
) -> None:
    """Commit samples of a known number, none ragged, in batches; those that are missing only."""
    num_samples = source.num_samples or 0

    def sample_of(number: int) -> Sample:
        sample = probed[number] if number < len(probed) else next(source.begin(number))
        return check(sample, number)

    with _create(arguments, with_counts(specs, num_samples)) as writer:
        missing = _compare_committed(arguments, writer, sample_of)
        line.begin_at(num_samples - len(missing))
        nbytes = sum(array.meta.sample_nbytes for array in writer.building.layout.per_sample)
        for run in consecutive_ranges(missing, longest=num_samples):
            samples = itertools.islice(source.begin(run.start), len(run))
            # Its end commits those before a sample that fails, too.
            with writer.batched(buffer_bytes=BATCH_BYTES, save_every_s=math.inf) as batch:
                for number, sample in zip(run, samples, strict=False):
                    values = check(sample, number).items()
                    arrays = {name: np.asarray(value) for name, value in values}
                    num = len(batch.commit(number, arrays))
                    line.advance(num, num * nbytes)
                num = len(batch.flush())
                line.advance(num, num * nbytes)
        writer.finish()


def _create(arguments: Arguments, arrays: Mapping[str, ArraySpec]) -> StoreWriter:
    """Begin or continue a store; one that was begun with other attributes is refused, or goes."""
    writer = create(arguments.target, arrays, durability="lazy", **arguments.options)
    path, attrs = writer.building.building_path, plain_json(dict(arguments.attrs), what="attrs")
    begun_with = read_building_file(writer.building.fd, path).catalog.root.attrs
    if begun_with == attrs:
        return writer
    with writer:
        if arguments.on_mismatch == "raise":
            hint = f"finish it with what it was begun with, or say {HOW_TO_REPLACE}"
            problem = "the unfinished file has other attributes"
            raise IdentityMismatchError(problem, path=path, expected=attrs, found=begun_with, hint=hint)
        files.remove(path)
    return create(arguments.target, arrays, durability="lazy", **arguments.options)


def _spread(num: int) -> list[int]:
    """Give the first, the last, and some between, of so many."""
    return sorted({*np.linspace(0, num - 1, COMPARED_SAMPLES).astype(int).tolist()}) if num else []


def _compare_committed(
    arguments: Arguments, writer: StoreWriter, sample_of: Callable[[int], Sample]
) -> npt.NDArray[np.int64]:
    """Compare a spread of the samples that an interrupted run committed; returns those that are missing.

    If one is another now, that is an error, unless "restart" takes all of them back.
    """
    missing = writer.missing()
    committed = np.setdiff1d(np.arange(writer.num_samples), missing)
    for number in committed[_spread(len(committed))].tolist():
        try:
            writer.commit(number, {name: np.asarray(value) for name, value in sample_of(number).items()})
        except SpecError as error:
            if error.kind != "committed":
                raise
            if arguments.on_mismatch == "restart":
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


def _compare_spooled(arguments: Arguments, source: Rows, spool: Spool, check: SampleCheck) -> None:
    """Compare as `_compare_committed` does, but samples in a spool."""
    num_samples = source.num_samples or 0
    if num_samples < spool.num_found and arguments.on_mismatch == "raise":
        raise spool.not_repeated(num_samples, f"{spool.num_found} samples or more", f"{num_samples} in all")
    for number in _spread(spool.num_found):
        is_there = number < num_samples
        array = spool.differing(number, check(next(source.begin(number)), number)) if is_there else ""
        if array is None:
            continue
        if arguments.on_mismatch == "raise":
            raise spool.not_repeated(number, "the sample that was committed", f"another {array!r}")
        spool.drop_found()
        return
