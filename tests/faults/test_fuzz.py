"""Random changes of good stores: nothing but typed errors; `tools.fuzz` tries as many as one likes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import ups_store
from tools.fuzz import run, stores
from tools.fuzz.inputs import KINDS
from ups_store.convert.import_pt import Names


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
@pytest.mark.parametrize(
    "num_inputs", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_changed_stores_give_typed_errors_in_bounded_time_and_memory(tmp_path: Path, num_inputs: int) -> None:
    """Spec 11.1, and that every blind change is noticed (7.6)."""
    outcome = run.fuzz(tmp_path, range(num_inputs), seed=1)
    assert outcome.failures == {}
    assert outcome.num_inputs == num_inputs
    assert len(outcome.kinds) > 15  # that many checks were reached
    assert outcome.num_opened > num_inputs / 10
    assert not outcome.kinds["not_found"]


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "store"])
@pytest.mark.parametrize(
    "num_inputs", [50, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's own, where it reads for comparison
def test_changed_source_configuration_or_checkpoint_gives_a_typed_error_or_the_right_data(
    tmp_path: Path, kind: str, num_inputs: int
) -> None:
    outcome = run.fuzz(tmp_path, range(num_inputs), seed=1, kind=kind)
    assert outcome.failures == {}
    assert outcome.num_inputs == num_inputs
    assert outcome.num_opened >= num_inputs / 25
    assert sum(outcome.kinds.values()) > num_inputs / 10


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_every_kind_are_a_function_of_seed_and_number(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind](tmp_path)
    later = [made.make_input(3, number).content for number in reversed(range(30))]
    assert later[::-1] == [made.make_input(3, number).content for number in range(30)]
    assert len(set(later)) > 20
    made.close()


@pytest.mark.parametrize("defect", ["untyped", "wrong", "hangs"])
def test_fuzzer_finds_a_reader_of_sources_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    def read(self: Names, raw: bytes, **options: object) -> object:
        if defect == "untyped":
            raise KeyError("data.pkl")
        if defect == "wrong":
            return {"x": np.frombuffer(raw, np.uint8)}, {}
        return time.sleep(60)

    monkeypatch.setattr(Names, "read", read)
    monkeypatch.setattr(run, "HANG_SECONDS", 0.2)
    if defect == "hangs":
        outcome = run.fuzz_in_processes(5, seed=0, num_processes=1, max_seconds=5, kind="pt")
        assert outcome.failures == {0: "took more than 0.2 s"}
    else:
        assert run.fuzz(tmp_path, range(5), seed=0, kind="pt").failures


@pytest.mark.parametrize("defect", ["slow", "unnoticed", "nameless"])
def test_fuzzer_finds_a_reader_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    def read(path: Path, number: int) -> bool:
        if defect == "nameless":
            raise ups_store.FormatError("no directory")
        return defect == "unnoticed"

    monkeypatch.setattr(stores, "read_everything", read)
    monkeypatch.setattr(run, "MAX_SECONDS", 0.0 if defect == "slow" else 60.0)
    assert run.fuzz(tmp_path, range(1, 16), seed=0).failures


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_death_of_a_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(folder: Path, share: range, **options: object) -> None:
        options["current"].value = share[3]  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(run, "fuzz", die)
    outcome = run.fuzz_in_processes(10, seed=0, num_processes=1, max_seconds=5)
    assert outcome.failures == {3: "the process ended with -9"}
