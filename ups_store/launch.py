"""How this process was started: its number among several, whether they share their work, and its run.

All of it is in environment variables. `torchrun` sets RANK and WORLD_SIZE, by which builds and trainings
share their work. A scheduler that starts several processes sets its own: then each would do all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from ups_store.errors import ConfigError

RUN_VARIABLE = "UPS_RUN_ID"
TO_SHARE = (
    "to share it, start it with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE "
    "(docs/guides/clusters.md); if each is to do all of it, set RANK=0 WORLD_SIZE=1"
)
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


def _place(variables: Mapping[str, str]) -> _Place | None:
    """This process's place among several that don't know torchrun's variables."""
    if all(name in variables for name in _TORCHRUN):
        return None
    for scheduler, of_rank, of_size in _SCHEDULERS:
        says = next((name for name in of_size if name in variables), "")
        rank, size = (variables.get(name, "") for name in (of_rank, says))
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            return _Place(scheduler, int(rank), int(size), f"{of_rank}={rank}, {says}={size}")
    return None


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
    job = (variables.get("SLURM_JOB_ID"), variables.get("SLURM_STEP_ID"))
    return ".".join(filter(None, job))


def _made_up_id(variables: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" not in variables:
        return os.urandom(8).hex()
    parent, began = os.getppid(), ""  # torchrun itself: the ranks of a machine have that in common
    with contextlib.suppress(OSError):  # a parent outside of the container
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return hashlib.sha256(f"{os.uname().nodename} {parent} {began}".encode()).hexdigest()[:16]
