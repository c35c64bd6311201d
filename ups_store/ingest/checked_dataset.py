"""A dataset of a source, once it was seen to have the rank and the kind of numbers that are expected."""

from __future__ import annotations

from functools import partial

import h5py

from ups_store.ingest.contents import AXIS_NAMES
from ups_store.ingest.hdf5 import get_dataset, source_error


def checked_dataset(
    file: h5py.File, name: str, *, axes: str, kinds: str, sample: int | None = None
) -> h5py.Dataset:
    """Open a dataset.

    Args:
        file: The source.
        name: HDF5 path of the dataset.
        axes: A letter for each of its axes (`contents.AXIS_NAMES`).
        kinds: NumPy's letters of the kinds of dtype that it may have, such as "fiu".
        sample: For messages, where the dataset belongs to one.
    Raises:
        SourceError: Kind "missing_dataset", "wrong_rank" or "wrong_dtype".
    """
    dataset = get_dataset(file, name, sample=sample)
    dtype, bad = dataset.dtype, partial(source_error, path=file.filename, dataset=name, sample=sample)
    if dataset.ndim != len(axes):
        raise bad(
            f"dataset {name!r} has the wrong rank",
            kind="wrong_rank",
            expected=f"({', '.join(AXIS_NAMES[axis] for axis in axes)})",
            found=f"shape {dataset.shape}",
        )
    if dtype.kind not in kinds or dtype.itemsize > 8:  # 8: no array type is wider than float64
        raise bad(
            f"dataset {name!r} has the wrong dtype",
            kind="wrong_dtype",
            expected="float16, float32 or float64" if kinds == "f" else "numbers of at most 8 bytes",
            found=dtype,
            hint="convert the file",
        )
    return dataset
