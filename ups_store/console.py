"""What the commands share: results to stdout, all else to stderr, exit codes, progress, common options.

Everything leaves through `PrintableConsole`, `print_lines` and `print_json`, which escape control characters.

Exit codes: 0 done, 1 damage or another error, 2 usage, 3 source unreadable, 4 timed out, 5 interrupted,
6 disk full, 7 identity mismatch, 8 locked by another build; the errors know theirs.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NoReturn

from ups_store.errors import BuildInterruptedError, DiskFullError, StoreError, needs
from ups_store.printable import json_text, one_line, printable, without_secrets
from ups_store.system.interrupt import INTERRUPTED, INTERRUPTED_LINE, STOPPING, interrupt
from ups_store.system.interrupt import importing as importing  # for verbs, too

with needs("cli"):
    import typer
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

_SHELL_INTERRUPTED = 130  # what typer makes of Ctrl-C

_HINTS = {  # what to do about errors of the system
    errno.EMFILE: "; raise the limit with `ulimit -n`",
    errno.ENFILE: "; the system has no more: end other processes",
    errno.ENAMETOOLONG: "; choose a shorter name",
}

_NO_FILES = ("<", os.path.dirname(os.__file__))  # of the user: what was never a file, the standard library
_INSTALLED = {"site-packages", "dist-packages"}
_UNWRAPPED = 10_000  # columns; whoever reads a pipe wants whole lines


class PrintableConsole(Console):
    """A console for names and attributes of files: control characters are escaped, nothing is markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string before it becomes text, so that a table measures what it shows."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what anything becomes, such as `Text` and progress bars; rich's own control codes pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


console = PrintableConsole(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object")]
NumThreads = Annotated[int | None, typer.Option(min=1, help="[default: one per processor]")]

_verbosity = 0


def set_quiet(is_wanted: bool) -> bool:
    """Leave out what is neither a result nor a warning nor an error, from now on; False changes nothing."""
    console.quiet = console.quiet or is_wanted
    return is_wanted


def is_quiet() -> bool:
    """Return whether -q was given."""
    return console.quiet


def set_verbosity(count: int) -> int:
    """Set how much is said on stderr: 1 details, 2 tracebacks too; never less than a flag before said."""
    global _verbosity  # of the process, as its stderr is
    _verbosity = max(_verbosity, count)
    return count


def is_verbose(level: int = 1) -> bool:
    """Return whether -v was given so many times."""
    return _verbosity >= level


def results() -> Console:
    """Return the console for results: stdout as it is now; lines wrap on a terminal only."""
    return PrintableConsole(width=None if sys.stdout.isatty() else _UNWRAPPED)


def print_lines(*lines: str) -> None:
    """Write results to stdout, each as one line whatever is in it."""
    for line in lines:
        print(one_line(line))  # noqa: T201


def print_json(document: Any) -> None:
    """Write one JSON document as one line to stdout; NumPy scalars and paths are converted.

    NaN and infinities, which JSON doesn't have, are a `ValueError`.
    """
    print_lines(json_text(document, default=_to_json))


def _to_json(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else os.fspath(value)


def log(message: str, *, style: str = "", label: str = "", is_last: bool = False) -> None:
    """Write a line to stderr, such as a warning: `log("...", label="warning", style="yellow")`.

    -q leaves out what has no label, unless it is the last, which says how the command ended.
    """
    prefix = [Text(f"{label}:", style=f"bold {style}".strip())] if label else []
    was_quiet, console.quiet = console.quiet, console.quiet and not (label or is_last)
    try:
        console.print(*prefix, without_secrets(message), soft_wrap=True)
    finally:
        console.quiet = was_quiet


def run(main: Callable[[], int | None], *, verbosity: int = 0) -> NoReturn:
    """Run a program and end the process with its exit code; errors become one message, not a traceback.

    Args:
        main: Returns the exit code, None for 0; a typer application may also exit by itself.
        verbosity: How many -v were given, where `main` doesn't set that.
    """
    global _verbosity
    _verbosity, console.quiet = verbosity, False
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: its descriptor would go to the next file that is opened
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long as the process lives
    if hasattr(sys.stdout, "reconfigure"):  # paths needn't be text in the encoding of the terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_as_lines(), _terminable(), _interruptible_anywhere():
            code: Any
            try:
                code = main()
            except SystemExit as ended:
                code = ended.code
            if code == _SHELL_INTERRUPTED:
                raise KeyboardInterrupt
            sys.stdout.flush()  # here, where a closed pipe can still be told from a good end
    except (Exception, KeyboardInterrupt) as error:
        code = report(error)
    # All is reported: a signal while Python ends must not turn the exit code into another. Registered
    # last, this is the first exit handler that runs: the others and Python's own end come after it. Not set
    # here and now, for whoever catches SystemExit goes on and needs Ctrl-C; waiting for threads, which comes
    # before the handlers, can be interrupted, too.
    for number in (signal.SIGINT, *STOPPING):
        atexit.register(signal.signal, number, signal.SIG_IGN)
    # `python -m` notes a Ctrl-C that left an `exec` of text, as that of an import that makes a dataclass, and
    # ends itself by SIGINT in the end, also where it was caught further out. The next `exec` clears the note.
    exec("")
    sys.exit(code or 0)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show Python's warnings as ours: without the line of code that gave them."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        with contextlib.suppress(OSError):
            log(str(message), label="warning", style="yellow")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGUSR1 like Ctrl-C, where they aren't ignored or handled by somebody else."""
    free = [number for number in STOPPING if signal.getsignal(number) is signal.SIG_DFL]
    for number in free:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _interruptible_anywhere() -> Iterator[None]:
    """Raise a Ctrl-C that landed in a finaliser, which can't raise, once more a moment later in the block."""
    previous = sys.unraisablehook
    timers: list[threading.Timer] = []

    def hook(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            previous(lost)
            return
        again = threading.Timer(0.01, _thread.interrupt_main)
        again.daemon = True
        timers.append(again)
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous
        # All is done meanwhile: nothing is left to interrupt.
        with contextlib.suppress(KeyboardInterrupt):
            for again in timers:
                again.cancel()
                again.join()  # one that is on its way comes here


@contextlib.contextmanager
def interruptible(hint: str = "run the same command again to continue") -> Iterator[None]:
    """Treat SIGTERM and SIGUSR1 like Ctrl-C, and all as `BuildInterruptedError`, which says what is kept."""
    previous = {number: signal.signal(number, interrupt) for number in STOPPING}
    try:
        yield
    except KeyboardInterrupt as error:
        raise BuildInterruptedError("interrupted", hint=hint) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def report(error: BaseException) -> int:
    """Report on stderr what went wrong; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        # What is still buffered would fail once more when Python closes stdout.
        with contextlib.suppress(OSError, ValueError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)
        return 1
    with contextlib.suppress(OSError, SystemExit):  # where stderr is closed, there is still the exit code
        if is_verbose(2):
            sys.stderr.write(printable(without_secrets("".join(traceback.format_exception(error)))))
        if _is_usage_error(error):
            usage = io.StringIO()
            error.show(usage)  # type: ignore[attr-defined]  # with the usage of the verb
            sys.stderr.write(printable(usage.getvalue().expandtabs(4)))  # values are listed by tabs
        else:
            log(message_of(error), label="error", style="red")
    return exit_code_of(error)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that an error stands for."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError.exit_code
    is_known = _has_sentence(error) or _is_usage_error(error)
    return int(getattr(error, "exit_code", 1)) if is_known else 1


def _has_sentence(error: BaseException) -> bool:
    """Return whether it was raised on purpose, here or by an encoder: then it has a sentence and a code."""
    return isinstance(error, StoreError) or (hasattr(error, "problem") and hasattr(error, "exit_code"))


def _is_usage_error(error: BaseException) -> bool:
    # By its methods: some releases of typer bring a click of their own.
    return hasattr(error, "show") and hasattr(error, "exit_code")


def message_of(error: BaseException) -> str:
    """Return what a person reads of an error: its sentence where it was raised on purpose."""
    if _has_sentence(error):
        return str(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED_LINE
    if isinstance(error, OSError):
        where = f"{one_line(str(error.filename))}: " if error.filename is not None else ""
        hint = _HINTS.get(error.errno or 0, "")
        return f"{where}{(error.strerror or str(error)).lower()}{hint}"
    if isinstance(error, MemoryError):
        return "out of memory"
    if where := _place_in_code_of_others(error):
        return f"{where}: {type(error).__name__}: {one_line(str(error))}; -vv shows the traceback"
    return f"unexpected {type(error).__name__}: {error}; run it with -vv and report what it prints"


def _place_in_code_of_others(error: BaseException) -> str:
    """Say where in code of the user's own, called by ours, an error is from; "" where it is ours."""
    place, is_inside = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        path, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("ups", "ups_store"):
            place, is_inside = "", True
        elif is_inside and not (path.startswith(_NO_FILES) or _INSTALLED & {*path.split(os.sep)}):
            place = f"{one_line(path)}:{line}, in {frame.f_code.co_name}"
    return place


@contextlib.contextmanager
def progress_bar(description: str, *, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left on stderr while the block runs; nothing unless it is a terminal.

    Yields a function that takes how many of the `total` bytes were done since the last call.
    """
    if quiet or is_quiet() or not console.is_terminal:
        yield lambda nbytes: None
        return
    from rich.progress import (  # 20 ms that other verbs don't need
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    name = TextColumn("{task.description}", markup=False)
    with Progress(name, *columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def format_nbytes(nbytes: int) -> str:
    """Write bytes for people: "823.3 kB", decimal units."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 999.95:
            size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def format_age(seconds: float) -> str:
    """Write time that has passed for people: "3 minutes ago"."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            num = int(seconds // length)
            return f"{num} {unit}{'s' if num > 1 else ''} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} seconds ago"


def format_duration(seconds: float) -> str:
    """Write time for people, rounded: "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
