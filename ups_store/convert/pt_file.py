"""One `.pt` file as `torch.save` writes it, read without torch: nothing in it runs, no size is believed.

Such a file is a ZIP archive of a pickle (`pt_pickle`) and of the tensors' bytes. Memory is taken only for
what is in the file.
"""

from __future__ import annotations

import io
import math
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.convert.pt_pickle import RefusalError, TensorRecord, Unknown, unpickled
from ups_store.errors import MissingExtraError, SourceError
from ups_store.format.checksum import crc32
from ups_store.format.metadata import DTYPE_NAMES, MAX_ARRAYS, dtype_of
from ups_store.system import files, memory

MAX_DIRECTORY_BYTES = 4 << 20  # of the archive; 46 of them become an object of about 500
MAX_DEPTH = 32  # of dicts within each other
MAX_KEYS = 2 * MAX_ARRAYS
MAX_KEY_LENGTH = 1000

_ZIP_START, _END, _END64, _LOCATOR64 = b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_HEADER_NBYTES, _END_NBYTES, _END64_NBYTES, _LOCATOR64_NBYTES = 30, 22, 56, 20  # APPNOTE 4.3.7, 4.3.14 ff.
_NOT_SAVED = "it is cut off, damaged, or not what torch.save writes since version 1.6"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; of a FIFO, a device or a folder nothing is read.

    Raises:
        SourceError: Kind "not_a_file"; "too_large" if memory doesn't hold it twice, as reading it takes.
        OSError: As the file system says.
    """
    with files.opened(path) as fd:
        mode = files.mode(fd)
        if not stat.S_ISREG(mode):
            found = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise SourceError(f"expected a regular file, found {found}", kind="not_a_file", path=path)
        nbytes, available = files.size(fd), memory.available_bytes()
        if 2 * nbytes > available:
            limit = f"memory holds {available:,} bytes, and reading it takes twice its size"
            raise SourceError(f"{nbytes:,} bytes: {limit}", kind="too_large", path=path)
        return files.read_at(fd, 0, nbytes)


class PtFile:
    """What one file holds; the bytes of tensors are read when they are asked for.

    Args:
        raw: The file's bytes.
        path: For messages.
    Raises:
        SourceError: Kind "damaged_file": another format, cut off, or larger inside than outside.
    """

    def __init__(self, raw: bytes, *, path: Path) -> None:
        self._path, self._raw, self._expanded = path, memoryview(raw), 0
        self._storages: dict[str, memoryview] = {}  # several tensors may lie in one
        try:
            self._entries = _entries_of(raw)
            (pickled,) = (name for name in self._entries if name.endswith("/data.pkl"))
            self._folder = pickled.removesuffix("data.pkl")
            self._check_byte_order()
            self._document = unpickled(bytes(self._bytes_of(pickled)))
        except RefusalError as refusal:
            raise self._refused(str(refusal)) from None
        except Exception as error:  # zipfile and pickletools raise whatever the damage leads to
            raise self._refused(_NOT_SAVED) from error

    def values(self) -> dict[str, Any]:
        """Everything by dotted key, such as "params.nu" of an inner dict; without what is None.

        Raises:
            SourceError: If it isn't a dict, or has too many or too deep ones.
        """
        if not isinstance(self._document, dict):
            found = _described(self._document)
            raise self._refused(f"expected a dict of names to tensors, found {found}")
        return {key: value for key, value in self._walk(self._document) if value is not None}

    def array(self, key: str, value: Any) -> npt.NDArray[Any]:
        """A tensor or number that `values` gave, as an array; it may be read-only.

        Raises:
            SourceError: For anything else, and for a tensor that isn't within its storage.
        """
        try:
            return self._tensor(value) if isinstance(value, TensorRecord) else _number(value)
        except RefusalError as refusal:
            raise self._refused(f"{key[:100]} {refusal}") from None
        except MissingExtraError:
            raise
        except Exception as error:  # as above
            raise self._refused(f"{key[:100]} is damaged, or isn't in the file") from error

    def _walk(self, document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Keys and values, with a bound: dicts may share inner ones, so that few bytes make many keys."""
        num_seen = 0
        left = [("", iter(document.items()))]
        while left:
            prefix, items = left[-1]
            item = next(items, None)
            if item is None:
                left.pop()
                continue
            num_seen += 1
            if num_seen > MAX_KEYS or len(left) > MAX_DEPTH or len(item[0]) > MAX_KEY_LENGTH:
                limits = f"{MAX_KEYS} keys, {MAX_DEPTH} dicts within each other, {MAX_KEY_LENGTH} letters"
                raise self._refused(f"it has more than {limits} of a key")
            key, value = f"{prefix}{item[0]}", item[1]
            if isinstance(value, dict):
                left.append((f"{key}.", iter(value.items())))
            else:
                yield key, value

    def _tensor(self, tensor: TensorRecord) -> npt.NDArray[Any]:
        dtype = _checked_dtype(tensor)
        storage = self._storage(tensor.storage.key)
        end = _checked_end(tensor, len(storage) // dtype.itemsize)
        self._check_memory(math.prod(tensor.shape) * dtype.itemsize)
        if not end:
            return np.zeros(tensor.shape, dtype)
        flat = np.frombuffer(storage, dtype, count=end - tensor.offset, offset=tensor.offset * dtype.itemsize)
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(view).reshape(tensor.shape)

    def _check_memory(self, nbytes: int) -> None:
        """Tensors that share a storage may be larger than the file together, but not than memory."""
        self._expanded += nbytes
        if self._expanded > len(self._raw) and 2 * self._expanded > (available := memory.available_bytes()):
            found = f"{self._expanded:,} bytes of tensors from {len(self._raw):,} bytes"
            raise RefusalError(f"takes too much memory: {found}, {available:,} bytes are available")

    def _storage(self, key: str) -> memoryview:
        if key not in self._storages:
            self._storages[key] = self._bytes_of(f"{self._folder}data/{key}")
        return self._storages[key]

    def _bytes_of(self, name: str) -> memoryview:
        """The bytes of an entry, a view; damaged ones are refused."""
        entry = self._entries[name]
        first = entry.header_offset + _HEADER_NBYTES
        first += sum(struct.unpack_from("<2H", self._raw, first - 4))
        found = self._raw[first : first + entry.file_size]
        if len(found) < entry.file_size or crc32(found) != entry.CRC:
            raise RefusalError(f"its entry {name[:100]} is damaged")
        return found

    def _check_byte_order(self) -> None:
        name = f"{self._folder}byteorder"
        if name in self._entries and bytes(self._bytes_of(name)) != b"little":
            raise RefusalError("its numbers aren't little-endian")

    def _refused(self, problem: str) -> SourceError:
        return SourceError(problem, kind="damaged_file", path=self._path)


def _entries_of(raw: bytes) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries by name; all together they are no larger than the file."""
    if not raw.startswith(_ZIP_START):
        raise RefusalError(_NOT_SAVED)
    if _directory_nbytes(raw) > MAX_DIRECTORY_BYTES:
        raise RefusalError(f"its directory is longer than {MAX_DIRECTORY_BYTES:,} bytes")
    entries = zipfile.ZipFile(io.BytesIO(raw)).infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise RefusalError("its entries are compressed, which torch.save never does")
    expanded = sum(entry.file_size for entry in entries)
    if expanded > len(raw):
        raise RefusalError(f"it expands to {expanded:,} bytes, the file has {len(raw):,} bytes")
    return {entry.filename: entry for entry in entries}


def _directory_nbytes(raw: bytes) -> int:
    """Length of the archive's directory: `zipfile` makes an object of each entry before it can be asked."""
    end = len(raw) - _END_NBYTES
    if not raw.startswith(_END, end) or raw[-2:] != b"\0\0":  # a comment, which torch.save doesn't write
        raise RefusalError(_NOT_SAVED)
    end64 = end - _LOCATOR64_NBYTES - _END64_NBYTES
    if raw.startswith(_LOCATOR64, end - _LOCATOR64_NBYTES) and raw.startswith(_END64, end64):
        return int(struct.unpack_from("<Q", raw, end64 + 40)[0])
    return int(struct.unpack_from("<I", raw, end + 12)[0])


def _checked_dtype(tensor: TensorRecord) -> np.dtype[Any]:
    if tensor.dtype not in DTYPE_NAMES:
        raise RefusalError(f"is {tensor.dtype}, expected one of {', '.join(DTYPE_NAMES)}")
    if not tensor.is_plain:
        raise RefusalError("is a negative or conjugate view, expected numbers as they are: save x.clone()")
    return dtype_of(tensor.dtype)


def _checked_end(tensor: TensorRecord, num_stored: int) -> int:
    """One past a tensor's last element in a storage of so many; 0 if it has none."""
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if len(tensor.shape) != len(tensor.strides):
        raise RefusalError(f"has {len(tensor.shape)} axes and {len(tensor.strides)} strides")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
        raise RefusalError("has a shape that can't be")
    num = math.prod(tensor.shape)
    if num > num_stored:
        raise RefusalError(f"repeats its elements: {tensor.shape} of {num_stored} stored ones")
    steps = zip(tensor.shape, tensor.strides, strict=True)
    end = tensor.offset + sum((length - 1) * stride for length, stride in steps) + 1 if num else 0
    if end > num_stored:
        raise RefusalError(f"ends at element {end} of {num_stored} stored ones")
    return end


def _number(value: object) -> npt.NDArray[Any]:
    for kind, dtype in ((bool, np.bool_), (float, np.float64), (int, np.int64)):  # a bool is an int too
        if isinstance(value, kind):
            try:
                return np.array(value, dtype)
            except OverflowError:
                raise RefusalError("is an integer of more than 64 bits") from None
    raise RefusalError(f"is {_described(value)}, expected a dense tensor or a number")


def _described(value: object) -> str:
    name = value.name if isinstance(value, Unknown) else type(value).__name__
    return f"a {'tensor' if isinstance(value, TensorRecord) else name}"[:120]
