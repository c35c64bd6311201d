"""What `info` tells of a packed store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ups_store.info import ArrayInfo, StoreInfo
from ups_store.system import files, mappings

if TYPE_CHECKING:
    from ups_store.packed.catalog import PackedArray
    from ups_store.packed.store import PackedStore


@dataclass(frozen=True)
class PackedInfo(StoreInfo):
    """What `describe_packed` tells; `nbytes` is the length of the packed file, `reads` is "decode".

    Attributes:
        codec: "blosc", "zstd" or "pcodec".
        level: Its effort.
        mapped_nbytes: Length of the mapped file that `unpack` makes.
    """

    codec: str = ""
    level: int = 0
    mapped_nbytes: int = 0


def describe_packed(store: PackedStore) -> PackedInfo:
    """Describe a packed store by its metadata; no chunk is decoded."""
    catalog = store.catalog
    packing, arrays = catalog.packing, catalog.arrays
    fd = files.open_existing(store.path)
    try:
        nbytes, network = files.size(fd), files.network_file_system(fd)
        resident = mappings.resident_nbytes(mappings.map_private(fd, nbytes), nbytes)
    finally:
        files.close(fd)
    return PackedInfo(
        path=store.path,
        format_version="{}.{}".format(*catalog.root.version),
        num_samples=len(store),
        nbytes=nbytes,
        modified_s=files.modified_s(store.path),
        resident_share=resident / nbytes,
        reads="decode",
        network=network,
        config_hash=store.config_hash,
        fingerprint=packing.fingerprint,
        identity=dict(store.identity),
        attrs=dict(store.attrs),
        arrays={name: _packed_array_info(a) for name, a in arrays.items() if not a.meta.is_constant},
        constants={name: _packed_array_info(a) for name, a in arrays.items() if a.meta.is_constant},
        build=None,
        codec=packing.codec,
        level=packing.level,
        mapped_nbytes=catalog.layout.file_nbytes,
    )


def _packed_array_info(array: PackedArray) -> ArrayInfo:
    meta = array.meta
    return ArrayInfo(meta.shape, meta.dtype, meta.dims, meta.sample_nbytes, None, dict(meta.attrs))
