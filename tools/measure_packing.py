"""Measure codecs and shuffles on the samples of HDF5 files; prints the table of docs/results/packing.md.

    python tools/measure_packing.py FOLDER [--limit-mb 24]

Chunks are single samples, as in packed stores; one thread; speeds are of the unpacked bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numcodecs.blosc
import numpy as np
import numpy.typing as npt
from numcodecs.blosc import BITSHUFFLE, NOSHUFFLE, SHUFFLE, Blosc
from numcodecs.shuffle import Shuffle
from numcodecs.zstd import Zstd

Chunk = npt.NDArray[Any]
MIN_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Codec:
    """A way to pack a chunk."""

    name: str
    shuffle: str
    encode: Callable[[Chunk], bytes]
    decode: Callable[[bytes, Chunk], Any]


def codecs() -> Iterator[Codec]:
    for level in (1, 3, 9):
        zstd = Zstd(level=level)
        yield Codec(f"zstd {level}", "none", zstd.encode, zstd.decode)
        yield Codec(f"zstd {level}", "byte", *shuffled(zstd))
    for level in (1, 5, 9):
        for name, shuffle in (("none", NOSHUFFLE), ("byte", SHUFFLE), ("bit", BITSHUFFLE)):
            blosc = Blosc(cname="zstd", clevel=level, shuffle=shuffle)
            yield Codec(f"blosc {level}", name, blosc.encode, blosc.decode)
    try:
        from numcodecs.pcodec import PCodec
    except ImportError:
        return
    for level in (4, 8, 12):
        pcodec = PCodec(level=level)
        yield Codec(f"pcodec {level}", "-", pcodec.encode, pcodec.decode)


def shuffled(zstd: Zstd) -> tuple[Callable[[Chunk], bytes], Callable[[bytes, Chunk], Any]]:
    def encode(chunk: Chunk) -> bytes:
        return bytes(zstd.encode(Shuffle(chunk.itemsize).encode(chunk)))

    def decode(packed: bytes, out: Chunk) -> Any:
        return Shuffle(out.itemsize).decode(zstd.decode(packed), out)

    return encode, decode


def chunks_of(path: Path, limit: int) -> list[Chunk]:
    """Samples of the floating-point datasets of a file, up to `limit` bytes."""
    found: list[Chunk] = []

    def visit(name: str, node: Any) -> None:
        is_own = isinstance(node, h5py.Dataset) and not (node.is_virtual or node.external)
        is_data = is_own and node.dtype.kind == "f" and node.ndim >= 2
        if not is_data or sum(chunk.nbytes for chunk in found) >= limit:
            return
        samples = [node] if "/" in name else node  # a group per sample, or samples along the first axis
        for sample in samples:
            chunk = np.ascontiguousarray(sample[...], dtype=node.dtype.newbyteorder("="))
            if chunk.nbytes >= MIN_SAMPLE_BYTES and sum(c.nbytes for c in found) < limit:
                found.append(chunk)

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def measure(codec: Codec, chunks: list[Chunk]) -> tuple[int, float, float]:
    """Packed bytes, seconds to pack, seconds to unpack."""
    started = time.perf_counter()
    packed = [bytes(codec.encode(chunk)) for chunk in chunks]
    encoded = time.perf_counter()
    for raw, chunk in zip(packed, chunks, strict=True):
        codec.decode(raw, out := np.empty_like(chunk))
        assert out.tobytes() == chunk.tobytes()
    checking = time.perf_counter()
    for chunk in chunks:  # the comparison is no part of decoding
        assert chunk.tobytes() == chunk.tobytes()
    compared = time.perf_counter() - checking
    return sum(map(len, packed)), encoded - started, max(1e-9, checking - encoded - compared)


def main() -> None:
    numcodecs.blosc.use_threads = False  # as in pack, whose threads encode a chunk each
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit-mb", type=float, default=24.0, help="per file")
    arguments = parser.parse_args()
    paths = sorted([*arguments.folder.glob("*.h5"), *arguments.folder.glob("*.hdf5")])
    sets = {path.stem: chunks_of(path, int(arguments.limit_mb * 1e6)) for path in paths}
    sets = {name: chunks for name, chunks in sets.items() if chunks}
    for name, chunks in sets.items():
        print(
            f"{name}: {len(chunks)} samples, {sum(c.nbytes for c in chunks) / 1e6:.1f} MB, {chunks[0].dtype}"
        )
    print("| codec, level | shuffle | " + " | ".join(sets) + " | all | pack MB/s | unpack MB/s |")
    print("|---" * (len(sets) + 5) + "|")
    total = sum(chunk.nbytes for chunks in sets.values() for chunk in chunks)
    for codec in codecs():
        found = {name: measure(codec, chunks) for name, chunks in sets.items()}
        ratios = [sum(c.nbytes for c in sets[name]) / found[name][0] for name in sets]
        nbytes, packing, unpacking = (sum(result[i] for result in found.values()) for i in range(3))
        cells = [f"{ratio:.2f}" for ratio in [*ratios, total / nbytes]]
        cells += [f"{total / seconds / 1e6:,.0f}" for seconds in (packing, unpacking)]
        print(f"| {codec.name} | {codec.shuffle} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
