"""`python -m benchmarks.peers.environment`: the peers' own environment, each of them installed alone.

A package that can't be installed is named and left out; the run then reports its peers as not installed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
ENVIRONMENT = _HERE / "env"
_LIMIT_S = 600
# Project and torch first, as they are pinned: no peer then brings another torch.
_LISTS = (("requirements.txt", ()), ("requirements-no-deps.txt", ("--no-deps",)))


def main() -> int:
    """Make what is missing; nothing is installed twice."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    if not _install(python, "torch==2.13.0") or not _install(
        python, "--editable", f"{_ROOT}[train,zarr,bench]"
    ):
        return 1
    for name, options in _LISTS:
        for requirement in _requirements(_HERE / name):
            if not _install(python, *options, requirement):
                print(f"{requirement}: can't be installed, its peers are left out", file=sys.stderr)
    return 0


def _install(python: Path, *arguments: str) -> bool:
    constraints = str(_ROOT / "constraints.txt")
    command = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, *arguments]
    try:
        return subprocess.run(command, timeout=_LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _requirements(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line


if __name__ == "__main__":
    sys.exit(main())
