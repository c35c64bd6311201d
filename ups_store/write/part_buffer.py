"""Samples that wait to become a part: checked, and copied into memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.write.encode import Arrays, as_payload, encoded_text

_BLOCK_BYTES = 16 << 20  # of samples of equal shape, which are committed together
_MAX_ROWS = 16384  # of a block


class PartBuffer:
    """Samples that wait to become a part; copies, so that the caller may go on using its memory.

    Those of equal shape are copied into blocks that are used again for the next part: touching new memory
    takes as long as the copy.
    """

    def __init__(self, metas: Mapping[str, ArrayMeta]) -> None:
        self._fixed = {name: meta for name, meta in metas.items() if not meta.is_ragged}
        self._blocks: list[dict[str, npt.NDArray[Any]]] = []
        self._rows = max(1, _BLOCK_BYTES // max(1, sum(meta.sample_nbytes for meta in self._fixed.values())))
        self._rows = min(self._rows, _MAX_ROWS)
        self._ragged: dict[str, list[npt.NDArray[Any]]] = {n: [] for n, m in metas.items() if m.is_ragged}
        self.num_samples = self.nbytes = 0

    def add(self, sample: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy a sample, as `sample_payload` gives its arrays."""
        number, row = divmod(self.num_samples, self._rows)
        if number == len(self._blocks):
            self._blocks.append(
                {
                    n: np.empty((self._rows, *m.sample_shape), dtype_of(m.dtype))
                    for n, m in self._fixed.items()
                }
            )
        for name, memory in self._blocks[number].items():
            memory[row] = sample[name]
        for name, samples in self._ragged.items():
            del samples[self.num_samples :]  # of a call that was interrupted
            samples.append(np.array(sample[name], order="C"))
        self.nbytes += sum(value.nbytes for value in sample.values())
        self.num_samples += 1  # from here on it counts

    def cut(self, num: int) -> None:
        """Forget the samples behind the first `num`."""
        self.num_samples = min(self.num_samples, num)

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Numbers of rows of the samples of ragged arrays, by name."""
        return {name: [len(rows) for rows in all[: self.num_samples]] for name, all in self._ragged.items()}

    def batches(self) -> Iterator[tuple[range, Arrays]]:
        """Numbers of samples and their arrays, as `commit_many` takes them."""
        for first in range(0, self.num_samples, self._rows):
            samples = range(first, min(first + self._rows, self.num_samples))
            block = self._blocks[first // self._rows]
            batch: dict[str, Any] = {name: memory[: len(samples)] for name, memory in block.items()}
            batch |= {name: rows[first : samples.stop] for name, rows in self._ragged.items()}
            yield samples, batch

    def clear(self) -> None:
        """Forget the samples."""
        self.num_samples = self.nbytes = 0
        for rows in self._ragged.values():
            rows.clear()


def sample_payload(value: Any, meta: ArrayMeta) -> npt.NDArray[Any]:
    """A sample as bytes of the declared dtype; of a ragged array of any number of rows."""
    if not meta.is_ragged:
        return as_payload(value, meta, meta.sample_shape)
    rows = encoded_text(value, meta)
    shape = np.shape(rows)
    return as_payload(rows, meta, (*(shape[:1] or (0,)), *meta.sample_shape))
