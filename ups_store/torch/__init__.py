"""Training with PyTorch: datasets over stores, and a loader that has the next batch ready.

The only part of the package that imports torch.
"""

from ups_store.errors import needs

with needs("torch"):
    from ups_store.read.order import DataOrder, Step
    from ups_store.torch.assembler import EpochReport, Order
    from ups_store.torch.batch import Batch, Sample, map_tensors
    from ups_store.torch.dataset import BatchSource, StoreDataset
    from ups_store.torch.device_store import DeviceStore
    from ups_store.torch.fallback import OpenedDataset, open_dataset
    from ups_store.torch.loader import Loader, make_batch_sampler, make_loader
    from ups_store.torch.memory import Allocate, new_tensor
    from ups_store.torch.mixed import MixedDataset
    from ups_store.torch.ragged import gather_nested
    from ups_store.torch.ranks import ranks_of_torch
    from ups_store.torch.sampler import StoreBatchSampler
    from ups_store.torch.windows import Window, WindowIndex

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
