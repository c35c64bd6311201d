"""Training with PyTorch: datasets over stores, and a loader that has the next batch ready.

The only part of the package that imports torch.
"""

from ups_store.errors import needs

with needs("torch"):
    from ups_store.read.items import Window, WindowIndex
    from ups_store.read.loader import EpochReport
    from ups_store.read.order import DataOrder, Order, Step
    from ups_store.torch.batch import Allocate, Batch, Sample, gather_nested, map_tensors, new_tensor
    from ups_store.torch.dataset import (
        BatchSource,
        MixedDataset,
        OpenedDataset,
        StoreDataset,
        open_dataset,
    )
    from ups_store.torch.device import DeviceStore
    from ups_store.torch.loader import (
        Loader,
        StoreBatchSampler,
        make_batch_sampler,
        make_loader,
        ranks_of_torch,
    )

__all__ = [
    "Allocate",
    "Batch",
    "BatchSource",
    "DataOrder",
    "DeviceStore",
    "EpochReport",
    "Loader",
    "MixedDataset",
    "OpenedDataset",
    "Order",
    "Sample",
    "Step",
    "StoreBatchSampler",
    "StoreDataset",
    "Window",
    "WindowIndex",
    "gather_nested",
    "make_batch_sampler",
    "make_loader",
    "map_tensors",
    "new_tensor",
    "open_dataset",
    "ranks_of_torch",
]
