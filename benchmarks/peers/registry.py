"""All peers: where each is defined; importing one needs its package."""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.peers.peer import Peer
from benchmarks.peers.sizes import Samples

# Name for tables, module, class: a peer that isn't installed has a row all the same.
PEERS = (
    ("memcpy (the limit)", "memory", "Memcpy"),
    ("ups_store", "store", "UpsStore"),
    ("np.memmap", "memmap", "Memmap"),
    ("TensorDict .tdz", "tensor_dict", "TensorDictArchive"),
    ("TensorDict memmap", "tensor_dict", "TensorDictFolder"),
    (".pt, preloaded", "pt_folder", "PtPreloaded"),
    ("folder of .pt", "pt_folder", "PtFolder"),
    ("safetensors, one file", "safetensors_files", "SafetensorsOne"),
    ("safetensors, many files", "safetensors_files", "SafetensorsMany"),
    ("HDF5", "hdf5", "Hdf5"),
    ("Zarr folder", "zarr_python", "ZarrFolder"),
    ("Zarr ZIP, zarr-python", "zarr_python", "ZarrZip"),
    ("TensorStore", "tensorstore_zarr", "TensorStoreZarr"),
    ("Arrow IPC", "arrow_ipc", "ArrowIpc"),
    ("Lance", "lance_dataset", "Lance"),
    ("Vortex", "vortex_file", "Vortex"),
    ("blosc2", "blosc2_array", "Blosc2"),
    ("HF datasets (Arrow)", "hugging_face", "HuggingFace"),
    ("LitData", "lit_data", "LitData"),
    ("MosaicML Streaming", "mosaic", "MosaicStreaming"),
    ("WebDataset", "web_dataset", "WebDataset"),
)


def make_peer(name: str, folder: Path, samples: Samples) -> Peer:
    """The peer of that name; ImportError if its package isn't there."""
    module, cls = next((module, cls) for known, module, cls in PEERS if known == name)
    peer_class: type[Peer] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), cls)
    assert peer_class.name == name
    return peer_class(folder, samples)
