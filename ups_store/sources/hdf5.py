"""HDF5 files, opened and read so that every failure is a `SourceError` that says where and what to do.

A dataset is handed out once it has been seen to have the expected rank and kind of numbers.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ups_store.errors import SourceError, StoreError, needs
from ups_store.sources.cf import ATTRIBUTES, CfEncoding
from ups_store.sources.contents import AXIS_NAMES

with needs("hdf5"):
    import h5py as h5py  # where the other modules of this room have it from

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
Box: TypeAlias = tuple[range, ...]  # indices along each axis
_TREE_LINES = 12
_FILTERS = {  # registered numbers of those that hdf5plugin has
    **{307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp"},
    **{32015: "zstd", 32018: "fcidecomp", 32024: "sz3", 32026: "blosc2", 32028: "sperr"},
}


def source_error(problem: str, *, dataset: str | None = None, **details: Any) -> SourceError:
    """A `SourceError` with its `dataset` attribute set; `details` as for every `StoreError`."""
    error = SourceError(problem, **details)
    error.dataset = dataset
    return error


@contextmanager
def translated(
    doing: str,
    *,
    path: str | Path,
    dataset: str | None = None,
    sample: int | None = None,
    opened: h5py.Dataset | None = None,
) -> Iterator[None]:
    """Turn what h5py raises into a `SourceError` of kind "read_failed".

    Args:
        doing: What is being done, such as "can't read samples 4..7"; the start of the message.
        path: The file.
        dataset: HDF5 path of the dataset, where one is concerned.
        sample: First of the samples concerned.
        opened: The dataset itself, whose filters the error names.
    """
    try:
        yield
    except StoreError as error:
        error.sample = sample if error.sample is None else error.sample
        raise
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # all that h5py knows
        raise source_error(
            doing if dataset is None else f"{doing} of dataset {dataset!r}",
            kind="read_failed",
            path=path,
            dataset=dataset,
            sample=sample,
            found=error.args[0] if isinstance(error, KeyError) else error,  # str(KeyError) has quotes
            hint=f"download or make the file again{_decoded_by(opened)}",
        ) from error


def _decoded_by(dataset: h5py.Dataset | None) -> str:
    filters = filters_of(dataset) if dataset is not None else []
    return f"; its chunks go through {', '.join(called for _, called in filters)}" if filters else ""


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading.

    The library's own locking is used first, since it notices a simulation that is still writing the file
    (and two openings of one file in one process must agree on it). Where the file system has no locks, as
    some network mounts, the file is opened without. `HDF5_USE_FILE_LOCKING` decides over both.
    """
    if not path.exists():
        raise source_error(
            "no such file", kind="missing_file", path=path, hint="check data.root and data.files"
        )
    if path.is_dir():
        raise source_error(
            "not a file", kind="not_hdf5", path=path, expected="an HDF5 file", found="a folder"
        )
    if not path.is_file():  # HDF5 would wait for the other end of a pipe
        raise no_file_any_more(path)
    try:
        return _open_without_locks_if_there_are_none(path)
    except OSError as error:
        raise _opening_error(path, error) from error


def no_file_any_more(path: Path) -> SourceError:
    """The error for a source that has become a pipe, a socket or a device."""
    hint = "it was a file when the build began: mend the source, and run again"
    return source_error("not a regular file any more", kind="not_a_file", path=path, hint=hint)


def _open_without_locks_if_there_are_none(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except BlockingIOError:
        raise
    except OSError as error:
        if "unable to lock file" not in str(error):
            raise
        return h5py.File(path, "r", locking=False)


def _opening_error(path: Path, error: OSError) -> SourceError:
    if isinstance(error, BlockingIOError) or "already open for" in str(error):
        return source_error(
            "the file is being written",
            kind="being_written",
            path=path,
            found=str(error),
            hint="close the program that writes it; if that one crashed, run `h5clear -s` on the file",
        )
    if "truncated file" in str(error):
        return source_error(
            "the file ends before its data does",
            kind="truncated",
            path=path,
            found=f"{path.stat().st_size} bytes",
            hint="download or copy it again, and compare its checksum",
        )
    is_refused = error.errno in (errno.EACCES, errno.EPERM)
    if is_refused or has_signature(path):
        hint = "check its permissions (`ls -l`)" if is_refused else "copy it again, and compare its checksum"
        return source_error("can't be opened", kind="unreadable", path=path, found=str(error), hint=hint)
    return source_error(
        "not an HDF5 file", kind="not_hdf5", path=path, expected=_hex(_SIGNATURE), found=_first_bytes(path)
    )


def has_signature(path: Path) -> bool:
    """Whether a file has the signature of HDF5."""
    # The superblock lies at 0, 512, 1024, 2048, ...: a user block of any of these sizes may precede it.
    size = path.stat().st_size
    offset = 0
    with path.open("rb") as file:
        while offset + len(_SIGNATURE) <= size:
            file.seek(offset)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            offset = max(512, offset * 2)
    return False


def _first_bytes(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(len(_SIGNATURE))
    return _hex(start) if start else "an empty file"


def _hex(data: bytes) -> str:
    return f"bytes {data.hex(' ')}"


def get_dataset(file: h5py.File, name: str, *, sample: int | None = None) -> h5py.Dataset:
    """A dataset by its HDF5 path."""
    with translated("can't open", path=file.filename, dataset=name, sample=sample):
        found = file.get(name)
    if isinstance(found, h5py.Dataset):
        return found
    raise source_error(
        f"no dataset {name!r}",
        kind="missing_dataset",
        path=file.filename,
        dataset=name,
        sample=sample,
        found=tree(file),
    )


def known_shape(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """The shape of any dataset, but None of a virtual one without end: HDF5 would look into its sources."""
    plist = dataset.id.get_create_plist()
    for i in range(plist.get_virtual_count() if dataset.is_virtual else 0):
        space = plist.get_virtual_vspace(i)
        is_slab = space.get_select_type() == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab()
        if is_slab and any(h5py.h5s.UNLIMITED in each for each in space.get_regular_hyperslab()):
            return None
    return tuple(dataset.shape)


def tree(file: h5py.File) -> str:
    """What a file holds, as a short list such as "tensor (64, 21, 1024), x-coordinate (1024)"."""
    lines: list[str] = []

    def note(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            lines.append(f"{name} {known_shape(item) or 'virtual'}")
        return True if len(lines) > _TREE_LINES else None  # True ends the visit

    def note_link(name: str, link: Any) -> bool | None:
        if not isinstance(link, h5py.HardLink) and name not in file:
            lines.append(f"{name}, a link to {_linked(link)}, which isn't there")
        return True if len(lines) > _TREE_LINES else None

    try:
        file["/"].visititems(note)  # of the group: its items are only looked at
        file["/"].visititems_links(note_link)
    except (OSError, KeyError, RuntimeError, TypeError, ValueError):  # only a part of an error message
        lines.append("damaged objects")
    shown = lines[:_TREE_LINES] + (["..."] if len(lines) > _TREE_LINES else [])
    return ", ".join(shown) or "no datasets"


def _linked(link: Any) -> str:
    """What a link names: an object, or one of another file."""
    where = f" of {link.filename}" if isinstance(link, h5py.ExternalLink) else ""
    return f"{link.path}{where}"


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
    if dtype.kind in "iu" and encoding_of(dataset, name, path=file.filename):
        kinds += "iu"  # which are decoded
    if dtype.kind not in kinds or dtype.itemsize > 8:  # 8: no array type is wider than float64
        raise bad(
            f"dataset {name!r} has the wrong dtype",
            kind="wrong_dtype",
            expected="float16, float32 or float64" if kinds == "f" else "numbers of at most 8 bytes",
            found=dtype,
            hint="convert the file",
        )
    for index, (number, called) in enumerate(filters_of(dataset)):
        if _is_lacking(dataset, index, number):
            hint = "pip install hdf5plugin" if number in _FILTERS else "install it, and set HDF5_PLUGIN_PATH"
            raise bad(
                f"dataset {name!r} needs {called}, which HDF5 doesn't find", kind="no_filter", hint=hint
            )
    return dataset


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, str]]:
    """Number of each filter of a dataset, and what people call it, such as "filter 32015 (zstd)"."""
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    names = [_FILTERS.get(number) or name.decode(errors="replace") for number, _, _, name in filters]
    return [
        (number, f"filter {number} ({name})" if name else f"filter {number}")
        for (number, *_), name in zip(filters, names, strict=True)
    ]


def _is_lacking(dataset: h5py.Dataset, index: int, number: int) -> bool:
    """Whether the first chunk went through a filter that HDF5 doesn't find."""
    if h5py.h5z.filter_avail(number):
        return False
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # which registers its filters, in 0.1 s
    is_used = dataset.id.get_num_chunks() and not dataset.id.get_chunk_info(0).filter_mask >> index & 1
    return bool(is_used and not h5py.h5z.filter_avail(number))


def encoding_of(dataset: h5py.Dataset, name: str, *, path: str | Path) -> CfEncoding | None:
    """How the numbers of a dataset are encoded; None where they are as they stand."""
    if not h5py.h5a.get_num_attrs(dataset.id):
        return None
    try:
        with translated("can't read attributes", path=path, dataset=name):
            attrs = {each: dataset.attrs[each] for each in ATTRIBUTES if each in dataset.attrs}
        return CfEncoding.of(attrs, dataset.dtype)
    except ValueError as error:
        raise source_error(
            f"dataset {name!r}: {error}", kind="bad_encoding", path=path, dataset=name, hint="mend the file"
        ) from None


def read_whole(dataset: h5py.Dataset, name: str, *, path: str | Path, sample: int | None = None) -> Any:
    """All of a small dataset, decoded, in native byte order."""
    check_written(dataset, name, (slice(None),) * dataset.ndim, path=path, sample=sample)
    encoding = encoding_of(dataset, name, path=path)
    with translated("can't read", path=path, dataset=name, sample=sample):
        values = dataset[...]
        return (
            encoding.decode(values)
            if encoding
            else values.astype(dataset.dtype.newbyteorder("="), copy=False)
        )


class VirtualDataset(h5py.Dataset):  # type: ignore[misc]  # h5py has no types
    """A virtual dataset of which it is known what its sources fill; HDF5 gives the fill value for the rest.

    Attributes:
        filled: The indices along its axes that each source fills; empty where they fill all of it.
    """

    filled: Sequence[Box] = ()

    def is_filled(self, part: tuple[slice, ...]) -> bool:
        """Whether sources fill all of a part of it."""
        spans = [range(n)[each] for n, each in zip(self.shape, part, strict=True)]
        num_filled = sum(math.prod(map(_num_within, box, spans)) for box in self.filled)
        return num_filled >= math.prod(map(len, spans))


def _num_within(indices: range, span: range) -> int:
    """How many of the indices lie in a span without steps."""
    first, last = (max(0, -(-(end - indices.start) // indices.step)) for end in (span.start, span.stop))
    return len(indices[first:last])


def is_complete(dataset: h5py.Dataset) -> bool:
    """Whether the file has bytes for all of a dataset, which takes HDF5 0.5 µs a chunk to say.

    Of what was never written HDF5 reads the fill value: by default 0, as if that were a measurement.
    """
    if dataset.is_virtual:
        return not getattr(dataset, "filled", ())
    if dataset.external or not dataset.size:  # `external_data` has checked that the bytes are there
        return True
    if dataset.chunks is None:
        return bool(dataset.id.get_storage_size())
    num_chunks = math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
    return bool(dataset.id.get_num_chunks() == num_chunks)


def check_written(
    dataset: h5py.Dataset, name: str, box: tuple[slice, ...], *, path: str | Path, sample: int | None = None
) -> None:
    """Refuse a part of a dataset that was never written, unless it reads as NaN.

    Args:
        dataset: The dataset.
        name: Its HDF5 path.
        box: The part, a slice for each axis.
        path: The file, for messages.
        sample: Number of the sample, likewise.
    """
    with translated("can't tell what was written", path=path, dataset=name, sample=sample):
        if is_complete(dataset):
            return
    fill, encoding = np.array([dataset.fillvalue]), encoding_of(dataset, name, path=path)
    if np.isnan(encoding.decode(fill) if encoding else fill).all():  # and is dealt with as any other NaN
        return
    if isinstance(dataset, VirtualDataset) and dataset.is_filled(box):
        return
    if dataset.chunks is not None:
        spans = [range(n)[each] for n, each in zip(dataset.shape, box, strict=True)]
        starts = [range(r.start // c * c, r.stop, c) for r, c in zip(spans, dataset.chunks, strict=True)]
        with translated("can't tell what was written", path=path, dataset=name, sample=sample):
            at = next((at for at in itertools.product(*starts) if not _has_chunk(dataset, at)), None)
        if at is None:
            return
    raise source_error(
        f"dataset {name!r} was never written" + ("" if dataset.chunks is None else f" at {at}"),
        kind="not_written",
        path=path,
        dataset=name,
        sample=sample,
        expected="data",
        found=f"nothing, which HDF5 reads as {dataset.fillvalue}",
        hint="finish or make the file again",
    )


def _has_chunk(dataset: h5py.Dataset, at: tuple[int, ...]) -> bool:
    return dataset.id.get_chunk_info_by_coord(at).byte_offset is not None
