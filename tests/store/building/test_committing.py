"""Commits in a thread: in order, bounded, and failing where the build sees it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ups_store
from ups_store import ArraySpec, CommitError
from ups_store.building.fill import CommitThread

N = 12
VALUES = np.arange(N * 4, dtype=np.float32).reshape(N, 4)


class SlowCommitter:
    """Commits nothing; waits until it may."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.may_go = threading.Event()
        self.committed: list[int] = []
        self.fail_at = fail_at

    def commit_many(self, samples: npt.NDArray[np.int64], arrays: Any) -> None:
        self.may_go.wait(60)
        if self.fail_at in samples:
            raise CommitError("the disk is gone")
        self.committed += samples.tolist()


def put_all(thread: CommitThread, *, size: int = 2) -> None:
    for first in range(0, N, size):
        samples = np.arange(first, first + size)
        thread.put(samples, {"a": VALUES[samples]})


def test_commit_thread_makes_the_store_that_plain_commits_make(tmp_path: Path) -> None:
    told: list[int] = []
    with ups_store.create(
        tmp_path / "a.zarr.zip", {"a": ArraySpec(VALUES.shape, "float32")}, identity={}
    ) as writer:
        with CommitThread(writer, committed=told.append) as thread:
            put_all(thread)
        assert not len(writer.missing())
        writer.finish()
    assert told == [2] * (N // 2)
    with ups_store.open(tmp_path / "a.zarr.zip") as store:
        np.testing.assert_array_equal(store["a"], VALUES)


def test_commit_thread_whose_queue_is_full_makes_put_wait() -> None:
    committer = SlowCommitter()
    done = threading.Event()

    def fill() -> None:
        with CommitThread(committer, depth=1) as thread:  # type: ignore[arg-type]
            put_all(thread)
        done.set()

    filler = threading.Thread(target=fill)
    filler.start()
    assert not done.wait(0.5)
    committer.may_go.set()
    filler.join(60)
    assert done.is_set()
    assert committer.committed == list(range(N))


@pytest.mark.parametrize("fail_at", [0, N - 1])
def test_commit_thread_that_fails_raises_in_the_build(fail_at: int) -> None:
    committer = SlowCommitter(fail_at=fail_at)
    committer.may_go.set()

    def build() -> None:
        with CommitThread(committer, depth=1) as thread:  # type: ignore[arg-type]
            put_all(thread)

    with pytest.raises(CommitError, match="the disk is gone"):
        build()
    assert committer.committed == list(range(fail_at // 2 * 2))


def test_commit_thread_left_by_an_exception_finishes_the_batch_at_work_and_drops_the_rest() -> None:
    committer = SlowCommitter()

    def interrupted() -> None:
        with CommitThread(committer, depth=4) as thread:  # type: ignore[arg-type]
            thread.put(np.arange(2), {})
            while thread.num_waiting:
                pass
            thread.put(np.arange(2, 4), {})
            threading.Timer(0.2, committer.may_go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert committer.committed == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "ups-store-commit"]


def test_interrupt_while_the_queue_is_full_ends_though_the_commit_at_work_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    committer = SlowCommitter(fail_at=0)
    thread = CommitThread(committer, depth=1)  # type: ignore[arg-type]
    put = thread._batches.put

    def interrupted(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(thread._batches, "put", fail_meanwhile)
        raise KeyboardInterrupt

    def fail_meanwhile(*arguments: Any, **options: Any) -> None:
        committer.may_go.set()
        thread._thread.join()  # the queue stays full: nobody takes from it any more
        put(*arguments, **options)

    def build() -> None:
        with thread:
            put_all(thread, size=N // 2)
            monkeypatch.setattr(thread._batches, "put", interrupted)

    with pytest.raises(KeyboardInterrupt):
        build()
