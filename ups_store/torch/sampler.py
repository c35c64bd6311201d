"""`StoreBatchSampler`: the agreed order for torch's own `DataLoader`, stores apart per batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from ups_store.read.order import DataOrder


class StoreBatchSampler(Sampler[list[int]]):
    """Batches of items of a `StoreDataset`, each from one store: `DataLoader(dataset, batch_sampler=...)`.

    Without it a `DataLoader` mixes stores in a batch, which only works where their arrays have equal shapes.
    Every iteration is the next epoch. The order is that of `make_loader`.

    A last batch that isn't full is shorter for a single rank; several ranks fill it up with items from the
    epoch's beginning, as `DistributedSampler` does, so that they have equally many steps.

    Args:
        order: Which items each step takes, as numbers within a store.
        first: Number of each store's first item in the dataset.
    """

    def __init__(self, order: DataOrder, first: list[int]) -> None:
        self.order = order
        self._first = first

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on all ranks."""
        return self.order.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.order.steps():
            items = step.items + self._first[step.source]
            if step.mask is not None and self.order.world_size == 1:
                items = items[step.mask]
            yield items.tolist()
        self.set_epoch(self.order.epoch + 1)

    def set_epoch(self, epoch: int, *, consumed: int = 0) -> None:
        """Have the next iteration be epoch number `epoch`.

        Args:
            epoch: Its number.
            consumed: Items of it that the training loop has had, over all ranks: steps * batch size. Only the
                loop knows: a `DataLoader` takes batches from here before it needs them.
        Raises:
            ConfigError: If the order can't stand there.
        """
        self.order.load_state_dict({"seed": self.order.seed, "epoch": epoch, "consumed": consumed})
