"""Samples into slots: values are checked, copied and checksummed, ready to be written (spec 5.2, 5.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.format.checksum import crc32_each, crc32c_each
from ups_store.format.layout import ArrayLayout, Layout
from ups_store.format.metadata import NAME_PATTERN, ArrayMeta, dtype_of
from ups_store.format.ragged import companion_names
from ups_store.read.gather import Samples
from ups_store.system.parallel import parts_of
from ups_store.system.runs import Runs, seal_slots

# Durable: the disk writes one piece while the next is encoded. Lazy: it doesn't; larger writes cost less.
DURABLE_PIECE_BYTES, LAZY_PIECE_BYTES = 1 << 20, 2 << 20
MAX_SAMPLES = 4096  # of a piece, for each has two views, which take more room than a tiny sample

Arrays = Mapping[str, npt.ArrayLike]
Values = Mapping[str, Any]  # arrays (M, ...); of a ragged array one for each of the samples
CrcTable = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Piece:
    """Consecutive samples of a batch, ready to be written.

    Attributes:
        samples: Sample numbers, sorted and distinct, shape (M,).
        slots: Per array in file order, the slots (large) or bytes (small) of the samples, shape (M, stride),
            of a ragged array the bytes of all samples, shape (num_bytes,); uint8; private, so that nothing
            changes them after the checksums were taken.
        crcs: CRC-32 of what `slots` has of each sample, shape (M, num_arrays).
    """

    samples: Samples
    slots: tuple[npt.NDArray[np.uint8], ...]
    crcs: CrcTable


def as_payload(value: npt.ArrayLike, meta: ArrayMeta, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A C-contiguous little-endian array of the declared dtype and shape, or `SpecError`.

    NumPy arrays must have the dtype already: a silent cast could lose what the caller meant to keep. Python
    numbers and lists take the array's dtype; integers that it can't hold are refused. Booleans are
    normalised to 0 and 1 (spec 4.7).
    """
    check_unmasked(value, meta.name)
    dtype = dtype_of(meta.dtype)
    array = np.asarray(value) if hasattr(value, "dtype") else _from_python(value, meta)
    if array.dtype.newbyteorder("<") != dtype:
        raise SpecError(
            "wrong dtype",
            kind="dtype",
            array=meta.name,
            expected=meta.dtype,
            found=array.dtype,
            hint="convert it first: array.astype(...)",
        )
    if array.shape != shape:
        raise SpecError("wrong shape", kind="shape", array=meta.name, expected=shape, found=array.shape)
    if meta.dtype == "bool":
        array = array.view(np.uint8) != 0
    return np.ascontiguousarray(array, dtype).reshape(shape)


def check_unmasked(value: object, name: str, *, sample: int | None = None) -> None:
    """Refuse an array with masked elements, and a list of such: a store has no masks, so they would be lost.

    Raises:
        SpecError: Kind "value".
    """
    values = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(each, np.ma.MaskedArray) and np.ma.is_masked(each) for each in values):
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
    """What `as_payload` makes of every sample of a ragged array, whose numbers of rows are given.

    Samples of text are `str`, of bytes `bytes`; both may be arrays of uint8.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) != len(lengths):
        found = f"{len(values)}" if hasattr(values, "__len__") else type(values).__name__
        raise SpecError(
            "wrong number of samples", kind="shape", array=meta.name, expected=f"{len(lengths)}", found=found
        )
    tail = meta.sample_shape
    return [
        as_payload(encoded_text(value, meta), meta, (length, *tail))
        for value, length in zip(values, lengths.tolist(), strict=True)
    ]


def sample_payload(value: Any, meta: ArrayMeta) -> npt.NDArray[Any]:
    """A sample as bytes of the declared dtype; of a ragged array of any number of rows."""
    if not meta.is_ragged:
        return as_payload(value, meta, meta.sample_shape)
    rows = encoded_text(value, meta)
    shape = np.shape(rows)
    return as_payload(rows, meta, (*(shape[:1] or (0,)), *meta.sample_shape))


def encoded_text(value: Any, meta: ArrayMeta) -> Any:
    """The bytes of a sample of text as an array of uint8, checked; all else as it is."""
    if meta.encoding is None:
        return value
    if isinstance(value, str) and meta.encoding == "utf-8":
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            raise _no_such_text(meta, error) from error
    elif isinstance(value, str):
        raise _no_such_text(meta, "a str")
    elif meta.encoding == "utf-8":
        try:
            str(np.asarray(value).data if hasattr(value, "dtype") else value, "utf-8")
        except (UnicodeDecodeError, TypeError, ValueError) as error:
            raise _no_such_text(meta, error) from error
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray | memoryview) else value


def _no_such_text(meta: ArrayMeta, found: object) -> SpecError:
    expected = "a str, or valid UTF-8" if meta.encoding == "utf-8" else "bytes"
    return SpecError("wrong text", kind="text", array=meta.name, expected=expected, found=found)


def _from_python(value: npt.ArrayLike, meta: ArrayMeta) -> npt.NDArray[Any]:
    dtype = dtype_of(meta.dtype)
    try:
        given, array = np.asarray(value), np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise _no_such_numbers(meta, str(error)) from error
    is_number = given.dtype.kind in "biuf" or given.dtype == dtype  # a string or None is no number
    if not is_number or (dtype.kind in "biu" and not np.array_equal(given, array)):
        raise _no_such_numbers(meta, given.dtype)
    return array


def _no_such_numbers(meta: ArrayMeta, found: object) -> SpecError:
    expected = f"numbers that {meta.dtype} can hold"
    return SpecError("wrong values", kind="dtype", array=meta.name, expected=expected, found=found)


@dataclass(frozen=True)
class Slots:
    """Memory for slots, or for bytes of samples of a small array.

    Attributes:
        rows: Shape (num, stride), uint8; the padding is zero.
        whole: Each row, made once: a new view of every sample takes longer than the checksum of a small one.
        payload: The part of each that the sample's bytes take.
    """

    rows: npt.NDArray[np.uint8]
    whole: list[memoryview]
    payload: list[memoryview]

    @classmethod
    def new(cls, array: ArrayLayout, num: int) -> Slots:
        """Room for `num` samples."""
        rows = np.zeros((num, array.stride), np.uint8)
        whole = [row.data for row in rows]
        return cls(rows, whole, [row[: array.meta.sample_nbytes] for row in whole])


class Scratch:
    """Slots that are used again: touching new pages costs as much as copying into them."""

    def __init__(self) -> None:
        self._slots: dict[str, Slots] = {}

    def slots(self, array: ArrayLayout, num: int) -> Slots:
        """Room for at least `num` samples."""
        slots = self._slots.get(array.meta.name)
        if slots is None or len(slots.rows) < num:
            slots = self._slots[array.meta.name] = Slots.new(array, num)
        return slots


class Scratches:
    """Scratch memory for as many pieces as are encoded and written at a time, kept for the next batch."""

    def __init__(self) -> None:
        self._free: list[Scratch] = []

    @contextlib.contextmanager
    def lent(self) -> Iterator[Scratch]:
        """One that is used by no other thread in the block."""
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = Scratch()
        try:
            yield scratch
        finally:
            self._free.append(scratch)


def pieces_of(layout: Layout, num_samples: int, piece_bytes: int, *, rows_nbytes: int = 0) -> list[slice]:
    """A batch in pieces of nearly equally many samples, about `piece_bytes` of slots each.

    None reaches 1.5 `piece_bytes` plus one sample: a batch that is a little larger than whole pieces makes
    them larger, for a short last piece costs as many calls as a full one. A sample that is larger is a piece
    by itself; tiny ones make smaller pieces, for each has its views. Of ragged arrays, whose samples have
    `rows_nbytes` in all, every sample counts alike.
    """
    fixed = sum(array.stride for array in layout.per_sample if not array.meta.is_ragged)
    nbytes = num_samples * fixed + rows_nbytes
    return parts_of(num_samples, max(round(nbytes / piece_bytes), -(-num_samples // MAX_SAMPLES)))


def encode_piece(layout: Layout, samples: Samples, rows: Samples, values: Values, scratch: Scratch) -> Piece:
    """Copy samples into slots and take their checksums.

    Args:
        layout: Geometry of the store.
        samples: Sorted distinct sample numbers, shape (M,), M > 0.
        rows: Where each of them lies in `values`, shape (M,).
        values: Every per-sample array as `as_payload` returns it.
        scratch: Of this layout.
    Returns:
        The piece, valid until something else is encoded with this scratch.
    """
    slots, crcs = [], np.empty((len(samples), len(layout.per_sample)), np.uint32)
    checks: dict[str, npt.NDArray[np.uint32]] = {}  # of samples of ragged arrays
    for i, array in enumerate(layout.per_sample):
        name = array.meta.name
        if array.meta.is_ragged:
            block, crcs[:, i], checks[companion_names(name)["crc32c"]] = _joined(values[name], rows)
            slots.append(block)
            continue
        memory = scratch.slots(array, len(samples))
        value, order = (checks[name], np.arange(len(rows))) if name in checks else (values[name], rows)
        crcs[:, i] = _fill(array, memory, value, order)
        slots.append(memory.rows[: len(samples)])
    return Piece(samples, tuple(slots), crcs)


def _joined(
    samples: Sequence[npt.NDArray[Any]], rows: Samples
) -> tuple[npt.NDArray[np.uint8], list[int], npt.NDArray[np.uint32]]:
    """Samples of a ragged array one behind the other; CRC-32 and CRC-32C of each."""
    chosen = [samples[row].reshape(-1).view(np.uint8) for row in rows.tolist()]
    block = np.concatenate(chosen)
    ends = np.cumsum([len(sample) for sample in chosen]).tolist()
    parts = [block.data[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]
    return block, crc32_each(parts), np.array(crc32c_each(parts), "<u4")


def _fill(array: ArrayLayout, slots: Slots, value: npt.NDArray[Any], rows: Samples) -> list[int]:
    """Copy rows of `value` into slots and seal them; returns the CRC-32 of each."""
    nbytes, num = array.meta.sample_nbytes, len(rows)
    filled, payloads = slots.rows[:num], value.reshape(len(value), -1).view(np.uint8)
    if array.meta.is_sharded and seal_slots(payloads, Runs(rows * nbytes, nbytes), filled):
        return crc32_each(slots.whole[:num])  # while they are in the cache
    filled[:, :nbytes] = payloads[rows]
    if array.meta.is_sharded:
        checksums = np.array(crc32c_each(slots.payload[:num]), "<u4")
        filled[:, nbytes : nbytes + checksums.itemsize] = checksums[:, None].view(np.uint8)
    return crc32_each(slots.whole[:num])
