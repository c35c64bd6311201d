"""Training with PyTorch: datasets over stores, and a loader that has the next batch ready.

The only part of the package that imports torch.
"""

from ups_store.errors import needs

with needs("torch"):
    from ups_store.torch.assembler import EpochReport
    from ups_store.torch.batch import Batch, Sample
    from ups_store.torch.dataset import StoreDataset
    from ups_store.torch.device_store import DeviceStore
    from ups_store.torch.fallback import OpenedDataset, open_dataset
    from ups_store.torch.loader import Loader, make_batch_sampler, make_loader
    from ups_store.torch.sampler import StoreBatchSampler
    from ups_store.torch.windows import Window

__all__ = [
    "Batch",
    "DeviceStore",
    "EpochReport",
    "Loader",
    "OpenedDataset",
    "Sample",
    "StoreBatchSampler",
    "StoreDataset",
    "Window",
    "make_batch_sampler",
    "make_loader",
    "open_dataset",
]
