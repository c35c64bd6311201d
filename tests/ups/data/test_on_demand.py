"""On-demand latents: a first pass while stores are made, the later ones mapped."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numbered_batches import batch_of
from on_demand_helpers import (
    BURGERS,
    NUM_TRAIN,
    NUM_WINDOWS,
    T,
    build,
    checkpoint,
    configure,
    make_folder,
    make_steady_folder,
    open_windows,
)
from ups.data.on_demand import sources as all_sources
from ups.data.on_demand.background import BuildEndedError
from ups.data.on_demand.sources import LiveSource
from ups.data.on_demand.unkept import UnkeptJob

import ups_store
from ups.data.batches import TrainingData, WindowBatch, WindowSource
from ups.data.statistics import measure_state_statistics
from ups.data.stores import latent_build
from ups.errors import ConfigError
from ups.trained.encoder import LatentEncoder
from ups_store.building.config import load_config as load_build_config
from ups_store.building.plan import DigestCache, plan_store
from ups_store.errors import DiskFullError, IdentityMismatchError, SourceError
from ups_store.read.recovery import building_path

TWO_TASKS = "data.tasks=[burgers1d,advection1d]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def store_path(folder: Path, task: str = "burgers1d") -> Path:
    return folder / "latents" / f"{task}_train.zarr.zip"


def live(
    folder: Path, *overrides: str, notes: list[str] | None = None, seed: int = 0
) -> TrainingData[WindowSource]:
    windows = open_windows(folder, *overrides, notes=notes, seed=seed)
    assert isinstance(windows.source, LiveSource)
    return windows


def first_pass(windows: TrainingData[WindowSource]) -> list[WindowBatch]:
    return [batch_of(windows, number) for number in range(windows.order.num_steps)]


def rows_of(batches: list[WindowBatch]) -> Counter[bytes]:
    return Counter(row.numpy().tobytes() for batch in batches for row in batch.states)


def expect_equal(found: list[WindowBatch], expected: list[WindowBatch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.task == other.task
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.dt, other.dt)
        assert torch.equal(one.parameters.nan_to_num(7), other.parameters.nan_to_num(7))
        assert one.draws.generator.initial_seed() == other.draws.generator.initial_seed()


def all_windows(folder: Path, *tasks: str) -> Counter[bytes]:
    """Every window of the finished stores."""
    rows: Counter[bytes] = Counter()
    for task in tasks or ("burgers1d",):
        with ups_store.open(store_path(folder, task)) as store:
            latent = np.asarray(store["latent"], np.float32)
        rows.update(latent[i, s : s + 3].tobytes() for i in range(NUM_TRAIN) for s in range(T - 2))
    return rows


def background_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("ups-on-demand", "ups-store-commit"))]


def on_each_forward(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Call something whenever a micro-batch of two samples is encoded, in whatever thread that is."""
    encode = LatentEncoder.encode_on_device

    def encode_and_call(self: LatentEncoder, batch: Any, **options: Any) -> Any:
        call()
        return encode(self, batch, **options)

    monkeypatch.setattr(LatentEncoder, "encode_on_device", encode_and_call)


class Gate:
    """Lets so many forwards through, and the others once it is opened."""

    def __init__(self, num: int) -> None:
        self.num_passed = 0
        self._places, self._opened = threading.Semaphore(num), threading.Event()

    def __call__(self) -> None:
        if not self._places.acquire(blocking=False):
            assert self._opened.wait(30)
        self.num_passed += 1

    def open(self) -> None:
        self._opened.set()


class Crawl:
    """Lets so many forwards through; each of the others takes seconds, until the encoder is quick again.

    So a test that looks at a build which isn't done yet finds it so, however busy the machine is.
    """

    def __init__(self, num: int) -> None:
        self._places, self._quick = threading.Semaphore(num), threading.Event()

    def __call__(self) -> None:
        if not self._places.acquire(blocking=False):
            self._quick.wait(2)

    def end(self) -> None:
        self._quick.set()


@pytest.fixture(autouse=True)
def _threads_end() -> Any:
    yield
    gc.collect()  # what a test forgot may hang in a cycle
    deadline = time.monotonic() + 60
    while background_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not background_threads()


def test_first_pass_has_every_window_once_and_leaves_the_store_of_a_build(folder: Path) -> None:
    windows = live(folder)
    batches = first_pass(windows)
    batch_of(windows, windows.order.num_steps)  # the second pass begins once the store is finished
    assert sum(map(len, batches)) == NUM_WINDOWS
    assert rows_of(batches) == all_windows(folder)
    made = store_path(folder).read_bytes()
    build(folder, f"training.latent_cache_dir={folder / 'other'}")
    assert (folder / "other" / store_path(folder).name).read_bytes() == made
    windows.close()


def test_later_passes_are_those_of_the_finished_store(folder: Path) -> None:
    windows = live(folder)
    num = windows.order.num_steps
    found = [batch_of(windows, number) for number in range(3 * num)][num:]
    stored = open_windows(folder, "training.cache_mode=store")
    assert not isinstance(stored.source, LiveSource)
    assert stored.order.num_steps == num
    expect_equal(found, [batch_of(stored, number) for number in range(num, 3 * num)])


def test_batches_do_not_depend_on_whether_the_store_was_there(folder: Path) -> None:
    made = first_pass(live(folder))
    live(folder).close()
    notes: list[str] = []
    build(folder)
    reused = live(folder, notes=notes)
    expect_equal(first_pass(reused), made)
    assert any("latents reused" in note for note in notes)
    assert not background_threads()


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_no_batch_is_larger_than_was_asked_for(folder: Path, mode: str) -> None:
    windows = live(folder, f"training.cache_mode={mode}", "data.limit=10")  # 30 windows, batches of 16
    num = windows.order.num_steps
    sizes = [len(batch_of(windows, number)) for number in range(2 * num)]
    windows.close()
    later = [15, 15] if mode == "none" else [14, 16]  # of the finished store only the last one is smaller
    assert sorted(sizes[:num]) == [15, 15]
    assert sorted(sizes[num:]) == later


def test_batches_are_a_function_of_the_seed(folder: Path) -> None:
    build(folder)
    one, again, other = (batch_of(live(folder, seed=seed), 0) for seed in (0, 0, 1))
    assert torch.equal(one.states, again.states)
    assert not torch.equal(one.states, other.states)


def test_two_tasks_are_mixed_and_each_window_comes_once(folder: Path) -> None:
    windows = live(folder, TWO_TASKS)
    batches = first_pass(windows)
    batch_of(windows, windows.order.num_steps)
    assert rows_of(batches) == all_windows(folder, "burgers1d", "advection1d")
    tasks = [batch.task for batch in batches]
    assert set(tasks) == {"burgers1d", "advection1d"}
    assert tasks != sorted(tasks)
    for batch in batches:
        known = ["advection1d", "burgers1d"].index(batch.task)  # the order of parameters: beta, nu
        assert torch.isnan(batch.parameters[:, 1 - known]).all()
        assert torch.allclose(batch.parameters[:, known], torch.tensor([0.4, 0.01][known]))
        assert torch.allclose(batch.dt, torch.tensor(0.4))


@pytest.mark.parametrize("mode", ["auto", "memory", "none"])
def test_steady_task_gives_every_pair_once(tmp_path: Path, mode: str) -> None:
    folder = make_steady_folder(tmp_path)
    windows = live(folder, f"training.cache_mode={mode}")
    assert windows.source.tasks["darcy2d"].is_steady
    assert set(measure_state_statistics(windows.source.tasks["darcy2d"])) == {"fields", "input"}
    found = rows_of(first_pass(windows))
    windows.close()
    build(folder)
    with ups_store.open(store_path(folder, "darcy2d")) as store:
        pairs = np.stack([store["latent_input"], store["latent"][:, 0]], axis=1).astype(np.float32)
    assert found == Counter(pair.tobytes() for pair in pairs)


def test_one_task_is_reused_while_the_other_is_made(folder: Path) -> None:
    build(folder)
    notes: list[str] = []
    windows = live(folder, TWO_TASKS, notes=notes)
    batches = first_pass(windows)
    batch_of(windows, windows.order.num_steps)
    assert rows_of(batches) == all_windows(folder, "burgers1d", "advection1d")
    assert sum("latents reused" in note for note in notes) == 1
    assert sum("on demand" in note for note in notes) == 1


def test_first_batch_comes_before_the_build_has_got_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(10)
    on_each_forward(monkeypatch, gate)
    windows = live(folder)
    assert len(batch_of(windows, 0)) >= 16
    assert gate.num_passed <= 10 < NUM_TRAIN // 2
    gate.open()
    assert sum(len(batch) for batch in first_pass(windows)) == NUM_WINDOWS
    batch_of(windows, windows.order.num_steps)


def test_statistics_wait_for_the_first_trajectories_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(8)
    on_each_forward(monkeypatch, gate)
    windows = live(folder)
    (task,) = windows.source.tasks.values()
    measured = measure_state_statistics(task)["fields"]
    assert task.parameter_ranges() == {"nu": (0.01, 0.01)}
    assert task.typical_dt() == pytest.approx(0.4)
    assert not task.is_steady
    assert gate.num_passed <= 8
    gate.open()
    batch_of(windows, windows.order.num_steps)
    again = measure_state_statistics(live(folder).source.tasks["burgers1d"])[
        "fields"
    ]  # of the finished store
    assert measured == again


def test_interrupted_run_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_pass(live(folder, f"training.latent_cache_dir={folder / 'other'}"))
    crawl = Crawl(16)
    on_each_forward(monkeypatch, crawl)
    windows = live(folder)
    begun = [batch_of(windows, number) for number in range(3)]
    windows.close()
    with ups_store.open(building_path(store_path(folder)), partial=True) as store:
        num_there = int(store.committed.sum())
    assert num_there > 0
    crawl.end()
    notes: list[str] = []
    continued = live(folder, notes=notes)
    num = continued.order.num_steps
    rest = [batch_of(continued, number) for number in range(3, num)]
    expect_equal(begun + rest, expected)
    assert any(f"{num_there} of {NUM_TRAIN} there" in note for note in notes)
    batch_of(continued, num)
    assert any(f"all {NUM_TRAIN} encoded" in note for note in notes)
    with ups_store.open(store_path(folder)) as store:
        assert store.verify().ok


def test_run_that_continues_after_the_store_was_finished_draws_the_same(folder: Path) -> None:
    windows = live(folder)
    expected = first_pass(windows)
    batch_of(windows, windows.order.num_steps)
    continued = live(folder)
    expect_equal([batch_of(continued, number) for number in range(4, 9)], expected[4:9])


def test_failing_encoder_is_told_where_batches_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the encoder broke")

    on_each_forward(monkeypatch, fail)
    windows = live(folder)
    with pytest.raises(RuntimeError, match="the encoder broke"):
        batch_of(windows, 0)
    with pytest.raises(RuntimeError, match="the encoder broke"):
        batch_of(windows, windows.order.num_steps)


def test_source_that_is_replaced_midway_is_told_where_batches_are_asked_for(folder: Path) -> None:
    windows = live(folder)
    source = next((folder / "data").glob("*Burgers*"))
    other = folder / "other.hdf5"
    other.write_bytes(source.read_bytes())
    other.replace(source)
    with pytest.raises(SourceError, match="changed"):
        batch_of(windows, windows.order.num_steps)


@pytest.mark.parametrize("mode", ["memory", "none"])
def test_data_in_another_file_is_refused_or_followed(folder: Path, mode: str) -> None:
    plain = first_pass(live(folder, f"training.cache_mode={mode}"))
    source, outer = folder / "data" / BURGERS, folder / "outer" / "burgers.h5"
    outer.parent.mkdir()
    source.rename(outer)
    with h5py.File(source, "w") as file:
        for name in ("tensor", "x-coordinate", "t-coordinate"):
            file[name] = h5py.ExternalLink("../outer/burgers.h5", name)
        file.attrs["Nu"] = 0.01
    with pytest.raises(SourceError):
        live(folder, f"training.cache_mode={mode}")
    windows = live(folder, f"training.cache_mode={mode}", f"data.follow_external={folder / 'outer'}")
    expect_equal(first_pass(windows), plain)


def test_failing_disk_is_told_where_batches_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ups_store.Committer, indices: Any, arrays: Any) -> None:
        raise DiskFullError("no room", path=folder)

    monkeypatch.setattr(ups_store.StoreWriter, "commit_many", fail)
    windows = live(folder)
    with pytest.raises(DiskFullError):
        batch_of(windows, 0)


def test_sample_that_can_not_be_read_ends_the_first_pass(folder: Path) -> None:
    with h5py.File(folder / "data" / BURGERS, "a") as file:
        file["tensor"][30, 2, 5] = np.nan
    windows = live(folder, "reading.on_error=skip")
    with pytest.raises(SourceError) as caught:
        first_pass(windows)
    assert caught.value.kind == "samples_skipped"


def test_value_that_is_not_finite_is_told_with_its_file_and_a_key_to_set(folder: Path) -> None:
    with h5py.File(folder / "data" / BURGERS, "a") as file:
        file["tensor"][30, 2, 5] = np.nan
    with pytest.raises(SourceError, match=r"mend the source, or data\.on_nan=keep$") as caught:
        first_pass(live(folder))
    assert (Path(caught.value.path).name, caught.value.sample) == (BURGERS, 30)


def test_close_ends_the_thread_and_keeps_what_is_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_each_forward(monkeypatch, Crawl(10))
    windows = live(folder)
    batch_of(windows, 0)
    windows.close()
    assert not background_threads()
    with ups_store.open(store_path(folder), partial=True) as store:
        assert 0 < store.committed.sum() < NUM_TRAIN
    with pytest.raises(BuildEndedError):
        batch_of(windows, windows.order.num_steps)


def test_forgotten_windows_end_their_thread(folder: Path) -> None:
    windows = live(folder)
    batch_of(windows, 0)
    del windows
    gc.collect()
    batch_of(live(folder), 0)  # nobody holds the store's locks any more


def test_memory_mode_writes_no_file_and_maps_the_second_pass(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    windows = live(folder, "training.cache_mode=memory")
    num = windows.order.num_steps
    found = [batch_of(windows, number) for number in range(2 * num)]
    assert sorted(folder.rglob("*")) == before
    stored = live(folder)
    expect_equal(found, [batch_of(stored, number) for number in range(2 * num)])


def test_none_mode_encodes_every_pass_to_the_bytes_of_a_store(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    windows = live(folder, "training.cache_mode=none", TWO_TASKS)
    num = windows.order.num_steps
    passes = [[batch_of(windows, which * num + i) for i in range(num)] for which in range(2)]
    windows.close()
    assert sorted(folder.rglob("*")) == before
    build(folder, TWO_TASKS)
    expected = all_windows(folder, "burgers1d", "advection1d")
    assert [rows_of(batches) for batches in passes] == [expected, expected]
    assert not torch.equal(passes[0][0].states, passes[1][0].states)


def test_none_mode_continues_in_the_middle_of_a_pass(folder: Path) -> None:
    whole = live(folder, "training.cache_mode=none")
    num = whole.order.num_steps
    expected = [batch_of(whole, number) for number in range(2 * num)]
    whole.close()
    continued = live(folder, "training.cache_mode=none")
    expect_equal([batch_of(continued, number) for number in range(num + 3, 2 * num)], expected[num + 3 :])
    expect_equal([batch_of(continued, 2)], expected[2:3])  # backwards, too
    continued.close()


def test_none_mode_holds_only_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_sources, "_UNKEPT_NBYTES", 1)
    windows = live(folder, "training.cache_mode=none")
    held = []
    for number in range(windows.order.num_steps):
        batch_of(windows, number)
        job = windows.source._jobs["burgers1d"]
        assert isinstance(job, UnkeptJob)
        held.append(len(job.store.held()))
    assert max(held) < NUM_TRAIN
    windows.close()


def test_auto_mode_without_a_folder_needs_a_finished_store(folder: Path) -> None:
    config = ("training.latent_cache_dir=null", f"cache.dir={folder / 'latents'}")
    with pytest.raises(ConfigError, match="latent_cache_dir") as caught:
        open_windows(folder, *config)
    assert caught.value.kind == "no_store"
    build(folder)
    assert not isinstance(open_windows(folder, *config).source, LiveSource)


def test_store_mode_does_not_build(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_windows(folder, "training.cache_mode=store")
    assert caught.value.kind == "no_store"
    assert not store_path(folder).exists()


def test_stale_store_is_made_anew_and_the_reason_told(folder: Path) -> None:
    build(folder, "latent.micro_batch=5")
    notes: list[str] = []
    windows = live(folder, notes=notes)
    batch_of(windows, windows.order.num_steps)
    (note,) = [note for note in notes if "made from something else" in note]
    assert "micro_batch" in note
    with ups_store.open(store_path(folder)) as store:
        assert store.identity["encoder"]["micro_batch"] == 10


def test_limit_takes_its_samples_from_the_whole_store_and_leaves_it(folder: Path) -> None:
    build(folder)
    before = store_path(folder).read_bytes()
    windows = open_windows(folder, "data.limit=8")
    assert not isinstance(windows.source, LiveSource)
    found = rows_of(first_pass(windows))
    assert sum(found.values()) == 24
    whole = live(folder)
    assert found <= rows_of(first_pass(whole))
    assert store_path(folder).read_bytes() == before


def test_limited_store_is_made_on_demand(folder: Path) -> None:
    windows = live(folder, "data.limit=8")
    assert sum(map(len, first_pass(windows))) == 24
    batch_of(windows, windows.order.num_steps)
    with ups_store.open(store_path(folder)) as store:
        assert len(store) == 8


def test_unfinished_store_of_something_else_is_refused(folder: Path) -> None:
    windows = live(folder, "latent.micro_batch=5")
    batch_of(windows, 0)
    windows.close()
    with pytest.raises(IdentityMismatchError):
        open_windows(folder)


def test_partitions_of_several_machines_are_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        build(folder)
    monkeypatch.undo()
    assert len(list((folder / "latents").glob("*-of-00002.zarr.zip"))) == 2
    notes: list[str] = []
    batches = first_pass(live(folder, notes=notes))
    assert any("latents reused" in note for note in notes)
    expect_equal(batches, first_pass(live(folder, f"training.latent_cache_dir={folder / 'other'}")))
    next((folder / "latents").glob("*-00001-of-00002.zarr.zip")).unlink()
    notes.clear()
    expect_equal(batches, first_pass(live(folder, notes=notes)))
    assert any("on demand" in note for note in notes)


def test_run_that_helps_finishes_the_store_if_its_builder_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = Crawl(14)
    on_each_forward(monkeypatch, crawl)
    notes: list[str] = []
    builder, helper = live(folder), live(folder, notes=notes)
    assert any("builds it too; helping" in note for note in notes)
    expect_equal([batch_of(helper, 0)], [batch_of(builder, 0)])
    builder.close()
    assert not store_path(folder).exists()
    crawl.end()
    batch_of(helper, helper.order.num_steps)
    with ups_store.open(store_path(folder)) as store:
        assert store.verify().ok


def test_run_that_helps_uses_what_its_builder_published(folder: Path) -> None:
    builder, helper = live(folder), live(folder)
    expect_equal(first_pass(helper), first_pass(builder))
    for windows in (builder, helper):
        batch_of(windows, windows.order.num_steps)
    assert not building_path(store_path(folder)).exists()


def test_chunks_of_several_samples_are_read_together(folder: Path) -> None:
    expected = first_pass(live(folder, "training.cache_mode=memory"))
    with h5py.File(folder / "data" / BURGERS, "a") as file:
        values = file["tensor"][:]
        del file["tensor"]
        file.create_dataset("tensor", data=values, chunks=(7, T, 16), compression="gzip")
    windows = live(folder)
    assert rows_of(first_pass(windows)) == rows_of(expected)
    batch_of(windows, windows.order.num_steps)


def test_store_whose_sources_are_gone_is_used(folder: Path) -> None:
    build(folder)
    for source in (folder / "data").iterdir():
        source.unlink()
    notes: list[str] = []
    assert not isinstance(open_windows(folder, notes=notes).source, LiveSource)
    assert any("can't be compared" in note for note in notes)
    store_path(folder).unlink()
    with pytest.raises(SourceError):
        open_windows(folder)


def test_store_of_an_unknown_encoder_is_never_replaced(folder: Path) -> None:
    build(folder)
    with ups_store.open(store_path(folder)) as store:
        content = {**store.identity, "encoder": "unknown"}
        options = {"constants": store.constants, "identity": content, "attrs": store.attrs}
        dims = {name: store.dims[name] for name in store.constants}
        with ups_store.create(store_path(folder), store.arrays, dims=dims, **options) as writer:
            writer.commit_many(range(NUM_TRAIN), store.gather(range(NUM_TRAIN)))
            writer.finish()
    with pytest.raises(ConfigError) as caught:
        open_windows(folder)
    assert caught.value.kind == "unknown_encoder"
    assert not isinstance(open_windows(folder, "training.allow_unknown_encoder=true").source, LiveSource)


def test_first_note_comes_first(folder: Path) -> None:
    notes: list[str] = []
    live(folder, notes=notes).close()
    assert notes[0].startswith("latents of burgers1d (train): looking into")


def test_horizon_that_is_too_long_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_windows(folder, "training.stride=3")
    assert caught.value.kind == "horizon"
    live(folder).close()  # nobody holds the store's locks


def test_stores_are_those_that_the_build_command_makes(folder: Path) -> None:
    config = configure(folder)
    own = latent_build(config, autoencoder_path=checkpoint(folder), device="cpu")
    overrides = [f"data.root={folder / 'data'}", f"checkpoint.dir={folder / 'checkpoints'}"]
    command = load_build_config(folder / "run.yaml", overrides=overrides)
    digests = DigestCache(folder, save=False)
    contents = [
        plan_store(build, "burgers1d", "train").identity(digests, lambda nbytes: None)
        for build in (own, command)
    ]
    assert contents[0] == contents[1]
    assert own.cache.dir == folder / "latents"


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("training.pin_memory=false",),
        ("training.pin_memory=false", "latent.pin_memory=true"),
        ("training.num_workers=3", "training.latent_cache_dtype=float32"),
        ("training.num_workers=3", "training.use_parallel_encoding=false", "reading.batch_size=2"),
        ("training.num_workers=3", "reading.num_workers=1"),
    ],
)
def test_run_says_to_its_build_what_it_says_to_the_build_command(folder: Path, keys: tuple[str, ...]) -> None:
    own = latent_build(configure(folder, *keys), autoencoder_path=checkpoint(folder), device="auto")
    paths = [f"data.root={folder / 'data'}", f"checkpoint.dir={folder / 'checkpoints'}"]
    paths.append(f"training.latent_cache_dir={folder / 'latents'}")
    command = load_build_config(folder / "run.yaml", overrides=[*paths, *keys])
    assert (own.latent, own.cache, own.reading) == (command.latent, command.cache, command.reading)


def test_latents_made_while_training_are_pushed_and_others_pull_them(folder: Path) -> None:
    (folder / "shared").mkdir()
    remote = f"cache.remote={folder / 'shared'}"
    windows = live(folder, remote)
    first_pass(windows)
    for _ in range(600):
        if list((folder / "shared").glob("*/*.zarr.zip")):
            break
        time.sleep(0.05)
    windows.close()
    (pushed,) = (folder / "shared").glob("*/*.zarr.zip")
    assert pushed.read_bytes() == store_path(folder).read_bytes()
    store_path(folder).unlink()
    notes: list[str] = []
    open_windows(folder, remote, notes=notes).close()
    assert any("pulled" in note for note in notes)
    assert pushed.read_bytes() == store_path(folder).read_bytes()
