"""A reader that starts before anybody knows what it will read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from reader_faults import FakeRead, fake

from ups_store.sources import reader_handle
from ups_store.sources.pool import ReaderPool
from ups_store.sources.reader_handle import start_spare, stop_readers
from ups_store.sources.source_files import USUAL_SLOT_NBYTES

pytestmark = pytest.mark.multi_process


@pytest.fixture
def spare() -> Iterator[int]:
    """Process id of the spare reader."""
    start_spare()
    (reader,) = reader_handle._spare
    yield reader.pid
    stop_readers(reader_handle._spare)
    reader_handle._spare.clear()


def pid_of(pool: ReaderPool) -> int:
    list(pool.read([fake(FakeRead, 0)]))
    (reader,) = pool.status().readers
    return reader.pid


def test_first_pool_of_the_usual_slots_takes_it(spare: int) -> None:
    with ReaderPool(1, slot_nbytes=USUAL_SLOT_NBYTES) as pool:
        assert pid_of(pool) == spare
        assert reader_handle._spare == []
        with ReaderPool(1, slot_nbytes=USUAL_SLOT_NBYTES) as another:
            assert pid_of(another) != spare
    assert not psutil.pid_exists(spare)


def test_pool_of_other_slots_leaves_it(spare: int) -> None:
    with ReaderPool(1, slot_nbytes=2 * USUAL_SLOT_NBYTES) as pool:
        assert pid_of(pool) != spare
    assert [reader.pid for reader in reader_handle._spare] == [spare]


def test_want_of_memory_is_left_to_whoever_needs_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    start_spare()
    assert reader_handle._spare == []


def test_it_ends_with_its_process() -> None:
    code = (
        "from ups_store.sources import reader_handle as r;r.start_spare(); print(r._spare[0].pid, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(done.stdout))


@pytest.mark.parametrize(("flag", "is_started"), [("--help", False), ("--tasks", True)])
def test_build_starts_it_unless_it_only_shows_help(flag: str, is_started: bool) -> None:
    code = (
        "import sys, atexit; from ups_store.building.__main__ import main\n"
        "def show():\n"
        "    handle = sys.modules.get('ups_store.sources.reader_handle')\n"
        "    print(len(handle._spare) if handle else 0)\n"
        "atexit.register(show); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True, timeout=60)
    assert int(done.stdout.splitlines()[-1]) == is_started
