"""What verifies of a damaged or unfinished file, copied into a new store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.check.doctor import ADVICE, Diagnosis, spans
from ups_store.check.intact import is_identity_lost, lengths_of, read_intact
from ups_store.errors import FormatError, IdentityMismatchError, hinting
from ups_store.format.layout import ArrayLayout, Layout
from ups_store.format.metadata import ArraySpec
from ups_store.read.base import spec_of
from ups_store.read.catalog import Catalog
from ups_store.read.gather import Samples
from ups_store.read.store_file import read_constant
from ups_store.system import files
from ups_store.write.create import create

ORIGINAL_SAMPLE = "original_sample"


def salvage(diagnosis: Diagnosis, out: Path) -> Path:
    """Copy what verifies into a new store; the examined file stays as it is.

    The new store has an int64 array `original_sample` with the old sample numbers, and its identity says what
    it was salvaged from, or `"identity": "lost"`.

    Args:
        diagnosis: Of the file.
        out: Where the new store goes; there must be nothing yet.
    Returns:
        The path of the new store.
    Raises:
        FormatError: If nothing verifies.
        IdentityMismatchError: If an unfinished store of something else is at `out`.
        FileExistsError: If there is something at `out`.
        CorruptChunkError: If the file changed since it was examined.
    """
    catalog, intact, samples = diagnosis.catalog, diagnosis.intact, diagnosis.savable
    if catalog is None or intact is None or not len(samples):
        raise FormatError(
            "there is nothing to save",
            path=diagnosis.path,
            kind="nothing_to_salvage",
            expected="at least 1 sample that verifies",
            found=diagnosis.status.value,
            hint="copy it again, or build it again" if intact else ADVICE[diagnosis.status],
        )
    if files.exists(out):
        raise FileExistsError(f"{out}: there is something already; give the new store another name")
    with files.opened(diagnosis.path) as fd:
        layout, names = catalog.layout, intact.arrays
        specs = {name: _spec(fd, layout, name, samples) for name in names}
        number = _free_name(layout.arrays)
        constants = {
            name: read_constant(fd, layout.arrays[name], path=diagnosis.path) for name in intact.constants
        }
        with hinting("give the new store another name", IdentityMismatchError, FormatError):
            writer = create(
                out,
                {**specs, number: ArraySpec((len(samples),), "int64", dims=("sample",))},
                constants=constants,
                dims={name: layout.arrays[name].meta.dims for name in constants},
                identity=_identity(diagnosis, catalog),
                attrs=catalog.root.attrs,
            )
        with writer:
            first = 0
            for batch, values in read_intact(fd, layout, names, samples, path=diagnosis.path):
                writer.commit_many(np.arange(first, first + len(batch)), {**values, number: batch})
                first += len(batch)
            return writer.finish()


def _identity(diagnosis: Diagnosis, catalog: Catalog) -> dict[str, Any]:
    if is_identity_lost(catalog):
        source: dict[str, Any] = {"identity": "lost"}
    else:
        identity = catalog.root.identity
        source = {"source_config_hash": catalog.root.config_hash, "source_content": identity.get("content")}
    return {
        "kind": "salvaged",
        **source,
        "samples": spans(diagnosis.savable),
        "lost_arrays": list(diagnosis.lost_arrays),
    }


def _spec(fd: int, layout: Layout, name: str, samples: Samples) -> ArraySpec:
    spec = spec_of(layout.arrays[name].meta, len(samples))
    if name not in layout.ragged:
        return spec
    return replace(spec, lengths=lengths_of(fd, layout.ragged[name], samples))


def _free_name(taken: dict[str, ArrayLayout]) -> str:
    name = ORIGINAL_SAMPLE
    while name in taken:  # a store that was salvaged before
        name = f"{name}_before" if name == ORIGINAL_SAMPLE else f"{name}_"
    return name
