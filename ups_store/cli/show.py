"""Verbs that show: `diff` what two stores were made from, `preview` one sample, as a picture or text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from ups_store.check.preview import sample_text
from ups_store.command_line import reading_urls
from ups_store.console import AsJson, print_json, print_lines
from ups_store.errors import StoreNotFoundError, needs
from ups_store.format.root import differences
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.several import PartitionedStore
from ups_store.system.interrupt import importing
from ups_store.system.urls import is_remote, shown_url

Differences: TypeAlias = dict[str, tuple[Any, Any]]

DIFFERENT = 1  # as of diff(1)


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
    with open_any(a, partial=True) as left, open_any(b, partial=True) as right:
        differing = differences(dict(left.identity_document), dict(right.identity_document))
        attrs = differences(dict(left.attrs), dict(right.attrs))
        num_samples = [len(left), len(right)]
        is_finished = not (left.is_partial or right.is_partial)
        is_alike = is_finished and _num_files(left) == _num_files(right)  # each file has checksums of its own
        same_content = left.fingerprint == right.fingerprint if is_alike else None
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
        why_not = "they lie in other numbers of files" if is_finished else "one is unfinished"
        if num_samples[0] != num_samples[1]:
            print_lines(f"samples: {num_samples[0]:,} -> {num_samples[1]:,}")
        _show_differences(differing, attrs, same_content, why_not)
    return DIFFERENT if differing or num_samples[0] != num_samples[1] else 0


def _num_files(store: AnyStore) -> int:
    return len(store.partitions) if isinstance(store, PartitionedStore) else 1


def _show_differences(
    differing: Differences, attrs: Differences, same_content: bool | None, why_not: str
) -> None:
    headings = {"identity": differing, "attributes, which are no part of it": attrs}
    for heading, found in headings.items():
        print_lines(f"{heading}: {counted(len(found), 'difference')}" if found else f"{heading}: the same")
        for key, values in found.items():
            before, after = (json.dumps(value, ensure_ascii=False) for value in values)
            print_lines(f"  {key}: {before} -> {after}")
    verdict = {True: "the same", False: "different", None: f"not compared, for {why_not}"}
    print_lines(f"checksums recorded in the files: {verdict[same_content]} (`verify` reads the bytes)")


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

        target = out or _preview_name(store.path, sample, array)
        save_preview(store, target, sample=sample, array=array)
    print_lines(str(target))


def _preview_name(path: Path, sample: int | None, array: str | None) -> Path:
    parts = [path.name.removesuffix(".zip").removesuffix(".zarr").replace("*", "all")]
    parts += [array] if array is not None else []
    parts += [f"sample{sample}"] if sample is not None else []
    return Path("_".join(parts) + ".png")
