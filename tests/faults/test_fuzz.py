"""Random changes of good stores: nothing but typed errors; `tools/fuzz.py` tries as many as one likes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tools import fuzz
from tools.fuzz import StoreFuzzer, make_input, make_seeds

NUM_INPUTS = 1500


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
def test_changed_stores_give_typed_errors_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """Spec 11.1, and that every blind change is noticed (7.6)."""
    outcome = fuzz.fuzz(tmp_path, range(NUM_INPUTS), seed=1)
    assert outcome.failures == {}
    assert outcome.num_inputs == NUM_INPUTS
    assert len(outcome.kinds) > 15  # that many checks were reached
    assert outcome.num_opened > NUM_INPUTS / 10


def test_inputs_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    seeds = make_seeds(tmp_path)
    assert make_input(seeds, 3, 17) == make_input(seeds, 3, 17)
    assert len({make_input(seeds, 3, number)[0] for number in range(50)}) > 40


@pytest.mark.parametrize("defect", ["untyped", "slow", "unnoticed"])
def test_fuzzer_finds_a_reader_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    def read(path: Path, number: int) -> bool:
        if defect == "untyped":
            raise KeyError("codecs")
        return defect == "unnoticed"

    monkeypatch.setattr(fuzz, "read_everything", read)
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.0 if defect == "slow" else 60.0)
    fuzzer = StoreFuzzer(tmp_path, seed=0)
    for number in range(1, 16):
        fuzzer.try_input(number)
    fuzzer.close()
    assert fuzzer.outcome.failures


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_death_of_a_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(folder: Path, share: range, **options: object) -> None:
        options["current"].value = share[3]  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(fuzz, "fuzz", die)
    outcome = fuzz.fuzz_in_processes(10, seed=0, num_processes=1, max_seconds=5)
    assert outcome.failures == {3: "the process ended with -9"}
