"""Verbs that write files from files: each parses and calls one function."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ups_store.command_line import completing
from ups_store.console import (
    AsJson,
    NumThreads,
    format_nbytes,
    interruptible,
    is_verbose,
    log,
    print_json,
    print_lines,
    progress_bar,
)
from ups_store.convert.export import FORMATS, export_store
from ups_store.errors import SpecError, StoreNotFoundError
from ups_store.printable import counted, one_line
from ups_store.read.open import open_any
from ups_store.read.several import parts_of
from ups_store.system.paths import is_pattern, partition_path
from ups_store.writing.target import check_target, payload_nbytes

Force = Annotated[bool, typer.Option("--force", help="replace what is there")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="don't check the source's checksums first")]
Source = Annotated[Path, typer.Argument(help="a finished store, or a pattern", metavar="FILE")]
Out = Annotated[Path, typer.Argument(help="what to write", metavar="OUT")]

MAX_LEFT_OUT = 10  # files shown for people; --json and -v show all
WHOLE_OR_NOT = "the target is whole, or as it was before: run it again, with --force if it is there"
WHOLE_KEPT = "files that are whole stay: run it again with --force"

_formats = completing(lambda: FORMATS)


def export(
    path: Source,
    out: Out,
    *,
    to: Annotated[str, typer.Option("--to", help=f"format: {', '.join(FORMATS)}", autocompletion=_formats)],
    force: Force = False,
    no_verify: NoVerify = False,
) -> None:
    """Write a store in another format: a Zarr folder, a safetensors or HDF5 file, references of Kerchunk."""
    with (
        interruptible(WHOLE_OR_NOT),
        open_any(path) as store,
        progress_bar(f"writing {out.name}", total=payload_nbytes(store)) as bar,
    ):
        done = export_store(store, out, to=to, force=force, verify=not no_verify, progress=bar)
        num_samples = len(store)
    _show_written(done, num_samples)


def _show_written(path: Path, num_samples: int) -> None:
    """The path to stdout, for programs; counts and size to stderr."""
    written = [path, *path.rglob("*")] if path.is_dir() else [path]
    nbytes = sum(file.stat().st_size for file in written if file.is_file())
    print_lines(str(path))
    log(f"{one_line(str(path))}: wrote {counted(num_samples, 'sample')}, {format_nbytes(nbytes)}")


def import_pt(
    folder: Annotated[Path, typer.Argument(help="folder of .pt files, a sample each", metavar="FOLDER")],
    out: Out,
    *,
    pattern: Annotated[str, typer.Option(help="which files of the folder")] = "sample_*.pt",
    names: Annotated[
        list[str] | None,
        typer.Option("--map", help="call the array of a key otherwise; may be repeated", metavar="KEY=NAME"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="leave out a key with all within it; may be repeated", metavar="KEY"),
    ] = None,
    ragged: Annotated[
        list[str] | None,
        typer.Option(help="an array whose number of rows differs by file; may be repeated", metavar="NAME"),
    ] = None,
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="files that can't be used: fail, or leave them out")
    ] = "fail",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a store of a folder of .pt files that hold dicts of names to tensors.

    Nothing in them is executed. Run it again to continue after an interruption.
    """
    from ups_store.convert.import_pt import RefusedFilesError, folder_nbytes
    from ups_store.convert.import_pt import import_pt as run_import

    total = 2 * folder_nbytes(folder, pattern)
    try:
        with interruptible(), progress_bar(f"reading {folder.name}", total=total, quiet=as_json) as bar:
            done = run_import(
                folder,
                out,
                pattern=pattern,
                map=_parsed_map(names or ()),
                ignore=ignore or (),
                ragged=ragged or (),
                on_error=on_error,
                force=force,
                progress=bar,
            )
    except RefusedFilesError as error:
        if as_json:
            print_json({"path": str(out), "error": error.kind, "refused": error.refused})
        raise
    refused = [f"{folder / name}: left out: {reason}" for name, reason in done.refused.items()]
    if (more := len(refused) - MAX_LEFT_OUT) > 0 and not is_verbose():
        refused[MAX_LEFT_OUT:] = [f"{folder}: {counted(more, 'more file')} left out; -v shows all"]
    for line in refused:
        log(line, label="warning", style="yellow")
    if as_json:
        print_json(asdict(done))
    else:
        left_out = counted(len(done.refused), "file")
        print_lines(f"{done.path}: {counted(done.num_samples, 'sample')}, {left_out} left out")


def _parsed_map(given: Sequence[str]) -> dict[str, str]:
    pairs = [(key, name) for key, _, name in (text.partition("=") for text in given)]
    for text, pair in zip(given, pairs, strict=True):
        if not all(pair):
            raise typer.BadParameter(f"expected KEY=NAME, found {text!r}", param_hint="--map")
    for kind, values in (("key", [key for key, _ in pairs]), ("name", [name for _, name in pairs])):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise typer.BadParameter(f"the {kind} {twice!r} is given twice", param_hint="--map")
    return dict(pairs)


def concat(
    paths: Annotated[
        list[Path],
        typer.Argument(help="finished stores, or a pattern, then the one to write", metavar="FILE... OUT"),
    ],
    *,
    force: Force = False,
    no_verify: NoVerify = False,
) -> None:
    """Make one store of the samples of several, in their order. Run it again to continue."""
    from ups_store.writing.concat import concat_stores

    if len(paths) < 2:
        raise typer.BadParameter("expected one store or more, and the one to write", param_hint="FILE... OUT")
    with contextlib.ExitStack() as opened:
        opened.enter_context(interruptible())
        stores = [opened.enter_context(open_any(path)) for path in paths[:-1]]
        total = sum(map(payload_nbytes, stores))
        bar = opened.enter_context(progress_bar(f"writing {paths[-1].name}", total=total))
        done = concat_stores(stores, paths[-1], force=force, verify=not no_verify, progress=bar)
        num_samples = sum(map(len, stores))
    _show_written(done, num_samples)


def split(
    path: Source,
    outs: Annotated[list[Path], typer.Argument(help="the stores to write", metavar="OUT...")],
    *,
    fractions: Annotated[str | None, typer.Option(help="such as 0.8,0.1,0.1: one per OUT")] = None,
    samples: Annotated[
        str | None, typer.Option(help="such as 0:80,80:100: FIRST:PAST_LAST, one per OUT")
    ] = None,
    force: Force = False,
    no_verify: NoVerify = False,
) -> None:
    """Make stores of consecutive samples of one. Run it again to continue."""
    from ups_store.writing.concat import split_store

    if (fractions is None) == (samples is None):
        raise typer.BadParameter("expected one of the two", param_hint="--fractions, --samples")
    with (
        interruptible(),
        open_any(path) as store,
        progress_bar(f"splitting {path.name}", total=payload_nbytes(store)) as bar,
    ):
        ranges = _ranges(len(store), fractions, samples)
        done = split_store(store, outs, samples=ranges, force=force, verify=not no_verify, progress=bar)
    for target, (first, end) in zip(done, ranges, strict=True):
        _show_written(target, end - first)


def _ranges(num_samples: int, fractions: str | None, samples: str | None) -> list[tuple[int, int]]:
    from ups_store.writing.concat import ranges_of_fractions

    try:
        if fractions is not None:
            return ranges_of_fractions(num_samples, [float(text) for text in fractions.split(",")])
        edges = [text.split(":") for text in (samples or "").split(",")]
        return [(int(first), int(end)) for first, end in edges]
    except SpecError:
        raise
    except ValueError:
        problem = f"expected numbers such as 0.8,0.1,0.1, found {fractions!r}"
        if fractions is None:
            problem = f"expected FIRST:PAST_LAST for each OUT, such as 0:80,80:100, found {samples!r}"
        option = "--samples" if fractions is None else "--fractions"
        raise typer.BadParameter(problem, param_hint=option) from None


def pack(
    path: Source,
    out: Out,
    *,
    codec: Annotated[
        Literal["blosc", "pcodec"],
        typer.Option(help="any Zarr reader knows blosc; pcodec makes smooth data smallest"),
    ] = "blosc",
    level: Annotated[int | None, typer.Option(help="effort [default: blosc 5, pcodec 8]")] = None,
    force: Force = False,
    num_threads: NumThreads = None,
    as_json: AsJson = False,
) -> None:
    """Compress a store for shipping; `unpack` gives the same file back, byte for byte.

    Each partition that a pattern names becomes a packed one, named after OUT as partitions are.
    """
    from ups_store.packed.pack import pack_store

    with (
        interruptible(WHOLE_KEPT if is_pattern(path) else WHOLE_OR_NOT),
        open_any(path) as store,
        progress_bar(f"packing {path.name}", total=payload_nbytes(store), quiet=as_json) as bar,
    ):
        parts = parts_of(store)
        outs = [partition_path(out, i, len(parts)) for i in range(len(parts))] if is_pattern(path) else [out]
        for target in outs:
            check_target(target.absolute(), force=force)
        options: dict[str, Any] = {"codec": codec, "level": level, "force": force, "num_threads": num_threads}
        done = [pack_store(*pair, progress=bar, **options) for pair in zip(parts, outs, strict=True)]
    for report in done:
        if as_json:
            print_json(asdict(report))
        else:
            ratio = report.mapped_nbytes / report.nbytes
            print_lines(f"{report.path}: {format_nbytes(report.nbytes)}, {ratio:.2f} times smaller")


def unpack(
    path: Annotated[Path, typer.Argument(help="a packed store", metavar="FILE")],
    out: Out,
    *,
    force: Force = False,
) -> None:
    """Make the mapped store that was packed, byte for byte. Run it again to continue."""
    from ups_store.packed.pack import unpack_store
    from ups_store.packed.store import open_packed

    try:
        packed = open_packed(path)
    except StoreNotFoundError:
        open_any(path).close()  # which says whether it is being built
        raise
    with (
        interruptible(),
        packed,
        progress_bar(f"unpacking {path.name}", total=packed.catalog.layout.file_nbytes) as bar,
    ):
        done = unpack_store(packed, out, force=force, progress=bar)
        num_samples = len(packed)
    _show_written(done, num_samples)
