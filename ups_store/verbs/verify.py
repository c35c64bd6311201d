"""The verb `verify`: check every byte, and `--repair`."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups_store.console import (
    Verbose,
    console,
    counted,
    format_nbytes,
    interruptible,
    is_verbose,
    log,
    print_json,
    progress_bar,
    report,
)
from ups_store.errors import ConfigError, FormatError, StoreError
from ups_store.read.open import open_store
from ups_store.verbs.options import NumThreads

if TYPE_CHECKING:
    from ups_store.read.verify import Report

DAMAGED = 1
MAX_PROBLEMS_OF_VERIFY = 50  # shown for people; --json and -v show all


def verify(
    paths: Annotated[list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip", metavar="PATH...")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    num_threads: NumThreads = None,
    config: Annotated[
        Path | None,
        typer.Option("--repair", help="rebuild what is damaged; KEY=VALUE overrides may follow the store"),
    ] = None,
    verbose: Verbose = 0,
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
    from ups_store.build.repair import repair_store
    from ups_store.build.watch import ConsoleWatcher

    path, overrides = words[0], [str(word) for word in words[1:]]
    if not all("=" in word for word in overrides):
        raise ConfigError("--repair", expected="one store, then KEY=VALUE overrides", found=overrides)
    _check_config(path, config, overrides)
    with interruptible(), ConsoleWatcher(console) as watcher:
        done = repair_store(path, config, overrides=overrides, watcher=watcher)
    if done.is_needed:
        log(f"{path}: {done.num_rebuilt:,} of {done.num_samples:,} samples rebuilt, the others copied")
    else:
        log(f"{path}: nothing to repair")


def _check_config(path: Path, config: Path, overrides: list[str]) -> None:
    """Read the configuration before the store is checked: it must be one, also if nothing is damaged."""
    from ups_store.build.config import load_config
    from ups_store.build.repair import flags_of

    try:
        with open_store(path) as store:
            content = store.identity.get("content")
    except (StoreError, OSError):
        return  # the repair says what it is
    load_config(config, flags=flags_of(content), overrides=overrides)


def _verify(path: Path, as_json: bool, num_threads: int | None) -> int:
    """Check one store and tell what was found; returns the exit code."""
    started = time.perf_counter()
    try:
        found = _check(path, num_threads, quiet=as_json)
    except (StoreError, OSError) as error:  # damage that opening finds; the other stores are still checked
        if as_json:
            print_json({"path": str(path), "ok": False, "error": _error_to_json(error)})
        return report(error)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({**asdict(found), "path": str(path), "ok": found.ok, "seconds": round(seconds, 4)})
    else:
        _show_report(path, found, seconds)
    return 0 if found.ok else DAMAGED


def _check(path: Path, num_threads: int | None, *, quiet: bool) -> Report:
    """Check a store; a packed one by decoding all of it."""
    try:
        store = open_store(path)
    except FormatError as error:
        if error.kind != "packed":
            raise
        return _check_packed(path, quiet=quiet)
    with store, progress_bar(f"checking {path.name}", total=store.nbytes, quiet=quiet) as bar:
        return store.verify(num_threads=num_threads, progress=bar)


def _check_packed(path: Path, *, quiet: bool) -> Report:
    from ups_store.packed.store import open_packed
    from ups_store.packed.verify import verify_packed

    with (
        open_packed(path) as store,
        progress_bar(f"checking {path.name}", total=path.stat().st_size, quiet=quiet) as bar,
    ):
        return verify_packed(store, progress=bar)


def _error_to_json(error: StoreError | OSError) -> dict[str, str]:
    return {"kind": error.kind if isinstance(error, StoreError) else "os", "message": str(error)}


def _show_report(path: Path, found: Report, seconds: float) -> None:
    shown = found.problems if is_verbose() else found.problems[:MAX_PROBLEMS_OF_VERIFY]
    for problem in shown:
        print(f"{path}: {problem}")
    if len(shown) < len(found.problems):
        print(f"{path}: and {counted(len(found.problems) - len(shown), 'more problem')}; -v shows all")
    for name, samples in found.damaged.items():
        print(f"{path}: {counted(len(samples), 'damaged sample')} in array {name!r}")
    verdict = "ok" if found.ok else f"DAMAGED, {counted(len(found.problems), 'problem')}"
    rate = found.nbytes / max(seconds, 1e-9) / 1e9
    print(
        f"{path}: {verdict} · {format_nbytes(found.nbytes)} and {found.num_chunks:,} checksums"
        f" in {seconds:.2f} s · {rate:.2f} GB/s"
    )
