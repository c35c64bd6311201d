"""A function of files, or of whatever else, in worker processes with deadlines; its samples into a store.

The processes are those that read HDF5 files for a build: a call that hangs, crashes or is killed ends in an
error that names its input, not in waiting. Notes in the spool say which inputs are done, so a run that
continues asks for those that are left only, whatever number of samples each gives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ups_store.errors import IdentityMismatchError, ReadTimeoutError, SourceError, SpecError
from ups_store.printable import one_line
from ups_store.sources.reader_pool import Patience, ReaderPool
from ups_store.sources.reader_process import MAX_MESSAGE_BYTES, Call, Reader
from ups_store.system.memory import num_cores
from ups_store.writing.filling import PROBED_SAMPLES, SKIPPED, Arguments, OnError
from ups_store.writing.samples import Names, SampleCheck, named_values, specs_of
from ups_store.writing.spool import Spool
from ups_store.writing.wait_for_maker import ProgressLine
from ups_store.writing.writer import warn

_ADDRESS = " at 0x"  # of an object whose text is another one in every process
_MAX_INPUT_BYTES = MAX_MESSAGE_BYTES // 3
_SHOWN = 200  # characters of an input in messages
_is_importing_main = False  # in a worker, while it runs the script of the process that started it
_imported_main: Mapping[str, str] = {}  # that script, once it was run
_functions: dict[bytes, Any] = {}  # that this worker has unpickled


@dataclass(frozen=True)
class MapJob:
    """A function for `write` to map over inputs, and how long workers may take."""

    function: Callable[[Any], Any]
    inputs: Iterable[Any]
    num_workers: int
    patience: Patience
    names: Names | None = None
    note: Callable[[str], None] = lambda message: None


def job_of(
    function: Callable[[Any], Any],
    inputs: Iterable[Any],
    num_workers: int | None,
    item_timeout_s: float,
    retries: int,
    names: Names | None,
) -> MapJob:
    """Check `write`'s arguments of a map; refused where a worker only runs the script for its functions."""
    if _is_importing_main:
        hint = "call `ups_store.write` below `if __name__ == '__main__':`"
        raise SpecError("a worker runs this script to find the function", kind="main", hint=hint)
    workers = num_cores() if num_workers is None else num_workers
    for argument, number, is_valid, expected in (
        ("num_workers", workers, workers >= 0, ">= 0"),
        ("item_timeout_s", item_timeout_s, item_timeout_s > 0, "> 0"),
        ("retries", retries, retries >= 0, ">= 0"),
    ):
        if not is_valid:
            raise SpecError(argument, kind="argument", expected=expected, found=number)
    patience = Patience(timeout_s=item_timeout_s, retries=retries)
    return MapJob(function, inputs, workers, patience, names, warn)


@dataclass(frozen=True)
class Mapped:
    """Samples that one input gave, or why it gave none."""

    number: int  # of the input, from 0
    input: str  # for messages
    samples: list[dict[str, Any]]  # empty where it failed
    error: SourceError | None = None


def write_mapped(arguments: Arguments, job: MapJob, on_error: OnError, line: ProgressLine) -> None:
    """Find specs from the first inputs' samples, write those of all, and publish the store."""
    specs = arguments.specs_left() or arguments.specs_alike()
    results, probed = map_inputs(job, first=0, on_error=on_error), list[Mapped]()
    if specs is None:
        while sum(len(result.samples) for result in probed) < PROBED_SAMPLES:
            result = next(results, None)
            if result is None:
                break
            probed.append(result)
        samples = [sample for result in probed for sample in result.samples]
        if not samples:
            failed = next((result.error for result in probed if result.error is not None), None)
            summary = f"{len(probed)} inputs" + (f", the first error: {failed}" if failed else "")
            raise SpecError("no input gave a sample", kind="empty", expected="one at least", found=summary)
        specs = arguments.named_dims(specs_of(samples, ragged=arguments.ragged))
    check = SampleCheck(specs, num_seen=sum(len(result.samples) for result in probed))
    with arguments.spool(specs) as spool:
        if spool.num_found and not spool.notes:
            raise _other_run(spool, "samples of a function of inputs", "those of an iterable")
        num_done = spool.notes[-1]["num_inputs"] if spool.notes else 0

        def same_inputs() -> Iterator[Any]:
            """Give all inputs; those that are done, by the spool's last note, have to be what they were."""
            last, num_inputs = spool.notes[-1]["last"], 0
            for number, item in enumerate(job.inputs):
                if number == num_done - 1 and _ADDRESS not in last and text_of(item) != last:
                    raise _other_run(spool, f"input {number} to be {last!r}", repr(text_of(item)))
                num_inputs = number + 1
                yield item
            if num_inputs < num_done:
                raise _other_run(spool, f"{num_done} inputs at least", f"{num_inputs}")

        if num_done:
            following = replace(job, inputs=same_inputs())
            results, probed = map_inputs(following, first=num_done, on_error=on_error), []
        else:  # a kill before the first input is done leaves samples of a function, too
            spool.note = {"num_inputs": 0, "last": "", "skipped": [], "num_samples": 0}
            spool.flush()
        spool.num_samples = spool.num_found
        line.begin_at(spool.num_found)
        skipped: list[dict[str, Any]] = []  # since the note before
        for result in itertools.chain(probed, results):
            try:  # all of its samples, or, if one doesn't fit, none
                samples = [check(sample, spool.num_samples + i) for i, sample in enumerate(result.samples)]
            except SpecError as error:
                error.path = result.input
                raise
            for sample in samples:
                spool.add(sample)
                line.advance(1, spool.nbytes_of_last)
            skipped = [] if spool.note is None else skipped
            if result.error is not None:
                reason = f": {result.error.found}" if result.error.found else ""
                skipped = [*skipped, {"input": result.input, "error": f"{result.error.problem}{reason}"}]
            spool.note = {
                "num_inputs": result.number + 1,
                "last": result.input,
                "skipped": skipped,
                "num_samples": spool.num_samples,
            }
        spool.flush()
        all_skipped = [entry for note in spool.notes for entry in note["skipped"]]
        line.say("making the store")
        spool.finish(attrs={**arguments.attrs, **({SKIPPED: all_skipped} if all_skipped else {})})


def _other_run(spool: Spool, expected: str, found: str) -> IdentityMismatchError:
    return IdentityMismatchError(
        "the inputs don't begin as in the run that this one continues",
        kind="not_repeated",
        path=spool.path,
        expected=expected,
        found=found,
        hint="give them in the same order, or say another identity",
    )


def map_inputs(job: MapJob, *, first: int, on_error: OnError) -> Iterator[Mapped]:
    """Call the function for the inputs from number `first` on; results in the order of the inputs."""
    pending: deque[tuple[int, str]] = deque()  # inputs are taken ahead of their answers

    def called_here() -> Iterator[Any]:  # in this process, without deadlines, for debugging
        for number, item in enumerate(job.inputs):
            if number >= first:
                pending.append((number, text_of(item)))
                try:
                    yield list(_samples_of(job.function, item, text_of(item), job.names))
                except SourceError as error:
                    yield error

    def calls() -> Iterator[Call]:
        for number, call in calls_of(job, first):
            pending.append((number, str(call.path)))
            yield call

    with contextlib.ExitStack() as stack:
        answers = called_here()
        if job.num_workers:
            options: dict[str, Any] = {"patience": job.patience, "note": job.note}
            pool = stack.enter_context(ReaderPool(job.num_workers, slot_nbytes=1, **options))
            answers = pool.ask_each(calls(), raises=False)
        for answer in answers:
            number, text = pending.popleft()
            if not isinstance(answer, Exception):
                yield Mapped(number, text, answer)
                continue
            if isinstance(answer, ReadTimeoutError):
                answer.hint = "raise item_timeout_s, or leave such inputs out with on_error='skip'"
            elif isinstance(answer, SourceError) and answer.kind == "reader_died":
                more = "or leave such inputs out with on_error='skip'"
                answer.hint = f"lower num_workers if memory ran out, {more}"
            if on_error == "fail" or not isinstance(answer, SourceError):
                raise answer
            yield Mapped(number, text, [], answer)


def calls_of(job: MapJob, first: int) -> Iterator[tuple[int, Call]]:
    """Make what workers are asked for the inputs from number `first` on, with these numbers."""
    function = _pickled(job.function, "the function")
    script: dict[str, str] = {}  # how a worker finds what the script of this process defines
    if getattr(job.function, "__module__", None) == "__main__":
        main = sys.modules["__main__"]
        name = getattr(getattr(main, "__spec__", None), "name", None)
        if name is not None:  # python -m
            script = {"init_main_from_name": name}
        elif getattr(main, "__file__", None) is None:
            raise _unsendable("a function", "one of an interactive session", None)
        else:
            script = {"init_main_from_path": os.path.abspath(str(main.__file__))}
    for number, item in enumerate(job.inputs):
        if number >= first:
            text, name = text_of(item), f"input {number}"
            arguments = text, function, _pickled(item, name), script, job.names
            yield number, Call(_call_in_worker, arguments, text, name)


def _call_in_worker(
    reader: Reader,
    text: str,
    function: bytes,
    argument: bytes,
    script: Mapping[str, str],
    names: Names | None,
) -> list[dict[str, Any]]:
    """Call the function in a worker; it and the argument are unpickled once the script was run."""
    global _is_importing_main, _imported_main
    reader.doing("starting")
    if function not in _functions:
        if script and script != _imported_main:  # as multiprocessing does it: not as `__main__`
            from multiprocessing import spawn

            _is_importing_main = True
            try:
                spawn.prepare(dict(script))
                _imported_main = script
            finally:
                _is_importing_main = False
        _functions[function] = pickle.loads(function)
    called, item = _functions[function], pickle.loads(argument)
    reader.progressed()
    reader.doing("calling")
    samples: list[dict[str, Any]] = []
    for sample in _samples_of(called, item, text, names):
        samples.append(sample)
        reader.progressed(1)
    return samples


def _samples_of(
    function: Callable[[Any], Any], argument: Any, text: str, names: Names | None
) -> Iterator[dict[str, Any]]:
    """Give the samples of one input, named: of a generator all, else the one that it returns, if any."""

    def samples() -> Iterator[Any]:
        try:
            returned = function(argument)
            if returned is None:
                return
            is_one = isinstance(returned, Mapping | tuple) or not isinstance(returned, Iterable)
            yield from [returned] if is_one or hasattr(returned, "dtype") else returned
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            hint = "mend it, or leave such inputs out with on_error='skip'"
            facts: dict[str, Any] = {"path": text, "found": one_line(reason), "hint": hint}
            failure = SourceError("the function failed", kind="function_failed", **facts)
            failure.add_note("".join(traceback.format_exception(error)))
            raise failure from error

    for number, sample in enumerate(samples()):
        try:
            named = named_values(sample, names, number=number)
        except SpecError as error:
            error.path = text
            raise
        yield named


def _pickled(value: Any, what: str) -> bytes:
    try:
        pickled = pickle.dumps(value)
    except Exception as error:  # whatever an object's own code raises
        raise _unsendable(what, repr(value)[:_SHOWN], error) from error
    if len(pickled) > _MAX_INPUT_BYTES:
        problem, expected = f"{what} is too large for a worker", f"at most {_MAX_INPUT_BYTES:,} bytes"
        hint = "give a file name or a number, and load it in the function"
        raise SpecError(problem, kind="function", expected=expected, found=f"{len(pickled):,}", hint=hint)
    return pickled


def _unsendable(what: str, found: str, error: Exception | None) -> SpecError:
    return SpecError(
        f"{what} can't be sent to a worker" + (f" ({error})" if error else ""),
        kind="function",
        expected="what a module or script defines at its top level",
        found=found,
        hint="move it to a .py file and import it, or say num_workers=0",
    )


def text_of(item: Any) -> str:
    """Show an input in messages, and in the note that says it is done."""
    if isinstance(item, str | Path):
        return one_line(str(item))[-_SHOWN:]
    with contextlib.suppress(Exception):  # of the object's own code
        return one_line(repr(item))[:_SHOWN]
    return type(item).__name__
