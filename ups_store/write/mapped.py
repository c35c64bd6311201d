"""A function of files, or of whatever else, in worker processes with deadlines: its samples in their order.

The processes are those that read HDF5 files for a build: a call that hangs, crashes or is killed ends in an
error that names its input, not in waiting.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups_store.errors import ReadTimeoutError, SourceError, SpecError, StoreError
from ups_store.printable import one_line
from ups_store.sources.reader import MAX_MESSAGE_BYTES, Call, Reader
from ups_store.sources.readers import Patience, ReaderPool
from ups_store.write.filling import OnError
from ups_store.write.sample_values import Names, named_values

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
    """What one input gave.

    Attributes:
        number: Of the input, from 0.
        input: The input, for messages.
        samples: Its samples; empty where it failed.
        error: Why there are none.
    """

    number: int
    input: str
    samples: list[dict[str, Any]]
    error: SourceError | None = None


def map_inputs(job: MapJob, *, first: int, on_error: OnError) -> Iterator[Mapped]:
    """Call the function for the inputs from number `first` on; results in the order of the inputs."""
    if not job.num_workers:  # in this process, without deadlines, for debugging
        for number, each in enumerate(job.inputs):
            if number >= first:
                yield _mapped(number, text_of(each), _answer_here(job, each), on_error)
        return
    asked: deque[tuple[int, Call]] = deque()

    def calls() -> Iterator[Call]:
        for number, call in calls_of(job, first):
            asked.append((number, call))
            yield call

    with ReaderPool(job.num_workers, slot_nbytes=1, patience=job.patience, note=job.note) as pool:
        for answer in pool.try_each(calls()):
            number, call = asked.popleft()
            yield _mapped(number, str(call.path), answer, on_error)


def calls_of(job: MapJob, first: int) -> Iterator[tuple[int, Call]]:
    """What workers are asked for the inputs from number `first` on, with these numbers."""
    function, main = _pickled(job.function, "the function"), _main_of(job.function)
    for number, each in enumerate(job.inputs):
        if number >= first:
            text, argument = text_of(each), _pickled(each, f"input {number}")
            yield number, Call(_call, (text, function, argument, main, job.names), text, f"input {number}")


def _call(
    reader: Reader, text: str, function: bytes, argument: bytes, main: Mapping[str, str], names: Names | None
) -> list[dict[str, Any]]:
    """Call the function in a worker; it and the argument are unpickled once the script was run."""
    reader.doing("starting")
    called, each = _function_of(function, main), pickle.loads(argument)
    reader.progressed()
    reader.doing("calling")
    samples: list[dict[str, Any]] = []
    for sample in _samples_of(called, each, text, names):
        samples.append(sample)
        reader.progressed(1)
    return samples


def _answer_here(job: MapJob, each: Any) -> list[dict[str, Any]] | SourceError:
    try:
        return list(_samples_of(job.function, each, text_of(each), job.names))
    except SourceError as error:
        return error


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


def _samples_of(
    function: Callable[[Any], Any], argument: Any, text: str, names: Names | None
) -> Iterator[dict[str, Any]]:
    """The samples of one input, named; what is none is an error that names the input."""
    for number, sample in enumerate(_calling(function, argument, text)):
        try:
            named = named_values(sample, names, number=number)
        except SpecError as error:
            error.path = text
            raise
        yield named


def _calling(function: Callable[[Any], Any], argument: Any, text: str) -> Iterator[Any]:
    """The samples of one input: of a generator all, else the one that the function returns, None for none."""
    try:
        found = function(argument)
        if found is None:
            return
        is_one = isinstance(found, Mapping | tuple) or not isinstance(found, Iterable)
        if is_one or hasattr(found, "dtype"):
            yield found
        else:
            yield from found
    except StoreError as error:
        raise _failed(error, text) from error
    except Exception as error:
        raise _failed(error, text) from error


def _failed(error: Exception, text: str) -> SourceError:
    found = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    failure = SourceError(
        "the function failed",
        kind="function_failed",
        path=text,
        found=one_line(found),
        hint="mend it, or leave such inputs out with on_error='skip'",
    )
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _function_of(pickled: bytes, main: Mapping[str, str]) -> Any:
    if pickled not in _functions:
        if main and main != _imported_main:
            _import_main(main)
        _functions[pickled] = pickle.loads(pickled)
    return _functions[pickled]


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
        raise SpecError(
            "a worker runs this script to find the function",
            kind="main",
            hint="call `ups_store.write` below `if __name__ == '__main__':`",
        )


def _pickled(value: Any, what: str) -> bytes:
    try:
        pickled = pickle.dumps(value)
    except Exception as error:  # whatever an object's own code raises
        raise _unsendable(what, repr(value)[:_SHOWN], error) from error
    if len(pickled) > _MAX_INPUT_BYTES:
        raise SpecError(
            f"{what} is too large to be sent to a worker",
            kind="function",
            expected=f"at most {_MAX_INPUT_BYTES:,} bytes",
            found=f"{len(pickled):,}",
            hint="give a file name or a number, and load it in the function",
        )
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
