"""Ways to train from a bucket: each uploads samples once, then gives shuffled epochs in another process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.inputs import Floats
from benchmarks.peers.sizes import Samples

BUCKET = "caches"
CHUNK_BYTES = 1 << 26  # of what packs samples into larger objects


class RemoteReader(ABC):
    """Samples in a bucket of the server that AWS_ENDPOINT_URL names.

    Args:
        samples: What they are.
        folder: Of this machine: what is kept between epochs, and what is written before it is uploaded.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, samples: Samples, folder: Path) -> None:
        self.samples, self.folder = samples, folder

    @abstractmethod
    def upload(self, values: Floats) -> None:
        """Put all samples, shape (N, frames, width), into the bucket."""

    @abstractmethod
    def epochs(self) -> Iterable[Tensor]:
        """Shuffled batches, shape (B, frames, width); every iteration is an epoch."""


class UpsStore(RemoteReader):
    """One object, read in place; a cache of slots on this machine's disk."""

    name, package, is_cached = "ups_store", "ups-store", True

    def upload(self, values: Floats) -> None:
        import ups_store

        path = self.folder / "a.zarr.zip"
        ups_store.write(path, values, names=["fields"]).close()
        put(path, "ups/a.zarr.zip")

    def epochs(self) -> Iterable[Tensor]:
        from ups_store.torch import StoreDataset, make_loader

        if self.is_cached:
            os.environ["UPS_STORE_CACHE_DIR"] = str(self.folder / "slots")
        dataset = StoreDataset(f"s3://{BUCKET}/ups/a.zarr.zip")
        return _Fields(make_loader(dataset, batch_size=self.samples.batch, shuffle=True, drop_last=True))


class UpsStoreUncached(UpsStore):
    """The same without a cache."""

    name, is_cached = "ups_store, no cache", False

    def upload(self, values: Floats) -> None:
        """It is there."""


class _Fields:
    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return (batch["fields"] for batch in self._batches)


class LitData(RemoteReader):
    """Chunks of 64 MB and its own loader, which keeps them on this machine's disk."""

    name, package = "LitData", "litdata"

    def upload(self, values: Floats) -> None:
        from litdata.streaming.cache import Cache

        folder = self.folder / "litdata"
        cache = Cache(str(folder), chunk_bytes=CHUNK_BYTES)
        for index, value in enumerate(values):
            cache[index] = torch.from_numpy(value)
        cache.done()
        cache.merge()
        for path in folder.iterdir():
            put(path, f"litdata/{path.name}")

    def epochs(self) -> Iterable[Tensor]:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for plain http
        dataset = StreamingDataset(
            f"s3://{BUCKET}/litdata",
            cache_dir=str(self.folder / "litdata kept"),
            shuffle=True,
            drop_last=True,
            storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
        )
        loader: Iterable[Tensor] = StreamingDataLoader(
            dataset, batch_size=self.samples.batch, num_workers=0, drop_last=True
        )
        return loader


class Mosaic(RemoteReader):
    """Shards of 64 MB, kept on this machine's disk."""

    name, package = "MosaicML Streaming", "mosaicml-streaming"

    def upload(self, values: Floats) -> None:
        from streaming import MDSWriter

        folder = self.folder / "mosaic"
        shape = ",".join(str(n) for n in values.shape[1:])
        columns = {"fields": f"ndarray:float32:{shape}"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=CHUNK_BYTES) as writer:
            for value in values:
                writer.write({"fields": value})
        for path in folder.iterdir():
            put(path, f"mosaic/{path.name}")

    def epochs(self) -> Iterable[Tensor]:
        from streaming import StreamingDataset

        os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
        batch, remote = self.samples.batch, f"s3://{BUCKET}/mosaic"
        kept = str(self.folder / "mosaic kept")
        dataset = StreamingDataset(remote=remote, local=kept, shuffle=True, batch_size=batch)
        return DataLoader(dataset, batch_size=batch, drop_last=True, collate_fn=_stack)


def _stack(rows: list[dict[str, Floats]]) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(row["fields"])) for row in rows])


class WebDataset(RemoteReader):
    """Shards of 64 MB by curl, kept on this machine's disk; shuffled by shard and in a buffer of 1000."""

    name, package = "WebDataset", "webdataset"

    def upload(self, values: Floats) -> None:
        import webdataset

        folder = self.folder / "tar"
        folder.mkdir()
        with webdataset.ShardWriter(str(folder / "a-%06d.tar"), maxsize=CHUNK_BYTES, verbose=0) as writer:
            for index, value in enumerate(values):
                writer.write({"__key__": f"{index:08d}", "npy": value})
        for path in folder.iterdir():
            put(path, f"tar/{path.name}")

    def epochs(self) -> Iterable[Tensor]:
        import webdataset

        names = sorted(path.name for path in (self.folder / "tar").iterdir())
        urls = [f"pipe:curl -s {os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/tar/{name}" for name in names]
        kept = self.folder / "tar kept"
        kept.mkdir(exist_ok=True)
        dataset = (
            webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False, cache_dir=str(kept))
            .shuffle(1000)
            .decode()
            .to_tuple("npy")
            .batched(self.samples.batch, partial=False)
            .map(_first)
        )
        return DataLoader(dataset, batch_size=None)


def _first(batch: tuple[Floats]) -> Tensor:
    return torch.as_tensor(batch[0])


class ZarrPython(RemoteReader):
    """An object for each sample, through fsspec; nothing is kept."""

    name, package = "zarr-python and fsspec", "zarr"

    def _store(self, *, read_only: bool) -> Any:
        import zarr
        from obstore.fsspec import FsspecStore

        files = FsspecStore("s3", client_options={"allow_http": True}, asynchronous=True)
        return zarr.storage.FsspecStore(files, read_only=read_only, path=f"{BUCKET}/zarr")

    def upload(self, values: Floats) -> None:
        import zarr

        array = zarr.create_array(
            self._store(read_only=False),
            shape=values.shape,
            chunks=(1, *values.shape[1:]),
            dtype="float32",
            compressors=None,
        )
        array[:] = values

    def epochs(self) -> Iterable[Tensor]:
        import zarr

        array = zarr.open_array(self._store(read_only=True), mode="r")
        return DataLoader(
            _Rows(array, self.samples.num),
            batch_size=None,
            sampler=torch.utils.data.BatchSampler(
                torch.utils.data.RandomSampler(range(self.samples.num)), self.samples.batch, drop_last=True
            ),
        )


class _Rows(Dataset[Tensor]):
    """Whole batches of a Zarr array: its requests go side by side."""

    def __init__(self, array: Any, num: int) -> None:
        self._array, self._num = array, num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(self._array.oindex[np.asarray(indices)]))


def put(path: Path, key: str) -> None:
    """Upload a file."""
    import obstore

    store = obstore.store.S3Store(BUCKET, client_options={"allow_http": True})
    obstore.put(store, key, path)


READERS = (UpsStore, UpsStoreUncached, LitData, Mosaic, WebDataset, ZarrPython)
