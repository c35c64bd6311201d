"""HDF5 files, opened and read so that every failure is a `SourceError` that says where and what to do.

A dataset is handed out once it has been seen to have the expected rank and kind of numbers.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ups_store.errors import SourceError, StoreError, needs
from ups_store.sources.cf_encoding import ATTRIBUTES, CfEncoding
from ups_store.sources.contents import AXIS_NAMES, StoredNumber

with needs("hdf5"):
    import h5py as h5py  # where the other modules of this room have it from

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
Box: TypeAlias = tuple[range, ...]  # indices along each axis
_ERRORS = (OSError, KeyError, RuntimeError, TypeError, ValueError)  # all that h5py raises
_TREE_LINES = 12
_FILTERS = {  # registered numbers of those that hdf5plugin has
    **{307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp"},
    **{32015: "zstd", 32018: "fcidecomp", 32024: "sz3", 32026: "blosc2", 32028: "sperr"},
}


def source_error(
    problem: str, kind: str, path: str | Path, dataset: str | None = None, **details: Any
) -> SourceError:
    """Return a `SourceError` about a file, and a dataset in it; `details` as for every `StoreError`."""
    return SourceError(problem, kind=kind, path=path, dataset=dataset, **details)


@contextmanager
def translated(
    doing: str,
    path: str | Path,
    dataset: str | None = None,
    sample: int | None = None,
    opened: h5py.Dataset | None = None,
) -> Iterator[None]:
    """Turn what h5py raises into a `SourceError` of kind "read_failed".

    `doing` begins the message, such as "can't read samples 4..7"; `sample` is the first one concerned. The
    error names the filters of the `opened` dataset.
    """
    try:
        yield
    except StoreError as error:
        error.sample = sample if error.sample is None else error.sample
        raise
    except _ERRORS as error:
        hint = "download or make the file again"
        if opened is not None and (filters := filters_of(opened)):
            hint += f"; its chunks go through {', '.join(called for _, called in filters)}"
        raise source_error(
            doing if dataset is None else f"{doing} of dataset {dataset!r}",
            "read_failed",
            path,
            dataset,
            sample=sample,
            found=error.args[0] if isinstance(error, KeyError) else error,  # str(KeyError) has quotes
            hint=hint,
        ) from error


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading.

    The library's own locking is used first, since it notices a simulation that is still writing the file
    (and two openings of one file in one process must agree on it). Where the file system has no locks, as
    some network mounts, the file is opened without. `HDF5_USE_FILE_LOCKING` decides over both.
    """
    if not path.exists():
        raise source_error("no such file", "missing_file", path, hint="check data.root and data.files")
    if path.is_dir():
        raise source_error("not a file", "not_hdf5", path, expected="an HDF5 file", found="a folder")
    if not path.is_file():  # HDF5 would wait for the other end of a pipe
        raise no_file_any_more(path)
    try:
        try:
            return h5py.File(path, "r")
        except OSError as error:
            if isinstance(error, BlockingIOError) or "unable to lock file" not in str(error):
                raise
            return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise _opening_error(path, error) from error


def no_file_any_more(path: Path) -> SourceError:
    """Return the error for a source that has become a pipe, a socket or a device."""
    hint = "it was a file when the build began: mend the source, and run again"
    return source_error("not a regular file any more", "not_a_file", path, hint=hint)


def _opening_error(path: Path, error: OSError) -> SourceError:
    if isinstance(error, BlockingIOError) or "already open for" in str(error):
        hint = "close the program that writes it; if that one crashed, run `h5clear -s` on the file"
        return source_error("the file is being written", "being_written", path, found=str(error), hint=hint)
    if "truncated file" in str(error):
        hint = "download or copy it again, and compare its checksum"
        size = f"{path.stat().st_size} bytes"
        return source_error("the file ends before its data does", "truncated", path, found=size, hint=hint)
    is_refused = error.errno in (errno.EACCES, errno.EPERM)
    if is_refused or has_signature(path):
        hint = "check its permissions (`ls -l`)" if is_refused else "copy it again, and compare its checksum"
        return source_error("can't be opened", "unreadable", path, found=str(error), hint=hint)
    with path.open("rb") as file:
        start = file.read(len(_SIGNATURE))
    first = f"bytes {start.hex(' ')}" if start else "an empty file"
    expected = f"bytes {_SIGNATURE.hex(' ')}"
    return source_error("not an HDF5 file", "not_hdf5", path, expected=expected, found=first)


def has_signature(path: Path) -> bool:
    """Tell whether a file has the signature of HDF5."""
    # The superblock lies at 0, 512, 1024, 2048, ...: a user block of any of these sizes may precede it.
    size, offset = path.stat().st_size, 0
    with path.open("rb") as file:
        while offset + len(_SIGNATURE) <= size:
            file.seek(offset)
            if file.read(len(_SIGNATURE)) == _SIGNATURE:
                return True
            offset = max(512, offset * 2)
    return False


def get_dataset(file: h5py.File, name: str, *, sample: int | None = None) -> h5py.Dataset:
    """Open a dataset by its HDF5 path."""
    with translated("can't open", file.filename, name, sample):
        dataset = file.get(name)
    if isinstance(dataset, h5py.Dataset):
        return dataset
    raise missing(f"no dataset {name!r}", file, name, sample=sample)


def missing(
    problem: str, file: h5py.File, name: str, *, asked_by: str = "", sample: int | None = None
) -> SourceError:
    """Return the error for an object that a file lacks, beside what it holds."""
    request = f", which {asked_by} asks for" if asked_by else ""
    kind, held = "missing_dataset", tree(file)
    return source_error(problem + request, kind, file.filename, name, sample=sample, found=held)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return a hint that names the nearest of the known names, if one is near; other capitals are nearest."""
    names = list(known)
    near = [other for other in names if other.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def known_shape(dataset: h5py.Dataset) -> tuple[int, ...] | None:
    """Return the shape of a dataset; None of a virtual one without end: HDF5 would look into its sources."""
    plist = dataset.id.get_create_plist()
    for i in range(plist.get_virtual_count() if dataset.is_virtual else 0):
        space = plist.get_virtual_vspace(i)
        is_slab = space.get_select_type() == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab()
        if is_slab and any(h5py.h5s.UNLIMITED in bounds for bounds in space.get_regular_hyperslab()):
            return None
    return tuple(dataset.shape)


def tree(file: h5py.File) -> str:
    """List what a file holds in short, such as "tensor (64, 21, 1024), x-coordinate (1024)"."""
    lines: list[str] = []

    def note(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            lines.append(f"{name} {known_shape(item) or 'virtual'}")
        return True if len(lines) > _TREE_LINES else None  # True ends the visit

    def note_link(name: str, link: Any) -> bool | None:
        if not isinstance(link, h5py.HardLink) and name not in file:
            outer = f" of {link.filename}" if isinstance(link, h5py.ExternalLink) else ""
            lines.append(f"{name}, a link to {link.path}{outer}, which isn't there")
        return True if len(lines) > _TREE_LINES else None

    try:
        file["/"].visititems(note)  # of the group: its items are only looked at
        file["/"].visititems_links(note_link)
    except _ERRORS:  # only a detail of an error message
        lines.append("damaged objects")
    ends_early = len(lines) > _TREE_LINES
    return ", ".join(lines[:_TREE_LINES] + ["..."] * ends_early) or "no datasets"


def checked_dataset(
    file: h5py.File, name: str, *, axes: str, kinds: str, sample: int | None = None
) -> h5py.Dataset:
    """Open a dataset that has to have these axes, and a dtype among NumPy's kinds, such as "fiu"."""
    dataset = get_dataset(file, name, sample=sample)
    dtype, bad = dataset.dtype, partial(source_error, path=file.filename, dataset=name, sample=sample)
    if dataset.ndim != len(axes):
        expected = f"({', '.join(AXIS_NAMES[axis] for axis in axes)})"
        problem, shape = f"dataset {name!r} has the wrong rank", f"shape {dataset.shape}"
        raise bad(problem, "wrong_rank", expected=expected, found=shape)
    if dtype.kind in "iu" and cf_encoding(dataset, name, path=file.filename):
        kinds += "iu"  # which are decoded
    if dtype.kind not in kinds or dtype.itemsize > 8:  # 8: no array type is wider than float64
        problem, hint = f"dataset {name!r} has the wrong dtype", "convert the file"
        expected = "float16, float32 or float64" if kinds == "f" else "numbers of at most 8 bytes"
        raise bad(problem, "wrong_dtype", expected=expected, found=dtype, hint=hint)
    for index, (number, called) in enumerate(filters_of(dataset)):
        if h5py.h5z.filter_avail(number):
            continue
        with contextlib.suppress(ImportError):
            importlib.import_module("hdf5plugin")  # which registers its filters, in 0.1 s
        is_used = dataset.id.get_num_chunks() and not dataset.id.get_chunk_info(0).filter_mask >> index & 1
        if is_used and not h5py.h5z.filter_avail(number):
            problem = f"dataset {name!r} needs {called}, which HDF5 doesn't find"
            hint = "pip install hdf5plugin" if number in _FILTERS else "install it, and set HDF5_PLUGIN_PATH"
            raise bad(problem, "no_filter", hint=hint)
    return dataset


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, str]]:
    """Give the number of each filter of a dataset, and what it is called: "filter 32015 (zstd)"."""
    plist, filters = dataset.id.get_create_plist(), []
    for i in range(plist.get_nfilters()):
        number, _, _, stored_name = plist.get_filter(i)
        name = _FILTERS.get(number) or stored_name.decode(errors="replace")
        filters.append((number, f"filter {number} ({name})" if name else f"filter {number}"))
    return filters


def cf_encoding(dataset: h5py.Dataset, name: str, *, path: str | Path) -> CfEncoding | None:
    """Say how the numbers of a dataset are encoded; None where they are as they stand."""
    if not h5py.h5a.get_num_attrs(dataset.id):
        return None
    try:
        with translated("can't read attributes", path, name):
            attrs = {key: dataset.attrs[key] for key in ATTRIBUTES if key in dataset.attrs}
        return CfEncoding.of(attrs, dataset.dtype)
    except ValueError as error:
        problem = f"dataset {name!r}: {error}"
        raise source_error(problem, "bad_encoding", path, name, hint="mend the file") from None


def read_whole(dataset: h5py.Dataset, name: str, *, path: str | Path, sample: int | None = None) -> Any:
    """Read all of a small dataset, decoded, in native byte order."""
    check_written(dataset, name, (slice(None),) * dataset.ndim, path=path, sample=sample)
    encoding = cf_encoding(dataset, name, path=path)
    with translated("can't read", path, name, sample):
        values = dataset[...]
        if encoding:
            return encoding.decode(values)
        return values.astype(dataset.dtype.newbyteorder("="), copy=False)


def read_number(file: h5py.File, number: StoredNumber, name: str, *, sample: int | None = None) -> float:
    """Read one number; `name` is its HDF5 path, in the group of `sample` where there are groups."""
    if number.attribute:
        owner = name.rstrip("/") or "/"
        return read_attribute(file, owner, number.attribute, asked_by=number.asked_by, sample=sample)
    dataset, of = get_dataset(file, name, sample=sample), f"dataset {name!r}"
    if dataset.size != 1:
        raise _no_number(file, of, f"shape {dataset.shape}", name, sample)
    return _as_number(file, of, read_whole(dataset, name, path=file.filename, sample=sample), name, sample)


def read_attribute(
    file: h5py.File, owner: str, attribute: str, *, asked_by: str = "", sample: int | None = None
) -> float:
    """Read an attribute that is one number, of the object `owner`; "/" for the file."""
    with translated("can't read attributes", file.filename, owner, sample):
        item = file.get(owner)
        attributes = {} if item is None else item.attrs
        value, names = attributes.get(attribute), list(attributes)
    if item is None:
        problem = f"no group or dataset {owner!r}"
        raise missing(problem, file, owner, asked_by=asked_by, sample=sample)
    request = f", which {asked_by} asks for" if asked_by else ""
    if value is None:
        raise source_error(
            f"no attribute {attribute!r} of {owner!r}{request}",
            "missing_attribute",
            file.filename,
            owner,
            sample=sample,
            found=", ".join(names) or "no attributes",
            hint=nearest(attribute, names),
        )
    return _as_number(file, f"attribute {attribute!r}{request}", value, owner, sample)


def _as_number(file: h5py.File, of: str, value: Any, name: str, sample: int | None) -> float:
    number: np.ndarray[Any, Any] = np.asarray(value)
    if number.size == 1 and number.dtype.kind in "fiub":
        return float(number.item())
    shown_value = f"text {value!r}" if isinstance(value, str | bytes) else number.tolist()
    raise _no_number(file, of, shown_value, name, sample)


def _no_number(file: h5py.File, of: str, found: object, name: str, sample: int | None) -> SourceError:
    path, expected = file.filename, "one number"
    return source_error(of, "bad_parameter", path, name, sample=sample, expected=expected, found=found)


class VirtualDataset(h5py.Dataset):  # type: ignore[misc]  # h5py has no types
    """A virtual dataset of which it is known what its sources fill; the rest reads as the fill value."""

    filled: Sequence[Box] = ()

    def is_filled(self, box: tuple[slice, ...]) -> bool:
        """Tell whether sources fill all of a box in it."""
        spans, num_filled = [range(n)[cut] for n, cut in zip(self.shape, box, strict=True)], 0
        for indices in self.filled:
            common = 1
            for axis, span in zip(indices, spans, strict=True):  # how many of the indices lie in the span
                first, last = (max(0, -(-(end - axis.start) // axis.step)) for end in (span.start, span.stop))
                common *= len(axis[first:last])
            num_filled += common
        return num_filled >= math.prod(map(len, spans))


def is_complete(dataset: h5py.Dataset) -> bool:
    """Tell whether the file has bytes for all of a dataset, which takes HDF5 0.5 µs a chunk.

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
    """Refuse a box of a dataset that was never written, unless it reads as NaN; a slice for each axis."""
    doing = "can't tell what was written"
    with translated(doing, path, name, sample):
        if is_complete(dataset):
            return
    fill, encoding = np.array([dataset.fillvalue]), cf_encoding(dataset, name, path=path)
    if np.isnan(encoding.decode(fill) if encoding else fill).all():  # and is dealt with as any other NaN
        return
    if isinstance(dataset, VirtualDataset) and dataset.is_filled(box):
        return
    where = ""
    if dataset.chunks is not None:
        spans = [range(n)[cut] for n, cut in zip(dataset.shape, box, strict=True)]
        starts = [range(r.start // c * c, r.stop, c) for r, c in zip(spans, dataset.chunks, strict=True)]
        with translated(doing, path, name, sample):
            for corner in itertools.product(*starts):
                if dataset.id.get_chunk_info_by_coord(corner).byte_offset is None:
                    where = f" at {corner}"
                    break
            else:
                return
    raise source_error(
        f"dataset {name!r} was never written{where}",
        "not_written",
        path,
        name,
        sample=sample,
        expected="data",
        found=f"nothing, which HDF5 reads as {dataset.fillvalue}",
        hint="finish or make the file again",
    )
