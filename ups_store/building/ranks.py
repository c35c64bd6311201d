"""Several processes, perhaps on several machines, that build together, and which samples each makes.

`torchrun` and Slurm say each process's place in environment variables, and a Dask cluster with each task. The
ranks of one machine commit into one file; each machine writes its own partition of the split (spec 2.4),
because machines share no locks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups_store.errors import ConfigError
from ups_store.launch import array_place, check_shared, is_of_srun, slurm_place
from ups_store.system.paths import partition_path, partition_range


@dataclass(frozen=True)
class BuildRank:
    """This process's place among those that build together.

    Attributes:
        local_rank: Its number on this machine; 0 creates and finishes the file.
        num_local: Processes on this machine.
        machine: This machine's number.
        num_machines: Machines.
    """

    local_rank: int = 0
    num_local: int = 1
    machine: int = 0
    num_machines: int = 1

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> BuildRank:
        """Take the place that `torchrun` says (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), or Slurm.

        Of a job array whose jobs each start `torchrun`, every machine of every job is one. Where you set RANK
        and WORLD_SIZE yourself, they are all that counts.

        Raises:
            ConfigError: If the variables contradict each other; kind "one_of_several" if a scheduler started
                several processes that can't know which of them makes what; kind "array" of a job array whose
                jobs can't be counted.
        """
        if "RANK" not in variables or "WORLD_SIZE" not in variables:
            if not is_of_srun(variables):
                check_shared(variables)
            return cls(*slurm_place(variables))
        defaults, numbers = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            text = variables.get(name, defaults.get(name, ""))
            try:
                numbers.append(int(text))
            except ValueError as error:
                problem, expected = f"environment variable {name}", "a whole number"
                raise ConfigError(problem, expected=expected, found=repr(text)) from error
        rank, size, local_rank, num_local = numbers
        is_sound = 0 <= rank < size and 0 <= local_rank < num_local and size % max(1, num_local) == 0
        if not is_sound or rank % num_local != local_rank:
            raise ConfigError(
                "place among the ranks",
                expected="RANK < WORLD_SIZE, and as many processes on every machine",
                found=f"RANK={rank} of {size}, LOCAL_RANK={local_rank} of {num_local}",
                hint="start it with torchrun, or unset RANK and WORLD_SIZE",
            )
        job, num_jobs = array_place(variables) if "TORCHELASTIC_RUN_ID" in variables else (0, 1)
        machine, num_machines = rank // num_local, size // num_local
        return cls(local_rank, num_local, job * num_machines + machine, num_jobs * num_machines)

    @property
    def is_builder(self) -> bool:
        """Tell whether this process creates and finishes its machine's file."""
        return self.local_rank == 0

    @property
    def is_partitioned(self) -> bool:
        """Tell whether several machines build, each a partition."""
        return self.num_machines > 1

    def __str__(self) -> str:
        """Say for people what this process makes."""
        words = [f"partition {self.machine} of 0..{self.num_machines - 1}"] if self.is_partitioned else []
        words += [f"rank {self.local_rank} of {self.num_local} of this machine"] if self.num_local > 1 else []
        return ", ".join(words) or "all"

    def path(self, path: Path) -> Path:
        """Return where this machine's file goes, for a store at `path`."""
        return partition_path(path, self.machine, self.num_machines) if self.is_partitioned else path

    def own_file(self, path: Path) -> Path:
        """Return where this machine's version of an output goes, such as a manifest in a shared folder."""
        if not self.is_partitioned:
            return path
        return path.with_name(f"{path.stem}-{self.machine:05d}-of-{self.num_machines:05d}{path.suffix}")

    def samples(self, num_samples: int) -> range:
        """Return the samples of the split that this machine's file holds."""
        return partition_range(num_samples, self.machine, self.num_machines)

    def share(self, missing: npt.NDArray[np.int64], num_samples: int) -> npt.NDArray[np.int64]:
        """Choose the missing samples that this process makes: those of one range of the N samples."""
        share = partition_range(num_samples, self.local_rank, self.num_local)
        return missing[(missing >= share.start) & (missing < share.stop)]


ALONE = BuildRank()
