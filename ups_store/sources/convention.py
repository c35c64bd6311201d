"""What a convention is: one way of keeping simulations in HDF5."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ups_store.sources.contents import Contents
from ups_store.sources.hdf5 import h5py
from ups_store.sources.parameters import root_parameters
from ups_store.sources.tasks import Task


class Convention(ABC):
    """It only describes; `regions` reads them all alike.

    Attributes:
        name: Part of a store's identity.
        version: Likewise; raised when the same file would give other arrays.
    """

    name: str
    version: int = 1

    @abstractmethod
    def matches(self, file: h5py.File) -> bool:
        """Whether the file is meant to follow this convention, complete or not."""

    @abstractmethod
    def describe(self, file: h5py.File, task: Task | None) -> Contents:
        """Where the file keeps what. `source.measure` checks that it is so."""

    def parameters(self, file: h5py.File) -> dict[str, float]:
        """Numbers that hold for all samples of the file."""
        return root_parameters(file)

    def boundary(self, file: h5py.File, task: Task | None) -> Mapping[str, str]:
        """Boundary type by spatial axis: what is known from the task and the file's name."""
        return task.boundary_of(Path(file.filename).name) if task else {}

    def computed_coordinates(self, lengths: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Coordinates that the file doesn't hold, by the letter of their axis, as long as it is."""
        return {}

    def attributes(self, file: h5py.File) -> dict[str, Any]:
        """What else a store's root group should say, as JSON values."""
        return {}
