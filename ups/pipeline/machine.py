"""On what and with which code a run works: for `metadata.json` and the provenance of checkpoints."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ups
import ups_store

_TIMEOUT_S = 5.0
_PACKAGES = ("torch", "numpy", "h5py", "zarr")


@cache
def code_identity() -> dict[str, Any]:
    """Version of the package, and where it is a Git checkout, its commit and whether files differ from it."""
    folder = Path(ups.__file__).resolve().parent
    if _output("git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"version": _version("ups-store"), "commit": None, "is_changed": None}
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", ".")
    is_changed = None if changes is None else bool(changes)
    return {"version": _version("ups-store"), "commit": commit, "is_changed": is_changed}


@cache
def machine() -> dict[str, Any]:
    """Host, processors, GPUs, and versions of what computes; without asking torch, which takes seconds."""
    names = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processors": ups_store.num_cores(),
        "gpus": names.splitlines() if names else [],
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None if it isn't there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
