"""Samples of a function of inputs into a store: notes in the spool say which inputs are done.

So a run that continues asks for the inputs that are left only, whatever number of samples each gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ups_store.errors import IdentityMismatchError, SpecError
from ups_store.write.filling import PROBED_SAMPLES, OnError, Plan, specs_left
from ups_store.write.progress_line import ProgressLine
from ups_store.write.sample_specs import SampleCheck, specs_of
from ups_store.write.spool import Spool

if TYPE_CHECKING:
    from ups_store.write.mapped import MapJob, Mapped


SKIPPED = "skipped_inputs"  # attribute of a store: what `on_error="skip"` left out
_ADDRESS = " at 0x"  # of an object whose text is another one in every process


def write_mapped(plan: Plan, job: MapJob, on_error: OnError, line: ProgressLine) -> None:
    """Find specs from the first inputs' samples, write those of all, and publish the store."""
    from ups_store.write.mapped import map_inputs

    specs = specs_left(plan) or plan.specs_alike()
    results, probed = map_inputs(job, first=0, on_error=on_error), []
    if specs is None:
        probed = _probe(results)
        specs = plan.named_dims(specs_of([s for each in probed for s in each.samples], ragged=plan.ragged))
    check = SampleCheck(specs, num_seen=sum(len(each.samples) for each in probed))
    with plan.spool(specs) as spool:
        done = _Done.of_spool(spool)
        if done.num_inputs:
            job = replace(job, inputs=done.same_inputs(job.inputs, spool))
            results, probed = map_inputs(job, first=done.num_inputs, on_error=on_error), []
        else:  # a kill before the first input is done leaves samples of a function, too
            spool.note = {**done.to_json(), "num_samples": 0}
            spool.flush()
        spool.begin_at(spool.num_found)
        line.begin_at(spool.num_found)
        for each in itertools.chain(probed, results):
            _add(spool, each, check, line)
            done = (replace(done, skipped=[]) if spool.note is None else done).after(each)
            spool.note = {**done.to_json(), "num_samples": spool.num_samples}
        spool.flush()
        skipped = [each for note in spool.notes for each in note["skipped"]]
        line.say("making the store")
        spool.finish(attrs={**plan.attrs, **({SKIPPED: skipped} if skipped else {})})


def _probe(results: Iterator[Mapped]) -> list[Mapped]:
    """The first inputs that have enough samples together."""
    probed: list[Mapped] = []
    while sum(len(each.samples) for each in probed) < PROBED_SAMPLES:
        each = next(results, None)
        if each is None:
            break
        probed.append(each)
    if not any(each.samples for each in probed):
        failed = next((each.error for each in probed if each.error is not None), None)
        found = f"{len(probed)} inputs" + (f", the first error: {failed}" if failed else "")
        raise SpecError("no input gave a sample", kind="empty", expected="one at least", found=found)
    return probed


def _add(spool: Spool, each: Mapped, check: SampleCheck, line: ProgressLine) -> None:
    """Add the samples of one input: all of them, or, if one doesn't fit, none."""
    try:
        samples = [check(sample, spool.num_samples + i) for i, sample in enumerate(each.samples)]
    except SpecError as error:
        error.path = each.input
        raise
    for sample in samples:
        spool.add(sample)
        line.advance(1, spool.nbytes_of_last)


@dataclass(frozen=True)
class _Done:
    """Which inputs are done, and which of them failed since the last note."""

    num_inputs: int = 0
    last: str = ""
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_spool(cls, spool: Spool) -> _Done:
        """What an interrupted run had done; samples behind its last note are made again."""
        if not spool.notes:
            if spool.num_found:
                raise _other_run(spool, "samples of a function of inputs", "those of an iterable")
            return cls()
        return cls(spool.notes[-1]["num_inputs"], spool.notes[-1]["last"])

    def after(self, each: Mapped) -> _Done:
        """The same with one input more."""
        skipped = self.skipped
        if each.error is not None:
            found = f": {each.error.found}" if each.error.found else ""
            skipped = [*skipped, {"input": each.input, "error": f"{each.error.problem}{found}"}]
        return _Done(each.number + 1, each.input, skipped)

    def to_json(self) -> dict[str, Any]:
        """The note of a spool that ends here; of failed inputs those since the note before."""
        return {"num_inputs": self.num_inputs, "last": self.last, "skipped": self.skipped}

    def same_inputs(self, inputs: Iterable[Any], spool: Spool) -> Iterator[Any]:
        """The inputs, all; those that are done have to be what they were."""
        from ups_store.write.mapped import text_of

        expected, last, num_inputs = self.last, self.num_inputs - 1, 0
        for number, each in enumerate(inputs):
            if number == last and _ADDRESS not in expected and text_of(each) != expected:
                raise _other_run(spool, f"input {last} to be {expected!r}", repr(text_of(each)))
            num_inputs = number + 1
            yield each
        if num_inputs <= last:
            raise _other_run(spool, f"{last + 1} inputs at least", f"{num_inputs}")


def _other_run(spool: Spool, expected: str, found: str) -> IdentityMismatchError:
    return IdentityMismatchError(
        "the inputs don't begin as in the run that this one continues",
        kind="not_repeated",
        path=spool.path,
        expected=expected,
        found=found,
        hint="give them in the same order, or say another identity",
    )
