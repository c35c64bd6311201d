"""`export_store`: a finished store as a Zarr folder, a safetensors or HDF5 file, or references of Kerchunk.

Arrays are written a block of samples at a time, so that memory stays bounded whatever N is. What they were
made from and their attributes travel with them into every format. A format's library is loaded when it is
first asked for.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups_store.errors import SpecError, check_installed, did_you_mean, needs
from ups_store.format.canonical import canonical_json
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.read.base import AnyStore
from ups_store.read.ragged import check_not_ragged
from ups_store.read.several import parts_of
from ups_store.read.store import Store
from ups_store.system import files
from ups_store.system.files import Progress
from ups_store.system.paths import is_remote, path_of
from ups_store.writing.target import (
    check_not_source,
    check_sound,
    check_target,
    new_file,
    new_folder,
    payload_nbytes,
)

if TYPE_CHECKING:
    import h5py

BLOCK_BYTES = 16 << 20
CHUNK_BYTES = 4 << 20  # of a Zarr folder, a file each: much smaller ones cost more than their bytes
MAX_HEADER_BYTES = 100_000_000  # readers of safetensors refuse longer ones
_LOCAL_HEADER_NBYTES = 30  # APPNOTE 4.3.7; the lengths of name and extra field are its last 4 bytes
_SAFETENSORS = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"}
_SAFETENSORS |= {
    f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_PACKAGES = {"zarr": "zarr", "hdf5": "h5py"}  # of the extras that are called as the formats
_RETIRED = {  # formats of earlier versions, and what to do instead
    "arrow": "export it to zarr, or make a table: `pyarrow.table({name: list(store[name])})`",
    "pt": "train on the store itself by `ups_store.torch`, or `torch.save` what `store.sample(i)` gives",
}


def export_store(
    store: AnyStore,
    target: str | os.PathLike[str],
    *,
    to: str,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a finished store in another format, in bounded memory; the target appears when it is whole.

    Arrays and constants keep names, shapes, dtypes and bits; identity, config hash and attributes travel
    with them. `docs/guides/convert.md` says how each format holds them.

    Args:
        store: A finished store of any kind: mapped, packed, or in partitions.
        target: File, or folder (zarr), to write.
        to: "zarr", "safetensors", "hdf5" or "kerchunk".
        force: Whether to replace what is there; a folder only if it is one of that format.
        verify: Whether to check every byte of the store first.
        progress: Called with the number of payload bytes that were written since the last call.
    Returns:
        Absolute path of the target.
    Raises:
        SpecError: For an unknown format; for a ragged array, except to "kerchunk" (kind "ragged"); if the
            target exists (kind "exists"), or is the store itself or a folder that holds it (kind
            "same_file", forced or not).
        CorruptChunkError: If the store is damaged.
        DiskFullError: If there is no room; nothing is left then.
    """
    if to not in FORMATS:
        expected, hint = f"one of {', '.join(FORMATS)}", _RETIRED.get(to) or did_you_mean(to, FORMATS)
        raise SpecError("format of an export", kind="format", expected=expected, found=to, hint=hint)
    if not store.committed.all():
        hint = "finish its build first"
        raise SpecError("the store is unfinished", kind="unfinished", path=store.path, hint=hint)
    if to != "kerchunk":  # whose readers find rows and offsets, as any Zarr reader does
        hint = "export it to kerchunk, or open it with any Zarr reader: rows and offsets are arrays there"
        check_not_ragged(store.metas.values(), f"export to {to}", hint, path=store.path)
    path = path_of(target)
    check_not_source(path, [part.path for part in parts_of(store)])
    if to in _PACKAGES:
        check_installed(_PACKAGES[to], extra=to)
    check_target(path, force=force)  # before a long check of the store
    if verify:
        check_sound(store)
    FORMATS[to](store, path, force, progress or (lambda nbytes: None))
    return path


def write_zarr(store: AnyStore, target: Path, force: bool, progress: Progress) -> None:
    """Write a Zarr v3 folder, chunked and compressed, for tools that want no archive."""
    with needs("zarr"):
        import zarr
        from zarr.codecs import ZstdCodec
        from zarr.storage import LocalStore

        import ups_store.format.bfloat16  # noqa: F401  # zarr-python before 3.4.1 doesn't load it to write

    provenance = {"config_hash": store.config_hash, "identity": dict(store.identity_document)}
    with new_folder(target, marker="zarr.json", force=force, needed_bytes=payload_nbytes(store)) as folder:
        attrs = {**store.attrs, "ups_store": provenance}
        group = zarr.create_group(LocalStore(folder), zarr_format=3, attributes=attrs)
        for name in store.dims:
            meta = store.metas[name]
            num = _samples_per_block(meta, CHUNK_BYTES) if meta.shape else 1
            array = group.create_array(
                name,
                shape=meta.shape,
                dtype=dtype_of(meta.dtype),
                chunks=tuple(max(1, n) for n in (num, *meta.shape[1:])) if meta.shape else (),
                compressors=ZstdCodec(level=3),
                fill_value=0,
                dimension_names=store.dims[name],
                attributes=_array_attrs(store, name),
                # Else chunks of -0.0 are left out as if they were the fill value.
                config={"write_empty_chunks": True},
            )
            if not meta.shape:
                array[...] = store[name]
                continue
            first = 0
            for block in _blocks_of(store, name, num):
                array[first : first + len(block)] = block
                first += len(block)
                progress(block.nbytes)


def write_safetensors(store: AnyStore, target: Path, force: bool, progress: Progress) -> None:
    """Write a safetensors file; `__metadata__` holds identity, attributes and dimension names as JSON texts.

    The header is small, so it is written here and the data are streamed: the `safetensors` package would need
    every array in memory at once.
    """
    # As that package orders them: wide dtypes first keep all data aligned.
    names = sorted(store.metas, key=lambda name: (-dtype_of(store.metas[name].dtype).itemsize, name))
    texts = {  # it allows no other values
        "format": "ups_store",
        "config_hash": store.config_hash,
        "identity": _json_text(store.identity_document),
        "attrs": _json_text(store.attrs),
        "dims": _json_text(store.dims),
        "array_attrs": _json_text({name: _array_attrs(store, name) for name in store.dims}),
    }
    document: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for name in names:
        meta = store.metas[name]
        first, end = end, end + meta.nbytes
        dtype = _SAFETENSORS[meta.dtype]
        document[name] = {"dtype": dtype, "shape": list(meta.shape), "data_offsets": [first, end]}
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise SpecError(
            "identity and attributes are too long for safetensors",
            kind="limits",
            path=store.path,
            expected=f"at most {MAX_HEADER_BYTES} bytes of header",
            found=len(text),
            hint="export it to zarr or hdf5",
        )
    header = struct.pack("<Q", len(text)) + text
    with new_file(target, force=force, needed_bytes=len(header) + end) as fd:
        files.allocate(fd, len(header) + end)
        files.write_at(fd, 0, header)
        offset = len(header)
        for name in names:
            for block in _blocks_of(store, name):
                files.write_at(fd, offset, block.reshape(-1).view(np.uint8).data)
                offset += block.nbytes
                progress(block.nbytes)


def write_kerchunk(store: AnyStore, target: Path, force: bool, progress: Progress) -> None:
    """Write references to a store: its Zarr documents, and where each of its chunks lies in its file.

    The entries are stored in the ZIP file as they are, so a chunk is a range of that file, wherever a copy of
    it lies: `template_overrides={"u": URL}` of fsspec's reference file system says where.
    """
    (path, *others) = (part.path for part in parts_of(store))
    if others:
        hint = "write references of each, or make one file of them by `concat`"
        raise SpecError("it is in several files", kind="partitions", path=store.path, hint=hint)
    if is_remote(path):
        hint = "write them of a copy here, and say where it lies by template_overrides={'u': URL}"
        raise SpecError("references of a store at a URL", kind="url", path=path, hint=hint)
    references: dict[str, Any] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("zarr.json"):
                references[entry.filename] = archive.read(entry).decode()
                continue
            file.seek(entry.header_offset)
            name_and_extra = struct.unpack("<2H", file.read(_LOCAL_HEADER_NBYTES)[-4:])
            first = entry.header_offset + _LOCAL_HEADER_NBYTES + sum(name_and_extra)
            references[entry.filename] = ["{{u}}", first, entry.file_size]
    document = {"version": 1, "templates": {"u": os.fspath(path)}, "refs": references}
    text = json.dumps(document, indent=0).encode()
    with new_file(target, force=force, needed_bytes=len(text)) as fd:
        progress(store.nbytes)
        files.write_at(fd, 0, text)


def write_hdf5(store: AnyStore, target: Path, force: bool, progress: Progress) -> None:
    """Write an HDF5 file: a dataset per array, dimension names as labels, all attributes as one text, too.

    bfloat16 becomes a floating-point type of 16 bits with 8 of exponent: the bits are the same, and readers
    without bfloat16 get float32.
    """
    with needs("hdf5"):
        import h5py

    bfloat16 = h5py.h5t.IEEE_F32LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)  # 1 bit of sign, 8 of exponent, 7 of mantissa, little-endian
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    with new_file(target, force=force, needed_bytes=payload_nbytes(store)) as fd:
        sink = _Sink(fd)
        with h5py.File(sink, "w") as file:
            _set_hdf5_attrs(file.attrs, store.attrs)
            file.attrs["ups_store.config_hash"] = store.config_hash
            file.attrs["ups_store.identity"] = _json_text(store.identity_document)
            for name in store.dims:
                meta = store.metas[name]
                dtype = h5py.Datatype(bfloat16) if meta.dtype == "bfloat16" else dtype_of(meta.dtype)
                dataset = file.create_dataset(name, shape=meta.shape, dtype=dtype)
                _set_hdf5_attrs(dataset.attrs, _array_attrs(store, name))
                for axis, dim in enumerate(store.dims[name]):
                    dataset.dims[axis].label = dim
                first = 0
                for block in _blocks_of(store, name):
                    if block.size:  # by the low-level call, in the file's own type: HDF5 converts nothing
                        source, destination = h5py.h5s.create(h5py.h5s.SCALAR), dataset.id.get_space()
                        if block.ndim:
                            source = h5py.h5s.create_simple(block.shape)
                            destination.select_hyperslab((first, *[0] * (block.ndim - 1)), block.shape)
                            first += len(block)
                        raw = block.view("u2") if meta.dtype == "bfloat16" else block
                        dataset.id.write(source, destination, raw, dataset.id.get_type())
                    sink.check()
                    progress(block.nbytes)
        sink.check()  # closing writes, too


def _set_hdf5_attrs(target: h5py.AttributeManager, attrs: Mapping[str, Any]) -> None:
    for key, value in attrs.items():
        has_type = isinstance(value, str | bool | int | float)
        if key and has_type and "\0" not in f"{key}{value}":
            target[key] = np.bool_(value) if isinstance(value, bool) else value
    target["ups_store.attrs"] = _json_text(attrs)


class _Sink(io.RawIOBase):
    """A file that seems to take everything once one write has failed, of which `check` speaks.

    The HDF5 library can't close a file that it can't write, and ends the process at its exit; and whatever is
    raised through it, such as a Ctrl-C, fails in what it calls next.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._error: BaseException | None = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _try(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._error is None:
            try:
                function(self._fd, *arguments)
            except BaseException as error:
                self._error = error

    def write(self, data: Any) -> int:
        self._try(files.write_at, self._at, data)
        self._at += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        length = self._at if size is None else size
        self._try(files.truncate, length)
        return length

    def readinto(self, target: Any) -> int:
        memory = memoryview(target).cast("B")
        num_read = files.read_into(self._fd, self._at, memory)
        memory[num_read:] = bytes(len(memory) - num_read)  # what isn't there is zeros
        self._at += len(memory)
        return len(memory)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: files.size(self._fd)}
        self._at = bases[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at


def _samples_per_block(meta: ArrayMeta, nbytes: int) -> int:
    sample_nbytes = math.prod(meta.shape[1:]) * dtype_of(meta.dtype).itemsize
    return max(1, min(meta.shape[0], nbytes // max(1, sample_nbytes)))


def _blocks_of(store: AnyStore, name: str, num: int | None = None) -> Iterator[npt.NDArray[Any]]:
    """Yield contiguous copies of `num` samples, shape (M, ...); an array without axes or elements at once.

    Of a constant the first axis is cut likewise. By default a block has at most `BLOCK_BYTES`.
    """
    meta = store.metas[name]
    at_once = not meta.shape or not meta.nbytes
    num = 0 if at_once else num or _samples_per_block(meta, BLOCK_BYTES)
    rows = [slice(None)] if at_once else [slice(i, i + num) for i in range(0, meta.shape[0], num)]
    if meta.is_constant or isinstance(store, Store):
        view = store[name]
        yield from (np.array(view[block] if view.ndim else view, order="C") for block in rows)
    else:
        yield from (store.gather(block, [name])[name] for block in rows)


def _array_attrs(store: AnyStore, name: str) -> dict[str, Any]:
    spec = store.arrays.get(name)  # constants may have some in files of other writers
    return dict(spec.attrs or {}) if spec else {}


def _json_text(document: Mapping[str, Any]) -> str:
    return canonical_json(dict(document), what="attrs").decode()


# Writers by format, as `writer(store, target, force, progress)`.
FORMATS = {
    "zarr": write_zarr,
    "safetensors": write_safetensors,
    "hdf5": write_hdf5,
    "kerchunk": write_kerchunk,
}
