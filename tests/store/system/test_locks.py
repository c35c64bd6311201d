"""Several processes at one store: who may build, who waits, what the dead and the forked leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    IDENTITY,
    all_arrays,
    assert_same_bits,
    begin,
    build,
    mixed_values,
    names_in,
    sample_of,
    samples_of,
)

import ups_store
from ups_store import BuildLockedError, StoreClosedError, StoreNotFoundError, StoreReplacedError
from ups_store.system import files
from ups_store.writing import commit, create

pytestmark = pytest.mark.multi_process

ANSWER_S = 60  # that another process may take, on a busy machine


@dataclass
class Others:
    """Processes that a test started, each with a pipe."""

    processes: list[BaseProcess] = field(default_factory=list)

    def start(self, work: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, *args))
        process.start()
        theirs.close()
        self.processes.append(process)
        return process, mine


@pytest.fixture
def others() -> Iterator[Others]:
    started = Others()
    yield started
    for process in started.processes:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


def receive(connection: Connection) -> Any:
    """The next message of another process."""
    assert connection.poll(ANSWER_S), "no answer from the other process"
    return connection.recv()


def kill(process: BaseProcess) -> None:
    """End a process as a power cut would: nothing of it runs any more."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# --- one builder --------------------------------------------------------------------------------------


def build_sample_2_and_wait(connection: Connection, path: Path) -> None:
    with begin(path, mixed_values()) as writer:
        writer.commit(2, sample_of(mixed_values(), 2))
        connection.send("committed")
        connection.recv()


def test_second_builder_is_told_who_builds(path: Path, others: Others) -> None:
    process, connection = others.start(build_sample_2_and_wait, path)
    assert receive(connection) == "committed"
    with pytest.raises(BuildLockedError) as caught:
        begin(path, mixed_values())
    error = caught.value
    assert (error.pid, error.host, error.exit_code) == (process.pid, socket.gethostname(), 8)
    assert f"pid {process.pid} on {socket.gethostname()}" in str(error)
    assert "another process is building it" in str(error)
    connection.send("close")
    process.join()
    with begin(path, mixed_values()) as writer:
        assert writer.missing().tolist() == [0, 1, 3]


def test_second_builder_in_the_same_process_is_told_so(path: Path) -> None:
    with begin(path, mixed_values()):
        with pytest.raises(BuildLockedError, match="this process holds it already") as caught:
            begin(path, mixed_values())
        assert (caught.value.pid, caught.value.hint) == (os.getpid(), "close the first writer")
    begin(path, mixed_values()).close()


def test_restart_does_not_replace_a_file_that_is_being_built(path: Path) -> None:
    with begin(path, mixed_values()) as writer:
        with pytest.raises(BuildLockedError) as caught:
            begin(path, mixed_values(), identity={"other": 1}, on_mismatch="restart")
        assert caught.value.pid == os.getpid()
        writer.commit(0, sample_of(mixed_values(), 0))


def test_builder_of_a_damaged_file_is_unknown(path: Path) -> None:
    with begin(path, mixed_values()) as writer:
        files.write_at(writer.building.fd, 0, bytes(100))
        with pytest.raises(BuildLockedError, match="an unknown process") as caught:
            begin(path, mixed_values())
    assert (caught.value.pid, caught.value.host) == (None, None)


# --- the dead and the forked ----------------------------------------------------------------------------


def test_killed_builder_does_not_block_the_next_one(path: Path, others: Others) -> None:
    process, connection = others.start(build_sample_2_and_wait, path)
    assert receive(connection) == "committed"
    kill(process)
    with begin(path, mixed_values()) as writer:
        assert writer.missing().tolist() == [0, 1, 3]
    assert names_in(path.parent) == [f"{path.name}.building"]


def build_and_fork(connection: Connection, path: Path) -> None:
    with begin(path, mixed_values()):
        if os.fork() == 0:
            connection.send(os.getpid())
            time.sleep(ANSWER_S)
            os._exit(0)
        connection.recv()


def test_killed_builder_does_not_block_while_its_forked_child_lives(path: Path, others: Others) -> None:
    process, connection = others.start(build_and_fork, path)
    child = receive(connection)
    try:
        kill(process)
        begin(path, mixed_values()).close()
        os.kill(child, 0)  # it does live
    finally:
        os.kill(child, signal.SIGKILL)


def build_while_a_forked_child_tries(connection: Connection, path: Path) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        child = os.fork()
        if child == 0:
            try:
                writer.commit(0, sample_of(values, 0))
            except StoreClosedError as error:
                connection.send(str(error))
            os._exit(0)
        os.waitpid(child, 0)
        writer.commit_many(range(4), values)
        writer.finish()


def test_writer_is_closed_in_a_forked_child_and_works_on_in_its_parent(path: Path, others: Others) -> None:
    process, connection = others.start(build_while_a_forked_child_tries, path)
    assert "the writer is closed" in receive(connection)
    process.join()
    assert process.exitcode == 0
    assert_same_bits(all_arrays(path), mixed_values())


# --- several committers ---------------------------------------------------------------------------------

NUM_SAMPLES = 24


def join_and_commit(connection: Connection, path: Path, seed: int) -> None:
    """Commit all samples in an order and in batches of its own; answers with those that it wrote."""
    values = mixed_values(NUM_SAMPLES)
    rng = np.random.default_rng(seed)
    with ups_store.join(path, identity=IDENTITY) as committer:
        connection.send("ready")
        connection.recv()
        order, written = rng.permutation(NUM_SAMPLES), []
        while len(order):
            batch, order = np.split(order, [int(rng.integers(1, 8))])
            written += batch[committer.commit_many(batch, samples_of(values, batch))].tolist()
    connection.send(written)


def test_processes_that_commit_the_same_samples_at_once_write_each_once(path: Path, others: Others) -> None:
    values = mixed_values(NUM_SAMPLES)
    with begin(path, values) as writer:
        connections = [others.start(join_and_commit, path, seed)[1] for seed in (1, 2)]
        assert [receive(connection) for connection in connections] == ["ready", "ready"]
        for connection in connections:
            connection.send("go")
        written = [i for i in range(NUM_SAMPLES) if writer.commit(i, sample_of(values, i))]
        for connection in connections:
            written += receive(connection)
        writer.finish()
    assert sorted(written) == list(range(NUM_SAMPLES))
    assert_same_bits(all_arrays(path), values)
    found = path.read_bytes()
    assert found == build(path, values).read_bytes()


def join_and_commit_part(connection: Connection, path: Path, first: int, step: int) -> None:
    values, mine = mixed_values(NUM_SAMPLES), np.arange(first, NUM_SAMPLES, step)
    with ups_store.join(path, identity=IDENTITY) as committer:
        connection.send(committer.commit_many(mine, samples_of(values, mine)).all())


def test_processes_that_commit_disjoint_samples_make_the_same_file(path: Path, others: Others) -> None:
    values = mixed_values(NUM_SAMPLES)
    with begin(path, values, durability="lazy") as writer:
        connections = [others.start(join_and_commit_part, path, first, 2)[1] for first in (0, 1)]
        assert all(receive(connection) for connection in connections)
        writer.finish()
    found = path.read_bytes()
    assert found == build(path, values).read_bytes()


def join_and_commit_on_command(connection: Connection, path: Path) -> None:
    with ups_store.join(path, identity=IDENTITY) as committer:
        connection.send("ready")
        connection.recv()
        connection.send("committing")
        answer: object = "committed"
        try:
            committer.commit(0, sample_of(mixed_values(seed=1), 0))
        except StoreReplacedError as error:
            answer = error
        connection.send(answer)


def test_committer_that_waits_while_the_store_is_published_never_writes(path: Path, others: Others) -> None:
    values = mixed_values()
    with begin(path, values) as writer:
        writer.commit_many(range(4), values)
        _, connection = others.start(join_and_commit_on_command, path)
        assert receive(connection) == "ready"
        with writer.building.gate(exclusive=True):
            connection.send("go")
            assert receive(connection) == "committing"
            assert not connection.poll(0.2)  # it waits for the gate
            commit.finish(writer.building)
            published = path.read_bytes()
        error = receive(connection)
    assert path.read_bytes() == published == build(path.with_name("undisturbed"), values).read_bytes()
    assert (type(error), error.path) == (StoreReplacedError, f"{path}.building")


def test_join_after_publication_finds_nothing_to_join(path: Path) -> None:
    build(path, mixed_values())
    with pytest.raises(StoreNotFoundError):
        ups_store.join(path, identity=IDENTITY)


# --- readers ------------------------------------------------------------------------------------------

NUM_REBUILDS = 15
VERSIONS = [mixed_values(seed=seed) for seed in range(NUM_REBUILDS)]


def open_again_and_again(connection: Connection, path: Path) -> None:
    """Answers with the seeds of the stores that it saw, and with how many times it looked.

    Each time it reads every byte of every array twice, by gathering and as views: all of one store.
    """
    versions = {values["nu"].tobytes(): seed for seed, values in enumerate(VERSIONS)}
    seen, num_opened = [], 0
    connection.send("ready")
    while not connection.poll():
        with ups_store.open(path, access=("map", "pread")[num_opened % 2]) as store:
            gathered = store.gather(range(4))
            views = {name: store[name].copy() for name in store.arrays}
            num_opened += 1
        seed = versions[gathered["nu"].tobytes()]
        for found in (gathered, views):
            assert_same_bits(found, VERSIONS[seed])
        if seed not in seen[-1:]:
            seen.append(seed)
    connection.send((seen, num_opened))


def test_reader_that_opens_while_stores_are_published_sees_whole_ones_in_order(
    path: Path, others: Others
) -> None:
    build(path, mixed_values(seed=0))
    with ups_store.open(path) as kept:
        _, connection = others.start(open_again_and_again, path)
        assert receive(connection) == "ready"
        for seed in range(1, NUM_REBUILDS):
            build(path, VERSIONS[seed])
        connection.send("enough")
        seen, num_opened = receive(connection)
        assert seen == sorted(seen)
        assert num_opened >= len(seen) > 1
        assert_same_bits(
            kept.gather(range(4)), mixed_values(seed=0)
        )  # the old content, as long as it is open


# --- waiting ------------------------------------------------------------------------------------------


def test_finish_gives_up_waiting_for_a_commit_and_stays_usable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    monkeypatch.setattr(commit, "LOCK_TIMEOUT_S", 0.05)
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        writer.commit_many(range(4), values)
        with committer.building.gate(exclusive=False):
            with pytest.raises(BuildLockedError, match=r"0\.05 s"):
                writer.finish()
            assert writer.commit(0, sample_of(values, 0)) is False  # two may hold it shared
        writer.finish()
    assert_same_bits(all_arrays(path), values)


def test_commit_gives_up_waiting_for_a_sample_of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mixed_values()
    monkeypatch.setattr(commit, "LOCK_TIMEOUT_S", 0.05)
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        with committer.building.samples_locked(np.array([1, 2])):
            with pytest.raises(BuildLockedError):
                writer.commit_many([0, 2], samples_of(values, [0, 2]))
            assert writer.commit(3, sample_of(values, 3)) is True
        assert writer.commit_many(range(4), values).tolist() == [True, True, True, False]


def test_commit_of_many_places_holds_what_lies_between_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = mixed_values()
    monkeypatch.setattr(commit, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(commit, "MAX_LOCKS", 1)
    with begin(path, values) as writer, ups_store.join(path, identity=IDENTITY) as committer:
        with committer.building.samples_locked(np.array([0, 2])):
            with pytest.raises(BuildLockedError):
                writer.commit(1, sample_of(values, 1))
            assert writer.commit(3, sample_of(values, 3)) is True
        assert writer.commit_many([1, 3, 0], samples_of(values, [1, 3, 0])).tolist() == [True, False, True]
        assert writer.missing().tolist() == [2]


def test_create_gives_up_waiting_for_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "LOCK_TIMEOUT_S", 0.05)
    begin(path, mixed_values()).close()
    with ups_store.join(path, identity=IDENTITY) as committer:
        with committer.building.gate(exclusive=False), pytest.raises(BuildLockedError):
            begin(path, mixed_values())
        begin(path, mixed_values()).close()


def test_writer_that_closes_itself_while_it_holds_the_gate_leaves_no_lock(path: Path) -> None:
    with begin(path, mixed_values()) as writer, writer.building.gate(exclusive=True):
        writer.close()
    begin(path, mixed_values()).close()
