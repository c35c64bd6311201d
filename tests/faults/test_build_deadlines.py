"""An encoder or a disk that hangs: the build ends with exit code 4, says where, and goes on afterwards."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from build_helpers import BURGERS, write_burgers
from forked import Forked
from inline_readers import in_this_process
from pdebench_files import T, X

import ups_store
from ups_store import ArraySpec
from ups_store.build import Watcher, build_all, load_config, main, open_build
from ups_store.read.recovery import building_path
from ups_store.system import files
from ups_store.system.stalls import LookingThread

NUM_TRAIN = 16
FLAGS = {
    "data.tasks": "burgers1d",
    "data.split": "train",
    "data.root": "source",
    "cache.dir": "cache",
    "reading.num_workers": 0,
}
reads_here = pytest.fixture(autouse=True)(in_this_process)


class Halves:
    """Every second point; a test may have it hang at a sample."""

    hangs_at: int | None = None
    latent_shape = (X // 2, 1)

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        pass

    def identity(self) -> Mapping[str, Any]:
        return {"class": "Halves"}

    def output_spec(self, arrays: Mapping[str, ArraySpec]) -> Mapping[str, ArraySpec]:
        num = arrays["fields"].shape[0]
        return {"latent": ArraySpec((num, T, X // 2, 1), "float32")}

    def encode(
        self, batch: Mapping[str, npt.NDArray[Any]], *, samples: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        if self.hangs_at in samples:
            threading.Event().wait()
        return {"latent": np.ascontiguousarray(batch["fields"][:, :, ::2])}

    def device_state(self) -> str:
        return "7 bytes of the device are taken"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fields = np.random.default_rng(0).random((20, T, X), dtype=np.float32)
    write_burgers(tmp_path / "source" / BURGERS, fields=fields)
    return tmp_path


def words(*more: str, is_latent: bool) -> list[str]:
    given = [f"{key}={value}" for key, value in FLAGS.items()]
    if is_latent:
        Path("weights").touch()
        given += ["--checkpoint=weights", "latent.encoder=test_build_deadlines:Halves"]
    return [*given, "--batch-size=2", *more]


def run(hang: Callable[[], object], *more: str, is_latent: bool) -> tuple[int | None, str]:
    """Exit code and stderr of the command, in a child that has something hang."""
    given = words(*more, is_latent=is_latent)
    process = Forked(lambda: (hang(), main(given)), Path.cwd(), {})
    _, err = process.communicate(timeout=100)
    return process.returncode, err


def hang_in_commit() -> None:
    sync, nth = files.sync_data, itertools.count(1)

    def that_hangs(fd: int) -> None:
        if next(nth) == 9:
            threading.Event().wait()
        sync(fd)

    files.sync_data = that_hangs


def hang_in_encode() -> None:
    Halves.hangs_at = 6


def num_kept() -> int:
    with ups_store.open(building_path(Path("cache/burgers1d_train.zarr.zip")), partial=True) as store:
        return int(store.committed.sum())


@pytest.mark.parametrize("is_latent", [False, True])
def test_commit_that_hangs_ends_the_build_and_the_same_command_continues_it(
    folder: Path, is_latent: bool
) -> None:
    flags = ("--commit-timeout=1", "--log-json=log.jsonl")
    code, err = run(hang_in_commit, *flags, is_latent=is_latent)
    assert code == 4, err
    written = Path("cache/burgers1d_train.zarr.zip.stalled.txt").read_text()
    for text in (err, written):
        assert "the build stalled: committing a batch wasn't over in 1 s" in text
        assert "raise cache.commit_timeout_s" in text
        assert "in that_hangs" in text
    last = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()][-2:]
    assert [(line["event"], line.get("kind")) for line in last] == [("error", "stalled"), ("end", None)]
    expect_finished(kept=num_kept(), is_latent=is_latent)


def test_encoder_that_hangs_ends_the_build_and_the_same_command_continues_it(folder: Path) -> None:
    code, err = run(hang_in_encode, "--encode-timeout=1", is_latent=True)
    assert code == 4, err
    written = Path("cache/burgers1d_train.zarr.zip.stalled.txt").read_text()
    assert "encoding a batch wasn't over in 1 s" in written
    assert "in encode" in written
    assert "7 bytes of the device are taken" in written
    expect_finished(kept=num_kept(), is_latent=True)


def expect_finished(*, kept: int, is_latent: bool) -> None:
    """The next build makes what is missing, and then it is as if nothing had happened."""
    assert 0 < kept < NUM_TRAIN
    flags: dict[str, Any] = dict(FLAGS)
    if is_latent:
        flags |= {"latent.checkpoint": "weights", "latent.encoder": "test_build_deadlines:Halves"}
    (made,) = build_all(load_config(flags=flags), watcher=Watcher()).stores
    assert made.num_committed == NUM_TRAIN - kept
    with ups_store.open(made.path) as store:
        name, step = ("latent", 2) if is_latent else ("fields", 1)
        values = store[name][:]
    fields = np.random.default_rng(0).random((20, T, X), dtype=np.float32)
    assert values.shape == (NUM_TRAIN, T, X // step, 1)
    assert np.isin(values, fields).all()


def test_deadlines_that_are_kept_leave_no_thread_and_no_file(folder: Path) -> None:
    flags = {**FLAGS, "cache.encode_timeout_s": 60, "cache.commit_timeout_s": 30}
    with open_build(load_config(flags=flags), "burgers1d", "train") as build:
        build.begin()
        build.fill()
        build.finish().close()
    assert all(thread.name != "build-deadlines" for thread in threading.enumerate())
    assert not list(Path("cache").glob("*.stalled.txt"))


def test_deadlines_are_no_part_of_a_stores_identity(folder: Path) -> None:
    def config_hash(**cache: Any) -> str:
        flags = {**FLAGS, **{f"cache.{key}": value for key, value in cache.items()}}
        return open_build(load_config(flags=flags), "burgers1d", "train").config_hash

    assert config_hash() == config_hash(encode_timeout_s=1, commit_timeout_s=2)


def test_looking_thread_looks_again_in_a_second_block_and_ends_when_its_look_says_so() -> None:
    class Twice(LookingThread):
        num_looks = 0
        over = threading.Event()

        def _look(self) -> bool:
            self.num_looks += 1
            self.over.set()
            return False

    looking = Twice("twice", every_s=1e-3)
    for number in (1, 2):
        with looking:
            assert looking.over.wait(60)
        looking.over.clear()
        assert looking.num_looks == number
