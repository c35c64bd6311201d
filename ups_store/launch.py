"""How this process was started: its number among several, whether they share their work, and its run.

All of it is in environment variables. `torchrun` sets RANK and WORLD_SIZE, by which builds and trainings
share their work. Slurm sets its own for `srun` and job arrays, by which builds share theirs (`slurm_place`).
What else starts several processes, such as `mpirun`, is refused: each of them would do all of the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ups_store.errors import ConfigError

RUN_VARIABLE = "UPS_RUN_ID"
ALLOWED_VARIABLES = "UPS_ALLOW_ENV"  # what configurations may tell other machines, by commas; --allow-env
ARRAY_SIZE_VARIABLE = "UPS_ARRAY_SIZE"
ALL_OF_IT = "if each is to do all of it, set RANK=0 WORLD_SIZE=1"
TO_SHARE = (
    "to share it, start it with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE "
    f"(docs/guides/clusters.md); {ALL_OF_IT}"
)
ONLY_ONCE = "start one process, such as by `srun --ntasks=1`"

# Name, the variable with a process's number, those with how many there are. MPI's first: it may run in Slurm.
_SCHEDULERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    ("MPI", "PMI_RANK", ("PMI_SIZE",)),
)


def check_shared(variables: Mapping[str, str] = os.environ, *, hint: str = TO_SHARE) -> None:
    """Check that this isn't one of several processes of a scheduler that would all do the same.

    Args:
        variables: The environment.
        hint: What to do about it.
    Raises:
        ConfigError: Kind "one_of_several".
    """
    scheduler, rank, size, said_by = _scheduled(variables)
    if size > 1 and not _may_be_alone(rank, said_by):
        raise ConfigError(
            f"this is process {rank} of {size} that {scheduler} started, "
            "and each of them would do all of the work",
            kind="one_of_several",
            found=said_by,
            hint=hint,
        )


def not_shared_note(variables: Mapping[str, str] = os.environ) -> str:
    """Return what the first of a Slurm job's tasks should say, which may be the only one; else nothing."""
    _, rank, size, said_by = _scheduled(variables)
    if size == 1 or not _may_be_alone(rank, said_by):
        return ""
    return f"the Slurm job has {size} tasks, and this process does all of the work; {TO_SHARE}"


def is_of_srun(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether `srun` itself started this process among several."""
    scheduler, _, size, _ = _scheduled(variables)
    return scheduler == "Slurm" and size > 1 and "SLURM_STEP_NUM_TASKS" in variables


def rank_of(variables: Mapping[str, str] = os.environ) -> int:
    """Return this process's number as torchrun says, else as a scheduler does, else 0."""
    _, rank, size, _ = _scheduled(variables)
    text = variables.get("RANK", "")
    return rank if size > 1 else int(text) if text.isdecimal() else 0


def _scheduled(variables: Mapping[str, str]) -> tuple[str, int, int, str]:
    """Return who started this process, its number, how many there are, and the variables that say so."""
    for scheduler, of_rank, of_size in () if {"RANK", "WORLD_SIZE"} <= variables.keys() else _SCHEDULERS:
        name = next((name for name in of_size if name in variables), "")
        rank, size = variables.get(of_rank, ""), variables.get(name, "")
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return scheduler, int(rank), int(size), f"{of_rank}={rank}, {name}={size}"
    return "", 0, 1, ""


def _may_be_alone(rank: int, said_by: str) -> bool:
    """Return whether this may be a batch script, which has the job's variables and starts one process."""
    return rank == 0 and "SLURM_NTASKS" in said_by


def slurm_place(variables: Mapping[str, str] = os.environ) -> tuple[int, int, int, int]:
    """Return this process's place as Slurm says, by `srun`, as a job array, or both; else that of one alone.

    Tasks of a node are ranks of one machine, and every node of every job of an array is a machine. Outside of
    `srun`, such as in a batch script, a job is one process.

    Returns:
        Number of this task on its node, how many these are, number of the node, counted through all jobs of
        the array, and how many there are in all jobs.
    Raises:
        ConfigError: Kind "slurm", if the variables contradict each other, or nodes have different numbers of
            tasks; kind "array", if jobs of an array can't be counted.
    """
    job, num_jobs = array_place(variables)
    num_tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks == "1" or not variables.get("SLURM_PROCID", "").isdecimal():
        return 0, 1, job, num_jobs
    rank, local_rank, node = (_whole(variables, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID"))
    on_nodes = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", on_nodes)  # "4(x2)", or "4" of one node
    per_node, num_nodes = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    is_known = str(per_node * num_nodes) == num_tasks and rank < per_node * num_nodes
    if not is_known or local_rank >= per_node or node >= num_nodes:
        raise ConfigError(
            "place among the tasks of a Slurm step",
            kind="slurm",
            expected="SLURM_PROCID, _LOCALID, _NODEID and _STEP_TASKS_PER_NODE as srun sets them, with as "
            "many tasks on every node",
            found=f"{rank} of {num_tasks}, {local_rank} on node {node} of {on_nodes!r}",
            hint=f"start it by `srun --ntasks-per-node=N`; {TO_SHARE}",
        )
    return local_rank, per_node, job * num_nodes + node, num_jobs * num_nodes


def array_place(variables: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of this job in its job array, from 0, and how many there are; (0, 1) without one.

    UPS_ARRAY_SIZE says how many jobs there are in all, where only some of them are submitted again: then
    their numbers count from 0.

    Raises:
        ConfigError: Kind "array", if that can't be known.
    """
    if "SLURM_ARRAY_TASK_ID" not in variables:
        return 0, 1
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")
    number, count, first, last = (_whole(variables, name, "0") for name in names)
    if ARRAY_SIZE_VARIABLE in variables:
        first, count = 0, _whole(variables, ARRAY_SIZE_VARIABLE)
        last = count - 1
    if first not in (0, 1) or last - first + 1 != count or not first <= number <= last:
        variables_text = ", ".join(
            f"{name}={variables.get(name, '')}" for name in (*names, ARRAY_SIZE_VARIABLE)
        )
        raise ConfigError(
            "job array whose jobs can't be counted",
            kind="array",
            expected="jobs 0..N-1 or 1..N, such as --array=0-15",
            found=variables_text,
            hint=f"if these are some jobs of an array 0..N-1, set {ARRAY_SIZE_VARIABLE}=N; {ALL_OF_IT}",
        )
    return number - first, count


def _whole(variables: Mapping[str, str], name: str, default: str = "") -> int:
    text = variables.get(name, default)
    if not text.isdecimal():
        raise ConfigError(
            f"environment variable {name}", kind="slurm", expected="a whole number", found=repr(text)
        )
    return int(text)


def log_origin(variables: MutableMapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what every line of a log for programs has besides: "rank", "host", "pid", "run" (`run_id`)."""
    return {
        "rank": rank_of(variables),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "run": run_id(variables),
    }


def run_id(variables: MutableMapping[str, str] = os.environ) -> str:
    """Return the id of this run, which all its processes have.

    That is UPS_RUN_ID, the one that torchrun was given (`--rdzv-id`), or the job and step of Slurm. Without
    them one is made up: the ranks of a machine's torchrun make up the same, and processes that this one
    starts learn it by UPS_RUN_ID.
    """
    of_torchrun = variables.get("TORCHELASTIC_RUN_ID")
    number = variables.get("SLURM_ARRAY_JOB_ID") or variables.get("SLURM_JOB_ID")
    of_slurm = ".".join(filter(None, (number, variables.get("SLURM_STEP_ID"))))
    run = variables.get(RUN_VARIABLE) or (of_torchrun not in ("none", None) and of_torchrun) or of_slurm
    if run:
        return run
    if of_torchrun is None:
        made_up = os.urandom(8).hex()
    else:
        parent, began = os.getppid(), ""  # torchrun itself: the ranks of a machine have that in common
        with contextlib.suppress(OSError):  # a parent outside of the container
            began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        made_up = hashlib.sha256(f"{os.uname().nodename} {parent} {began}".encode()).hexdigest()[:16]
    variables[RUN_VARIABLE] = made_up
    return made_up
