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
from ups_store.sources.reader import MAX_MESSAGE_BYTES, Call, Reader
from ups_store.sources.readers import Patience, ReaderPool
from ups_store.write.filling import PROBED_SAMPLES, SKIPPED, Arguments, OnError
from ups_store.write.samples import Names, SampleCheck, named_values, specs_of
from ups_store.write.spool import Spool
from ups_store.write.turn import ProgressLine

_ADDRESS = " at 0x"  # of an object whose text is another one in every process
_MAX_INPUT_BYTES = MAX_MESSAGE_BYTES // 3
_SHOWN = 200  # characters of an input in messages
_is_importing_main = False  # in a worker, while it runs the script of the process that started it
_imported_main: Mapping[str, str] = {}  # that script, once it was run
_functions: dict[bytes, Any] = {}  # that this worker has unpickled


@dataclass(frozen=True)
class MapJob:
    """What `write` maps, and how."""

    function: Callable[[Any], Any]
    inputs: Iterable[Any]
    num_workers: int
    patience: Patience
    names: Names | None = None
    note: Callable[[str], None] = lambda message: None


@dataclass(frozen=True)
class Mapped:
    """What one input gave."""

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
            found = f"{len(probed)} inputs" + (f", the first error: {failed}" if failed else "")
            raise SpecError("no input gave a sample", kind="empty", expected="one at least", found=found)
        specs = arguments.named_dims(specs_of(samples, ragged=arguments.ragged))
    check = SampleCheck(specs, num_seen=sum(len(result.samples) for result in probed))
    with arguments.spool(specs) as spool:
        if spool.num_found and not spool.notes:
            raise _other_run(spool, "samples of a function of inputs", "those of an iterable")
        num_done = spool.notes[-1]["num_inputs"] if spool.notes else 0
        if num_done:
            job = replace(job, inputs=_same_inputs(job.inputs, spool))
            results, probed = map_inputs(job, first=num_done, on_error=on_error), []
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
                found = f": {result.error.found}" if result.error.found else ""
                skipped = [*skipped, {"input": result.input, "error": f"{result.error.problem}{found}"}]
            spool.note = {
                "num_inputs": result.number + 1,
                "last": result.input,
                "skipped": skipped,
                "num_samples": spool.num_samples,
            }
        spool.flush()
        every = [each for note in spool.notes for each in note["skipped"]]
        line.say("making the store")
        spool.finish(attrs={**arguments.attrs, **({SKIPPED: every} if every else {})})


def _same_inputs(inputs: Iterable[Any], spool: Spool) -> Iterator[Any]:
    """Give the inputs, all; those that are done, by the spool's last note, have to be what they were."""
    num_done, last, num_inputs = spool.notes[-1]["num_inputs"], spool.notes[-1]["last"], 0
    for number, each in enumerate(inputs):
        if number == num_done - 1 and _ADDRESS not in last and text_of(each) != last:
            raise _other_run(spool, f"input {number} to be {last!r}", repr(text_of(each)))
        num_inputs = number + 1
        yield each
    if num_inputs < num_done:
        raise _other_run(spool, f"{num_done} inputs at least", f"{num_inputs}")


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
    if not job.num_workers:  # in this process, without deadlines, for debugging
        for number, each in enumerate(job.inputs):
            if number >= first:
                answer: Any
                try:
                    answer = list(_samples_of(job.function, each, text_of(each), job.names))
                except SourceError as error:
                    answer = error
                yield _mapped(number, text_of(each), answer, on_error)
        return
    asked: deque[tuple[int, str]] = deque()  # calls are taken ahead of their answers

    def calls() -> Iterator[Call]:
        for number, call in calls_of(job, first):
            asked.append((number, str(call.path)))
            yield call

    with ReaderPool(job.num_workers, slot_nbytes=1, patience=job.patience, note=job.note) as pool:
        for answer in pool.try_each(calls()):
            yield _mapped(*asked.popleft(), answer, on_error)


def calls_of(job: MapJob, first: int) -> Iterator[tuple[int, Call]]:
    """Make what workers are asked for the inputs from number `first` on, with these numbers."""
    function, main = _pickled(job.function, "the function"), _main_of(job.function)
    for number, each in enumerate(job.inputs):
        if number >= first:
            text, argument = text_of(each), _pickled(each, f"input {number}")
            yield number, Call(_call, (text, function, argument, main, job.names), text, f"input {number}")


def _mapped(number: int, text: str, answer: Any, on_error: OnError) -> Mapped:
    """What came of an input; raises the error unless it is to be skipped."""
    if not isinstance(answer, Exception):
        return Mapped(number, text, answer)
    if isinstance(answer, ReadTimeoutError):
        answer.hint = "raise item_timeout_s, or leave such inputs out with on_error='skip'"
    elif isinstance(answer, SourceError) and answer.kind == "reader_died":
        answer.hint = "lower num_workers if memory ran out, or leave such inputs out with on_error='skip'"
    if on_error == "fail" or not isinstance(answer, SourceError):
        raise answer
    return Mapped(number, text, [], answer)


def _call(
    reader: Reader, text: str, function: bytes, argument: bytes, main: Mapping[str, str], names: Names | None
) -> list[dict[str, Any]]:
    """Call the function in a worker; it and the argument are unpickled once the script was run."""
    reader.doing("starting")
    if function not in _functions:
        if main and main != _imported_main:
            _import_main(main)
        _functions[function] = pickle.loads(function)
    called, each = _functions[function], pickle.loads(argument)
    reader.progressed()
    reader.doing("calling")
    samples: list[dict[str, Any]] = []
    for sample in _samples_of(called, each, text, names):
        samples.append(sample)
        reader.progressed(1)
    return samples


def _samples_of(
    function: Callable[[Any], Any], argument: Any, text: str, names: Names | None
) -> Iterator[dict[str, Any]]:
    """The samples of one input, named: of a generator all, else the one that it returns, None for none."""

    def samples() -> Iterator[Any]:
        try:
            returned = function(argument)
            if returned is None:
                return
            is_one = isinstance(returned, Mapping | tuple) or not isinstance(returned, Iterable)
            yield from [returned] if is_one or hasattr(returned, "dtype") else returned
        except Exception as error:
            found = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            hint = "mend it, or leave such inputs out with on_error='skip'"
            failure = SourceError(
                "the function failed", kind="function_failed", path=text, found=one_line(found), hint=hint
            )
            failure.add_note("".join(traceback.format_exception(error)))
            raise failure from error

    for number, sample in enumerate(samples()):
        try:
            named = named_values(sample, names, number=number)
        except SpecError as error:
            error.path = text
            raise
        yield named


def _import_main(main: Mapping[str, str]) -> None:
    """Run the script that defines the function, as multiprocessing does: not as `__main__`."""
    global _is_importing_main, _imported_main
    from multiprocessing import spawn

    _is_importing_main = True
    try:
        spawn.prepare(dict(main))
        _imported_main = main
    finally:
        _is_importing_main = False


def _main_of(function: Callable[[Any], Any]) -> dict[str, str]:
    """How a worker finds what the script of this process defines; empty where a module defines it."""
    if getattr(function, "__module__", None) != "__main__":
        return {}
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:  # python -m
        return {"init_main_from_name": name}
    if getattr(main, "__file__", None) is None:
        raise _unsendable("a function", "one of an interactive session", None)
    return {"init_main_from_path": os.path.abspath(str(main.__file__))}


def check_not_importing() -> None:
    """Refuse to write where a worker only runs the script for its functions."""
    if _is_importing_main:
        hint = "call `ups_store.write` below `if __name__ == '__main__':`"
        raise SpecError("a worker runs this script to find the function", kind="main", hint=hint)


def _pickled(value: Any, what: str) -> bytes:
    try:
        pickled = pickle.dumps(value)
    except Exception as error:  # whatever an object's own code raises
        raise _unsendable(what, repr(value)[:_SHOWN], error) from error
    if len(pickled) > _MAX_INPUT_BYTES:
        problem, expected = (
            f"{what} is too large to be sent to a worker",
            f"at most {_MAX_INPUT_BYTES:,} bytes",
        )
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


def text_of(each: Any) -> str:
    """An input, for messages and for the note that says it is done."""
    if isinstance(each, str | Path):
        return one_line(str(each))[-_SHOWN:]
    with contextlib.suppress(Exception):  # of the object's own code
        return one_line(repr(each))[:_SHOWN]
    return type(each).__name__
