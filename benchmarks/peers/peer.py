"""`Peer`: what every way to keep samples must do here, so that all are measured alike."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.inputs import Floats
from benchmarks.peers.sizes import Items, Samples


class Peer(ABC):
    """Samples in a folder, written once and read at random; one object per process.

    Attributes:
        name: For tables.
        package: Distribution whose version is reported; None for what needs none of its own.
        is_random: Whether single samples can be asked for; without, only epochs are measured.
        has_preload: Whether it can bring everything into memory before it is used.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    is_random: ClassVar[bool] = True
    has_preload: ClassVar[bool] = False

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder, self.samples = folder, samples

    @abstractmethod
    def write(self, values: Floats) -> None:
        """Store all samples, shape (N, frames, width), in `folder`."""

    @abstractmethod
    def open(self) -> None:
        """Make samples readable in this process."""

    def close(self) -> None:  # noqa: B027
        """Give back what `open` took, mappings included; by default there is nothing."""

    def preload(self) -> None:
        """Bring all samples into memory; after `open`."""
        raise NotImplementedError

    def sample(self, index: int) -> Tensor:
        """One sample, shape (frames, width): a view or new memory."""
        raise NotImplementedError

    def batch(self, indices: Items) -> Tensor:
        """Samples, shape (B, frames, width), in memory that may be reused: the fastest way there is."""
        return torch.stack([self.sample(index) for index in indices.tolist()])

    def window(self, index: int, start: int, length: int) -> Tensor:
        """Some frames of one sample, shape (length, width); by default of a whole sample."""
        return self.sample(index)[start : start + length]

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        """One window per sample, shape (B, length, width)."""
        pairs = zip(indices.tolist(), starts.tolist(), strict=True)
        return torch.stack([self.window(index, start, length) for index, start in pairs])

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        """Shuffled batches; every iteration is an epoch. By default a DataLoader over single samples."""
        return DataLoader(
            _Items(self),
            batch_size=self.samples.batch,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )


class _Items(Dataset[Tensor]):
    """Single samples of a peer, which every process opens for itself."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._opened_by = -1

    def __len__(self) -> int:
        return self._peer.samples.num

    def __getitem__(self, index: int) -> Tensor:
        if self._opened_by != os.getpid():
            self._peer.open()
            self._opened_by = os.getpid()
        return self._peer.sample(index)
