"""A builder, its death, other committers and readers in any order, against a dictionary of samples."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_stores import assert_same_bits, begin, names_in, sample_of

import ups_store
from ups_store import (
    BuildLockedError,
    IdentityMismatchError,
    NotCommittedError,
    StoreNotFoundError,
    StoreWriter,
)
from ups_store.system import files

NUM_SAMPLES = 5
EMPTY = {"fields": np.zeros((NUM_SAMPLES, 600)), "nu": np.zeros(NUM_SAMPLES, np.float32)}

indices = st.integers(0, NUM_SAMPLES - 1)
variants = st.integers(0, 9)
durabilities = st.sampled_from(["durable", "lazy"])


def sample(index: int, variant: int) -> dict[str, npt.NDArray[Any]]:
    """What a caller might commit as sample `index`; the variant that is committed stays."""
    number = 10.0 * index + variant
    return {"fields": np.full(600, number), "nu": np.asarray(number, np.float32)}


class Killed(BaseException):
    """The process dies here."""


class StoreMachine(RuleBasedStateMachine):
    """The model: samples committed to the unfinished file, and the samples of the published one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "a.zarr.zip"
        self.writer: StoreWriter | None = None
        self.identity = 0
        self.committed: dict[int, int] | None = None  # sample -> variant; None: there is no unfinished file
        self.is_cut = False  # whether only the rename is left
        self.published: dict[int, int] | None = None
        self.views: list[tuple[npt.NDArray[Any], int]] = []

    def teardown(self) -> None:
        if self.writer:
            self.writer.close()
        shutil.rmtree(self.folder)

    def begin(self, **options: Any) -> StoreWriter:
        return begin(self.path, EMPTY, dims={}, identity={"identity": self.identity}, **options)

    def model(self) -> dict[int, int]:
        assert self.committed is not None
        return self.committed

    # --- the builder ---

    @precondition(lambda self: self.writer is None)
    @rule(durability=durabilities)
    def create(self, durability: str) -> None:
        """A new file, or the unfinished one with every committed sample."""
        self.writer = self.begin(durability=durability)
        self.committed = self.committed or {}
        assert self.writer.missing().tolist() == [i for i in range(NUM_SAMPLES) if i not in self.committed]
        assert self.writer.is_finished == self.is_cut

    @precondition(lambda self: self.writer is None)
    @rule()
    def create_with_another_identity(self) -> None:
        """Refused where there is an unfinished file, and it stays as it is; restarting empties it."""
        self.identity += 1
        if self.committed is not None:
            with pytest.raises(IdentityMismatchError):
                self.begin()
        self.writer = self.begin(on_mismatch="restart")
        self.committed, self.is_cut = {}, False

    @precondition(lambda self: self.writer is not None)
    @rule()
    def create_beside_the_builder(self) -> None:
        """There is one builder at a time."""
        with pytest.raises(BuildLockedError):
            self.begin()

    @precondition(lambda self: self.writer is not None)
    @rule(index=indices, variant=variants)
    def commit(self, index: int, variant: int) -> None:
        """True, and committed, exactly if it wasn't before; other values are refused."""
        assert self.writer is not None
        with self.refusing([index], variant):
            assert self.writer.commit(index, sample(index, variant)) is (index not in self.model())
            self.model().setdefault(index, variant)

    @contextlib.contextmanager
    def refusing(self, chosen: list[int], variant: int) -> Iterator[None]:
        """Expect an error where a sample is committed with other values, and the file isn't finished."""
        if self.is_cut or all(self.model().get(index, variant) == variant for index in chosen):
            yield
            return
        with pytest.raises(ups_store.SpecError, match="other values"):
            yield

    @precondition(lambda self: self.writer is not None)
    @rule(chosen=st.lists(indices, unique=True), variant=variants)
    def commit_many(self, chosen: list[int], variant: int) -> None:
        """The flags say which were written."""
        assert self.writer is not None
        parts = [sample(index, variant) for index in chosen]
        batch = {name: np.array([part[name] for part in parts]) for name in EMPTY}
        if not chosen:
            batch = {name: value[:0] for name, value in EMPTY.items()}
        with self.refusing(chosen, variant):
            written = self.writer.commit_many(chosen, batch)
            assert written.tolist() == [index not in self.model() for index in chosen]
            for index in chosen:
                self.model().setdefault(index, variant)

    @precondition(lambda self: self.writer is not None)
    @rule(variant=variants)
    def commit_the_rest(self, variant: int) -> None:
        """What callers do with `missing`; then the store can be finished."""
        assert self.writer is not None
        for index in self.writer.missing().tolist():
            assert self.writer.commit(index, sample(index, variant)) is True
            self.model()[index] = variant

    @precondition(lambda self: self.committed is not None)
    @rule(index=indices, variant=variants)
    def join_and_commit(self, index: int, variant: int) -> None:
        """Another process commits too, whether the builder lives or not, until the file is cut to length."""
        identity = {"identity": self.identity}
        if self.is_cut:
            with pytest.raises(StoreNotFoundError):
                ups_store.join(self.path, identity=identity)
            return
        with ups_store.join(self.path, identity=identity) as committer, self.refusing([index], variant):
            assert committer.commit(index, sample(index, variant)) is (index not in self.model())
            self.model()[index] = variant

    @precondition(lambda self: self.writer is not None)
    @rule()
    def close(self) -> None:
        assert self.writer is not None
        self.writer.close()
        self.writer = None

    @precondition(lambda self: self.writer is not None)
    @rule()
    def kill(self) -> None:
        """The system closes the descriptors of the dead, and that is all."""
        assert self.writer is not None
        os.close(self.writer.building.fd)
        self.writer.building.fd = -1
        self.writer = None

    @precondition(lambda self: self.writer is not None)
    @rule()
    def finish(self) -> None:
        """Published if and only if all is committed; otherwise the writer works on."""
        assert self.writer is not None
        if len(self.model()) < NUM_SAMPLES:
            with pytest.raises(NotCommittedError):
                self.writer.finish()
            return
        assert self.writer.finish() == self.path
        self.published, self.committed = self.committed, None
        self.writer, self.is_cut = None, False

    @precondition(lambda self: self.writer is not None and len(self.model()) == NUM_SAMPLES)
    @rule(step=st.sampled_from(["write_at", "truncate", "sync", "rename"]))
    def kill_while_finishing(self, step: str) -> None:
        """Nothing is lost and nothing is published, wherever it ends."""
        assert self.writer is not None
        step = "rename" if self.is_cut else step
        with mock.patch.object(files, step, side_effect=Killed), pytest.raises(Killed):
            self.writer.finish()
        self.is_cut = step in ("sync", "rename")
        self.kill()

    # --- readers ---

    @rule()
    def open_finished(self) -> None:
        """The last published content, whatever is being built."""
        if self.published is None:
            with pytest.raises(StoreNotFoundError):
                ups_store.open(self.path)
            return
        with ups_store.open(self.path) as store:
            assert store.verify().ok
            self.check(store, self.published)
            self.views.append((store.sample(0)["fields"], self.published[0]))

    @precondition(lambda self: self.published is None)
    @rule()
    def open_partial(self) -> None:
        """Exactly what is committed, with its values."""
        if self.committed is None:
            with pytest.raises(StoreNotFoundError):
                ups_store.open(self.path, partial=True)
            return
        with ups_store.open(self.path, partial=True) as store:
            self.check(store, self.committed)
            for index in set(range(NUM_SAMPLES)) - self.committed.keys():
                with pytest.raises(NotCommittedError):
                    store.sample(index)
            if 0 in self.committed:
                self.views.append((store.sample(0)["fields"], self.committed[0]))

    def check(self, store: ups_store.Store, expected: dict[int, int]) -> None:
        assert np.flatnonzero(store.committed).tolist() == sorted(expected)
        for index, variant in expected.items():
            assert_same_bits(store.sample(index), sample(index, variant))
        batch = store.gather(list(expected))
        for row, (index, variant) in enumerate(expected.items()):
            assert_same_bits(sample_of(batch, row), sample(index, variant))

    # --- always ---

    @invariant()
    def folder_holds_only_the_store_and_its_building_file(self) -> None:
        """No temporary file outlives the call that made it."""
        expected = [self.path.name] if self.published is not None else []
        expected += [f"{self.path.name}.building"] if self.committed is not None else []
        assert names_in(self.folder) == expected

    @invariant()
    def views_never_change(self) -> None:
        """A view shows its sample for as long as it lives, whatever was built or replaced since."""
        for view, variant in self.views:
            assert (view == variant).all()


TestStore = StoreMachine.TestCase
