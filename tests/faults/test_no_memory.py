"""Memory that runs out at any call on the way of a sample into a store: no committed sample is lost.

Every call that the package makes or gets, in Python or C, may allocate; a profile function makes one of them
fail.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from crash_builds import N, Run, undisturbed
from lossy_disk import Disk, installed

import ups_store
from ups_store import CommitError, StoreReplacedError

PACKAGE = str(Path(ups_store.__file__).parent)
TESTING = str(Path(ups_store.__file__).parent / "testing")


RELEASING = {"close", "__enter__", "__exit__", "unlock"}  # what takes over or releases needs no memory


class Allocations:
    """The calls of the package; the `nth` fails, as if there were no memory for it.

    Attributes:
        num_calls: How many there were until then.
    """

    def __init__(self, nth: int | None) -> None:
        self.nth, self.num_calls = nth, 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "c_call") or not file.startswith(PACKAGE) or file.startswith(TESTING):
            return
        if {frame.f_code.co_name, getattr(function, "__name__", "")} & RELEASING:
            return
        self.num_calls += 1
        if self.num_calls == self.nth:
            raise MemoryError


@contextlib.contextmanager
def failing(nth: int | None) -> Iterator[Allocations]:
    """Have the nth call in the block fail."""
    allocations = Allocations(nth)
    sys.setprofile(allocations)
    try:
        yield allocations
    finally:
        sys.setprofile(None)


def commit(run: Run, writer: ups_store.StoreWriter) -> None:
    run.commit(writer, [1, 3])


def commit_after_resuming(run: Run, writer: ups_store.StoreWriter) -> None:
    writer.close()
    with run.create() as again:
        run.commit(again, [1, 3])


def commit_by_another(run: Run, writer: ups_store.StoreWriter) -> None:
    with ups_store.join(run.path, identity={"seed": 0}) as other:
        run.commit(other, [1, 3])


def finish(run: Run, writer: ups_store.StoreWriter) -> None:
    run.finish(writer)


STEPS: dict[Callable[[Run, ups_store.StoreWriter], None], list[int]] = {  # and what is committed before
    commit: [0, 2],
    commit_after_resuming: [0, 2],
    commit_by_another: [0, 2],
    finish: [*range(N)],
}


@pytest.mark.no_cover
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # in a weak reference's callback
@pytest.mark.parametrize("durability", ["durable", "lazy"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_call_without_memory_loses_no_committed_sample(
    tmp_path: Path,
    step: Callable[[Run, ups_store.StoreWriter], None],
    durability: str,
    request: pytest.FixtureRequest,
) -> None:
    """The error is `MemoryError`; the writer goes on or says that it doesn't; the build ends as ever."""
    path = tmp_path / "a.zarr.zip"
    expected, nth, num_errors = undisturbed(path), 1, 0
    stride = 1 if request.config.getoption("--run-slow") else 16 if step in (commit, finish) else 120
    while True:
        disk, run = Disk(), Run(path, durability)
        with installed(disk):
            was_reached, was_said = without_memory(run, step, nth)
            if disk.read(path) is None:
                run.to_the_end()
        assert disk.read(path) == expected, f"call {nth}"
        if not was_reached:
            break
        nth, num_errors = nth + stride, num_errors + was_said
    print(f"{step.__name__}, {durability}: {nth // stride} calls without memory, {num_errors} errors")
    assert num_errors > 200 // stride


def without_memory(
    run: Run, step: Callable[[Run, ups_store.StoreWriter], None], nth: int
) -> tuple[bool, bool]:
    """Begin a build and take a step of it whose nth call fails; whether there was one, and an error."""
    was_said = False
    with run.create() as writer:
        run.commit(writer, STEPS[step])
        with failing(nth) as allocations:
            try:
                step(run, writer)
            except MemoryError:
                was_said = True
        if writer.building.fd >= 0:
            with contextlib.suppress(CommitError, StoreReplacedError):  # it says that it is of no use
                run.commit(writer, [1, 4])
    return allocations.num_calls >= nth, was_said
