"""The layouts that are understood, and how one is recognised: by what a file holds, never by its name."""

from __future__ import annotations

from ups_store.sources.declared import Declared
from ups_store.sources.hdf5 import h5py, source_error, tree
from ups_store.sources.layout import Layout
from ups_store.sources.pdebench import (
    CompressibleFlow,
    Converted,
    Darcy,
    IncompressibleFlow,
    SampleGroups,
    ScalarTensor,
)
from ups_store.sources.tasks import Task
from ups_store.sources.well import TheWell

LAYOUTS: tuple[Layout, ...] = (
    TheWell(),
    Darcy(),
    ScalarTensor(),
    CompressibleFlow(),
    IncompressibleFlow(),
    SampleGroups(),
    Converted(),
)


def recognise(file: h5py.File, task: Task | None = None) -> Layout:
    """The layout that the task's configuration declares, else the first that matches.

    Raises:
        SourceError: Kind "unknown_layout", with what the file holds.
    """
    if task is not None and task.layout is not None:
        return Declared(task.name, task.layout)
    for layout in LAYOUTS:
        if layout.matches(file):
            return layout
    raise source_error(
        "no layout fits",
        kind="unknown_layout",
        path=file.filename,
        expected=f"one of {', '.join(layout.name for layout in LAYOUTS)}",
        found=tree(file),
        hint="convert the file: one root dataset 'data' (sample, time, [z, y,] x[, channel]), or declare its "
        "layout (docs/guides/layouts.md)",
    )
