"""A launched job deletes nothing in the folders that it works in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from command_line import run_ups
from small_runs import files_below

NAMES = (
    *("ck/operator.safetensors", "ck/operator.training.safetensors", "ck/operator_notes/a.txt"),
    *("ck/student_thesis/b.txt", "ck/seed-0/operator.safetensors", "ck/baselines/fno.safetensors"),
    *("ck/joint.training.safetensors", "ck/prior.safetensors", "data/burgers1d/burgers1d_valid.h5"),
    "data/burgers1d/burgers1d_val.h5",
)


@pytest.mark.parametrize("remote", ["", "there:full"])
def test_job_of_slurm_leaves_every_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    before = files_below(Path())
    words = ["--config", "demo", "--remote", remote, "checkpoint.dir=ck", "data.tasks=burgers1d"]
    assert run_ups("launch", "slurm", *words).exit_code == 0
    commands = Path("bin")
    commands.mkdir()
    for command in ("ups", "rclone", "scontrol"):
        (commands / command).write_text("#!/bin/sh\necho there\n")
        (commands / command).chmod(0o755)
    env = {"PATH": f"{commands.absolute()}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", ".slurm/job.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    after = files_below(Path())
    assert {name: after.get(name) for name in NAMES} == {name: before[name] for name in NAMES}
    assert not Path("data/burgers1d/burgers1d_valid.h5").is_symlink()
