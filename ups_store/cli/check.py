"""Verbs that check: `verify` every byte of stores, `doctor` any file, `gc` what dead builders left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups_store.command_line import reading_urls
from ups_store.console import (
    AsJson,
    NumThreads,
    console,
    exit_code_of,
    format_age,
    format_nbytes,
    interruptible,
    is_verbose,
    log,
    print_json,
    print_lines,
    progress_bar,
    report,
)
from ups_store.errors import ConfigError, StoreError, StoreNotFoundError
from ups_store.printable import counted, one_line
from ups_store.read.open import open_any, open_store
from ups_store.read.recovery import building_path
from ups_store.system.paths import is_pattern, is_remote, named_partitions, shown_url

if TYPE_CHECKING:
    from ups_store.check.doctor import Diagnosis
    from ups_store.read.verify import Report


DAMAGED = NOT_SOUND = 1  # exit codes of `verify` and `doctor`
MAX_PROBLEMS_OF_VERIFY = 50  # shown for people; --json and -v show all
MAX_PROBLEMS_OF_DOCTOR = 10


@reading_urls("paths")
def verify(
    paths: Annotated[
        list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip, or their URLs", metavar="PATH...")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    num_threads: NumThreads = None,
    config: Annotated[
        Path | None,
        typer.Option("--repair", help="rebuild what is damaged; KEY=VALUE overrides may follow the store"),
    ] = None,
) -> int:
    """Check every byte; exit code 1 for damage.

    Payloads are checked by their checksums, all other bytes by making them again. With --repair CONFIG.yaml
    the damaged samples of one store are read from its sources again, and a new file takes its place.
    """
    if config is not None:
        _repair(paths, config)
        paths = paths[:1]
    return max([_verify(path, as_json, num_threads) for path in paths])


def _repair(words: list[Path], config: Path) -> None:
    """Repair the store that the first word names; the others are overrides of the configuration."""
    from ups_store.building.config import load_config
    from ups_store.building.repair import repair_store, words_of
    from ups_store.building.watch import BuildWatcher

    path, overrides = words[0], [str(word) for word in words[1:]]
    if not all("=" in word for word in overrides):
        raise ConfigError("--repair", expected="one store, then KEY=VALUE overrides", found=overrides)
    identity = None
    with contextlib.suppress(StoreError, OSError), open_store(path) as store:  # the repair says what it is
        identity = store.identity
    if identity is not None:  # the configuration must be one, also if nothing is damaged
        load_config(config, overrides=[*overrides, *words_of(identity)])
    with interruptible(), BuildWatcher(console) as watcher:
        done = repair_store(path, config, overrides=overrides, watcher=watcher)
    rebuilt = f"{done.num_rebuilt:,} of {done.num_samples:,} samples rebuilt, the others copied"
    log(f"{one_line(str(path))}: {rebuilt if done.is_needed else 'nothing to repair'}")


def _verify(path: Path, as_json: bool, num_threads: int | None) -> int:
    """Check one store and say what was found; returns the exit code."""
    started, label = time.perf_counter(), shown_url(path) if is_remote(path) else str(path)
    try:
        with (
            open_any(path) as store,
            progress_bar(f"checking {path.name}", total=store.nbytes, quiet=as_json) as bar,
        ):
            checked = store.verify(num_threads=num_threads, progress=bar)
    except (StoreError, OSError) as error:  # damage that opening finds; the other stores are still checked
        if as_json:
            kind = error.kind if isinstance(error, StoreError) else "os"
            print_json({"path": label, "ok": False, "error": {"kind": kind, "message": str(error)}})
        files: list[Path] = []  # of a pattern that can't be opened as a whole: they are checked one by one
        if is_pattern(path.absolute()):
            with contextlib.suppress(StoreError):  # which opening has said already
                named, missing = named_partitions(path.absolute())
                files = [file for file in named if file not in missing]
        if getattr(error, "path", None) not in [str(file) for file in files]:  # else checking that says it
            report(error)
        return max([exit_code_of(error), *(_verify(file, as_json, num_threads) for file in files)])
    seconds = time.perf_counter() - started
    if as_json:
        print_json({**_report_to_json(checked), "path": label, "seconds": round(seconds, 4)})
        return 0 if checked.ok else DAMAGED
    _show_problems(checked.problems, MAX_PROBLEMS_OF_VERIFY, prefix=f"{label}: ")
    for name, samples in checked.damaged.items():
        which = counted(len(samples), "damaged sample") if samples else "damage, of no sample alone,"
        print_lines(f"{label}: {which} in array {name!r}")
    verdict = "ok" if checked.ok else f"DAMAGED, {counted(len(checked.problems), 'problem')}"
    rate = checked.nbytes / max(seconds, 1e-9) / 1e9
    print_lines(
        f"{label}: {verdict} · {format_nbytes(checked.nbytes)} and {counted(checked.num_chunks, 'checksum')}"
        f" in {seconds:.2f} s · {rate:.2f} GB/s"
    )
    return 0 if checked.ok else DAMAGED


def _report_to_json(checked: Report) -> dict[str, Any]:
    partitions = [_report_to_json(partition) for partition in checked.partitions]
    return {**asdict(checked), "ok": checked.ok, "partitions": partitions}


def _show_problems(problems: Sequence[object], most: int, *, prefix: str) -> None:
    listed = problems if is_verbose() else problems[:most]
    for problem in listed:
        print_lines(f"{prefix}{problem}")
    if len(listed) < len(problems):
        print_lines(f"{prefix}and {counted(len(problems) - len(listed), 'more problem')}; -v shows all")


def doctor(
    path: Annotated[Path, typer.Argument(help="any file, or a pattern of partitions", metavar="FILE")],
    *,
    out: Annotated[
        Path | None, typer.Option("--salvage", help="copy what verifies into a new store", metavar="OUT")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say what is the matter with a file and what can be saved; exit code 0 only for a sound one.

    The file itself is never changed.
    """
    from ups_store.check.doctor import Diagnosis, Status

    pattern = path.absolute()
    if not is_pattern(pattern):
        return _doctor(path, out, as_json)
    if out is not None:
        hint = "salvage the files that are damaged, one by one"
        raise ConfigError("--salvage of several files", path=path, hint=hint)
    named, absent = named_partitions(pattern)
    codes = [_doctor(partition, None, as_json) for partition in named if partition not in absent]
    for partition in absent:
        _say(Diagnosis(partition, Status.MISSING, ("no such file",)), None, as_json)
    if absent or any(codes):
        return NOT_SOUND
    try:
        open_any(pattern).close()  # whether they belong together
    except StoreError as error:
        report(error)
        return NOT_SOUND
    return 0


def _doctor(path: Path, out: Path | None, as_json: bool) -> int:
    """Examine one file; returns the exit code."""
    from ups_store.check.doctor import examine, salvage

    try:
        nbytes = path.stat().st_size
    except FileNotFoundError as error:
        unfinished = building_path(path)
        hint = f"it is being built: ask about {unfinished.name}" if unfinished.exists() else "check the path"
        raise StoreNotFoundError("no such file", path=path, hint=hint) from error
    with progress_bar(f"checking {path.name}", total=nbytes, quiet=as_json) as bar:
        diagnosis = examine(path, progress=bar)
    saved = None
    if out is not None:
        with interruptible("run the same command again to continue"):
            saved = salvage(diagnosis, out.absolute())
    _say(diagnosis, saved, as_json)
    return 0 if diagnosis.status.is_sound else NOT_SOUND


def _say(diagnosis: Diagnosis, saved: Path | None, as_json: bool) -> None:
    from ups_store.check.doctor import Status

    if as_json:
        print_json({**diagnosis.to_json(), "salvaged": saved})
        return
    savable = len(diagnosis.savable)
    sound = ", sound" if diagnosis.status is Status.PACKED else ""
    print_lines(f"{diagnosis.path}: {diagnosis.status.title}{sound}")
    _show_problems(diagnosis.problems, MAX_PROBLEMS_OF_DOCTOR, prefix="  ")
    if diagnosis.catalog is not None:
        where = " in the other arrays" if diagnosis.lost_arrays and savable else ""
        print_lines(f"  {savable:,} of {diagnosis.num_samples:,} samples verify{where}")
    if diagnosis.lost_arrays:
        print_lines(f"  nothing verifies of {', '.join(diagnosis.lost_arrays)}")
    saved_text = f"{counted(savable, 'sample')} saved: {saved}"
    print_lines(f"  {diagnosis.status.advice if saved is None else saved_text}")


def gc(
    folder: Annotated[Path, typer.Argument(help="folder of the stores")] = Path("cache"),
    delete: Annotated[bool, typer.Option("--delete", help="remove what can't be continued")] = False,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="with --delete: unfinished stores, with samples"),
    ] = False,
    remote: Annotated[str | None, typer.Option(help="URL or folder of a shared cache instead")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="with --remote: stores that were pushed so many days ago, too")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="with --remote: seconds for one request")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per file and line")] = False,
) -> None:
    """List what dead builders left in a folder; remove it on request. Files of living ones are left alone.

    With --remote what dead pushes left in a shared cache, after a day.
    """
    from ups_store.check.garbage import REMOVABLE, find_garbage, remove_garbage

    if unfinished and not delete:
        raise ConfigError(
            "--unfinished has no effect",
            expected="--delete beside it",
            hint="say --delete too, or leave --unfinished out to list what is there",
        )
    if remote is not None:
        from ups_store.cli.shared import gc_remote

        options: dict[str, Any] = {"delete": delete, "unfinished": unfinished, "as_json": as_json}
        return gc_remote(remote, older_than=older_than, timeout=timeout, **options)
    if older_than is not None:
        hint = "name the shared cache by --remote, or leave --older-than out"
        raise ConfigError("--older-than has no effect", expected="--remote beside it", hint=hint)
    if not folder.is_dir():
        raise StoreNotFoundError("no such folder", path=folder, hint="check the path")
    kinds = REMOVABLE if unfinished else REMOVABLE - {"unfinished", "pull"}
    entries = find_garbage(folder)
    if not entries:
        log(f"{one_line(str(folder))}: nothing that a dead builder left")
    for garbage in entries:
        is_removed = delete and garbage.kind in kinds and remove_garbage(garbage)
        if as_json:
            print_json({**asdict(garbage), "removed": is_removed})
            continue
        committed = f"{garbage.num_committed} of {garbage.num_samples} samples committed"
        title = {
            "unfinished": f"unfinished, {committed}",
            "too_new": "unfinished, begun by a newer version of ups-store, left alone",
            "damaged": "unfinished, and damaged: it can't be continued",
            "temporary": "temporary file of a builder that died before it held anything",
            "pull": "of a pull that was killed, which goes on with it",
            "finished": "finished store, left alone",
            "foreign": "foreign file, left alone",
        }.get(garbage.kind, garbage.kind)
        size = f"{format_nbytes(garbage.nbytes)}, written {format_age(garbage.age_s)}"
        print_lines(f"{garbage.path}: {title}, {size}{', removed' if is_removed else ''}")
