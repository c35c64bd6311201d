"""A store as one safetensors file: the header is small, so it is written here and the data are streamed.

The `safetensors` package would need every array in memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.convert.export import blocks_of, texts_of
from ups_store.errors import SpecError
from ups_store.format.metadata import dtype_of
from ups_store.read.base import AnyStore
from ups_store.system import files
from ups_store.write.target import new_file, payload_nbytes

MAX_HEADER_BYTES = 100_000_000  # readers of safetensors refuse longer ones
_DTYPES = {"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"}
_DTYPES |= {
    f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the file; `__metadata__` holds identity, attributes and dimension names as JSON texts.

    Raises:
        SpecError: If identity and attributes are too long for a safetensors header.
    """
    # As the safetensors package orders them: wide dtypes first keep all data aligned.
    names = sorted(store.metas, key=lambda name: (-dtype_of(store.metas[name].dtype).itemsize, name))
    header = _header(store, names)
    nbytes = len(header) + payload_nbytes(store)
    with new_file(target, force=force, needed_bytes=nbytes) as fd:
        files.allocate(fd, nbytes)
        files.write_at(fd, 0, header)
        offset = len(header)
        for name in names:
            for block in blocks_of(store, name):
                files.write_at(fd, offset, _bytes_of(block))
                offset += block.nbytes
                progress(block.nbytes)


def _bytes_of(block: npt.NDArray[Any]) -> memoryview:
    return block.reshape(-1).view(np.uint8).data


def _header(store: AnyStore, names: Iterable[str]) -> bytes:
    document: dict[str, Any] = {"__metadata__": texts_of(store)}
    offset = 0
    for name in names:
        meta = store.metas[name]
        end = offset + meta.nbytes
        document[name] = {
            "dtype": _DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        expected, found = f"at most {MAX_HEADER_BYTES} bytes of header", f"{len(text)}"
        hint = "export it to zarr or hdf5"
        raise SpecError(
            "identity and attributes are too long for safetensors",
            kind="limits",
            path=store.path,
            expected=expected,
            found=found,
            hint=hint,
        )
    return struct.pack("<Q", len(text)) + text
