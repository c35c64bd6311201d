"""A request that reads many batches in a reader process and says nothing before the last one is read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.sources.reader import Reader, ReadRequest


@functools.cache
def _silent_reader() -> Reader:
    """The only one of this process: it reports nothing, and its files stay open."""
    return Reader()


@dataclass(frozen=True)
class SilentRead:
    """What a pool asks for once, and so supervises once, instead of batch by batch.

    Attributes:
        requests: The batches, all of the same arrays in the same shapes.
    """

    requests: Sequence[ReadRequest]
    subject = "all samples"
    first_sample = None

    @property
    def path(self) -> Path:
        """The file of the first batch."""
        return self.requests[0].path

    def run(self, reader: Reader) -> None:
        """Read every batch to the same place in the slot."""

        @functools.cache
        def place(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
            return reader.place(name, shape, dtype)

        for number, request in enumerate(self.requests):
            _silent_reader().run(request, request_id=number, place=place)
