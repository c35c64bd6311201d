"""Verbs that look: `info` says what stores hold, `diff` compares two, `preview` draws a sample."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ups_store.check.info import StoreInfo
from ups_store.check.preview import sample_text
from ups_store.command_line import reading_urls
from ups_store.console import (
    AsJson,
    format_age,
    format_nbytes,
    is_verbose,
    print_json,
    print_lines,
    progress_bar,
    results,
)
from ups_store.errors import StoreNotFoundError, needs
from ups_store.format.root import differences
from ups_store.printable import counted, one_line
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.several import PartitionedStore
from ups_store.system.interrupt import importing
from ups_store.system.paths import is_remote, partition_of, shown_url

DIFFERENT = 1  # exit code of `diff`, as of diff(1)
_SHORT_HASH = 12


@reading_urls("paths")
def info(
    paths: Annotated[
        list[Path], typer.Argument(help="stores, <task>_<split>.zarr.zip, or their URLs", metavar="PATH...")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="read all float arrays: range, mean, NaN")] = False,
) -> None:
    """Say what stores hold; unfinished and packed ones and patterns of partitions, too."""
    from ups_store.check.info import describe

    infos = []
    for store in [open_any(path, partial=True) for path in paths]:
        title, is_quiet = f"reading {store.path.name}", as_json or not stats
        with progress_bar(title, total=store.nbytes, quiet=is_quiet) as bar:
            infos.append(describe(store, statistics=stats, progress=bar))
    if as_json:
        for described in infos:
            print_json(described.to_json())
        return
    output = results()
    if len(infos) > 1:
        output.print(several_stores(infos))
    if len(infos) == 1 or is_verbose() or any(described.statistics for described in infos):
        for described in infos:
            for part in one_store(described, verbose=is_verbose()):
                output.print(part)


@reading_urls("a", "b")
def diff(
    a: Annotated[Path, typer.Argument(help="a store, may be unfinished")],
    b: Annotated[Path, typer.Argument(help="another one")],
    *,
    as_json: AsJson = False,
) -> int:
    """Compare what two stores were made from, and how many samples they have.

    Exit code 0 if their identities and numbers of samples are the same, 1 if they differ.
    """
    with open_any(a, partial=True) as first, open_any(b, partial=True) as second:
        differing = differences(dict(first.identity_document), dict(second.identity_document))
        attrs = differences(dict(first.attrs), dict(second.attrs))
        num_samples = [len(first), len(second)]
        is_finished = not (first.is_partial or second.is_partial)
        is_alike = is_finished and _num_files(first) == _num_files(
            second
        )  # each file has checksums of its own
        same_content = first.fingerprint == second.fingerprint if is_alike else None
    if as_json:
        print_json(
            {
                "paths": [shown_url(path) if is_remote(path) else path for path in (a, b)],
                "same_identity": not differing,
                "same_content": same_content,
                "num_samples": num_samples,
                "differences": differing,
                "attrs_differences": attrs,
            }
        )
    else:
        if num_samples[0] != num_samples[1]:
            print_lines(f"samples: {num_samples[0]:,} -> {num_samples[1]:,}")
        for heading, keys in (("identity", differing), ("attributes, which are no part of it", attrs)):
            print_lines(f"{heading}: {counted(len(keys), 'difference') if keys else 'the same'}")
            for key, values in keys.items():
                before, after = (json.dumps(value, ensure_ascii=False) for value in values)
                print_lines(f"  {key}: {before} -> {after}")
        why_not = "they lie in other numbers of files" if is_finished else "one is unfinished"
        verdict = {True: "the same", False: "different", None: f"not compared, for {why_not}"}[same_content]
        print_lines(f"checksums recorded in the files: {verdict} (`verify` reads the bytes)")
    return DIFFERENT if differing or num_samples[0] != num_samples[1] else 0


def _num_files(store: AnyStore) -> int:
    return len(store.partitions) if isinstance(store, PartitionedStore) else 1


@reading_urls("path")
def preview(
    path: Annotated[Path, typer.Argument(help="a store, may be unfinished")],
    *,
    sample: Annotated[int | None, typer.Option(min=0, help="[default: the first one]")] = None,
    array: Annotated[str | None, typer.Option(help="[default: fields, else the largest]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="FILE.png, .svg or .pdf [default: a PNG named after the store]")
    ] = None,
) -> None:
    """Draw one sample; of an array of text print it.

    A space-time image in 1D, frames in 2D, frames of the mid-plane in 3D; with a steady sample its inputs,
    such as Darcy's coefficient. Samples of uint8 that are (H, W, 1), (H, W, 3) or (H, W, 4) are pictures.
    """
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        problem = f"{out}: expected a name that ends in .png, .svg or .pdf"
        raise typer.BadParameter(problem, param_hint="--out")
    if out is not None and not out.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=out.parent, hint="create it first")
    with open_any(path, partial=True) as store:
        text = sample_text(store, sample=sample, array=array)
        if text is not None and out is not None:
            raise typer.BadParameter("text is printed: leave it out", param_hint="--out")
        if text is not None:
            print_lines(*text.split("\n"))
            return
        with importing(), needs("plot"):  # what takes long of a preview
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401

            from ups_store.check.preview import save_preview

        parts = [store.path.name.removesuffix(".zip").removesuffix(".zarr").replace("*", "all")]
        parts += [array] if array is not None else []
        parts += [f"sample{sample}"] if sample is not None else []
        target = out or Path("_".join(parts) + ".png")
        save_preview(store, target, sample=sample, array=array)
    print_lines(str(target))


def one_store(info: StoreInfo, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Yield all about one store; with `verbose` attributes of arrays and the identity document, too."""
    yield Text(one_line(str(info.path)), style="bold")
    size = format_nbytes(info.nbytes)
    samples = counted(info.num_samples, "sample")
    yield f"format {info.format_version} · {samples} · {size} · {_state(info)}"
    yield f"config hash {info.config_hash}"
    where = f", for it lies on {info.network}" if info.network and info.reads != "remote" else ""
    yield f"reads: {info.reads}{where}"
    yield ""
    table = _table("array", "shape", "dtype", "dims", "per sample", "slot", right=("per sample", "slot"))
    for name, array in {**info.arrays, **info.constants}.items():
        per_sample = format_nbytes(array.sample_nbytes)
        per_sample = f"constant, {per_sample}" if name in info.constants else per_sample
        slot = format_nbytes(array.slot_nbytes) if array.slot_nbytes else "-"
        shape = str(array.shape).replace("None", "*")
        table.add_row(name, shape, array.dtype, one_line(" ".join(array.dims)), per_sample, slot)
    yield table
    if info.statistics is not None:
        yield ""
        numbers = ("min", "max", "mean", "NaN", "Inf")
        table = _table("array", *numbers, right=numbers)
        for name, values in info.statistics.items():
            moments = (values.minimum, values.maximum, values.mean)
            cells = ("-" if value is None else f"{value:.6g}" for value in moments)
            counts = (Text(f"{n:,}", style="bold red" if n else "") for n in (values.num_nan, values.num_inf))
            table.add_row(name, *cells, *counts)
        yield table
    attrs = {name: array.attrs for name, array in info.arrays.items() if array.attrs} if verbose else {}
    for heading, document in (
        ("attributes", info.attrs),
        ("array attributes", attrs),
        ("identity", info.identity),
        ("identity document", info.identity_document if verbose else {}),
    ):
        if document:
            yield ""
            yield Text(heading, style="bold")
            for key, value in document.items():  # nested values as JSON
                text = one_line(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                if len(text) > 100:
                    text = json.dumps(value, ensure_ascii=False, indent=2)
                yield indent(f"{one_line(key)}: {text}", "  ")


def several_stores(infos: Sequence[StoreInfo]) -> Table:
    """Make a table with a line for each store."""
    table = _table("store", "samples", "size", "arrays", "config hash", "state", right=("samples", "size"))
    for info in infos:
        arrays = []
        for name, array in info.arrays.items():
            shape = "×".join("*" if num is None else str(num) for num in array.shape[1:]) or "scalar"
            arrays.append(f"{name} {shape}")
        size, config_hash = format_nbytes(info.nbytes), info.config_hash[:_SHORT_HASH]
        path, num_samples = one_line(str(info.path)), f"{info.num_samples:,}"
        table.add_row(path, num_samples, size, ", ".join(arrays), config_hash, _state(info))
    return table


def _state(info: StoreInfo) -> str:
    age = format_age(time.time() - info.modified_s)
    if (build := info.build) is not None:
        which = f"{counted(build.num_committed, 'sample')} of an unknown number"
        which = f"{build.num_committed:,} of {info.num_samples:,} samples" if build.is_counted else which
        kept = f", {build.durability}" if build.durability else ", only its renaming is left"
        by = f"being built by {one_line(build.owner or 'an unknown process')}"
        if not build.is_running:
            by = "no process builds it" + (f" (last {one_line(build.owner)})" if build.owner else "")
        return f"unfinished: {which} committed{kept} · {by} · last written {age}"
    facts = []
    if info.partitions:
        facts.append(
            counted(len(info.partitions), "partition" if partition_of(info.partitions[0]) else "store")
        )
    if info.packed:
        level = "" if info.packed.level is None else f", level {info.packed.level}"
        unpacked = f"{format_nbytes(info.packed.mapped_nbytes)} unpacked"
        facts.append(f"packed by {info.packed.codec}{level}, {unpacked}")
    return " · ".join([*facts, f"written {age}", f"{info.resident_share:.0%} in RAM"])


def _table(*headings: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table
