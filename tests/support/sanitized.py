"""`_runs.c` compiled with sanitizers of addresses and undefined behaviour, and Python run with it.

As a program: `sanitized.py MODULE CODE` runs code in which `ups_store._runs` is that module.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "ups_store" / "_runs.c"
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", "-shared", "-fPIC")


def find_runtime() -> Path | None:
    """The library of gcc's address sanitizer, which has to be loaded first; None where it is missing."""
    command = ["gcc", "-print-file-name=libasan.so"]
    try:
        found = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None
    return found if found.is_absolute() and found.exists() else None


def compile_runs(folder: Path, source: str) -> Path | None:
    """The module of a text in C; None where gcc can't make it, such as without the headers of Python."""
    file, module = folder / "_runs.c", folder / "_runs.abi3.so"
    file.write_text(source)
    include = sysconfig.get_paths()["include"]
    done = subprocess.run(["gcc", *FLAGS, f"-I{include}", str(file), "-o", str(module)], capture_output=True)
    return None if done.returncode else module


def run(module: Path, code: str, *, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python whose memory is watched; its own leaks at exit are no matter."""
    environment = os.environ | {
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests" / "support")]),
    }
    command = [sys.executable, __file__, str(module), code]
    return subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=600
    )


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("ups_store._runs", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["ups_store._runs"] = importlib.util.module_from_spec(spec)
    exec(sys.argv[2])
