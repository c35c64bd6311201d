"""`training.cache_mode`: the same latents in the same batches, wherever they lie."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cache_runs import (
    BURGERS,
    NUM_TRAIN,
    NUM_WINDOWS,
    N,
    T,
    X,
    build,
    checkpoint,
    configure,
    make_folder,
    make_steady_folder,
    open_windows,
)
from numbered_batches import batch_of

import ups_store
from ups.data.batches import WindowBatch, augment_windows_of
from ups.data.latents import make_latents
from ups.data.statistics import measure_state_statistics
from ups.data.stores import latent_build
from ups.data.windows import EncodedWindows
from ups.errors import ConfigError
from ups.grid import GridSpec
from ups.laws import LAWS
from ups.trained.autoencoder import load_autoencoder
from ups.trained.encoder import LatentEncoder
from ups.trained.specs import SimulatedTask
from ups_store.build import open_build
from ups_store.building.config import load_config as load_build_config
from ups_store.building.plan import DigestCache, plan_store
from ups_store.errors import IdentityMismatchError, SourceError
from ups_store.read.recovery import building_path

TWO_TASKS = "data.tasks=[burgers1d,advection1d]"
MODES = ["auto", "memory", "none"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def store_path(folder: Path, task: str = "burgers1d") -> Path:
    return folder / "latents" / f"{task}_train.zarr.zip"


def batches_of(folder: Path, *overrides: str, num_passes: int = 1, seed: int = 0) -> list[WindowBatch]:
    data = open_windows(folder, *overrides, seed=seed)
    return [
        data.source.encoded(batch_of(data, number)) for number in range(num_passes * data.order.num_steps)
    ]


def expect_equal(batches: list[WindowBatch], expected: list[WindowBatch]) -> None:
    for one, other in zip(batches, expected, strict=True):
        assert one.task == other.task
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.dt, other.dt)
        assert torch.equal(one.parameters.nan_to_num(7), other.parameters.nan_to_num(7))
        assert one.draws.generator.initial_seed() == other.draws.generator.initial_seed()


def rows_of(batches: list[WindowBatch]) -> Counter[bytes]:
    return Counter(row.numpy().tobytes() for batch in batches for row in batch.states)


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_stores_that_the_build_command_made(folder: Path, mode: str) -> None:
    before = sorted(folder.rglob("*"))
    mode = f"training.cache_mode={mode}"
    batches = batches_of(folder, mode, TWO_TASKS, num_passes=2)
    statistics = measure_state_statistics(open_windows(folder, mode).source.tasks["burgers1d"])
    if mode.endswith("auto"):
        made = [store_path(folder, task).read_bytes() for task in ("burgers1d", "advection1d")]
        (folder / "latents").rename(folder / "made")
    else:
        assert sorted(folder.rglob("*")) == before
    build(folder, TWO_TASKS)
    stored = open_windows(folder, "training.cache_mode=store", TWO_TASKS)
    num = stored.order.num_steps
    expect_equal(batches, [batch_of(stored, number) for number in range(2 * num)])
    assert measure_state_statistics(stored.source.tasks["burgers1d"]) == statistics
    assert sum(len(batch) for batch in batches[:num]) == 2 * NUM_WINDOWS
    if mode.endswith("auto"):
        assert made == [store_path(folder, task).read_bytes() for task in ("burgers1d", "advection1d")]


@pytest.mark.parametrize("mode", MODES)
def test_pairs_of_a_steady_task_are_those_of_its_store(tmp_path: Path, mode: str) -> None:
    folder = make_steady_folder(tmp_path)
    batches = batches_of(folder, f"training.cache_mode={mode}")
    statistics = measure_state_statistics(
        open_windows(folder, f"training.cache_mode={mode}").source.tasks["darcy2d"]
    )
    build(folder)
    expect_equal(batches, batches_of(folder, "training.cache_mode=store"))
    stored = open_windows(folder, "training.cache_mode=store").source.tasks["darcy2d"]
    assert measure_state_statistics(stored) == statistics


def write_well(path: Path) -> None:
    """A file in the format of The Well whose samples have times, and numbers of steps, of their own."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"dataset_name": "small", "grid_type": "cartesian", "n_spatial_dims": 1})
        file.attrs.update({"n_trajectories": N, "simulation_parameters": ["nu"], "nu": 0.01})
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = ["x"]
        dimensions["x"] = np.linspace(0, 1, X, dtype=np.float32)
        dimensions["x"].attrs.update({"sample_varying": False, "time_varying": False})
        dimensions["time"] = ((1.0 + np.arange(N))[:, None] / 100 * np.arange(T)).astype(np.float32)
        dimensions["time"].attrs["sample_varying"] = True
        group = file.create_group("t0_fields")
        group.attrs["field_names"] = ["u"]
        group["u"] = np.random.default_rng(0).standard_normal((N, T, X)).astype(np.float32)
        group["u"].attrs.update({"dim_varying": [True], "sample_varying": True, "time_varying": True})
        scalars = file.create_group("scalars")
        scalars.attrs["field_names"] = ["num_steps"]
        scalars["num_steps"] = np.where(np.arange(N) % 3, T, T - 1)
        scalars["num_steps"].attrs.update({"sample_varying": True, "time_varying": False})


@pytest.mark.parametrize("mode", MODES)
def test_samples_may_have_times_and_lengths_of_their_own(folder: Path, mode: str) -> None:
    write_well(folder / "data" / BURGERS)
    batches = batches_of(folder, f"training.cache_mode={mode}")
    steps, counts = np.unique(np.concatenate([batch.dt for batch in batches]).round(4), return_counts=True)
    assert len(steps) == NUM_TRAIN
    assert set(counts.tolist()) == {T - 2, T - 3}
    build(folder)
    expect_equal(batches, batches_of(folder, "training.cache_mode=store"))


# --- encoding in each step ----------------------------------------------------------------------------


def test_fields_are_augmented_before_they_are_encoded(folder: Path) -> None:
    data = open_windows(folder, "training.cache_mode=none")
    grid = GridSpec((X,), (True,), (("fields", 1),))
    task = SimulatedTask(grid, ("periodic",), (4,), ("u",), False, 0.1, {"nu": (0.0, 1.0)}, {})
    batch = augment_windows_of(task, batch_of(data, 0), laws=LAWS)
    encoded = data.source.encoded(batch)
    assert encoded.items is None
    with torch.no_grad():
        parameters = batch.parameters.repeat_interleave(batch.states.shape[1], dim=0)
        model = load_autoencoder(checkpoint(folder))
        expected = model.encode(batch.states.flatten(0, 1), parameters, task="burgers1d")
    torch.testing.assert_close(encoded.states.flatten(0, 1), expected, rtol=2e-3, atol=2e-3)
    plain = data.source.encoded(batch_of(data, 0))
    assert not torch.equal(encoded.states, plain.states)


def test_frames_of_few_samples_take_few_micro_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 frames of a micro-batch are 2 samples of 5 steps: windows at other places of it go together."""
    (windows,) = open_windows(folder, "training.cache_mode=none").source.tasks.values()
    assert isinstance(windows, EncodedWindows)
    shapes: list[int] = []
    encode = LatentEncoder.encode_on_device

    def counted(self: LatentEncoder, batch: Any, **options: Any) -> Any:
        shapes.append(len(batch["fields"]))
        return encode(self, batch, **options)

    monkeypatch.setattr(LatentEncoder, "encode_on_device", counted)
    windows.whole(np.array([0, 5, 8, 3]), "fields")
    assert shapes == [10, 10]


def test_other_encoders_are_not_asked_for_single_frames(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.cache_mode = none") as caught:
        open_windows(folder, "training.cache_mode=none", "latent.encoder=lab:encoder")
    assert caught.value.kind == "other_encoder"


# --- which stores are valid ---------------------------------------------------------------------------


def test_interrupted_build_goes_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    expected, left = batches_of(folder, "training.cache_mode=memory"), iter(range(16))
    encode = LatentEncoder.encode_on_device

    def encode_some(self: LatentEncoder, batch: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode(self, batch, **options)

    with monkeypatch.context() as patched:
        patched.setattr(LatentEncoder, "encode_on_device", encode_some)
        with pytest.raises(ups_store.BuildInterruptedError):
            open_windows(folder, "reading.batch_size=4")
    with ups_store.open(building_path(store_path(folder)), partial=True) as store:
        num_there = int(store.committed.sum())
    assert 0 < num_there < NUM_TRAIN
    expect_equal(batches_of(folder), expected)
    assert any(f"{num_there} of {NUM_TRAIN} samples are there, continuing" in note for note in notes)
    with ups_store.open(store_path(folder)) as store:
        assert store.verify().ok


def test_store_that_another_run_builds_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.data.latents._POLL_S", 0.02)
    config = latent_build(configure(folder), autoencoder_path=checkpoint(folder), device="cpu")
    builder, opened = open_build(config, "burgers1d", "train"), []
    builder.begin()
    waiting = threading.Thread(target=lambda: opened.append(batches_of(folder)))
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()
    builder.fill(np.arange(5))
    builder.close()  # it ends before it is done, and the other one goes on
    waiting.join(60)
    assert sum(map(len, opened[0])) == NUM_WINDOWS


@pytest.mark.parametrize("mode", MODES)
def test_value_that_is_not_finite_is_told_with_its_file_and_a_key_to_set(folder: Path, mode: str) -> None:
    with h5py.File(folder / "data" / BURGERS, "a") as file:
        file["tensor"][30, 2, 5] = np.nan
    with pytest.raises(SourceError, match=r"mend the source, or data\.on_nan=keep$") as caught:
        open_windows(folder, f"training.cache_mode={mode}")
    assert (Path(caught.value.path).name, caught.value.sample) == (BURGERS, 30)


@pytest.mark.parametrize("mode", ["memory", "none"])
def test_data_in_another_file_is_refused_or_followed(folder: Path, mode: str) -> None:
    plain = batches_of(folder, f"training.cache_mode={mode}")
    source, outer = folder / "data" / BURGERS, folder / "outer" / "burgers.h5"
    outer.parent.mkdir()
    source.rename(outer)
    with h5py.File(source, "w") as file:
        for name in ("tensor", "x-coordinate", "t-coordinate"):
            file[name] = h5py.ExternalLink("../outer/burgers.h5", name)
        file.attrs["Nu"] = 0.01
    with pytest.raises(SourceError):
        open_windows(folder, f"training.cache_mode={mode}")
    follow = f"data.follow_external={folder / 'outer'}"
    expect_equal(batches_of(folder, f"training.cache_mode={mode}", follow), plain)


def test_auto_mode_without_a_folder_and_store_mode_need_a_finished_store(folder: Path) -> None:
    config = ("training.latent_cache_dir=null", f"cache.dir={folder / 'latents'}")
    with pytest.raises(ConfigError, match="latent_cache_dir") as caught:
        open_windows(folder, *config)
    assert caught.value.kind == "no_store"
    with pytest.raises(ConfigError) as caught:
        open_windows(folder, "training.cache_mode=store")
    assert caught.value.kind == "no_store"
    assert not store_path(folder).exists()
    build(folder)
    assert len(batches_of(folder, *config)) > 0


def test_stale_store_is_made_anew_and_the_reason_told(folder: Path, notes: list[str]) -> None:
    build(folder, "latent.micro_batch=5")
    open_windows(folder)
    (note,) = [note for note in notes if "made from something else" in note]
    assert "micro_batch" in note
    with ups_store.open(store_path(folder)) as store:
        assert store.identity["encoder"]["micro_batch"] == 10


def test_unfinished_store_of_something_else_is_refused(folder: Path) -> None:
    other = configure(folder, "latent.micro_batch=5")
    config = latent_build(other, autoencoder_path=checkpoint(folder), device="cpu")
    with open_build(config, "burgers1d", "train") as builder:
        builder.begin()
        builder.fill(np.arange(4))
    with pytest.raises(IdentityMismatchError):
        open_windows(folder)


def test_limit_takes_its_samples_from_the_whole_store_and_leaves_it(folder: Path) -> None:
    limited = batches_of(folder, "data.limit=8")
    with ups_store.open(store_path(folder)) as store:
        assert len(store) == 8
    whole = batches_of(folder)
    before = store_path(folder).read_bytes()
    rows = rows_of(batches_of(folder, "data.limit=8"))
    assert sum(rows.values()) == 24
    assert rows == rows_of(limited) <= rows_of(whole)
    assert store_path(folder).read_bytes() == before


def test_limited_run_on_whole_stores_goes_on_with_them(folder: Path) -> None:
    build(folder)
    checked: list[Mapping[str, Any]] = []
    options: dict[str, Any] = {"autoencoder_path": checkpoint(folder), "device": "cpu"}
    make_latents(configure(folder, "data.limit=8"), check_data=checked.append, **options)
    assert not checked  # a training state has the hash of what was opened, the whole store
    make_latents(configure(folder), check_data=checked.append, **options)
    with ups_store.open(store_path(folder)) as store:
        assert checked == [{"burgers1d": store.config_hash}]


def test_partitions_of_several_machines_are_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        build(folder)
    monkeypatch.undo()
    expected = batches_of(folder, "training.cache_mode=memory")
    expect_equal(batches_of(folder), expected)
    assert not store_path(folder).exists()
    next((folder / "latents").glob("*-00001-of-00002.zarr.zip")).unlink()
    expect_equal(batches_of(folder), expected)


def test_store_whose_sources_are_gone_is_used(folder: Path, notes: list[str]) -> None:
    build(folder)
    for source in (folder / "data").iterdir():
        source.unlink()
    assert sum(map(len, batches_of(folder))) == NUM_WINDOWS
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
    assert len(batches_of(folder, "training.allow_unknown_encoder=true")) > 0


def test_split_without_samples_is_refused_with_the_folder_of_its_sources(folder: Path) -> None:
    with pytest.raises(ConfigError, match="burgers1d train would be empty") as caught:
        open_windows(folder, "data.split_fractions=[0.0,0.5,0.5]")
    assert (caught.value.kind, caught.value.path) == ("empty_split", str(folder / "data"))


def test_stores_are_those_that_the_build_command_makes(folder: Path) -> None:
    own = latent_build(configure(folder), autoencoder_path=checkpoint(folder), device="cpu")
    overrides = [f"data.root={folder / 'data'}", f"checkpoint.dir={folder / 'checkpoints'}"]
    command = load_build_config(folder / "run.yaml", overrides=overrides)
    digests = DigestCache(folder, save=False)
    contents = [
        plan_store(config, "burgers1d", "train").identity(digests, lambda nbytes: None)
        for config in (own, command)
    ]
    assert contents[0] == contents[1]
    assert own.cache.dir == folder / "latents"


@pytest.mark.parametrize(
    "keys",
    [
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


def test_latents_are_pushed_and_others_pull_them(folder: Path, notes: list[str]) -> None:
    (folder / "shared").mkdir()
    remote = f"cache.remote={folder / 'shared'}"
    open_windows(folder, remote)
    (pushed,) = (folder / "shared").glob("*/*.zarr.zip")
    assert pushed.read_bytes() == store_path(folder).read_bytes()
    store_path(folder).unlink()
    open_windows(folder, remote)
    assert any("pulled" in note for note in notes)
    assert pushed.read_bytes() == store_path(folder).read_bytes()
