"""A store as one Arrow IPC file: a row for each sample, a batch of rows at a time.

Arrays of equal samples are fixed-shape tensors, ragged ones lists, text is text. Arrow has no bfloat16, and
tensors of bool that pyarrow doesn't give to NumPy: these become float32 and uint8, which hold the same
values, and the column's metadata say what they were.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.convert.export import BLOCK_BYTES, texts_of
from ups_store.errors import SpecError, needs
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import AnyStore
from ups_store.system import files
from ups_store.write.target import new_file, payload_nbytes

with needs("arrow"):
    import pyarrow as pa

MAX_LENGTH = (1 << 31) - 1  # of a list with offsets of 32 bits, and of a list of fixed size
MAX_CONSTANTS_BYTES = 64 << 20  # readers have the schema in memory, where they are, and the file has it twice
PREFIX = "ups_store."  # of keys in metadata
STORED_DTYPE = f"{PREFIX}dtype"
OTHERWISE = "export it to zarr or hdf5"


class _Sink:
    """A new file as pyarrow writes to one: from its beginning on, by `files`.

    Args:
        fd: The file, which stays its maker's.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._offset = fd, 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Write all of it behind what was written before."""
        view = memoryview(data).cast("B")
        files.write_at(self._fd, self._offset, view)
        self._offset += len(view)
        return len(view)

    def close(self) -> None:
        """Leave the file to its maker."""
        self.closed = True


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the file; the schema's metadata hold what a store says of itself as JSON, and its constants.

    Raises:
        SpecError: Kind "limits", for constants too large for the schema, and samples for a list of Arrow.
    """
    metas = [meta for meta in store.metas.values() if not meta.is_constant]
    schema = pa.schema([_field(store, meta) for meta in metas], metadata=_metadata(store))
    with (
        new_file(target, force=force, needed_bytes=payload_nbytes(store)) as fd,
        pa.ipc.new_file(pa.PythonFile(_Sink(fd), "w"), schema) as writer,
    ):
        progress(sum(constant.nbytes for constant in store.constants.values()))
        for rows, nbytes in _batches(store, metas):
            columns = _columns(store, metas, rows)
            writer.write_batch(pa.record_batch(columns, schema=schema))
            del columns
            progress(nbytes)


def _batches(store: AnyStore, metas: list[ArrayMeta]) -> Iterator[tuple[slice, int]]:
    """Consecutive samples of `BLOCK_BYTES` at most, one at least, and their bytes."""
    cost = np.full(len(store), sum(meta.sample_nbytes for meta in metas if not meta.is_ragged))
    for meta in metas:
        if meta.is_ragged:
            cost += store.lengths(meta.name) * meta.sample_nbytes
    ends, first = np.cumsum(cost), 0
    while first < len(ends):
        begun = int(ends[first - 1]) if first else 0
        end = max(first + 1, int(np.searchsorted(ends, begun + BLOCK_BYTES, side="right")))
        yield slice(first, end), int(ends[end - 1]) - begun
        first = end


def _columns(store: AnyStore, metas: list[ArrayMeta], rows: slice) -> list[pa.Array]:
    """The columns of a batch, over the memory of what was gathered."""
    batch = store.gather(rows, [meta.name for meta in metas])
    columns = []
    for meta in metas:
        values, kind = batch[meta.name], _type(store, meta)
        if meta.encoding is not None:
            columns.append(pa.array(values, kind))
        else:
            columns.append(_lists(values, kind) if meta.is_ragged else _tensors(values, kind))
    return columns


def _tensors(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if values.ndim == 1:
        return _numbers(values, kind)
    lists = _fixed_lists(_numbers(values.reshape(-1), kind.value_type), len(values), kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, lists)


def _lists(samples: list[npt.NDArray[Any]], kind: pa.DataType) -> pa.Array:
    """Samples of their own numbers of rows; rows that have axes are lists of fixed size."""
    rows = np.concatenate(samples)
    levels = [kind.value_type]
    while pa.types.is_fixed_size_list(levels[-1]):
        levels.append(levels[-1].value_type)
    values = _numbers(rows.reshape(-1), levels.pop())
    while levels:
        values = _fixed_lists(values, math.prod(rows.shape[: len(levels)]), levels.pop())
    is_large = pa.types.is_large_list(kind)
    offsets = np.cumsum([0, *map(len, samples)]).astype(np.int64 if is_large else np.int32)
    lists = pa.LargeListArray if is_large else pa.ListArray
    return lists.from_arrays(pa.array(offsets), values, type=kind)


def _fixed_lists(values: pa.Array, num: int, kind: pa.DataType) -> pa.Array:
    """By buffers, as the number of lists doesn't follow from their values where they are empty."""
    return pa.FixedSizeListArray.from_buffers(kind, num, [None], children=[values])


def _numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Numbers as Arrow has them, without a copy unless it has them otherwise."""
    if values.dtype.name == "bfloat16":
        values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif values.dtype == bool and kind == pa.uint8():
        values = values.view(np.uint8)
    return pa.array(values, kind)


def _field(store: AnyStore, meta: ArrayMeta) -> pa.Field:
    """The column of an array; where the store has its numbers in another dtype, the metadata say in which."""
    kind = _type(store, meta)
    is_other = meta.dtype == "bfloat16" or (meta.dtype == "bool" and isinstance(kind, pa.BaseExtensionType))
    metadata = {STORED_DTYPE: meta.dtype} if is_other else {}
    return pa.field(meta.name, kind, nullable=False, metadata=metadata)


def _type(store: AnyStore, meta: ArrayMeta) -> pa.DataType:
    """The type of a sample, of a constant that of all of it."""
    is_large = meta.is_ragged and meta.shape[0] > MAX_LENGTH
    if meta.encoding == "utf-8":
        return pa.large_string() if is_large else pa.string()
    if meta.encoding == "bytes":
        return pa.large_binary() if is_large else pa.binary()
    shape = meta.sample_shape
    _check_length(store, meta, math.prod(shape))
    kind = pa.float32() if meta.dtype == "bfloat16" else pa.from_numpy_dtype(dtype_of(meta.dtype))
    if meta.is_ragged:
        for size in reversed(shape):
            kind = pa.list_(kind, size)
        return pa.large_list(kind) if is_large else pa.list_(kind)
    if not shape:
        return kind
    kind = pa.uint8() if meta.dtype == "bool" else kind
    return pa.fixed_shape_tensor(kind, shape, dim_names=meta.dims[-len(shape) :])


def _check_length(store: AnyStore, meta: ArrayMeta, num: int) -> None:
    if num > MAX_LENGTH:
        raise SpecError(
            "its samples are too long for Arrow",
            kind="limits",
            path=store.path,
            array=meta.name,
            expected=f"at most {MAX_LENGTH:,} numbers in one",
            found=f"{num:,}",
            hint=OTHERWISE,
        )


def _metadata(store: AnyStore) -> dict[str, str]:
    """Texts only: programs in other languages refuse bytes there."""
    texts = {f"{PREFIX}{key}": text for key, text in texts_of(store).items()}
    metas = [meta for meta in store.metas.values() if meta.is_constant]
    nbytes = sum(meta.nbytes for meta in metas)
    if nbytes > MAX_CONSTANTS_BYTES:
        raise SpecError(
            "the constants are too large for Arrow",
            kind="limits",
            path=store.path,
            expected=f"at most {MAX_CONSTANTS_BYTES:,} bytes",
            found=f"{nbytes:,}",
            hint=OTHERWISE,
        )
    return texts | ({f"{PREFIX}constants": _constants(store, metas)} if metas else {})


def _constants(store: AnyStore, metas: list[ArrayMeta]) -> str:
    """A stream of one row whose columns are the constants, in base64."""
    schema = pa.schema([_field(store, meta) for meta in metas])
    columns = [
        _tensors(store[meta.name][None], field.type) for meta, field in zip(metas, schema, strict=True)
    ]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return base64.b64encode(sink.getvalue()).decode()
