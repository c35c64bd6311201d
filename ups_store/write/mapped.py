"""A function of files, or of whatever else, in worker processes with deadlines: its samples in their order.

The processes are those that read HDF5 files for a build: a call that hangs, crashes or is killed ends in an
error that names its input, not in waiting. Results come back through memory without a name, which is gone
when the worker is, so nothing of them stays behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups_store.errors import ReadTimeoutError, SourceError, SpecError, StoreError
from ups_store.printable import one_line
from ups_store.sources.lane import Patience
from ups_store.sources.pool import ReaderPool
from ups_store.sources.requests import MAX_MESSAGE_BYTES, CallRequest
from ups_store.sources.source_files import USUAL_SLOTS
from ups_store.system import files
from ups_store.write.filling import OnError
from ups_store.write.sample_values import Names, named_values

if TYPE_CHECKING:
    from ups_store.sources.reader import Reader

_MAX_INPUT_BYTES = MAX_MESSAGE_BYTES // 3
_SHOWN = 200  # characters of an input in messages
_is_importing_main = False  # in a worker, while it runs the script of the process that started it
_imported_main: Mapping[str, str] = {}  # that script, once it was run
_functions: dict[bytes, Any] = {}  # that this worker has unpickled
_sent: deque[int] = deque()  # descriptors of the results that the other process may not have opened yet


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


class Result:
    """Samples on their way to the process that asked; in the same one just the samples.

    Attributes:
        samples: None if they were lost with the worker.
    """

    def __init__(self, samples: list[dict[str, Any]] | None) -> None:
        self.samples = samples

    def __reduce__(self) -> tuple[Any, ...]:
        fd = files.create_anonymous("ups_store samples")
        with open(fd, "wb", closefd=False) as file:
            pickle.dump(self.samples, file, protocol=5)
        _sent.append(fd)
        if len(_sent) > USUAL_SLOTS:  # a worker has so many requests at most that aren't done with
            files.close(_sent.popleft())
        return _received, (str(files.descriptor_path(fd)), files.size(fd))


def _received(path: str, nbytes: int) -> Result:
    """Called where the answer is unpickled, which is while the worker waits or does the next one."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as memory:
            return Result(pickle.loads(memory))
    except OSError:
        return Result(None)


@dataclass(frozen=True)
class _Call:
    """What a worker is sent; function and argument are pickled apart, as the script has to be run before.

    Attributes:
        text: The input, for messages.
        function: Pickled.
        argument: Pickled.
        main: The script that defines the function, as `multiprocessing.spawn.prepare` takes it.
        names: See `named_values`.
    """

    text: str
    function: bytes
    argument: bytes
    main: Mapping[str, str]
    names: Names | None


def prepare(payload: bytes) -> tuple[_Call, Callable[[Any], Any], Any]:
    """What `run` takes, as `CallRequest` says: everything is imported here."""
    call: _Call = pickle.loads(payload)
    return call, _function_of(call.function, call.main), pickle.loads(call.argument)


def run(reader: Reader, prepared: tuple[_Call, Callable[[Any], Any], Any]) -> Result:
    """Call the function.

    Raises:
        SourceError: If it raises, kind "function_failed"; has the stack as a note.
        SpecError: If what it gives is no sample.
    """
    call, function, argument = prepared
    samples: list[dict[str, Any]] = []
    for sample in _samples_of(function, argument, call.text, call.names):
        samples.append(sample)
        reader.progressed(1)
    return Result(samples)


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
    """Refuse to write where a worker only runs the script for its functions.

    Raises:
        SpecError: Kind "main".
    """
    if _is_importing_main:
        raise SpecError(
            "a worker runs this script to find the function",
            kind="main",
            hint="call `ups_store.write` below `if __name__ == '__main__':`",
        )


def map_inputs(job: MapJob, *, first: int, on_error: OnError) -> Iterator[Mapped]:
    """Call the function for the inputs from number `first` on; results in the order of the inputs.

    Raises:
        SourceError: If the function fails, kind "function_failed", or its worker is lost, unless `on_error`
            is "skip"; `ReadTimeoutError` if it takes too long. Names the input.
        SpecError: If the function or an input can't be sent to a worker, or gives what is no sample.
    """
    if not job.num_workers:
        yield from _map_here(job, first, on_error)
        return
    asked: deque[tuple[int, CallRequest]] = deque()

    def requests() -> Iterator[CallRequest]:
        for number, request in _requests(job, first):
            asked.append((number, request))
            yield request

    def ask(requests: Iterable[CallRequest], num_workers: int) -> Iterator[Any]:
        with ReaderPool(num_workers, slot_nbytes=1, patience=job.patience, note=job.note) as pool:
            yield from pool.try_each(requests)

    for answer in ask(requests(), job.num_workers):
        number, request = asked.popleft()
        if isinstance(answer, Result) and answer.samples is None:  # its worker was killed by the next input
            (answer,) = ask([request], 1)
        yield _mapped(number, request.path, answer, on_error)


def _map_here(job: MapJob, first: int, on_error: OnError) -> Iterator[Mapped]:
    """In this process, without deadlines, for debugging."""
    for number, each in enumerate(job.inputs):
        if number >= first:
            text = text_of(each)
            try:
                samples = list(_samples_of(job.function, each, text, job.names))
            except SourceError as error:
                if on_error == "fail":
                    raise
                yield Mapped(number, text, [], error)
            else:
                yield Mapped(number, text, samples)


def _mapped(number: int, text: str, answer: Any, on_error: OnError) -> Mapped:
    """What came of a request; raises the error unless it is to be skipped."""
    if isinstance(answer, Result) and answer.samples is not None:
        return Mapped(number, text, answer.samples)
    if isinstance(answer, Result):
        answer = SourceError("its worker was lost", kind="reader_died", path=text)
    if isinstance(answer, ReadTimeoutError):
        answer.hint = "raise item_timeout_s, or leave such inputs out with on_error='skip'"
    elif isinstance(answer, SourceError) and answer.kind == "reader_died":
        answer.hint = "lower num_workers if memory ran out, or leave such inputs out with on_error='skip'"
    if on_error == "fail" or not isinstance(answer, SourceError):
        raise answer
    return Mapped(number, text, [], answer)


def _requests(job: MapJob, first: int) -> Iterator[tuple[int, CallRequest]]:
    function, main = _pickled(job.function, "the function"), _main_of(job.function)
    for number, each in enumerate(job.inputs):
        if number >= first:
            argument, text = _pickled(each, f"input {number}"), text_of(each)
            payload = pickle.dumps(_Call(text, function, argument, main, job.names))
            yield number, CallRequest(text, f"input {number}", __name__, payload)


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
    """An input, for messages and for what a part says of its last one."""
    if isinstance(each, str | Path):
        return one_line(str(each))[-_SHOWN:]
    with contextlib.suppress(Exception):  # of the object's own code
        return one_line(repr(each))[:_SHOWN]
    return type(each).__name__
