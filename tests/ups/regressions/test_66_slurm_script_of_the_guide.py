"""The guide's batch script submits itself again if it was stopped, and only then."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "clusters.md"
# As torchrun: it passes SIGTERM on to a rank, which saves itself, and ends with 1 whatever that ended with.
TORCHRUN = """#!/bin/bash
trap 'touch saved; exit 1' TERM
touch begun
[ "$HOW" != finishes ] || exit 0
[ "$HOW" != fails ] || exit 1
while :; do sleep 0.02; done
"""
STAND_INS = {
    "torchrun": TORCHRUN,
    "srun": '#!/bin/bash\nexec "$@"\n',
    "sbatch": '#!/bin/bash\necho "$@" >> submitted\n',
}


def start(folder: Path, how: str) -> subprocess.Popen[bytes]:
    """The script of the guide that trains, with stand-ins of the commands that it calls."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if block.startswith("#!/bin/bash") and "ups train" in block)
    script = folder / "job.sh"
    script.write_text(text)
    for name, body in STAND_INS.items():
        command = folder / name
        command.write_text(body)
        command.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOW": how}
    return subprocess.Popen(["bash", script], cwd=folder, env=env, start_new_session=True)


def wait_for(process: subprocess.Popen[bytes], path: Path) -> None:
    while not path.exists():
        assert process.poll() is None


@pytest.mark.parametrize("to_all", [False, True])
def test_script_that_is_stopped_is_submitted_again(tmp_path: Path, to_all: bool) -> None:
    process = start(tmp_path, "trains")
    try:
        wait_for(process, tmp_path / "begun")
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "submitted").read_text() == f"{tmp_path / 'job.sh'}\n"
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("how", ["finishes", "fails"])
def test_script_that_ends_by_itself_is_not(tmp_path: Path, how: str) -> None:
    assert start(tmp_path, how).wait(timeout=60) == 0
    assert not (tmp_path / "submitted").exists()
