"""The verb `preview`: one sample as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups_store.console import Verbose
from ups_store.errors import StoreNotFoundError
from ups_store.read.open import open_store
from ups_store.system.interrupt import importing


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
    if out is not None and not out.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=out.parent, hint="create it first")
    with importing():  # what takes long of a preview
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

        from ups_store.check.preview import save_preview

    with open_store(path, partial=True) as store:
        target = out or _preview_name(store.path, sample, array)
        save_preview(store, target, sample=sample, array=array)
    print(target)


def _preview_name(path: Path, sample: int | None, array: str | None) -> Path:
    parts = [path.name.removesuffix(".zip").removesuffix(".zarr")]
    parts += [array] if array is not None else []
    parts += [f"sample{sample}"] if sample is not None else []
    return Path("_".join(parts) + ".png")
