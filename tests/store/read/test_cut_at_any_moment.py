"""A file that is cut between any two calls of a reader: an error with a type, or the right data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_stores import MakeStore

PROGRAM = Path(__file__).parents[2] / "support" / "cut_files.py"
FINE = {"data", "StoreError"}


def outcomes(path: Path, access: str, works: str, num_lengths: int) -> dict[str, str]:
    command = [sys.executable, str(PROGRAM), str(path), access, works, str(num_lengths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def not_fine(found: dict[str, str]) -> dict[str, str]:
    return {when: outcome for when, outcome in found.items() if outcome not in FINE}


@pytest.mark.multi_process
@pytest.mark.parametrize("access", ["map", "pread"])
def test_file_cut_in_half_before_any_call_of_open_or_gather_is_an_error_or_the_data(
    make_store: MakeStore, access: str
) -> None:
    found = outcomes(make_store(), access, "open,gather", 1)
    assert not_fine(found) == {}
    assert len(found) > 10


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("access", ["map", "pread"])
def test_file_cut_anywhere_before_any_call_of_a_reader_is_an_error_or_the_data(
    make_store: MakeStore, access: str
) -> None:
    """A cut amid a copy out of the mapping is a SIGBUS, as the page on reliability says: no call is there."""
    found = outcomes(make_store(), access, "open,gather,window,sample,constants,verify", 12)
    assert not_fine(found) == {}
    assert len(found) > 700
