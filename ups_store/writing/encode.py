"""Samples into slots: values are checked, copied and checksummed, ready to be written (spec 5.2, 5.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.checksum import crc32_each, crc32c_each
from ups_store.format.layout import Layout
from ups_store.format.metadata import NAME_PATTERN, ArrayMeta, dtype_of
from ups_store.format.ragged import companion_names
from ups_store.read.gather import Samples
from ups_store.system.parallel import parts_of
from ups_store.system.runs import Runs, seal_slots

# Durable: the disk writes one block while the next is encoded. Lazy: it doesn't; larger writes cost less.
DURABLE_BLOCK_BYTES, LAZY_BLOCK_BYTES = 1 << 20, 2 << 20
MAX_SAMPLES = 4096  # of a block, for each has two views, which take more room than a tiny sample

Arrays = Mapping[str, npt.ArrayLike]
Values = Mapping[str, Any]  # arrays (M, ...); of a ragged array one for each of the samples
CrcTable = npt.NDArray[np.uint32]


def as_payload(value: npt.ArrayLike, meta: ArrayMeta, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Make a C-contiguous little-endian array of the declared dtype and shape, or raise `SpecError`.

    NumPy arrays must have the dtype already: a silent cast could lose what the caller meant to keep. Python
    numbers and lists take the array's dtype; integers that it can't hold are refused. Booleans are
    normalised to 0 and 1 (spec 4.7).
    """
    check_unmasked(value, meta.name)
    dtype = dtype_of(meta.dtype)
    if hasattr(value, "dtype"):
        array = np.asarray(value)
    else:
        facts: dict[str, Any] = {"array": meta.name, "expected": f"numbers that {meta.dtype} can hold"}
        try:
            numbers, array = np.asarray(value), np.asarray(value, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise SpecError("wrong values", kind="dtype", found=error, **facts) from error
        is_number = numbers.dtype.kind in "biuf" or numbers.dtype == dtype  # a string or None is no number
        if not is_number or (dtype.kind in "biu" and not np.array_equal(numbers, array)):
            raise SpecError("wrong values", kind="dtype", found=numbers.dtype, **facts)
    if array.dtype.newbyteorder("<") != dtype:
        facts = {"expected": meta.dtype, "found": array.dtype}
        hint = "convert it first: array.astype(...)"
        raise SpecError("wrong dtype", kind="dtype", array=meta.name, hint=hint, **facts)
    if array.shape != shape:
        raise SpecError("wrong shape", kind="shape", array=meta.name, expected=shape, found=array.shape)
    if meta.dtype == "bool":
        array = array.view(np.uint8) != 0
    return np.ascontiguousarray(array, dtype).reshape(shape)


def check_unmasked(value: object, name: str, *, sample: int | None = None) -> None:
    """Refuse an array with masked elements, or a list of such: a store has no masks, they would be lost."""
    values = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(item, np.ma.MaskedArray) and np.ma.is_masked(item) for item in values):
        raise SpecError(
            "a mask would be lost",
            kind="value",
            array=name if NAME_PATTERN.fullmatch(name) else repr(name),
            sample=sample,
            expected="arrays without masked elements",
            found="masked elements",
            hint="fill them (`filled`), or store the mask as an array",
        )


def as_rows(values: Any, meta: ArrayMeta, lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Make of every sample of a ragged array, whose numbers of rows are given, what `as_payload` does.

    Samples of text are `str`, of bytes `bytes`; both may be arrays of uint8.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) != len(lengths):
        count = f"{len(values)}" if hasattr(values, "__len__") else type(values).__name__
        facts: dict[str, Any] = {"array": meta.name, "expected": f"{len(lengths)}", "found": count}
        raise SpecError("wrong number of samples", kind="shape", **facts)
    return [
        as_payload(_encoded_text(value, meta), meta, (length, *meta.sample_shape))
        for value, length in zip(values, lengths.tolist(), strict=True)
    ]


def sample_payload(value: Any, meta: ArrayMeta) -> npt.NDArray[Any]:
    """Make of one sample what `as_payload` does; of a ragged array it may have any number of rows."""
    if not meta.is_ragged:
        return as_payload(value, meta, meta.sample_shape)
    rows = _encoded_text(value, meta)
    return as_payload(rows, meta, (*(np.shape(rows)[:1] or (0,)), *meta.sample_shape))


def _encoded_text(value: Any, meta: ArrayMeta) -> Any:
    """Give the bytes of a sample of text as an array of uint8, checked; all else as it is."""
    if meta.encoding is None:
        return value
    try:
        if meta.encoding == "utf-8" and isinstance(value, str):
            value = value.encode()
        elif meta.encoding == "utf-8":
            str(np.asarray(value).data if hasattr(value, "dtype") else value, "utf-8")
        elif isinstance(value, str):
            raise TypeError("a str")
    except (TypeError, ValueError) as error:
        expected = "a str, or valid UTF-8" if meta.encoding == "utf-8" else "bytes"
        raise SpecError("wrong text", kind="text", array=meta.name, expected=expected, found=error) from error
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray | memoryview) else value


@dataclass(frozen=True)
class Slots:
    """Memory for slots, or for bytes of samples of a small array."""

    rows: npt.NDArray[np.uint8]  # shape (num, stride); the padding is zero
    whole: list[memoryview]  # of each row, once: a new view takes longer than the checksum of a small sample
    payload: list[memoryview]  # the part of each that the sample's bytes take


Scratch: TypeAlias = dict[str, Slots]  # by array


class Scratches:
    """Slots for as many blocks as are encoded and written at a time, kept for the next batch.

    They are used again: touching new pages costs as much as copying into them.
    """

    def __init__(self) -> None:
        self._free: list[Scratch] = []

    @contextlib.contextmanager
    def lent(self) -> Iterator[Scratch]:
        """Lend what no other thread uses in the block."""
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = {}
        try:
            yield scratch
        finally:
            self._free.append(scratch)


def blocks_of(
    layout: Layout, rows: Samples, values: Values, *, block_bytes: int = LAZY_BLOCK_BYTES
) -> list[slice]:
    """Cut a batch into blocks of nearly equally many samples, about `block_bytes` of slots each.

    None reaches 1.5 `block_bytes` plus one sample: a batch that is a little larger than whole blocks makes
    them larger, for a short last block costs as many calls as a full one. A sample that is larger is a block
    by itself; tiny ones make smaller blocks, for each has its views. Ragged samples count alike.
    """
    fixed = sum(array.stride for array in layout.per_sample if not array.meta.is_ragged)
    nbytes = len(rows) * fixed + sum(
        values[name][row].nbytes for name in layout.ragged for row in rows.tolist()
    )
    return parts_of(len(rows), max(round(nbytes / block_bytes), -(-len(rows) // MAX_SAMPLES)))


def encode_block(
    layout: Layout, rows: Samples, values: Values, scratch: Scratch
) -> tuple[list[npt.NDArray[np.uint8]], CrcTable]:
    """Copy samples into slots and take their checksums.

    `rows` says where each of them lies in `values`, shape (M,), M > 0. Returns per array in file order the
    slots (large) or bytes (small) of the samples, shape (M, stride), of a ragged array the bytes of all:
    private, so that nothing changes them after the checksums were taken. And the CRC-32 of each sample in
    each, shape (M, num_arrays).
    """
    slots, crcs = [], np.empty((len(rows), len(layout.per_sample)), np.uint32)
    checks: dict[str, npt.NDArray[np.uint32]] = {}  # of samples of ragged arrays, which stand before them
    for i, array in enumerate(layout.per_sample):
        name = array.meta.name
        if array.meta.is_ragged:
            samples = [values[name][row].reshape(-1).view(np.uint8) for row in rows.tolist()]
            raw = np.concatenate(samples)
            ends = np.cumsum([len(sample) for sample in samples]).tolist()
            views = [raw.data[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
            crcs[:, i] = crc32_each(views)
            checks[companion_names(name)["crc32c"]] = np.array(crc32c_each(views), "<u4")
            slots.append(raw)
            continue
        memory = scratch.get(name)
        if memory is None or len(memory.rows) < len(rows):
            zeros = np.zeros((len(rows), array.stride), np.uint8)
            whole = [row.data for row in zeros]
            memory = Slots(zeros, whole, [row[: array.meta.sample_nbytes] for row in whole])
            scratch[name] = memory
        value, order = (checks[name], np.arange(len(rows))) if name in checks else (values[name], rows)
        num, nbytes = len(rows), array.meta.sample_nbytes
        filled, payloads = memory.rows[:num], value.reshape(len(value), -1).view(np.uint8)
        if not (array.meta.is_sharded and seal_slots(payloads, Runs(order * nbytes, nbytes), filled)):
            filled[:, :nbytes] = payloads[order]
            if array.meta.is_sharded:
                checksums = np.array(crc32c_each(memory.payload[:num]), "<u4")
                filled[:, nbytes : nbytes + checksums.itemsize] = checksums[:, None].view(np.uint8)
        crcs[:, i] = crc32_each(memory.whole[:num])  # while they are in the cache
        slots.append(filled)
    return slots, crcs
