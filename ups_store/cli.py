"""`python -m ups_store VERB` and `ups-store VERB`: look at stores, check them, compare them."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

import ups_store
from ups_store import convert_verbs, doctor_verb
from ups_store.console import (
    Verbose,
    console,
    format_age,
    format_nbytes,
    interruptible,
    is_verbose,
    log,
    print_json,
    progress_bar,
    report,
    results,
    run,
)
from ups_store.errors import ConfigError, StoreError, StoreNotFoundError
from ups_store.identity import differences

if TYPE_CHECKING:
    from ups_store.info import StoreInfo
    from ups_store.verify import Report

Differences: TypeAlias = dict[str, tuple[Any, Any]]

DAMAGED = 1
DIFFERENT = 7
MAX_PROBLEMS = 50  # shown for people; --json and -v show all

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # a quarter of the time that --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Paths = Annotated[list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip", metavar="PATH...")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object per store and line")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        major, minor = ups_store.FORMAT_VERSION
        print(f"ups-store {version('ups-store')}, format {major}.{minor}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    verbose: Verbose = 0,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and exit"),
    ] = False,
) -> None:
    """Stores: one dataset split in one mapped, checked, resumable Zarr file.

    Build them with `python -m ups_store.build`.
    """


@app.command()
def info(
    paths: Paths,
    *,
    as_json: AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="read all float arrays: range, mean, NaN")] = False,
    verbose: Verbose = 0,
) -> None:
    """Say what stores hold; warn if they share samples.

    Unfinished stores are described too, but not compared.
    """
    from ups_store.info import describe

    stores = [ups_store.open(path, partial=True) for path in paths]
    infos = []
    for store in stores:
        with progress_bar(
            f"reading {store.path.name}", total=store.nbytes, quiet=as_json or not stats
        ) as bar:
            infos.append(describe(store, statistics=stats, progress=bar))
    shared = _shared(stores, infos)
    if as_json:
        for i, described in enumerate(infos):
            print_json({**described.to_json(), "shared_samples": shared[i]})
        return
    _show_infos(infos)
    for i, j in itertools.combinations(range(len(infos)), 2):
        if num := shared[i].get(str(infos[j].path)):
            pair = f"{num:,} of the {len(stores[i]):,} samples of {infos[i].path} are in {infos[j].path} too"
            log(pair, label="WARNING", style="yellow")


def _shared(stores: list[ups_store.Store], infos: list[StoreInfo]) -> list[dict[str, int]]:
    """For each store how many of its samples are in which other one; unfinished stores are left out."""
    from ups_store.info import shared_samples

    found: list[dict[str, int]] = [{} for _ in stores]
    finished = [i for i, described in enumerate(infos) if described.build is None]
    for i in finished:
        for j in finished:
            if i != j and (num := len(shared_samples(stores[i], stores[j]))):
                found[i][str(infos[j].path)] = num
    return found


def _show_infos(infos: list[StoreInfo]) -> None:
    from ups_store.info_text import one_store, several_stores

    output = results()
    if len(infos) > 1:
        output.print(several_stores(infos))
    if len(infos) == 1 or is_verbose() or any(described.statistics for described in infos):
        for described in infos:
            for part in one_store(described, verbose=is_verbose()):
                output.print(part)


@app.command()
def verify(
    paths: Paths,
    *,
    as_json: AsJson = False,
    num_threads: Annotated[int | None, typer.Option(min=1, help="[default: one per processor]")] = None,
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
    with interruptible(), ConsoleWatcher(console) as watcher:
        done = repair_store(path, config, overrides=overrides, watcher=watcher)
    if done.is_needed:
        log(f"{path}: {done.num_rebuilt:,} of {done.num_samples:,} samples rebuilt, the others copied")
    else:
        log(f"{path}: nothing to repair")


def _verify(path: Path, as_json: bool, num_threads: int | None) -> int:
    """Check one store and tell what was found; returns the exit code."""
    started = time.perf_counter()
    try:
        with (
            ups_store.open(path) as store,
            progress_bar(f"checking {path.name}", total=store.nbytes, quiet=as_json) as bar,
        ):
            found = store.verify(num_threads=num_threads, progress=bar)
    except (StoreError, OSError) as error:  # damage that opening finds; the other stores are still checked
        if isinstance(error, StoreError) and error.kind == "packed":
            return _verify_packed(path, as_json)
        if as_json:
            print_json({"path": str(path), "ok": False, "error": _error_to_json(error)})
        return report(error)
    return _tell_found(path, found, time.perf_counter() - started, as_json)


def _tell_found(path: Path, found: Report, seconds: float, as_json: bool) -> int:
    """Tell what a check found; returns the exit code."""
    if as_json:
        print_json({**asdict(found), "path": str(path), "ok": found.ok, "seconds": round(seconds, 4)})
    else:
        _show_report(path, found, seconds)
    return 0 if found.ok else DAMAGED


def _verify_packed(path: Path, as_json: bool) -> int:
    """Check one packed store by decoding all of it; returns the exit code."""
    from ups_store.packed_store import open_packed
    from ups_store.packed_verify import verify_packed

    started = time.perf_counter()
    try:
        with (
            open_packed(path) as store,
            progress_bar(f"checking {path.name}", total=path.stat().st_size, quiet=as_json) as bar,
        ):
            found = verify_packed(store, progress=bar)
    except (StoreError, OSError) as error:
        if as_json:
            print_json({"path": str(path), "ok": False, "error": _error_to_json(error)})
        return report(error)
    return _tell_found(path, found, time.perf_counter() - started, as_json)


def _error_to_json(error: StoreError | OSError) -> dict[str, str]:
    return {"kind": error.kind if isinstance(error, StoreError) else "os", "message": str(error)}


def _show_report(path: Path, found: Report, seconds: float) -> None:
    shown = found.problems if is_verbose() else found.problems[:MAX_PROBLEMS]
    for problem in shown:
        print(f"{path}: {problem}")
    if len(shown) < len(found.problems):
        print(f"{path}: and {len(found.problems) - len(shown):,} more problems; -v shows all")
    for name, samples in found.damaged.items():
        print(f"{path}: {len(samples):,} damaged samples in array {name!r}")
    verdict = "ok" if found.ok else f"DAMAGED, {len(found.problems):,} problems"
    rate = found.nbytes / max(seconds, 1e-9) / 1e9
    print(
        f"{path}: {verdict} · {format_nbytes(found.nbytes)} and {found.num_chunks:,} checksums"
        f" in {seconds:.2f} s · {rate:.2f} GB/s"
    )


@app.command()
def preview(
    path: Annotated[Path, typer.Argument(help="a store, may be unfinished")],
    *,
    sample: Annotated[int | None, typer.Option(min=0, help="[default: the first one]")] = None,
    array: Annotated[str | None, typer.Option(help="[default: fields, else the largest]")] = None,
    out: Annotated[Path | None, typer.Option(help="FILE.png [default: named after the store]")] = None,
    verbose: Verbose = 0,
) -> None:
    """Draw one sample as a PNG.

    A space-time image in 1D, frames in 2D, frames of the mid-plane in 3D.
    """
    if out is not None and out.suffix.lower() != ".png":
        raise typer.BadParameter(f"{out}: expected a name that ends in .png", param_hint="--out")
    from ups_store.preview import save_preview

    with ups_store.open(path, partial=True) as store:
        target = out or _preview_name(store.path, sample, array)
        save_preview(store, target, sample=sample, array=array)
    print(target)


def _preview_name(path: Path, sample: int | None, array: str | None) -> Path:
    parts = [path.name.removesuffix(".zip").removesuffix(".zarr")]
    parts += [array] if array is not None else []
    parts += [f"sample{sample}"] if sample is not None else []
    return Path("_".join(parts) + ".png")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="a store, may be unfinished")],
    b: Annotated[Path, typer.Argument(help="another one")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    verbose: Verbose = 0,
) -> int:
    """Compare what two stores were made from.

    Exit code 0 if their identities are the same, 7 if they differ.
    """
    with ups_store.open(a, partial=True) as left, ups_store.open(b, partial=True) as right:
        differing = differences(dict(left.identity), dict(right.identity))
        attrs = differences(dict(left.attrs), dict(right.attrs))
        is_finished = not (left.is_partial or right.is_partial)
        same_content = left.fingerprint == right.fingerprint if is_finished else None
    if as_json:
        print_json(
            {
                "paths": [a, b],
                "same_identity": not differing,
                "same_content": same_content,
                "differences": differing,
                "attrs_differences": attrs,
            }
        )
    else:
        _show_differences(differing, attrs, same_content)
    return DIFFERENT if differing else 0


def _show_differences(differing: Differences, attrs: Differences, same_content: bool | None) -> None:
    headings = {"identity": differing, "attributes, which are no part of it": attrs}
    for heading, found in headings.items():
        print(f"{heading}: {len(found)} differences" if found else f"{heading}: the same")
        for key, values in found.items():
            before, after = (json.dumps(value, ensure_ascii=False) for value in values)
            print(f"  {key}: {before} -> {after}")
    verdict = {True: "the same", False: "different", None: "not compared, for one is unfinished"}
    print(f"checksums recorded in the files: {verdict[same_content]} (`verify` reads the bytes)")


@app.command()
def gc(
    folder: Annotated[Path, typer.Argument(help="folder of the stores")] = Path("cache"),
    delete: Annotated[bool, typer.Option("--delete", help="remove what can't be continued")] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="with --delete: unfinished stores too, with their samples")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
) -> None:
    """List what dead builders left in a folder; remove it on request. Files of living ones are left alone."""
    from ups_store.garbage import find_garbage, remove_garbage

    if unfinished and not delete:
        raise ConfigError("--unfinished has no effect", expected="--delete beside it")
    if not folder.is_dir():
        raise StoreNotFoundError("no such folder", path=folder)
    kinds = {"temporary", "damaged", "unfinished"} if unfinished else {"temporary", "damaged"}
    for garbage in find_garbage(folder):
        is_removed = delete and garbage.kind in kinds and remove_garbage(garbage)
        if as_json:
            print_json({**asdict(garbage), "removed": is_removed})
            continue
        committed = f", {garbage.num_committed} of {garbage.num_samples} samples committed"
        what = f"{garbage.kind}{committed if garbage.kind == 'unfinished' else ''}"
        size = f"{format_nbytes(garbage.nbytes)}, written {format_age(garbage.age_s)}"
        print(f"{garbage.path}: {what}, {size}{', removed' if is_removed else ''}")


convert_verbs.add_to(app)
doctor_verb.add_to(app)


def main() -> NoReturn:
    """Entry point of `ups-store` and `python -m ups_store`."""
    run(lambda: app(prog_name="ups-store", standalone_mode=False))
