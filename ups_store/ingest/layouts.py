"""The layouts that are understood, and how one is recognised: by what a file holds, never by its name."""

from __future__ import annotations

from typing import Protocol

import h5py

from ups_store.ingest.contents import Contents
from ups_store.ingest.converted import Converted
from ups_store.ingest.hdf5 import source_error, tree
from ups_store.ingest.pdebench import CompressibleFlow, Darcy, IncompressibleFlow, SampleGroups, ScalarTensor
from ups_store.tasks import Task


class Layout(Protocol):
    """One way of keeping simulations in HDF5. It only describes; `regions` reads them all alike."""

    name: str
    version: int  # part of a store's identity

    def matches(self, file: h5py.File) -> bool:
        """Whether the file is meant to be of this layout, complete or not."""
        ...

    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Where the file keeps what. `describe.measure` checks that it is so.

        Raises:
            SourceError: If a dataset that the description depends on is missing or makes no sense.
        """
        ...


LAYOUTS: tuple[Layout, ...] = (
    Darcy(),
    ScalarTensor(),
    CompressibleFlow(),
    IncompressibleFlow(),
    SampleGroups(),
    Converted(),
)


def recognise(file: h5py.File) -> Layout:
    """The first layout that matches.

    Raises:
        SourceError: Kind "unknown_layout", with what the file holds.
    """
    for layout in LAYOUTS:
        if layout.matches(file):
            return layout
    raise source_error(
        "no layout fits",
        kind="unknown_layout",
        path=file.filename,
        expected=f"one of {', '.join(layout.name for layout in LAYOUTS)}",
        found=tree(file),
        hint="convert the file: one root dataset 'data' (sample, time, [z, y,] x[, channel])",
    )
