"""Every way to keep samples that is measured: what each must do, and how each does it, fastest way first.

Packages are imported where they are used: a peer that isn't installed has a row all the same, and nothing
here is imported that another peer needs.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.inputs import NAME, Floats, values_of

Items = npt.NDArray[np.int64]
SHARD_BYTES = 1 << 26  # of what packs samples into larger files


@dataclass(frozen=True)
class Samples:
    """Samples of one size: float32, shape (N, frames, width); a batch has `batch` of them."""

    label: str
    num: int
    frames: int
    width: int
    batch: int

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return 4 * self.frames * self.width

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.num * self.sample_bytes

    def values(self, samples: Items) -> Floats:
        """What the samples must hold, shape (B, frames, width)."""
        return values_of(samples, self.sample_bytes).reshape(-1, self.frames, self.width)


def sizes(*, full: bool) -> list[Samples]:
    """Samples of 4 KB, 100 KB and 13 MB; frames of 1, 1 and 32 KB."""
    factor = 8 if full else 1
    return [
        Samples("4 KB", 8192 * factor, 4, 256, 64),
        Samples("100 KB", 1024 * factor, 100, 256, 64),
        Samples("13 MB", 12 * factor, 400, 8192, 4),
    ]


class Peer(ABC):
    """Samples in a folder, written once and read at random; one object per process.

    `package` is the distribution whose version is reported. Of a peer that isn't `is_random` only epochs are
    measured; one that `has_preload` can bring everything into memory before it is used.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    is_random: ClassVar[bool] = True
    has_preload: ClassVar[bool] = False
    file: ClassVar[str] = "samples"

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder, self.samples = folder, samples
        self.path = folder / self.file

    @abstractmethod
    def write(self, values: Floats) -> None:
        """Store all samples, shape (N, frames, width), in `folder`."""

    def open(self) -> None:  # noqa: B027
        """Make samples readable in this process: what is kept open is an attribute that begins with "_"."""

    def close(self) -> None:
        """Give back what `open` took, mappings included."""
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)

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
        return self._data_loader(_Items(self), num_workers, shuffle=True)

    def _data_loader(self, dataset: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
        options = {"batch_size": self.samples.batch, "drop_last": True, **options}
        return DataLoader(dataset, num_workers=num_workers, persistent_workers=num_workers > 0, **options)

    def _empty_batch(self) -> Floats:
        return np.empty((self.samples.batch, self.samples.frames, self.samples.width), np.float32)


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


class Selected(Peer):
    """Batches by `index_select` out of `_tensor` into a reused tensor."""

    _tensor: Tensor

    def _keep(self, values: Any) -> None:
        """Read from these from now on, shape (N, frames, width)."""
        self._tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
        self._out = torch.from_numpy(self._empty_batch())

    def sample(self, index: int) -> Tensor:
        return self._tensor[index]

    def batch(self, indices: Items) -> Tensor:
        return torch.index_select(self._tensor, 0, torch.from_numpy(indices), out=self._out[: len(indices)])


class Indexed(Peer):
    """Whatever is asked for by one index into `_array`."""

    _array: Any

    def _read(self, index: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index]))

    def sample(self, index: int) -> Tensor:
        return self._read(index)

    def window(self, index: int, start: int, length: int) -> Tensor:
        return self._read((index, slice(start, start + length)))


class Rows(Peer):
    """What has no cheaper way to one sample than a batch of one."""

    def sample(self, index: int) -> Tensor:
        return self.batch(np.array([index]))[0]


class Epochs:
    """Calls a function for every epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Tensor]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return self._epoch()


# --- the limit, ours, and plain files -----------------------------------------------------------------


class Memcpy(Peer):
    """An array in RAM, indexed; an epoch is as many block copies as there are batches."""

    name = "memcpy (the limit)"

    def write(self, values: Floats) -> None:
        del values

    def open(self) -> None:
        self._values = self.samples.values(np.arange(self.samples.num))
        self._out = self._empty_batch()

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._values[index])

    def batch(self, indices: Items) -> Tensor:
        np.take(self._values, indices, axis=0, out=self._out[: len(indices)], mode="clip")
        return torch.from_numpy(self._out[: len(indices)])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        return torch.from_numpy(self._values[indices[:, None], starts[:, None] + np.arange(length)])

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        return Epochs(self._copies)

    def _copies(self) -> Iterator[Tensor]:
        if not hasattr(self, "_values"):
            self.open()
        num, batch = self.samples.num, self.samples.batch
        for first in np.random.default_rng(0).integers(0, num - batch + 1, num // batch).tolist():
            np.copyto(self._out, self._values[first : first + batch])
            yield torch.from_numpy(self._out)


class UpsStore(Peer):
    """With the defaults: durable commits of one batch each, checksums, mapped."""

    name, package, has_preload, file = "ups_store", "ups-store", True, "samples.zarr.zip"

    def write(self, values: Floats) -> None:
        import ups_store

        spec = ups_store.ArraySpec(values.shape, "float32", dims=("sample", "time", "x"))
        with ups_store.create(self.path, {NAME: spec}, identity={"made_for": "a benchmark"}) as writer:
            for first in range(0, len(values), self.samples.batch):
                indices = np.arange(first, min(len(values), first + self.samples.batch))
                writer.commit_many(indices, {NAME: values[indices[0] : indices[-1] + 1]})
            writer.finish()

    def open(self) -> None:
        import ups_store

        self._store = ups_store.open(self.path)
        self._out = self._window_out = None

    def close(self) -> None:
        self._store.close()
        super().close()

    def preload(self) -> None:
        self._store.preload(mode="page-cache")

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(self._store.sample(index)[NAME].copy())

    def batch(self, indices: Items) -> Tensor:
        self._out = self._store.gather(indices, [NAME], out=self._out)
        return torch.from_numpy(self._out[NAME])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        out = self._window_out
        self._window_out = self._store.gather(indices, [NAME], start=starts, length=length, out=out)
        return torch.from_numpy(self._window_out[NAME])

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        from ups_store.torch import StoreDataset, make_loader

        dataset, batch = StoreDataset(self.path), self.samples.batch
        if num_workers:
            loader: Iterable[Any] = self._data_loader(dataset, num_workers, shuffle=True)
        else:
            loader = make_loader(dataset, batch_size=batch, drop_last=True, shuffle=True)
        return Epochs(lambda: (each[NAME] for each in loader))


class Memmap(Selected):
    """Without workers an epoch is a plain loop: what people write first, and loaders are measured against."""

    name, package, has_preload, file = "np.memmap", "numpy", True, "samples.npy"

    def write(self, values: Floats) -> None:
        np.save(self.path, values)

    def open(self) -> None:
        # Copy-on-write: torch has no read-only tensors, and warns.
        self._values = np.load(self.path, mmap_mode="c")
        self._keep(self._values)

    def preload(self) -> None:
        torch.sum(self._tensor.view(-1)[:: 4096 // 4])

    def windows(self, indices: Items, starts: Items, length: int) -> Tensor:
        return torch.from_numpy(self._values[indices[:, None], starts[:, None] + np.arange(length)])

    def loader(self, num_workers: int) -> Iterable[Tensor]:
        return super().loader(num_workers) if num_workers else Epochs(self._plain_loop)

    def _plain_loop(self) -> Iterator[Tensor]:
        if not hasattr(self, "_values"):
            self.open()
        num, batch = self.samples.num, self.samples.batch
        order = np.random.default_rng(0).permutation(num)
        for first in range(0, num - batch + 1, batch):
            yield torch.from_numpy(self._values[order[first : first + batch]])


class PtFolder(Peer):
    """The old system: one `.pt` file per sample."""

    name, package = "folder of .pt", "torch"

    def write(self, values: Floats) -> None:
        for index, value in enumerate(values):
            torch.save({"fields": torch.from_numpy(value.copy())}, self.folder / f"{index}.pt")

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = torch.load(self.folder / f"{index}.pt", weights_only=True)["fields"]
        return tensor


class PtPreloaded(PtFolder):
    """The same, all loaded into a list by every process."""

    name, has_preload = ".pt, preloaded", True

    def open(self) -> None:
        self._loaded = [super(PtPreloaded, self).sample(index) for index in range(self.samples.num)]

    def preload(self) -> None:
        """What `open` did."""

    def sample(self, index: int) -> Tensor:
        return self._loaded[index]


# --- formats of arrays --------------------------------------------------------------------------------


class TensorDictFolder(Peer):
    """Mapped tensors in a folder, indexed as a TensorDict."""

    name, package = "TensorDict memmap", "tensordict"

    def write(self, values: Floats) -> None:
        from tensordict import TensorDict

        TensorDict({"fields": torch.from_numpy(values)}, batch_size=[len(values)]).memmap(self.path)

    def open(self) -> None:
        from tensordict import TensorDict

        self._rows = TensorDict.load_memmap(self.path)

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._rows[index]["fields"]
        return tensor

    def batch(self, indices: Items) -> Tensor:
        tensor: Tensor = self._rows[torch.from_numpy(indices)]["fields"]
        return tensor


class TensorDictArchive(Selected):
    """One file; a view of its tensor is faster than indexing the TensorDict."""

    name, package, file = "TensorDict .tdz", "tensordict", "samples.tdz"

    def write(self, values: Floats) -> None:
        from tensordict import TensorDict

        TensorDict({"fields": torch.from_numpy(values)}, batch_size=[len(values)]).save(self.path)

    def open(self) -> None:
        from tensordict import TensorDict

        self._rows = TensorDict.load(self.path)
        self._keep(self._rows["fields"].as_subclass(Tensor))


class SafetensorsMany(Peer):
    """A file per sample."""

    name, package = "safetensors, many files", "safetensors"

    def write(self, values: Floats) -> None:
        from safetensors.torch import save_file

        for index, value in enumerate(values):
            save_file({"fields": torch.from_numpy(value)}, self.folder / f"{index}.safetensors")

    def open(self) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file

        self._load, self._open_file = load_file, safe_open

    def sample(self, index: int) -> Tensor:
        return self._load(self.folder / f"{index}.safetensors")["fields"]

    def window(self, index: int, start: int, length: int) -> Tensor:
        with self._open_file(self.folder / f"{index}.safetensors", "pt") as file:
            window: Tensor = file.get_slice("fields")[start : start + length]
            return window


class SafetensorsOne(Peer):
    """One file, a tensor per sample."""

    name, package, file = "safetensors, one file", "safetensors", "samples.safetensors"

    def write(self, values: Floats) -> None:
        from safetensors.torch import save_file

        save_file({str(index): torch.from_numpy(value) for index, value in enumerate(values)}, self.path)

    def open(self) -> None:
        from safetensors import safe_open

        self._file = safe_open(self.path, "pt").__enter__()

    def close(self) -> None:
        self._file.__exit__(None, None, None)
        super().close()

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._file.get_tensor(str(index))
        return tensor

    def window(self, index: int, start: int, length: int) -> Tensor:
        window: Tensor = self._file.get_slice(str(index))[start : start + length]
        return window


class Hdf5(Indexed):
    """One dataset, a chunk per sample, read one by one into a reused batch: h5py's fancy index is slower."""

    name, package, file = "HDF5", "h5py", "samples.h5"

    def write(self, values: Floats) -> None:
        import h5py

        with h5py.File(self.path, "w") as file:
            file.create_dataset("fields", data=values, chunks=(1, *values.shape[1:]))

    def open(self) -> None:
        import h5py

        self._file = h5py.File(self.path, "r")
        self._array, self._out = self._file["fields"], self._empty_batch()

    def close(self) -> None:
        self._file.close()
        super().close()

    def batch(self, indices: Items) -> Tensor:
        for row, index in enumerate(indices.tolist()):
            self._array.read_direct(self._out, np.s_[index], np.s_[row])
        return torch.from_numpy(self._out[: len(indices)])


class ZarrFolder(Indexed):
    """zarr-python: a file per chunk, a chunk per sample, no compression."""

    name, package, file = "Zarr folder", "zarr", "samples.zarr"

    def _zarr_store(self, mode: Any) -> Any:
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=mode == "r")

    def write(self, values: Floats, store: Any = None) -> None:
        import zarr

        store, chunks = store or self._zarr_store("w"), (1, *values.shape[1:])
        array = zarr.create_array(store, shape=values.shape, chunks=chunks, dtype="float32", compressors=None)
        array[:] = values
        store.close()

    def open(self) -> None:
        import zarr

        self._opened = self._zarr_store("r")
        self._array = zarr.open_array(self._opened, mode="r")

    def close(self) -> None:
        self._opened.close()
        super().close()

    def batch(self, indices: Items) -> Tensor:
        return torch.from_numpy(np.asarray(self._array.oindex[indices]))


class ZarrZip(ZarrFolder):
    """The chunks as entries of one ZIP file."""

    name, file = "Zarr ZIP, zarr-python", "samples.zarr.zip"

    def _zarr_store(self, mode: Any) -> Any:
        from zarr.storage import ZipStore

        return ZipStore(self.path, mode=mode)


class TensorStoreZarr(Indexed):
    """A Zarr v3 folder, a chunk per sample; batches by one index operation, read with several threads."""

    name, package, file = "TensorStore", "tensorstore", "samples.zarr"

    def _open(self, metadata: dict[str, Any] | None = None) -> Any:
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.path)}}
        if metadata:
            return tensorstore.open({**spec, "metadata": metadata}, create=True).result()
        return tensorstore.open(spec, read=True).result()

    def write(self, values: Floats) -> None:
        chunks = {"name": "regular", "configuration": {"chunk_shape": [1, *values.shape[1:]]}}
        codec = {"name": "bytes", "configuration": {"endian": "little"}}
        metadata = {"shape": list(values.shape), "data_type": "float32", "chunk_grid": chunks}
        self._open({**metadata, "codecs": [codec]})[...].write(values).result()

    def open(self) -> None:
        self._array = self._open()

    def _read(self, index: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self._array[index].read().result()))

    def batch(self, indices: Items) -> Tensor:
        return self._read(indices)


class Blosc2(Indexed):
    """Not compressed, as nothing is here; samples are read one by one, which is its faster way."""

    name, package, file = "blosc2", "blosc2", "samples.b2nd"

    def write(self, values: Floats) -> None:
        import blosc2

        options = {"urlpath": str(self.path), "chunks": (1, *values.shape[1:]), "mode": "w"}
        blosc2.asarray(values, cparams={"clevel": 0}, **options)

    def open(self) -> None:
        import blosc2

        self._array = blosc2.open(str(self.path), mode="r", mmap_mode="r")
        self._out = self._empty_batch()

    def batch(self, indices: Items) -> Tensor:
        for row, index in enumerate(indices.tolist()):
            self._out[row] = self._array[index]
        return torch.from_numpy(self._out[: len(indices)])


# --- formats of tables --------------------------------------------------------------------------------

COLUMN = "fields"


def arrow_table(values: Floats) -> Any:
    """Samples as rows of one column: lists of one length, as Arrow has no arrays of several axes."""
    import pyarrow as pa

    flat = pa.array(values.reshape(-1))
    return pa.table({COLUMN: pa.FixedSizeListArray.from_arrays(flat, values[0].size)})


def values_of_column(column: Any, samples: Samples) -> Floats:
    """Rows of that column, shape (B, frames, width); a view where the column is in one piece."""
    import pyarrow as pa

    rows = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    rows = rows.chunk(0) if isinstance(rows, pa.ChunkedArray) else rows
    values: Floats = rows.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(-1, samples.frames, samples.width)


class ArrowIpc(Selected):
    """One file, one record batch, mapped; a view of it is faster than Arrow's `take`."""

    name, package, file = "Arrow IPC", "pyarrow", "samples.arrow"

    def write(self, values: Floats) -> None:
        import pyarrow as pa

        table = arrow_table(values)
        with pa.OSFile(str(self.path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def open(self) -> None:
        import pyarrow as pa

        self._file = pa.memory_map(str(self.path))
        values = values_of_column(pa.ipc.open_file(self._file).get_batch(0).column(COLUMN), self.samples)
        # Torch warns of what is read-only.
        self._keep(np.lib.stride_tricks.as_strided(values, writeable=True))


class Lance(Rows):
    """A row per sample, read by `take`; rows come into new memory."""

    name, package, file = "Lance", "pylance", "samples.lance"

    def write(self, values: Floats) -> None:
        import lance

        lance.write_dataset(arrow_table(values), str(self.path))

    def open(self) -> None:
        import lance

        self._rows = lance.dataset(str(self.path))

    def batch(self, indices: Items) -> Tensor:
        rows = self._rows.take(indices.tolist(), columns=[COLUMN])
        return torch.from_numpy(np.require(values_of_column(rows[COLUMN], self.samples), requirements="W"))


class Vortex(Rows):
    """A scan takes rising rows only, so batches are put into their order afterwards."""

    name, package, file = "Vortex", "vortex-data", "samples.vortex"

    def write(self, values: Floats) -> None:
        import vortex

        vortex.io.write(vortex.array(arrow_table(values)), str(self.path))

    def open(self) -> None:
        import pyarrow as pa
        import vortex

        self._file = vortex.open(str(self.path))
        self._rows_of = lambda rising: vortex.array(pa.array(rising, pa.uint64()))

    def batch(self, indices: Items) -> Tensor:
        rising, places = np.unique(indices, return_inverse=True)
        table = self._file.scan([COLUMN], indices=self._rows_of(rising)).read_all().to_arrow_table()
        return torch.from_numpy(values_of_column(table[COLUMN], self.samples)[places])


class HuggingFace(Peer):
    """Arrow files, mapped; samples as `Array2D`, given as NumPy arrays, which is their fastest format."""

    name, package = "HF datasets (Arrow)", "datasets"

    def write(self, values: Floats) -> None:
        from datasets import Array2D, Dataset, Features, disable_progress_bars

        disable_progress_bars()
        features = Features({"fields": Array2D(shape=values.shape[1:], dtype="float32")})
        cache = str(self.folder.with_name(self.folder.name + "-cache"))

        def rows() -> Iterator[dict[str, Any]]:
            for value in values:
                yield {"fields": value}

        Dataset.from_generator(rows, features=features, cache_dir=cache).save_to_disk(self.path)

    def open(self) -> None:
        from datasets import load_from_disk

        self._rows = load_from_disk(self.path).with_format("numpy")

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._rows[index]["fields"]))

    def batch(self, indices: Items) -> Tensor:
        return torch.from_numpy(np.array(self._rows[indices.tolist()]["fields"]))


# --- formats of streams: shards of 64 MB --------------------------------------------------------------


class LitData(Peer):
    """Chunk files, streamed by its own loader."""

    name, package = "LitData", "litdata"

    def write(self, values: Floats) -> None:
        from litdata.streaming.cache import Cache

        cache = Cache(str(self.path), chunk_bytes=SHARD_BYTES)
        for index, value in enumerate(values):
            cache[index] = torch.from_numpy(value)
        cache.done()
        cache.merge()

    def open(self) -> None:
        from litdata import StreamingDataset

        self._rows = StreamingDataset(str(self.path))

    def sample(self, index: int) -> Tensor:
        tensor: Tensor = self._rows[index]
        return tensor

    def loader(self, num_workers: int, **options: Any) -> Iterable[Tensor]:
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(
            **{"input_dir": str(self.path), "shuffle": True, "drop_last": True, **options}
        )
        return StreamingDataLoader(
            dataset,
            batch_size=self.samples.batch,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            drop_last=True,
        )


class MosaicStreaming(Peer):
    """MDS shards; epochs through a DataLoader, as its documentation says."""

    name, package = "MosaicML Streaming", "mosaicml-streaming"

    def write(self, values: Floats) -> None:
        from streaming import MDSWriter

        columns = {"fields": f"ndarray:float32:{','.join(str(n) for n in values.shape[1:])}"}
        with MDSWriter(out=str(self.path), columns=columns, size_limit=SHARD_BYTES) as writer:
            for value in values:
                writer.write({"fields": value})

    def _dataset(self, **options: Any) -> Any:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        return StreamingDataset(**{"local": str(self.path), "batch_size": self.samples.batch, **options})

    def open(self) -> None:
        self._rows = self._dataset(shuffle=False)

    def sample(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self._rows[index]["fields"]))

    def loader(self, num_workers: int, **options: Any) -> Iterable[Tensor]:
        def stacked(rows: list[dict[str, Floats]]) -> Tensor:
            return torch.stack([torch.from_numpy(np.array(row["fields"])) for row in rows])

        return self._data_loader(self._dataset(shuffle=True, **options), num_workers, collate_fn=stacked)


class WebDataset(Peer):
    """Tar files, shuffled by shard and in a buffer of 1000; single samples can't be asked for."""

    name, package, is_random = "WebDataset", "webdataset", False

    def write(self, values: Floats) -> None:
        import webdataset

        self.path.mkdir()
        pattern = str(self.path / "%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, verbose=0) as writer:
            for index, value in enumerate(values):
                writer.write({"__key__": f"{index:08d}", "npy": value})

    def loader(self, num_workers: int, shards: list[str] | None = None, **options: Any) -> Iterable[Tensor]:
        import webdataset

        shards = shards or sorted(str(path) for path in self.path.glob("*.tar"))
        dataset = (
            webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, **options)
            .shuffle(1000)
            .decode()
            .to_tuple("npy")
            .batched(self.samples.batch, partial=False)
            .map(lambda batch: torch.as_tensor(batch[0]))
        )
        return self._data_loader(dataset, num_workers, batch_size=None, drop_last=False)


# In the order of the tables.
_ORDER = (Memcpy, UpsStore, Memmap, TensorDictArchive, TensorDictFolder, PtPreloaded, PtFolder,
          SafetensorsOne, SafetensorsMany, Hdf5, ZarrFolder, ZarrZip, TensorStoreZarr, ArrowIpc, Lance,
          Vortex, Blosc2, HuggingFace, LitData, MosaicStreaming, WebDataset)  # fmt: skip
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in _ORDER}
