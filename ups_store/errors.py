"""The errors of the package: a tree by what the caller can do about them.

Every error carries what it knows as attributes, and a stable `kind` that tests and programs match on.
People read the sentence: where, what was found, what was expected, what to do.
This module imports nothing of ours, so everything else may import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from ups_store.printable import one_line, printable, without_secrets


class StoreError(Exception):
    """Root of every error that the package raises on purpose. URLs in it have no user, password and query.

    Args:
        problem: What is wrong, lower case, no full stop.
        kind: Stable identifier of the defect, snake case; the class's own by default.
        path: File that the error is about.
        array: Array name, where one is concerned.
        sample: Sample number, where one is concerned.
        byte_range: `(first, past_last)` in the file, in bytes.
        clause: Clause of `docs/format/spec.md` that is violated, such as "3.2".
        expected: What should have been there.
        found: What was there.
        hint: What to do about it, as an imperative; the class's own by default.
        attributes: Others that the class has.
    """

    kind = "store"
    exit_code = 1
    default_hint: str | None = None

    def __init__(
        self,
        problem: str,
        *,
        kind: str | None = None,
        path: object = None,
        array: str | None = None,
        sample: int | None = None,
        byte_range: tuple[int, int] | None = None,
        clause: str | None = None,
        expected: Any = None,
        found: Any = None,
        hint: str | None = None,
        **attributes: Any,
    ) -> None:
        problem = without_secrets(problem)
        self.problem = problem
        self.kind = kind or type(self).kind
        self.path = None if path is None else without_secrets(str(path))
        self.array = array
        self.sample = sample
        self.byte_range = byte_range
        self.clause = clause
        self.expected = without_secrets(expected) if isinstance(expected, str) else expected
        self.found = without_secrets(found) if isinstance(found, str) else found
        self.hint = hint or type(self).default_hint
        super().__init__(problem)
        for name, value in attributes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def __str__(self) -> str:
        sentence = self.problem
        if self.expected is not None:
            sentence += f": expected {self.expected}"
            if self.found is not None:
                sentence += f", found {self.found}"
        elif self.found is not None:
            sentence += f": found {self.found}"
        if self.clause is not None:
            sentence += f" (spec {self.clause})"
        where = [one_line(self.path)] if self.path is not None else []
        where += [f"array {self.array!r}"] if self.array is not None else []
        where += [f"sample {self.sample}"] if self.sample is not None else []
        where += ["bytes {}..{}".format(*self.byte_range)] if self.byte_range is not None else []
        sentence = f"{', '.join(where)}: {sentence}" if where else sentence
        return printable(without_secrets(f"{sentence}; {self.hint}" if self.hint else sentence))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders; the default would call __init__ with the message only.
        state = dict(self.__dict__)
        if isinstance(self, OSError):  # which keeps these elsewhere
            state |= {"errno": self.errno, "strerror": self.strerror}
        return _rebuild, (type(self), self.problem, state)


def _rebuild(cls: type[StoreError], problem: str, state: dict[str, Any]) -> StoreError:
    error = cls.__new__(cls)
    Exception.__init__(error, problem)
    for name, value in state.items():
        setattr(error, name, value)
    return error


@contextlib.contextmanager
def hinting(hint: str, *classes: type[StoreError], kind: str | None = None) -> Iterator[None]:
    """Have errors of some classes, or of one kind, say this to do: what they say names other flags."""
    try:
        yield
    except classes as error:
        if kind in (None, error.kind):
            error.hint = hint
        raise


def near_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant by a misspelled one; one of the same letters is nearest.

    If nothing resembles the word enough, there is no suggestion, not a wrong one.
    """
    from difflib import get_close_matches  # for an error only

    words = list(known)
    same = [other for other in words if sorted(other.lower()) == sorted(word.lower())]
    return next(iter(same or get_close_matches(word, words, n=1, cutoff=0.75)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Suggest `near_word`, if there is one."""
    near = near_word(word, known)
    return f"did you mean {near}?" if near else None


class FormatError(StoreError):
    """The file isn't a store of this format, or a byte outside the payloads is wrong."""

    kind = "format"
    default_hint = "copy it again, or look at it with `ups-store doctor`"


class TruncatedError(FormatError):
    """The file ends before something that it must hold."""

    kind = "truncated"


class VersionTooNewError(FormatError):
    """The file was written for a newer version of the format."""

    kind = "version_too_new"
    default_hint = "upgrade ups-store"


class CorruptChunkError(StoreError):
    """A chunk's bytes don't match their checksum."""

    kind = "corrupt_chunk"


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no file at the path."""

    kind = "not_found"


class AccessError(StoreError, PermissionError):
    """The system doesn't let this user open the file.

    Or the file has no write permission for any user, so it isn't replaced: kind "read_only", exit code 2.
    """

    kind = "access"


class ReadError(StoreError, OSError):
    """The system couldn't read bytes of a store's file that are there: the disk fails, or the way to it.

    Attributes:
        errno: What the system reported, such as `errno.EIO`.
    """

    kind = "read_failed"
    exit_code = 3


class ArrayNotFoundError(StoreError, KeyError):
    """The store has no array of that name."""

    kind = "no_array"
    __str__ = StoreError.__str__  # KeyError shows the repr of its argument


class SampleIndexError(StoreError, IndexError):
    """A sample or time step outside the store was asked for."""

    kind = "index"


class StoreReplacedError(StoreError):
    """The file at the path isn't the one that was opened, pickled or locked."""

    kind = "replaced"


class RemoteError(StoreError):
    """An object store didn't give what was asked for: it refuses, or can't be reached before the deadline."""

    kind = "remote"
    exit_code = 3


class StoreClosedError(StoreError, ValueError):
    """The store or writer was closed."""

    kind = "closed"


class NotCommittedError(StoreError):
    """A sample was asked for, or the end of the build, before it was committed."""

    kind = "not_committed"


class CommitError(StoreError):
    """A commit didn't become durable; the samples since the last good sync aren't committed."""

    kind = "commit"


class DiskFullError(StoreError, OSError):
    """The file system has no room for the whole store.

    Attributes:
        needed_bytes: Room that the operation needs.
        free_bytes: Room that the file system had: when a write failed, or before a copy began.
    """

    kind = "disk_full"
    exit_code = 6
    needed_bytes: int = 0
    free_bytes: int = 0


class IdentityMismatchError(StoreError):
    """What is at the path was made from something else.

    Attributes:
        differences: Mapping from key path to `(found, expected)`.
    """

    kind = "identity_mismatch"
    exit_code = 7
    differences: Mapping[str, tuple[Any, Any]] = MappingProxyType({})


class BuildLockedError(StoreError):
    """Another process is building the same file.

    Attributes:
        pid: Its process id, where known.
        host: Its host name, where known.
    """

    kind = "build_locked"
    exit_code = 8
    pid: int | None = None
    host: str | None = None


class BuildInterruptedError(StoreError):
    """The user stopped the build; what was committed stays."""

    kind = "interrupted"
    exit_code = 5


class BatchTimeoutError(StoreError, TimeoutError):
    """A batch of a loader or a dataset didn't come in time; what reads it may hang.

    Attributes:
        samples: Numbers of the samples that are being read, in the store.
        stack: Of the thread that reads them; empty if there is none.
    """

    kind = "batch_timeout"
    exit_code = 4
    samples: tuple[int, ...] = ()
    stack: str = ""


class SpecError(StoreError, ValueError):
    """Arguments that no valid store could be made from: shapes, dtypes, names, dimensions."""

    kind = "spec"
    exit_code = 2


class ConfigError(StoreError, ValueError):
    """A configuration key, flag or combination of them is wrong.

    Attributes:
        problems: The single ones, where this one says several at once; else empty.
    """

    kind = "config"
    exit_code = 2
    problems: tuple[ConfigError, ...] = ()

    @classmethod
    def joined(cls, problems: Sequence[ConfigError]) -> ConfigError:
        """One error of several, a line each; of one kind if all are. One alone stays as it is."""
        if len(problems) == 1:
            return problems[0]
        return cls(mistakes(problems), kind=common_kind(problems), problems=tuple(problems))


def mistakes(problems: Sequence[Exception]) -> str:
    """Say what is wrong with a configuration, a line each."""
    return "\n  ".join((f"{len(problems)} mistakes in the configuration:", *map(str, problems)))


def common_kind(problems: Iterable[Any]) -> str | None:
    """The kind of all of some errors, if it is one."""
    kinds = {problem.kind for problem in problems}
    return kinds.pop() if len(kinds) == 1 else None


class MissingExtraError(StoreError, ImportError):
    """A package that a part of this one needs isn't installed.

    Attributes:
        module: The package that couldn't be imported.
        extra: The extra that brings it, as in `pip install 'ups-store[EXTRA]'`.
    """

    kind = "missing_extra"
    exit_code = 2
    module: str = ""
    extra: str = ""
    path: str | None = None  # else it would be that of ImportError, which empties it

    @classmethod
    def of(cls, module: str, *, extra: str) -> Self:
        """The error about a package and the extra that brings it."""
        hint = f"pip install 'ups-store[{extra}]'"
        return cls(f"{module} isn't installed", hint=hint, module=module, extra=extra)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Make importing a package that isn't installed a `MissingExtraError` that names the extra.

    Of several around one another the outermost names its extra: it is what the user asked for.
    """
    try:
        yield
    except MissingExtraError as error:
        raise MissingExtraError.of(error.module, extra=extra) from None
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("ups", "ups_store"):  # a defect of ours, which no extra mends
            raise
        raise MissingExtraError.of(module, extra=extra) from None


def check_installed(*modules: str, extra: str) -> None:
    """Check that packages are there, without importing them; `MissingExtraError` for the first that isn't."""
    from importlib.util import find_spec

    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError.of(module, extra=extra)


class SourceError(StoreError):
    """A source is missing, unreadable, couldn't be fetched, or isn't what its task needs.

    Attributes:
        dataset: HDF5 path of the dataset or group, where one is concerned.
        outer: Another file that it has data in, which isn't allowed or isn't there; as named or found.
    """

    kind = "source"
    exit_code = 3
    dataset: str | None = None
    outer: str = ""


class ReadTimeoutError(SourceError):
    """Reading a source took longer than its deadline."""

    kind = "read_timeout"
    exit_code = 4


class MemoryLimitError(StoreError):
    """What was asked for doesn't fit into the memory that may be used.

    Attributes:
        needed_bytes: Memory that the operation needs.
        available_bytes: Memory that it may use: of the machine, its control group, the device, or a limit.
    """

    kind = "memory"
    needed_bytes: int = 0
    available_bytes: int = 0


class DeviceError(StoreError, RuntimeError):
    """There is no such device, or it refuses memory that was to be page-locked."""

    kind = "device"
