"""`MixedDataset`: datasets whose samples share batches, in the shares of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ups_store.errors import SpecError
from ups_store.read.base import AnyStore
from ups_store.read.gather import Samples
from ups_store.torch.batch import Batch, Sample
from ups_store.torch.dataset import StoreDataset, StoreLike, as_table, in_words, interleave
from ups_store.torch.deadline import Where
from ups_store.torch.memory import Allocate, BufferPool

SOURCE = "source"  # key of a batch

Mixable = StoreDataset | StoreLike


class MixedDataset:
    """Several datasets for one loader, every batch of which has samples of all in the shares of `weights`.

    `make_loader(MixedDataset([a, b], weights=[3, 1]), batch_size=64)` gives batches with 48 samples of `a`
    and 16 of `b`. `batch["source"]`, int64, shape (B,), says of which dataset a sample is, and
    `batch["index"]` which item of that. Picklable.

    Which samples a step takes depends on the seed, the epoch and the step alone, not on the number of ranks.
    Each dataset is read through, over the ends of epochs, before a sample of it comes again; then it begins
    again, in a new order where the loader shuffles. An epoch ends after `epoch_size` samples.

    Args:
        datasets: What is mixed, perhaps by name: datasets, or stores, paths, or several of them, which stand
            for a `StoreDataset`. Their arrays have the same names, shapes and dtypes.
        weights: Shares of the samples, one per dataset; by default in proportion to their lengths.
        epoch_size: Samples of an epoch over all ranks, filled up to whole batches, or with `drop_last` cut
            down to them; by default as many as the datasets have together.
        transform: Called with every `Sample`, which has `source`, too.

    Attributes:
        datasets: The datasets, in order.
        names: Their names; "0", "1", ... where they have none.
        sources: Their stores, one after the other.

    Raises:
        SpecError: If the datasets' samples don't fit into one batch, kind "mixed"; if one of them has a
            transform of its own, kind "transform", or an array named "source", kind "names".
    """

    def __init__(
        self,
        datasets: Mapping[str, Mixable | Iterable[StoreLike]] | Sequence[Mixable | Iterable[StoreLike]],
        *,
        weights: Sequence[float] | None = None,
        epoch_size: int | None = None,
        transform: Callable[[Sample], Any] | None = None,
    ) -> None:
        named = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
        if not named:
            raise SpecError("no dataset given", kind="stores", expected="at least one", found=0)
        self.names = tuple(map(str, named))
        self.datasets = tuple(
            given if isinstance(given, StoreDataset) else StoreDataset(given) for given in named.values()
        )
        self.weights, self.epoch_size, self.transform = weights, epoch_size, transform
        self.sources = tuple(source for dataset in self.datasets for source in dataset.sources)
        self._check()
        counts = [len(dataset.sources) for dataset in self.datasets]
        self._dataset_of = np.repeat(np.arange(len(counts)), counts)  # by source
        self._ends: Samples = np.cumsum([len(source) for source in self.sources])
        self._firsts = np.cumsum([0, *map(len, self.datasets[:-1])])
        self._pool = BufferPool(limit=4 * self.num_tensors * len(self.sources))

    def __repr__(self) -> str:
        return in_words("MixedDataset", self._facts())

    def _repr_html_(self) -> str:
        return as_table("MixedDataset", self._facts())

    @property
    def stores(self) -> tuple[AnyStore, ...]:
        """The stores that the samples lie in."""
        return tuple(source.store for source in self.sources)

    @property
    def num_tensors(self) -> int:
        """Tensors of a batch that are gathered."""
        return max(dataset.num_tensors for dataset in self.datasets)

    @property
    def sizes(self) -> list[int]:
        """Number of items of each dataset."""
        return [len(dataset) for dataset in self.datasets]

    def fetch(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Batch:
        """A batch of all datasets together.

        Args:
            number: 0.
            items: Items, numbered through over the datasets, all valid, int64, shape (B,).
            epoch: What windows are drawn for.
            allocate: Makes each tensor of the batch.
        """
        numbers = np.searchsorted(self._ends, items, side="right")
        present = np.unique(numbers).tolist()
        if len(present) == 1:
            return self._part(present[0], items, epoch=epoch, allocate=allocate)
        rows = [np.flatnonzero(numbers == number) for number in present]
        parts = [
            self._part(number, items[mine], epoch=epoch, allocate=self._pool.empty)
            for number, mine in zip(present, rows, strict=True)
        ]
        ragged = {field.key for field in self.sources[0].ragged}
        return interleave(parts, rows, allocate, ragged)

    def where(self, number: int, items: Samples, *, epoch: int) -> Where:
        """For people: path of the first store that items are of, and the samples of theirs that lie there.

        Args:
            number: 0; all datasets are one source.
            items: As those of `fetch`.
            epoch: Likewise.
        """
        numbers = np.searchsorted(self._ends, items, side="right")
        first = int(numbers[0])
        source = self.sources[first]
        mine = items[numbers == first] - (int(self._ends[first]) - len(source))
        return source.where(mine, epoch=epoch)

    def _part(self, number: int, items: Samples, *, epoch: int, allocate: Allocate) -> Batch:
        """The samples of a batch that lie in one store."""
        source, dataset = self.sources[number], int(self._dataset_of[number])
        first = int(self._ends[number]) - len(source)
        values = source.fetch(items - first, epoch=epoch, allocate=allocate)
        values["index"] = torch.from_numpy(items - self._firsts[dataset])
        values[SOURCE] = torch.full((len(items),), dataset)
        batch = Batch(values | {"task": source.task})
        batch.padded = source.padded
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        options: dict[str, Any] = {"weights": self.weights, "epoch_size": self.epoch_size}
        options["transform"] = self.transform
        named = dict(zip(self.names, self.datasets, strict=True))
        return functools.partial(MixedDataset, **options), (named,)

    def _check(self) -> None:
        first = self.sources[0]
        for name, dataset in zip(self.names, self.datasets, strict=True):
            if dataset.transform is not None:
                hint = 'give one to MixedDataset: sample["source"] says of which dataset a sample is'
                raise SpecError(f"dataset {name} has a transform", kind="transform", hint=hint)
            for source in dataset.sources:
                if source.signature != first.signature:
                    raise SpecError(
                        f"samples of {self.names[0]} and {name} don't fit into one batch",
                        kind="mixed",
                        path=source.store.path,
                        expected=first.signature,
                        found=source.signature,
                        hint="choose arrays with `names`, or give the stores to make_loader unmixed",
                    )
        if SOURCE in first.signature:
            hint = "leave it out with `names`"
            problem = "the array's name is a key of mixed batches"
            raise SpecError(problem, kind="names", path=first.store.path, array=SOURCE, hint=hint)

    def _facts(self) -> dict[str, object]:
        sizes = [f"{name} ({size:,} items)" for name, size in zip(self.names, self.sizes, strict=True)]
        weights = "by their lengths" if self.weights is None else list(self.weights)
        return {"datasets": ", ".join(sizes), "weights": weights}
