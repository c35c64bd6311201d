"""What a result was measured on; never whose machine it was."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from ups_store.system import runs
from ups_store.system.memory import num_cores

PACKAGES = ("ups-store", "numpy", "crc32c", "zlib-ng", "blake3", "rfc8785", "h5py")


def describe(folder: Path) -> dict[str, Any]:
    """Hardware, system and versions; the file system is that of `folder`."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "caches": caches(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": file_system(folder),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "copies": "compiled code" if runs.compiled else "NumPy",
    }


def kind(machine: dict[str, Any]) -> str:
    """A short name for machines of this sort, for file names."""
    text = f"{machine['cpu']} {machine['cores']} cores {machine['file_system']}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def cpu_model() -> str:
    """The processor's name as the kernel tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def caches() -> str:
    """Sizes of the first core's caches of data, such as "L1 32K, L2 1024K, L3 32768K"."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, sort, size = (
            (folder / name).read_text().strip() if (folder / name).exists() else ""
            for name in ("level", "type", "size")
        )
        if sort != "Instruction" and size:
            found[f"L{level}"] = size
    return ", ".join(f"{level} {size}" for level, size in found.items()) or "caches unknown"


def file_system(folder: Path) -> str:
    """Type of the file system that holds the folder."""
    place = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype
