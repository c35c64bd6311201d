"""References of Kerchunk to a store: where each of its chunks lies, for readers that know fsspec.

The entries of a store are stored in its ZIP file as they are, so a chunk is a range of that file, wherever a
copy of it lies: `template_overrides={"u": URL}` of fsspec's reference file system says where.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ups_store.errors import SpecError
from ups_store.read.base import AnyStore
from ups_store.read.several import parts_of
from ups_store.system import files
from ups_store.system.urls import is_remote
from ups_store.write.target import new_file

_LOCAL_HEADER_NBYTES = 30  # APPNOTE 4.3.7; the lengths of name and extra field are its last 4 bytes


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the JSON file; it holds the Zarr documents, and points at the store's file for all chunks.

    Raises:
        SpecError: For a store in several files, kind "partitions", or at a URL, kind "url".
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
