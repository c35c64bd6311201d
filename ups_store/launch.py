"""How this process was started: its number among several, whether they share their work, and its run.

All of it is in environment variables. `torchrun` sets RANK and WORLD_SIZE, by which builds and trainings
share their work. Slurm sets its own for `srun` and job arrays, by which builds share theirs (`slurm_place`);
trainings don't, and neither of them does by those of MPI: then each process would do all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from ups_store.errors import ConfigError

RUN_VARIABLE = "UPS_RUN_ID"
ALLOWED_VARIABLES = "UPS_ALLOW_ENV"  # what configurations may tell other machines, by commas; --allow-env
ALL_OF_IT = "if each is to do all of it, set RANK=0 WORLD_SIZE=1"
TO_SHARE = (
    "to share it, start it with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE "
    f"(docs/guides/clusters.md); {ALL_OF_IT}"
)
ARRAY_SIZE_VARIABLE = "UPS_ARRAY_SIZE"
ONLY_ONCE = "start one process, such as by `srun --ntasks=1`"

_TORCHRUN = ("RANK", "WORLD_SIZE")
_SCHEDULERS = (  # name, the variable with a process's number, and those with how many there are
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI", "PMI_RANK", ("PMI_SIZE",)),
    (
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ),  # last: its jobs call `mpirun`
)
_WHOLE_JOB = "SLURM_NTASKS"  # a batch script has it and number 0, too, and without `srun` starts one process


class _Place(NamedTuple):
    """A process's number among those that a scheduler started."""

    scheduler: str
    rank: int
    size: int
    said_by: str

    @property
    def is_sure(self) -> bool:
        """Whether there are others: not sure of the first task, where a job without `srun` says the same."""
        return self.rank > 0 or _WHOLE_JOB not in self.said_by


def check_shared(variables: Mapping[str, str] = os.environ, *, hint: str = TO_SHARE) -> None:
    """Check that this isn't one of several processes of a scheduler that would all do the same.

    Args:
        variables: The environment.
        hint: What to do about it.
    Raises:
        ConfigError: Kind "one_of_several".
    """
    place = _place(variables)
    if place is not None and place.is_sure:
        raise ConfigError(
            f"this is process {place.rank} of {place.size} that {place.scheduler} started, "
            "and each of them would do all of the work",
            kind="one_of_several",
            found=place.said_by,
            hint=hint,
        )


def not_shared_note(variables: Mapping[str, str] = os.environ) -> str:
    """What the first of a Slurm job's tasks should say, which may be the only one; nothing elsewhere."""
    place = _place(variables)
    if place is None or place.is_sure:
        return ""
    return f"the Slurm job has {place.size} tasks, and this process does all of the work; {TO_SHARE}"


def is_of_srun(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether `srun` itself started this process among several, and not an MPI launcher that it started."""
    place = _place(variables)
    return place is not None and place.scheduler == "Slurm" and "SLURM_STEP_NUM_TASKS" in variables


def _place(variables: Mapping[str, str]) -> _Place | None:
    """This process's place among several that don't know torchrun's variables."""
    if all(name in variables for name in _TORCHRUN):
        return None
    for scheduler, of_rank, of_size in _SCHEDULERS:
        if scheduler == "MPI" and _is_pmi_of_srun(variables):
            continue
        says = next((name for name in of_size if name in variables), "")
        rank, size = (variables.get(name, "") for name in (of_rank, says))
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return _Place(scheduler, int(rank), int(size), f"{of_rank}={rank}, {says}={size}")
    return None


class SlurmPlace(NamedTuple):
    """This process's place among those that Slurm started, by `srun`, as a job array, or both.

    Attributes:
        local_rank: Its number among the tasks of the step on this node.
        num_local: How many these are.
        machine: Number of the node, counted through all jobs of the array.
        num_machines: Nodes of all jobs of the array.
    """

    local_rank: int
    num_local: int
    machine: int
    num_machines: int


def slurm_place(variables: Mapping[str, str] = os.environ) -> SlurmPlace:
    """This process's place as Slurm says; that of a process alone without it.

    Tasks of a node are ranks of one machine, and every node of every job of an array is a machine. Outside of
    `srun`, such as in a batch script, a job is one process.

    Raises:
        ConfigError: Kind "slurm", if the variables contradict each other; kind "array", if jobs of an array
            can't be counted.
    """
    local_rank, num_local, node, num_nodes = _step_place(variables)
    job, num_jobs = array_place(variables)
    return SlurmPlace(local_rank, num_local, job * num_nodes + node, num_jobs * num_nodes)


def array_place(variables: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Number of this job in its job array, from 0, and how many there are; (0, 1) without one.

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
        first, count = 0, _whole(variables, ARRAY_SIZE_VARIABLE, "")
        last = count - 1
    if first not in (0, 1) or last - first + 1 != count or not first <= number <= last:
        shown = ", ".join(f"{name}={variables.get(name, '')}" for name in (*names, ARRAY_SIZE_VARIABLE))
        raise ConfigError(
            "job array whose jobs can't be counted",
            kind="array",
            expected="jobs 0..N-1 or 1..N, such as --array=0-15",
            found=shown,
            hint=f"if these are some jobs of an array 0..N-1, set {ARRAY_SIZE_VARIABLE}=N; {ALL_OF_IT}",
        )
    return number - first, count


def _step_place(variables: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Number of this task on its node, how many there are, number of the node, and how many of these."""
    if "SLURM_STEP_NUM_TASKS" not in variables or not variables.get("SLURM_PROCID", "").isdecimal():
        return 0, 1, 0, 1
    num_tasks = _whole(variables, "SLURM_STEP_NUM_TASKS", "")
    if num_tasks == 1:
        return 0, 1, 0, 1
    rank, local_rank, node = (
        _whole(variables, f"SLURM_{name}", "") for name in ("PROCID", "LOCALID", "NODEID")
    )
    per_node = _tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    is_known = sum(per_node) == num_tasks and rank < num_tasks and node < len(per_node)
    if not is_known or local_rank >= per_node[node]:
        raise ConfigError(
            "place among the tasks of a Slurm step",
            kind="slurm",
            expected="SLURM_PROCID, _LOCALID, _NODEID and _STEP_TASKS_PER_NODE as srun sets them",
            found=f"{rank} of {num_tasks}, {local_rank} on node {node} of {per_node}",
            hint=TO_SHARE,
        )
    return local_rank, per_node[node], node, len(per_node)


def _tasks_per_node(text: str) -> list[int]:
    """Tasks of each node, of such as "4(x2),1"; empty if it isn't of that form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _whole(variables: Mapping[str, str], name: str, default: str) -> int:
    text = variables.get(name, default)
    if not text.isdecimal():
        raise ConfigError(
            f"environment variable {name}", kind="slurm", expected="a whole number", found=repr(text)
        )
    return int(text)


def _is_pmi_of_srun(variables: Mapping[str, str]) -> bool:
    """Whether the variables of PMI are those that `srun --mpi=pmi2` adds to its own."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    return all(variables.get(pmi) == variables.get(slurm, "") for pmi, slurm in pairs)


def rank_of(variables: Mapping[str, str] = os.environ) -> int:
    """This process's number as torchrun says, else as a scheduler does, else 0."""
    place, text = _place(variables), variables.get("RANK", "")
    return place.rank if place else int(text) if text.isdecimal() else 0


def log_origin(variables: MutableMapping[str, str] = os.environ) -> dict[str, Any]:
    """What every line of a log for programs has besides: "rank", "host", "pid" and "run"; see `run_id`."""
    return {
        "rank": rank_of(variables),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "run": run_id(variables),
    }


def run_id(variables: MutableMapping[str, str] = os.environ) -> str:
    """The id of this run, which all its processes have.

    That is UPS_RUN_ID, the one that torchrun was given (`--rdzv-id`), or the job and step of Slurm. Without
    them one is made up: the ranks of a machine's torchrun find the same, and processes that this one starts
    learn it by UPS_RUN_ID.
    """
    if not (found := _given_id(variables)):
        found = variables[RUN_VARIABLE] = _made_up_id(variables)
    return found


def _given_id(variables: Mapping[str, str]) -> str:
    if own := variables.get(RUN_VARIABLE):
        return own
    by_torchrun = variables.get("TORCHELASTIC_RUN_ID", "none")
    if by_torchrun not in ("", "none"):  # "none": it wasn't given one
        return by_torchrun
    number = variables.get("SLURM_ARRAY_JOB_ID") or variables.get("SLURM_JOB_ID")
    job = (number, variables.get("SLURM_STEP_ID"))
    return ".".join(filter(None, job))


def _made_up_id(variables: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" not in variables:
        return os.urandom(8).hex()
    parent, began = os.getppid(), ""  # torchrun itself: the ranks of a machine have that in common
    with contextlib.suppress(OSError):  # a parent outside of the container
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return hashlib.sha256(f"{os.uname().nodename} {parent} {began}".encode()).hexdigest()[:16]
