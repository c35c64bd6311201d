"""`SpoolStore`: what is committed of a store whose number of samples isn't known yet (spec 6.13)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.format.layout import RaggedLayout
from ups_store.format.ragged import Offsets
from ups_store.read.gather import Samples
from ups_store.read.ragged import RaggedReader
from ups_store.read.store import Store
from ups_store.read.store_file import read_bytes
from ups_store.system import files


class SpoolStore(Store):
    """The first samples, as many as were committed when this was opened; open it again to see more.

    Attributes:
        nbytes: What the file took on the disk then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_samples = int(np.argmin(np.append(super().committed, False)))
        self.nbytes = files.allocated_bytes(self._file.fd)
        num_rows = {name: int(self._offsets(name)[-1]) for name in self._ragged}
        for name, meta in self.metas.items():
            if not meta.is_constant:
                shape = (num_rows.get(name, len(self)), *meta.shape[1:])
                self.metas[name] = replace(meta, shape=shape)

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Which samples are there: all."""
        return np.ones(len(self), bool)

    def whole(self, name: str) -> Any:
        """The array as a view, of the samples that are there; see `Store.whole`."""
        array, meta = super().whole(name), self._meta(name)
        return array if meta.is_constant or meta.is_ragged else array[: len(self)]

    def _lengths_of(self, name: str) -> Samples:
        self.check_length()
        return np.diff(self._offsets(name))

    def _offsets(self, name: str) -> Samples:
        layout = self._catalog.layout.ragged[name]
        return read_offsets_of_spool(self._file.fd, layout, path=self.path)[: len(self) + 1]

    def _reader(self, name: str) -> RaggedReader:
        reader = super()._reader(name)
        reader.num_samples = len(self)
        return reader

    def _summary(self) -> list[str]:
        return [f"{self.nbytes:,} bytes", "under construction, its number of samples not known yet"]


def read_offsets_of_spool(fd: int, layout: RaggedLayout, *, path: Path) -> Offsets:
    """All offsets of a ragged array of a spool, as they stand there: they grow, and have no checksum yet."""
    return np.frombuffer(read_bytes(fd, layout.offsets.offset, layout.offsets.meta.nbytes, path=path), "<i8")
