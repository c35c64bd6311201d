"""`for_each` and `parts_of`: what threads do with items, with errors, and after a fork."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ups_store.system import parallel
from ups_store.system.parallel import MAX_THREADS, for_each, in_order, parts_of


@pytest.mark.parametrize("num_threads", [0, 1, 2, 5, 100])
def test_every_item_is_worked_on_once(num_threads: int) -> None:
    done: list[int] = []
    for_each(done.append, range(40), num_threads=num_threads)
    assert sorted(done) == list(range(40))
    if num_threads <= 1:
        assert done == list(range(40))


def test_items_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(MAX_THREADS)
    for_each(lambda item: together.wait(timeout=30), range(MAX_THREADS), num_threads=MAX_THREADS)


@pytest.mark.parametrize("wrong", [0, 1])
def test_error_is_raised_once_the_other_threads_are_done(wrong: int) -> None:
    """Item 0 is the calling thread's."""
    done: list[int] = []
    started = threading.Barrier(2)

    def work(item: int) -> None:
        if item < 2:
            started.wait(timeout=30)
        if item == wrong:
            raise ValueError(f"item {item}")
        done.append(item)

    with pytest.raises(ValueError, match=f"item {wrong}"):
        for_each(work, range(4), num_threads=2)
    assert sorted(done) == [item for item in range(4) if item % 2 != wrong]


def test_interrupts_are_raised_once_the_other_threads_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them: what the threads work on is closed next."""
    interrupts, go_on, done = [KeyboardInterrupt(), KeyboardInterrupt()], threading.Event(), []
    started = threading.Barrier(2)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if interrupts:
                raise interrupts.pop()
            go_on.set()
            return super().wait(timeout)

    def work(item: int) -> None:
        started.wait(timeout=30)
        if item == 1:
            go_on.wait(timeout=30)
            done.append(item)

    # Of that module alone: threads, as they start, wait for events, too.
    monkeypatch.setattr(
        parallel, "threading", SimpleNamespace(Event=Interrupted, get_ident=threading.get_ident)
    )
    with pytest.raises(KeyboardInterrupt):
        for_each(work, range(2), num_threads=2)
    assert interrupts == []
    assert done == [1]


@pytest.mark.parametrize("message", ["can't start new thread", "cannot schedule new futures after shutdown"])
def test_calling_thread_does_all_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    def submit(function: Callable[[], None]) -> None:
        raise RuntimeError(message)

    done: list[int] = []
    monkeypatch.setattr(parallel._pool(), "submit", submit)
    for_each(done.append, range(5), num_threads=3)
    assert sorted(done) == [0, 1, 2, 3, 4]


@pytest.mark.multi_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_of_a_fork_has_threads_of_its_own() -> None:
    for_each(str, range(4), num_threads=4)  # starts the parent's
    child = os.fork()
    if child == 0:
        together = threading.Barrier(2)
        for_each(lambda item: together.wait(timeout=30), range(2), num_threads=2)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(("num_items", "num_parts"), [(64, 2), (7, 3), (2, 5), (1, 1), (0, 4), (5, 0)])
def test_parts_follow_each_other_and_are_nearly_equal(num_items: int, num_parts: int) -> None:
    parts = parts_of(num_items, num_parts)
    items = [item for part in parts for item in range(num_items)[part]]
    assert items == list(range(num_items))
    sizes = {len(range(num_items)[part]) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == max(1, min(num_items, num_parts))


def test_results_come_in_order_and_items_are_taken_so_many_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in itertools.count():
            taken.append(item)
            yield item

    with ThreadPoolExecutor(3) as pool:
        results = in_order(pool, lambda item: item * item, items(), ahead=4)
        assert [next(results) for _ in range(10)] == [item * item for item in range(10)]
        assert len(taken) == 13
        results.close()
        assert len(taken) == 13


def test_failure_of_one_item_is_raised_at_its_turn() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = in_order(pool, lambda item: 1 // item, [2, 1, 0, 1], ahead=4)
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)
