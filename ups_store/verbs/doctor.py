"""The verb `doctor`: what is the matter with a file, and `--salvage`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups_store.console import Verbose, counted, interruptible, is_verbose, print_json, progress_bar
from ups_store.errors import StoreNotFoundError
from ups_store.verbs.options import AsJson

if TYPE_CHECKING:
    from ups_store.check.doctor import Diagnosis

MAX_PROBLEMS_OF_DOCTOR = 10  # shown for people; --json and -v show all
NOT_SOUND = 1


def doctor(
    path: Annotated[Path, typer.Argument(help="any file", metavar="FILE")],
    *,
    out: Annotated[
        Path | None, typer.Option("--salvage", help="copy what verifies into a new store", metavar="OUT")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
) -> int:
    """Say what is the matter with a file and what can be saved; exit code 0 only for a sound one.

    The file itself is never changed.
    """
    from ups_store.check.doctor import examine
    from ups_store.check.salvage import salvage

    with progress_bar(f"checking {path.name}", total=_nbytes_of(path), quiet=as_json) as bar:
        found = examine(path, progress=bar)
    saved = None
    if out is not None:
        with interruptible("run the same command again to continue"):
            saved = salvage(found, out.absolute())
    if as_json:
        print_json({**found.to_json(), "salvaged": saved})
    else:
        _show(found, saved)
    return 0 if found.status.is_sound else NOT_SOUND


def _nbytes_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise StoreNotFoundError("no such file", path=path, hint="check the path") from error


def _show(found: Diagnosis, saved: Path | None) -> None:
    from ups_store.check.doctor import ADVICE, Status

    savable = len(found.savable)
    sound = ", sound" if found.status is Status.PACKED else ""
    print(f"{found.path}: {found.status.value.replace('_', ' ')}{sound}")
    shown = found.problems if is_verbose() else found.problems[:MAX_PROBLEMS_OF_DOCTOR]
    for problem in shown:
        print(f"  {problem}")
    if len(shown) < len(found.problems):
        print(f"  and {counted(len(found.problems) - len(shown), 'more problem')}; -v shows all")
    if found.catalog is not None:
        print(f"  {savable:,} of {found.num_samples:,} samples verify")
    if found.lost_arrays:
        print(f"  nothing verifies of {', '.join(found.lost_arrays)}")
    print(f"  {ADVICE[found.status]}" if saved is None else f"  {counted(savable, 'sample')} saved: {saved}")
