"""Auto-tuning: trials that are part of the build, a choice with its reason, and the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from build_helpers import BURGERS, Recorder, build, settings, write_burgers

from ups_store.building import fill
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.fill import rate_of
from ups_store.building.ranks import BuildRank
from ups_store.errors import ConfigError, StoreError

N = 600


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_burgers(tmp_path / "source" / BURGERS, num_samples=N)


def tuned(folder: Path, **reading: Any) -> BuildConfig:
    flags = {
        "data.tasks": "burgers1d",
        "data.split": "train",
        "data.root": str(folder / "source"),
        "cache.dir": str(folder / "tuned"),
        "reading.batch_size": "auto",
        "reading.num_workers": 0,
    }
    return load_config(flags=flags | {f"reading.{name}": value for name, value in reading.items()})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a few batches of 4 samples, whatever is left afterwards."""
    monkeypatch.setattr(fill, "TRIAL_S", 1e-9)  # two batches each
    monkeypatch.setattr(fill, "LONG", 0)
    monkeypatch.setattr(fill, "batch_size_of", lambda plan: 4)


def rates(monkeypatch: pytest.MonkeyPatch, by_size: dict[int, float | Exception]) -> list[int]:
    """Have trials be as fast as is said, by batch size, or fail; returns the sizes that are filled with."""
    plain, sizes = fill.Filling.fill, list[int]()

    def filled(self: Any, *arguments: Any, **options: Any) -> None:
        sizes.append(self.batch_size)
        if isinstance(error := by_size.get(self.batch_size), Exception):
            raise error
        plain(self, *arguments, **options)

    monkeypatch.setattr(fill.Filling, "fill", filled)
    monkeypatch.setattr(fill, "rate_of", lambda progress, seconds: by_size.get(sizes[-1], 1.0))
    return sizes


def test_tuned_build_makes_the_same_bytes_and_loses_nothing_of_the_trials(
    source: Path, tmp_path: Path, quick: None
) -> None:
    (plain,) = build(settings(tmp_path, split="train")).stores
    watcher = Recorder()
    (store,) = build(tuned(tmp_path), watcher).stores
    assert store.path.read_bytes() == plain.path.read_bytes()
    assert store.config_hash == plain.config_hash
    assert store.tuning is not None
    assert len(store.tuning["trials"]) > 1
    assert sum(trial["num_samples"] for trial in store.tuning["trials"]) < store.num_committed == N * 8 // 10
    assert watcher.stages[-1][3] == N * 8 // 10  # each was committed once
    assert store.seconds["probe"] > 0


def test_batch_is_doubled_as_long_as_that_is_faster(
    source: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = rates(monkeypatch, {4: 10.0, 8: 20.0, 16: 20.4})
    watcher = Recorder()
    (store,) = build(tuned(tmp_path), watcher).stores
    assert store.tuning is not None
    assert (store.tuning["batch_size"], sizes) == (8, [4, 8, 16, 8])
    assert store.tuning["why"] == "20 samples/s, the best of 3 tries"
    assert any(
        note.startswith("reading 8 samples at a time with 1 reader process, chosen automatically (20 ")
        for note in watcher.notes
    )


class OutOfMemoryError(RuntimeError):
    """As of a device."""


@pytest.mark.parametrize(
    ("by_size", "size", "filled"),
    [
        ({4: StoreError("full", kind="no_memory"), 2: MemoryError(), 1: 5.0}, 1, [4, 2, 1, 2, 1]),
        ({4: 5.0, 8: OutOfMemoryError()}, 4, [4, 8, 4]),
    ],
)
def test_batch_is_halved_where_memory_does_not_suffice(
    by_size: dict[int, Any],
    size: int,
    filled: list[int],
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_burgers(tmp_path / "source" / BURGERS, num_samples=100)
    sizes = rates(monkeypatch, by_size)
    (store,) = build(tuned(tmp_path)).stores
    assert store.tuning is not None
    assert (store.tuning["batch_size"], sizes) == (size, filled)


def test_other_errors_of_a_trial_are_errors(
    source: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates(monkeypatch, {4: ValueError("of the source")})
    with pytest.raises(ValueError, match="of the source"):
        build(tuned(tmp_path))


def test_small_build_is_not_tuned_and_says_so(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / BURGERS)
    watcher = Recorder()
    (store,) = build(tuned(tmp_path), watcher).stores
    assert store.tuning is not None
    assert store.tuning["trials"] == []
    assert any("16 samples are too few to try others on" in note for note in watcher.notes)


def test_build_whose_rest_is_short_is_tried_once(
    source: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "LONG", 1e30)
    (store,) = build(tuned(tmp_path)).stores
    assert store.tuning is not None
    assert len(store.tuning["trials"]) == 1
    assert "too little to try others" in store.tuning["why"]


def test_build_beside_other_processes_is_not_tuned(source: Path, tmp_path: Path, quick: None) -> None:
    from ups_store.building.build import open_build
    from ups_store.building.readers import Readers
    from ups_store.building.stores import build_store

    config, watcher = tuned(tmp_path), Recorder()
    with Readers(config.reading, note=watcher.note) as readers:
        opened = open_build(
            config, "burgers1d", "train", readers=readers, watcher=watcher, rank=BuildRank(0, 2)
        )
        result = build_store(opened, readers=readers, watcher=watcher)
    assert result.tuning is not None
    assert "other processes of this machine" in result.tuning["why"]


def test_valid_store_is_not_tuned(source: Path, tmp_path: Path) -> None:
    build(tuned(tmp_path))
    (store,) = build(tuned(tmp_path)).stores
    assert (store.reused, store.tuning) == (True, None)


def test_build_that_is_told_a_batch_size_is_not_tuned(source: Path, tmp_path: Path) -> None:
    (store,) = build(tuned(tmp_path, batch_size=32)).stores
    assert store.tuning is None


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5", "true"])
def test_batch_size_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, or a whole number >= 1"):
        load_config(flags={"data.tasks": "burgers1d"}, overrides=[f"reading.batch_size={value}"])


def test_rate_counts_from_the_first_commit() -> None:
    assert rate_of([(10.0, 5), (11.0, 4), (12.0, 6)], seconds=60.0) == 4.0
    assert rate_of([(10.0, 5), (11.0, 4)], seconds=3.0) == 3.0
    assert rate_of([], seconds=3.0) == 0.0
