"""How a process was started: environments in which nothing would be shared are refused; ids of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ups_store.build import BuildRank
from ups_store.errors import ConfigError
from ups_store.launch import check_shared, log_origin, not_shared_note, rank_of, run_id

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # also of a script without `srun`
STEP = {**BATCH, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8"}
PLACED = {**STEP, "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
ARRAY = {
    "SLURM_ARRAY_JOB_ID": "16",
    **{
        f"SLURM_ARRAY_TASK_{name}": value
        for name, value in (("ID", "2"), ("COUNT", "4"), ("MIN", "0"), ("MAX", "3"))
    },
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}

IN_A_STEP = {
    "first of a step": (STEP, "process 0 of 8 that Slurm started", 0),
    "third of a step": ({**STEP, "SLURM_PROCID": "3"}, "process 3 of 8 that Slurm started", 3),
}
SEVERAL = {
    "second, no step": ({**BATCH, "SLURM_PROCID": "1"}, "process 1 of 8 that Slurm started", 1),
    "mpirun": (OPEN_MPI, "process 2 of 4 that Open MPI started", 2),
    "mpirun in a batch script": ({**BATCH, **OPEN_MPI}, "process 2 of 4 that Open MPI started", 2),
    "mpiexec": (PMI, "process 0 of 4 that MPI started", 0),
    "mpirun by srun": ({**STEP, **OPEN_MPI}, "process 2 of 4 that Open MPI started", 2),
    "mpiexec by srun of one task": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", **PMI},
        "process 0 of 4 that MPI started",
        0,
    ),
}
ALONE = {
    "nothing": {},
    "step of one task": {**BATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "job of one task": {**BATCH, "SLURM_NTASKS": "1"},
    "a shell of an allocation": {"SLURM_NTASKS": "8"},
    "mpirun of one": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "no numbers": {"SLURM_PROCID": "x", "SLURM_NTASKS": "8(x2)"},
}


@pytest.mark.parametrize(("variables", "said", "rank"), SEVERAL.values(), ids=SEVERAL)
def test_several_processes_that_would_share_nothing_are_refused(
    variables: dict[str, str], said: str, rank: int
) -> None:
    for check in (check_shared, BuildRank.from_environment):
        with pytest.raises(ConfigError, match=said) as caught:
            check(variables)
        assert caught.value.kind == "one_of_several"
        assert "torchrun" in str(caught.value)
    assert not_shared_note(variables) == ""
    assert rank_of(variables) == rank


@pytest.mark.parametrize(("variables", "said", "rank"), IN_A_STEP.values(), ids=IN_A_STEP)
def test_tasks_of_srun_share_builds_but_no_other_work(
    variables: dict[str, str], said: str, rank: int
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_shared(variables)
    assert caught.value.kind == "one_of_several"
    assert rank_of(variables) == rank


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, BuildRank(0, 4, 0, 2)),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}, BuildRank(1, 4, 1, 2)),
        # `--distribution=cyclic` numbers tasks across nodes first
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "1"}, BuildRank(0, 4, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "8"}, BuildRank(0, 4, 0, 2)),  # srun --mpi=pmi2
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, BuildRank(0, 8)),
        ({**ARRAY, "SLURM_PROCID": "5", "SLURM_NODEID": "1"}, BuildRank(0, 4, 5, 8)),
    ],
)
def test_tasks_of_srun_build_a_partition_on_every_node(said: dict[str, str], expected: BuildRank) -> None:
    assert BuildRank.from_environment({**PLACED, **said}) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"},  # are 6
        {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"},  # of a job of different nodes
        {"SLURM_STEP_TASKS_PER_NODE": "8(y)"},
        {"SLURM_NODEID": "2"},
        {"SLURM_LOCALID": "4"},
        {"SLURM_LOCALID": ""},
        {"SLURM_PROCID": "8"},
    ],
)
def test_variables_of_srun_that_contradict_each_other_are_refused(said: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        BuildRank.from_environment({**PLACED, **said})
    assert caught.value.kind == "slurm"


def array(number: int, count: int, first: int, last: int, **more: str) -> dict[str, str]:
    names = ("ID", "COUNT", "MIN", "MAX")
    values = zip(names, (number, count, first, last), strict=True)
    return {**{f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values}, **more}


@pytest.mark.parametrize(
    ("variables", "machine", "count"),
    [
        (array(0, 16, 0, 15), 0, 16),
        (array(16, 16, 1, 16), 15, 16),
        (array(0, 1, 0, 0), 0, 1),
        (array(3, 1, 3, 3, UPS_ARRAY_SIZE="16"), 3, 16),
        (array(9, 2, 4, 9, UPS_ARRAY_SIZE="16"), 9, 16),
        (array(0, 1, 0, 0, UPS_ARRAY_SIZE="16"), 0, 16),
        ({**array(2, 4, 0, 3), **BATCH}, 2, 4),  # a script that starts no step is one process
        ({**array(2, 4, 0, 3), **STEP, "SLURM_STEP_NUM_TASKS": "1"}, 2, 4),
        ({**array(2, 4, 0, 3), "RANK": "0", "WORLD_SIZE": "1"}, 0, 1),  # said by hand: all of it
    ],
)
def test_every_job_of_an_array_builds_a_partition(
    variables: dict[str, str], machine: int, count: int
) -> None:
    assert BuildRank.from_environment(variables) == BuildRank(0, 1, machine, count)


def test_torchrun_in_every_job_of_an_array_makes_a_partition_of_each_machine() -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = BuildRank.from_environment({**ARRAY, **ranks, "TORCHELASTIC_RUN_ID": "none"})
    assert place == BuildRank(1, 2, 5, 8)


@pytest.mark.parametrize(
    "variables",
    [
        array(3, 1, 3, 3),  # one that is submitted again
        array(4, 3, 0, 8),  # --array=0,4,8
        array(5, 3, 5, 7),
        array(16, 1, 16, 16, UPS_ARRAY_SIZE="16"),
        array(1, 16, 0, 15, UPS_ARRAY_SIZE="many"),
    ],
)
def test_array_whose_jobs_cannot_be_counted_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        BuildRank.from_environment(variables)
    assert caught.value.kind in ("array", "slurm")
    assert "UPS_ARRAY_SIZE" in str(caught.value)


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_process_of_its_own_goes_on(variables: dict[str, str]) -> None:
    assert BuildRank.from_environment(variables) == BuildRank()
    assert not_shared_note(variables) == ""
    assert rank_of(variables) == 0


def test_only_process_of_a_batch_script_goes_on_and_says_so() -> None:
    assert BuildRank.from_environment(BATCH) == BuildRank()
    assert "8 tasks" in not_shared_note(BATCH)


@pytest.mark.parametrize("variables", [value for value, *_ in (SEVERAL | IN_A_STEP).values()])
def test_ranks_of_torchrun_share_whatever_the_scheduler_says(variables: dict[str, str]) -> None:
    together = {**variables, **TORCHRUN}
    assert BuildRank.from_environment(together) == BuildRank(local_rank=1, num_local=2)
    assert rank_of(together) == 1
    each = {**variables, "RANK": "0", "WORLD_SIZE": "1"}
    assert BuildRank.from_environment(each) == BuildRank()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"UPS_RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "17"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "nightly", "SLURM_JOB_ID": "17"}, "nightly"),
        ({"TORCHELASTIC_RUN_ID": "none", **STEP}, "17.3"),
        (BATCH, "17"),
        ({**BATCH, **ARRAY}, "16"),  # all its jobs
    ],
)
def test_run_has_the_id_that_its_environment_gives(variables: dict[str, str], expected: str) -> None:
    given = dict(variables)
    assert run_id(given) == expected
    assert given == variables


def test_run_without_an_id_gets_one_that_its_children_learn() -> None:
    variables: dict[str, str] = {}
    made_up = run_id(variables)
    assert variables == {"UPS_RUN_ID": made_up}
    assert run_id(dict(variables)) == made_up
    assert run_id({}) != made_up


def test_ranks_of_one_torchrun_without_an_id_find_the_same() -> None:
    """It is their parent, as this process is here."""
    program = "from ups_store.launch import log_origin; import json; print(json.dumps(log_origin()))"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    for name in ("UPS_RUN_ID", "SLURM_JOB_ID"):
        environment.pop(name, None)
    command = [sys.executable, "-c", program]
    said = [json.loads(subprocess.check_output(command, env={**environment, "RANK": i})) for i in "01"]
    assert said[0]["run"] == said[1]["run"]
    assert [origin["rank"] for origin in said] == [0, 1]
    assert said[0]["pid"] != said[1]["pid"] != os.getpid()
    assert said[0]["host"] == said[1]["host"] == os.uname().nodename


def test_every_line_of_an_event_log_says_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ups_store.building.watch import BuildWatcher, EventLog

    for name, value in {**TORCHRUN, "UPS_RUN_ID": "a\x7fb"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        BuildWatcher(log=log).note("\x1b[2J \x7f")
    assert all(" " <= c <= "~" or c == "\n" for c in path.read_text())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "note", "end"]
    expected = {"rank": 1, "host": os.uname().nodename, "pid": os.getpid(), "run": "a\x7fb"}
    assert all(expected.items() <= line.items() for line in lines)
    assert log_origin() == expected
