"""Random reads of samples whose slots lie on 64 bytes, beside slots on 4096 (docs/format/rationale.md).

python -m benchmarks.store.slot_alignment [FOLDER]

FOLDER is on the file system to measure, not in memory. Three files of equal samples: slots on 64 twice, so
that comparing those two says what the noise is, and slots on 4096. Of each random sample all three copies are
read, in turns, the order drawn for every turn. "Cold" is after POSIX_FADV_DONTNEED, and mincore counts what
stayed; a virtual disk's host may have a cache of its own, which nothing here can drop.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.format.zip_records import align

PAGE = 4096
DATA_OFFSET = 4096  # entries' data start on a page (spec 3.4)
FILE_BYTES = 512 << 20
TURNS = {65_536: 1500, 262_144: 900, 1_048_576: 400, 4_194_304: 120}  # no sample twice
ALIGNMENTS = {"64": 64, "64 again": 64, "4096": 4096}

_libc = ctypes.CDLL(None, use_errno=True)
_mincore = _libc.mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

Read = Callable[[int, int], object]
Seconds = npt.NDArray[np.float64]


def make_file(path: Path, sample_nbytes: int, alignment: int) -> int:
    """Write a file of slots, random bytes, to the disk; return the slot size."""
    stride = align(sample_nbytes + 4, alignment)
    block = np.random.default_rng(0).bytes(16 << 20)
    left = DATA_OFFSET + num_samples_of(sample_nbytes) * stride + PAGE
    with path.open("wb") as file:
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        os.fsync(file.fileno())
    return stride


def num_samples_of(sample_nbytes: int) -> int:
    return FILE_BYTES // sample_nbytes


def drop(fd: int) -> float:
    """Drop a file's pages from the page cache; return the share that stayed."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    nbytes = os.fstat(fd).st_size
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE) as whole:
        pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
        view = (ctypes.c_ubyte * nbytes).from_buffer(whole)
        failed = _mincore(ctypes.addressof(view), nbytes, pages)
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return float(np.mean(np.frombuffer(pages, np.uint8) & 1))


@contextmanager
def pread(path: Path, out: memoryview) -> Iterator[Read]:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    yield lambda offset, nbytes: os.preadv(fd, [out[:nbytes]], offset)
    os.close(fd)


@contextmanager
def mapped(path: Path, out: memoryview) -> Iterator[Read]:
    """A copy out of a private mapping; MADV_RANDOM, or a fault reads far more than a sample ahead."""
    fd = os.open(path, os.O_RDONLY)
    file = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE)
    file.madvise(mmap.MADV_RANDOM)
    source, target = np.frombuffer(file, np.uint8), np.frombuffer(out, np.uint8)
    yield lambda offset, nbytes: np.copyto(target[:nbytes], source[offset : offset + nbytes])
    os.close(fd)  # the mapping goes with the last reference to it


@contextmanager
def direct(path: Path, out: memoryview) -> Iterator[Read]:
    """Past the page cache: whole pages, so a sample that doesn't begin on one takes a page more."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(offset: int, nbytes: int) -> int:
        first = offset // PAGE * PAGE
        return os.preadv(fd, [out[: align(offset + nbytes, PAGE) - first]], first)

    yield read
    os.close(fd)


WAYS = {
    "pread, cold": (pread, True),
    "pread, warm": (pread, False),
    "mmap, cold": (mapped, True),
    "mmap, warm": (mapped, False),
    "O_DIRECT": (direct, True),
}


def measure(folder: Path, sample_nbytes: int, way: str, strides: dict[str, int]) -> dict[str, Seconds]:
    """Seconds of each turn, by file."""
    opened, is_cold = WAYS[way]
    out = memoryview(mmap.mmap(-1, align(sample_nbytes, PAGE) + 2 * PAGE))  # begins on a page
    rng = np.random.default_rng(1)
    samples = rng.permutation(num_samples_of(sample_nbytes))[: TURNS[sample_nbytes]]
    times: dict[str, list[float]] = {name: [] for name in strides}
    for name in strides:
        _prepare(folder / name, is_cold=is_cold)
    with ExitStack() as stack:
        reads = {name: stack.enter_context(opened(folder / name, out)) for name in strides}
        for sample in samples:
            for name in rng.permutation(list(strides)):
                offset = DATA_OFFSET + int(sample) * strides[name]
                begin = time.perf_counter()
                reads[name](offset, sample_nbytes)
                times[name].append(time.perf_counter() - begin)
    return {name: np.array(seconds) for name, seconds in times.items()}


def _prepare(path: Path, *, is_cold: bool) -> None:
    with path.open("rb") as file:
        if not is_cold:
            while file.read(16 << 20):
                pass
        elif (stayed := drop(file.fileno())) > 0.01:
            print(f"{stayed:.0%} of {path.name} stayed in the page cache: cold figures are not cold")


def row(way: str, times: dict[str, Seconds]) -> str:
    """Medians in ms; medians and quartiles of 4096 over 64 and of 64 over 64, pair by pair."""
    base = times["64"]
    cells = [f"{np.median(base) * 1e3:.3f}", f"{np.median(times['4096']) * 1e3:.3f}"]
    for name in ("4096", "64 again"):
        low, mid, high = np.quantile(times[name] / base, (0.25, 0.5, 0.75))
        cells.append(f"{mid:.2f} ({low:.2f} to {high:.2f})")
    return f"| {way} | " + " | ".join(cells) + " |"


def main(folder: Path) -> None:
    for sample_nbytes in TURNS:
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            place = Path(inner)
            strides = {name: make_file(place / name, sample_nbytes, a) for name, a in ALIGNMENTS.items()}
            print(f"\n{sample_nbytes // 1024} KiB, {TURNS[sample_nbytes]} turns")
            print("| way | 64, ms | 4096, ms | 4096 over 64 | 64 over 64 |\n|---|---|---|---|---|")
            for way in WAYS:
                print(row(way, measure(place, sample_nbytes, way, strides)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
