"""What a machine is to do, as one Bash script: the values of a launch, then `job.sh`, the same for all."""

from __future__ import annotations

import base64
import gzip
import os
import posixpath
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ups.config.loading import load_config, write_standalone
from ups.errors import ConfigError, LaunchError
from ups.log import logger

# Where downloads go, in the machine's working directory.
DATA_ROOT = "data"
_BUCKET = "B2TRAIN"  # the remote that `job.sh` declares itself
_BODY = "\n# --- what is done"  # how `job.sh` begins


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        name: Of the configuration; folders are named by it.
        launch_id: Tells a machine that starts again from another launch.
        config_text: The configuration, complete in itself, as YAML.
        num_gpus: That train together.
        tasks: Whose files are fetched, from `<remote>/<task>`.
        result_folders: What is uploaded.
        workdir: Where everything lies on the machine.
        remote: Of rclone, such as "B2TRAIN:pdebench/full"; "" fetches nothing.
        results: Where results go; "" leaves them on the machine.
        package: What pip installs on the machine; "" if it is there.
        installs: Whether packages may be installed on the machine.
        shuts_down: Whether the machine goes off at the end, however the run ended.
        requeues: Whether a run that was interrupted and has saved itself is queued again.
        max_hours: When the run is asked to save itself and end.
    """

    name: str
    launch_id: str
    config_text: str
    num_gpus: int
    tasks: tuple[str, ...]
    result_folders: tuple[str, ...]
    workdir: str
    remote: str = ""
    results: str = ""
    package: str = ""
    installs: bool = False
    shuts_down: bool = False
    requeues: bool = False
    max_hours: float | None = None


def make_job(
    config_path: Path, overrides: Sequence[str], *, num_gpus: int | None, remote: str, **more: Any
) -> Job:
    """The launch of a configuration, which is checked here, before anything costs money.

    Args:
        config_path: YAML file, or the name of a shipped one.
        num_gpus: GPUs; by default `training.num_gpus`, or one.
        remote: See `Job`.
        more: Other attributes of the `Job`.
    """
    config = load_config(config_path, overrides=overrides)
    meant, pipeline = config.training.num_gpus, config.pipeline
    num = num_gpus or meant or 1
    if meant not in (None, num):
        expected, hint = f"{meant}, as training.num_gpus has it", f"training.num_gpus={num} if that is meant"
        raise ConfigError("--gpus", expected=expected, found=str(num), hint=hint)
    if config.latent.checkpoint is not None:
        logger.warning(f"latent.checkpoint = {config.latent.checkpoint} has to be on the machine")
    keys = []  # for want of which the job would end
    if any(each.startswith(f"{_BUCKET}:") for each in (remote, more.get("results", ""))):
        keys += ["B2_KEY_ID", "B2_APP_KEY"]
    if config.logging.wandb.enabled and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        keys.append("WANDB_API_KEY")
    for name in keys:
        if not os.environ.get(name):
            logger.warning(f"{name} isn't set here, and the job needs it: export it before the launch")
    changed = [f"data.root={DATA_ROOT}"] if remote else []
    changed += [f"pipeline.num_processes={num}"] if num > 1 else []
    checkpoints = config.checkpoint.dir
    folders = filter(None, (pipeline.dir, pipeline.report_dir, pipeline.best_dir))
    elsewhere = [str(folder) for folder in folders if not folder.is_relative_to(checkpoints)]
    return Job(
        name=config_path.stem,
        launch_id=secrets.token_hex(4),
        config_text=write_standalone(config_path, overrides=[*overrides, *changed]),
        num_gpus=num,
        tasks=tuple(config.data.tasks),
        result_folders=(str(checkpoints), *elsewhere),
        remote=remote,
        **more,
    )


def job_script(job: Job, *, header: Sequence[str] = ()) -> str:
    """The script. It holds no secrets: keys are variables of the machine's environment.

    Args:
        header: Lines behind the first, such as those for Slurm.
    """
    values = {
        "LAUNCH_ID": job.launch_id,
        "NAME": job.name,
        "WORKDIR": job.workdir,
        "DATA_ROOT": f"{job.workdir.rstrip('/')}/{DATA_ROOT}",
        "REMOTE": job.remote.rstrip("/"),
        "RESULTS": job.results.rstrip("/"),
        "PACKAGE": job.package,
        "INSTALLS": str(int(job.installs)),
        "SHUTS_DOWN": str(int(job.shuts_down)),
        "REQUEUES": str(int(job.requeues)),
        "MAX_SECONDS": "" if job.max_hours is None else str(round(job.max_hours * 3600)),
        "CONFIG_TEXT": job.config_text,
    }
    lists = {"TASKS": job.tasks, "RESULT_FOLDERS": job.result_folders}
    settings = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    settings += [f"{name}=({shlex.join(items)})" for name, items in lists.items()]
    body = files("ups.pipeline.launch").joinpath("job.sh").read_text(encoding="utf-8")
    text = "\n".join(("#!/bin/bash", *header, *settings, body))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"Bash can't read the script: {done.stderr.strip()}", kind="bad_script")
    return text


def packed(script: str, *, path: str, limit: int) -> tuple[str, str]:
    """A short command that unpacks a script on the machine and runs it, and the rest of what it unpacks.

    Args:
        script: Of `job_script`.
        path: Where it is unpacked.
        limit: Characters that the command may have.

    Returns:
        The command, and what the variable UPS_JOB_REST has to hold; "" where all fits into the command.
    """
    values, _, body = script.partition(_BODY)
    lines = [line for line in body.splitlines()[1:] if not line.lstrip().startswith("# ")]
    text = base64.b64encode(gzip.compress("\n".join([values, *lines, ""]).encode(), mtime=0)).decode()
    where, folder = shlex.quote(path), shlex.quote(posixpath.dirname(path))
    before = f"mkdir -p {folder} && printf %s%s "
    after = f' "${{UPS_JOB_REST:-}}" | base64 -d | gzip -dc > {where} && exec bash {where}'
    room = max(limit - len(before) - len(after), 0)
    return f"{before}{text[:room]}{after}", text[room:]
