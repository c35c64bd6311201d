"""Samples of a function of inputs into a store: parts end with an input and say with which.

So a run that continues asks for the inputs that are left only, whatever number of samples each gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ups_store.errors import IdentityMismatchError, SpecError
from ups_store.write.filling import PROBED_SAMPLES, Clock, OnError, Plan, saving, specs_of_parts
from ups_store.write.parts import PartsWriter, write_parts
from ups_store.write.progress_line import ProgressLine
from ups_store.write.sample_specs import SampleCheck, specs_of

if TYPE_CHECKING:
    from ups_store.write.mapped import MapJob, Mapped


SKIPPED = "skipped_inputs"  # attribute of a store: what `on_error="skip"` left out
_DONE = "mapped_inputs"  # attribute of a part: which inputs it ends with
_NEVER = 1 << 62  # bytes: parts end with an input
_ADDRESS = " at 0x"  # of an object whose text is another one in every process


def write_mapped(plan: Plan, job: MapJob, on_error: OnError, line: ProgressLine) -> None:
    """Find specs from the first inputs' samples, write those of all, and publish the store."""
    from ups_store.write.mapped import map_inputs

    specs = specs_of_parts(plan)
    results, probed = map_inputs(job, first=0, on_error=on_error), []
    if specs is None:
        probed = _probe(results)
        specs = plan.named_dims(specs_of([s for each in probed for s in each.samples], ragged=plan.ragged))
    check = SampleCheck(specs, num_seen=sum(len(each.samples) for each in probed))
    with write_parts(plan.target, specs, buffer_bytes=_NEVER, **plan.options) as writer:
        done = _Done.of_parts(writer)
        if done.num_inputs:
            job = replace(job, inputs=done.same_inputs(job.inputs, writer))
            results, probed = map_inputs(job, first=done.num_inputs, on_error=on_error), []
        writer.extend(lambda found: ())
        line.begin_at(writer.num_found)
        clock = Clock(plan.save_every_s)
        whole = 0, done  # samples that wait of whole inputs, and these: changed in one step, for an interrupt
        with saving(plan, writer, lambda: (whole[0], whole[1].attrs())):
            for each in itertools.chain(probed, results):
                _add(writer, each, check, line)
                whole = writer.num_waiting, whole[1].after(each)
                if writer.waiting_nbytes >= plan.buffer_bytes or clock.is_time(writer.num_waiting):
                    writer.flush(attrs=whole[1].attrs())
                    whole = 0, whole[1]
        done = whole[1]
        line.say("merging parts")
        writer.flush(attrs=done.attrs())
        writer.finish(attrs={**plan.attrs, **({SKIPPED: done.skipped} if done.skipped else {})})


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


def _add(writer: PartsWriter, each: Mapped, check: SampleCheck, line: ProgressLine) -> None:
    """Add the samples of one input: all of them, or, if one doesn't fit, none."""
    before = writer.waiting_nbytes
    try:
        samples = [check(sample, writer.num_samples + i) for i, sample in enumerate(each.samples)]
    except SpecError as error:
        error.path = each.input
        raise
    for sample in samples:
        writer.add(sample)
    line.advance(len(samples), writer.waiting_nbytes - before)


@dataclass(frozen=True)
class _Done:
    """Which inputs are done, and which of them failed; the attributes of a part."""

    num_inputs: int = 0
    last: str = ""
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_parts(cls, writer: PartsWriter) -> _Done:
        """What an interrupted run had done."""
        if not writer.num_found:
            return cls()
        found = writer.found_attrs.get(_DONE)
        if not isinstance(found, Mapping):
            raise _other_run(writer, "parts of a function of inputs", "parts of an iterable")
        return cls(int(found["num_inputs"]), str(found["last"]), list(found["skipped"]))

    def after(self, each: Mapped) -> _Done:
        """The same with one input more."""
        skipped = self.skipped
        if each.error is not None:
            found = f": {each.error.found}" if each.error.found else ""
            skipped = [*skipped, {"input": each.input, "error": f"{each.error.problem}{found}"}]
        return _Done(each.number + 1, each.input, skipped)

    def attrs(self) -> dict[str, Any]:
        """The attributes of a part that ends here."""
        return {_DONE: {"num_inputs": self.num_inputs, "last": self.last, "skipped": self.skipped}}

    def same_inputs(self, inputs: Iterable[Any], writer: PartsWriter) -> Iterator[Any]:
        """The inputs, all; those that are done have to be what they were."""
        from ups_store.write.mapped import text_of

        expected, last, num_inputs = self.last, self.num_inputs - 1, 0
        for number, each in enumerate(inputs):
            if number == last and _ADDRESS not in expected and text_of(each) != expected:
                raise _other_run(writer, f"input {last} to be {expected!r}", repr(text_of(each)))
            num_inputs = number + 1
            yield each
        if num_inputs <= last:
            raise _other_run(writer, f"{last + 1} inputs at least", f"{num_inputs}")


def _other_run(writer: PartsWriter, expected: str, found: str) -> IdentityMismatchError:
    return IdentityMismatchError(
        "the inputs don't begin as in the run that this one continues",
        kind="not_repeated",
        path=writer.path,
        expected=expected,
        found=found,
        hint="give them in the same order, or say another identity",
    )
