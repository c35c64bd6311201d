"""A build of latents: the stores hold what the encoder makes, and their identity says of what."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from burgers_encoder import make_checkpoint
from latent_runs import T, write_burgers, write_latent_run
from quiet import Quiet

import ups_store
from ups.errors import UpsError
from ups.trained.checkpoint import load_checkpoint, save_checkpoint
from ups.trained.encoder import LatentEncoder
from ups_store.building.config import BuildConfig, load_config
from ups_store.building.encode import EncodeError
from ups_store.building.plan import DigestCache, plan_store
from ups_store.building.progress import BuildReport, Stopwatch
from ups_store.building.read import batch_size_of, read_batches
from ups_store.building.stores import build_all
from ups_store.errors import BuildInterruptedError
from ups_store.format.root import config_hash
from ups_store.system import files
from ups_store.writing.plan import identity_of
from ups_store.writing.writer import Committer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Burgers file in PDEBench's layout, an encoder, and a run's configuration."""
    config = (
        "data: {task: burgers1d, root: data}\n"
        "latent: {dim: 4, tokens: 4}\n"
        "training: {batch_size: 32, latent_cache_dir: latents, num_workers: 0}\n"
        "stages: {autoencoder: {epochs: 1}}\n"
        "operator: {width: 32}\n"
        "checkpoint: {dir: checkpoints}\n"
        "seed: 0\n"
    )
    return write_latent_run(tmp_path, num_samples=20, config=config)


def configure(folder: Path, *overrides: str, **flags: Any) -> BuildConfig:
    return load_config(folder / "run.yaml", flags=flags, overrides=overrides)


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def build(folder: Path, *overrides: str) -> BuildReport:
    return build_all(configure(folder, *overrides), watcher=Quiet())


def hash_of(folder: Path, *overrides: str) -> str:
    """Hash of the identity that the training split would get; nothing is built, torch isn't imported."""
    config = configure(folder, *overrides)
    planned = plan_store(config, "burgers1d", "train")
    content = planned.identity(DigestCache(config.cache.dir), lambda nbytes: None)
    document = identity_of(planned.arrays, constants=planned.constants, dims=planned.dims, identity=content)
    return config_hash(document)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ups_store.build", "--config", "run.yaml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_build_stores_the_latents_of_the_encoder(inside: Path) -> None:
    folder, report = inside, build(inside)
    assert [store.num_samples for store in report.stores] == [16, 2, 2]
    assert report.stores[0].seconds["encode"] > 0
    assert not report.stores[0].reused
    encoder = LatentEncoder.load(folder / "checkpoints" / "autoencoder.safetensors")
    with ups_store.open(folder / "latents" / "burgers1d_test.zarr.zip") as store:
        assert store.arrays["latent"].shape == (2, T, 4, 4)
        assert store.dims["latent"] == ("sample", "time", "token", "latent_channel")
        assert store.identity["kind"] == "latents"
        with h5py.File(folder / "data" / "1D_Burgers_Sols_Nu0.01.hdf5") as file:
            fields = file["tensor"][:2][..., None]
        expected = encoder.encode({"fields": fields, "nu": np.full(2, 0.01)})["latent"]
        np.testing.assert_allclose(store["latent"], expected, rtol=2e-3, atol=1e-3)
        np.testing.assert_array_equal(store["nu"], [0.01, 0.01])
        assert store.verify().ok


def test_second_build_finds_the_stores_valid_without_torch(inside: Path) -> None:
    build(inside)
    code = (
        "import sys\nfrom ups_store.building.__main__ import main\n"
        "sys.argv = ['build', '--config', 'run.yaml', '--json']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(store["reused"] for store in json.loads(done.stdout)["stores"])


def test_builds_in_batches_of_any_size_make_the_same_bytes(inside: Path) -> None:
    stores = []
    for name, size in {"a": 1, "b": 3, "c": 20}.items():
        sizes = f"reading.batch_size={size}", "latent.micro_batch=10"  # of two samples
        build(inside, f"cache.dir={name}", *sizes, "data.split=train")
        stores.append((inside / name / "burgers1d_train.zarr.zip").read_bytes())
    assert stores[0] == stores[1] == stores[2]


@pytest.mark.multi_process
@pytest.mark.parametrize("num_workers", [1, 3])
def test_builds_with_any_number_of_readers_make_the_same_bytes(inside: Path, num_workers: int) -> None:
    write_burgers(inside / "data", nu=0.1, num_samples=20, seed=1)
    options = "latent.micro_batch=10", "data.split=train"  # of two samples
    (whole,) = build(inside, "cache.dir=whole", "reading.batch_size=32", *options).stores
    assert whole.num_samples == 32
    for size in (1, 3):
        readers = f"reading.num_workers={num_workers}", f"reading.batch_size={size}"
        report = build(inside, f"cache.dir=readers{size}", *readers, *options)
        assert report.readers.num_workers == max(1, num_workers)
        assert report.stores[0].path.read_bytes() == whole.path.read_bytes()


def test_resumed_build_makes_the_bytes_of_an_undisturbed_one(inside: Path) -> None:
    build(inside, "data.split=train")
    whole, target = (inside / name / "burgers1d_train.zarr.zip" for name in ("latents", "resumed"))
    target.parent.mkdir()
    some = [0, 5, 6, 11]
    with ups_store.open(whole) as store:
        options = {
            "constants": store.constants,
            "dims": {name: store.dims[name] for name in store.constants},
            "identity": store.identity,
            "attrs": store.attrs,
        }
        with ups_store.create(target, store.arrays, **options) as writer:
            writer.commit_many(some, store.gather(some))
    report = build(inside, "data.split=train", "cache.dir=resumed")
    assert report.stores[0].num_committed == 12
    assert target.read_bytes() == whole.read_bytes()


def retrain(folder: Path) -> None:
    path = make_checkpoint(folder / "checkpoints")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # the last bit of a weight; the decoder's weights come first
    path.write_bytes(raw)


def edit_spec(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the specification in the checkpoint and leave its weights."""
    path = folder / "checkpoints" / "autoencoder.safetensors"
    tensors, document = load_checkpoint(path, kind="autoencoder")
    change(document["spec"])
    save_checkpoint(path, tensors, kind="autoencoder", document=document)


def statistics_of(spec: dict[str, Any]) -> dict[str, Any]:
    statistics: dict[str, Any] = spec["tasks"]["burgers1d"]["statistics"]["fields"]
    return statistics


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "heads": lambda spec: spec["encoder"].update(num_heads=4),
    "mean": lambda spec: statistics_of(spec).update(mean=[0.25]),
    "std": lambda spec: statistics_of(spec).update(std=[1.0]),
    "parameters": lambda spec: spec.update(parameters=["mu"]),
    "tasks": lambda spec: spec["tasks"].update(advection1d=spec["tasks"]["burgers1d"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_whatever_the_checkpoint_says_of_the_encoder_changes_the_hash(inside: Path, name: str) -> None:
    before = hash_of(inside)
    edit_spec(inside, EDITS[name])
    assert hash_of(inside) != before


def test_what_the_checkpoint_says_of_the_decoder_leaves_the_hash(inside: Path) -> None:
    before = hash_of(inside)
    edit_spec(inside, lambda spec: spec["decoder"].update(radius=2))
    assert hash_of(inside) == before


@pytest.mark.parametrize(
    ("change", "override"),
    [
        (retrain, "seed=0"),
        (None, "latent.micro_batch=8"),
        (None, "latent.compute_dtype=bfloat16"),
        (None, "latent.compile=true"),
        (None, "latent.encoder=latent_runs:make_other_encoder"),
        (None, "training.latent_cache_dtype=float32"),
        (None, "data.limit=7"),
        (None, "data.reduce_time=2"),
        (None, "data.split_fractions=[0.7,0.2,0.1]"),
        (None, "data.source_digest=sampled"),
    ],
    ids=[
        *("weights", "micro-batch", "precision", "compile", "class", "dtype", "limit", "reduction", "split"),
        "digest",
    ],
)
def test_whatever_decides_the_latents_changes_the_hash(
    inside: Path, change: Callable[[Path], None] | None, override: str
) -> None:
    before = hash_of(inside)
    if change:
        change(inside)
    assert hash_of(inside, override) != before


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache.dir=elsewhere",),
        ("training.latent_cache_dir=elsewhere",),
        ("reading.num_workers=1",),
        ("reading.batch_size=3",),
        ("latent.device=cuda",),
        ("training.batch_size=8", "training.lr=0.1", "stages.autoencoder.epochs=9", "seed=3"),
    ],
    ids=["folder", "latent folder", "workers", "batch size", "device", "training"],
)
def test_what_does_not_decide_the_latents_leaves_the_hash(inside: Path, overrides: tuple[str, ...]) -> None:
    assert hash_of(inside, *overrides) == hash_of(inside)


def test_another_host_leaves_the_hash(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(inside)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    monkeypatch.setenv("HOSTNAME", "elsewhere")
    assert hash_of(inside) == before


def test_moved_data_and_checkpoint_leave_the_hash(inside: Path) -> None:
    before = hash_of(inside)
    (inside / "data").rename(inside / "moved")
    (inside / "checkpoints").rename(inside / "weights")
    assert hash_of(inside, "data.root=moved", "checkpoint.dir=weights") == before


def test_build_of_fields_beside_latents(inside: Path) -> None:
    build(inside, "latent.encoder=none", "data.split=train")
    with ups_store.open(inside / "cache" / "burgers1d_train.zarr.zip") as store:
        assert list(store.arrays) == ["fields", "nu"]


def test_latents_do_not_take_the_place_of_fields(inside: Path) -> None:
    build(inside, "latent.encoder=none", "data.split=train")
    before = (inside / "cache" / "burgers1d_train.zarr.zip").read_bytes()
    done = run(inside, "cache.dir=cache", "data.split=train")
    assert (done.returncode, "a store of fields is there, and latents would replace it" in done.stderr) == (
        2,
        True,
    )
    assert (inside / "cache" / "burgers1d_train.zarr.zip").read_bytes() == before
    asked = run(inside, "cache.dir=cache", "data.split=train", "--dry-run")
    assert "refuse: a store of fields is there" in asked.stdout
    assert run(inside, "cache.dir=cache", "data.split=train", "--overwrite").returncode == 0
    with ups_store.open(inside / "cache" / "burgers1d_train.zarr.zip") as store:
        assert "latent" in store


def test_earlier_script_takes_the_same_flags(folder: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "precompute_latent_cache.py"
    flags = ["--tasks", "burgers1d", "--splits", "test", "--root", "data", "--cache-dir", "latents"]
    flags += ["--cache-dtype", "float32", "--latent-dim", "4", "--latent-len", "4", "--device", "cpu"]
    flags += ["--batch-size", "2", "--num-workers", "0", "--no-parallel", "--manifest", "manifest.json"]
    command = [sys.executable, str(script), "--config", "run.yaml", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with ups_store.open(folder / "latents" / "burgers1d_test.zarr.zip") as store:
        assert store.arrays["latent"].dtype == "float32"
    (store_json,) = json.loads((folder / "manifest.json").read_text())["stores"]
    assert store_json["num_samples"] == 2
    assert not store_json["reused"]


def test_earlier_script_builds_latents_from_flags_alone_and_fields_if_told(folder: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "precompute_latent_cache.py"
    flags = ["--tasks", "burgers1d", "--splits", "test", "--root", "data", "--no-parallel"]

    def precompute(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments, *flags]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)

    done = precompute("--cache-dir", "out")
    assert done.returncode == 0, done.stderr
    with ups_store.open(folder / "out" / "burgers1d_test.zarr.zip") as store:
        assert "latent" in store
    done = precompute("latent.encoder=none", "--cache-dir", "of_fields")
    assert done.returncode == 0, done.stderr
    with ups_store.open(folder / "of_fields" / "burgers1d_test.zarr.zip") as store:
        assert "fields" in store
    missing = precompute("checkpoint.dir=nowhere", "--cache-dir", "more")
    assert missing.returncode != 0
    assert "nowhere/autoencoder.safetensors" in missing.stderr
    assert not list(folder.glob("more/*.zarr.zip*"))


@pytest.mark.parametrize(
    ("spoil", "override", "message"),
    [
        (lambda path: path.unlink(), "seed=0", "autoencoder.safetensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "seed=0", "as long as its header"),
        (None, "latent.dim=8", "4 x 4 in the checkpoint"),
        (None, "latent.tokens=16", "4 x 4 in the checkpoint"),
        (None, "data.reduce_space=2", "trained on"),
        (None, "latent.device=abacus", "abacus"),
        (None, "latent.device=mps", "auto, cpu, cuda or cuda:N"),
        (None, "latent.encoder=nobody", "no such encoder"),
    ],
    ids=["missing", "truncated", "dim", "tokens", "grid", "device", "other device", "name"],
)
def test_build_with_an_encoder_that_does_not_fit_says_why(
    inside: Path, spoil: Any, override: str, message: str
) -> None:
    if spoil:
        spoil(inside / "checkpoints" / "autoencoder.safetensors")
    with pytest.raises((UpsError, ups_store.StoreError)) as caught:
        build(inside, override)
    assert message in str(caught.value)


def spoil_source(folder: Path, value: float) -> None:
    with h5py.File(folder / "data" / "1D_Burgers_Sols_Nu0.01.hdf5", "r+") as file:
        file["tensor"][7, 2, 8] = value


def test_nan_in_a_source_that_is_kept_stops_the_build_and_names_store_sample_and_field(inside: Path) -> None:
    spoil_source(inside, np.nan)
    with pytest.raises(EncodeError, match="from NaN or Inf in 'fields'") as caught:
        build(inside, "data.on_nan=keep", "data.split=train")
    assert (caught.value.array, caught.value.sample) == ("latent", 5)  # the first two are of test
    assert caught.value.path == "latents/burgers1d_train.zarr.zip"


def test_batches_hold_whole_micro_batches(inside: Path) -> None:
    config = configure(inside, "latent.micro_batch=15", "reading.batch_size=4", "data.split=train")
    plan = plan_store(config, "burgers1d", "train")
    assert plan.group_size == 3
    batches = [batch.samples.tolist() for batch in read_batches(plan, np.arange(1, 16), on_nan="fail")]
    assert batches == [[1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15]]


def test_small_store_is_cut_into_batches_for_the_stages_to_overlap(inside: Path) -> None:
    plan = plan_store(configure(inside, "latent.micro_batch=5", "data.split=train"), "burgers1d", "train")
    assert batch_size_of(plan) == 4  # of 16 samples, a group of one each
    fields = plan_store(configure(inside, "latent.encoder=none"), "burgers1d", "train")
    assert batch_size_of(fields) > 16


@pytest.mark.parametrize("stage", ["encode", "commit"])
def test_build_that_is_interrupted_in_any_stage_continues_to_the_same_bytes(
    inside: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["latent.micro_batch=5", "reading.batch_size=2", "data.split=train"]
    build(inside, "cache.dir=whole", *sizes)
    plain, num = Stopwatch.timed, 0

    def timed(self: Stopwatch, name: str) -> Any:
        nonlocal num
        num += name == stage
        if num == (3 if stage in ("encode", "commit") else 1):
            num += 1
            raise KeyboardInterrupt
        return plain(self, name)

    monkeypatch.setattr(Stopwatch, "timed", timed)
    with pytest.raises((BuildInterruptedError, KeyboardInterrupt)):
        build(inside, *sizes)
    build(inside, *sizes)
    name = "burgers1d_train.zarr.zip"
    assert (inside / "latents" / name).read_bytes() == (inside / "whole" / name).read_bytes()


def test_full_disk_at_the_start_of_latents_leaves_nothing(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda folder: 0)
    (inside / "latents").mkdir()
    with pytest.raises(ups_store.DiskFullError) as caught:
        build(inside)
    assert caught.value.exit_code == 6
    assert list((inside / "latents").iterdir()) == []


def test_disk_that_fills_up_while_latents_are_committed_is_continued_to_the_same_bytes(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["latent.micro_batch=5", "reading.batch_size=2", "data.split=train"]
    build(inside, "cache.dir=whole", *sizes)
    plain, num = Committer.commit_many, 0

    def commit_many(self: Committer, *args: Any) -> Any:
        nonlocal num
        num += 1
        if num == 3:
            raise ups_store.DiskFullError("no room", path=self.path)
        return plain(self, *args)

    monkeypatch.setattr(Committer, "commit_many", commit_many)
    with pytest.raises(ups_store.DiskFullError):
        build(inside, *sizes)
    (store,) = build(inside, *sizes).stores
    assert store.num_committed == 16 - 4
    whole = inside / "whole" / store.path.name
    assert store.path.read_bytes() == whole.read_bytes()


@pytest.mark.gpu
def test_builds_on_a_gpu_make_the_same_bytes_in_batches_of_any_size(inside: Path) -> None:
    stores = []
    for name, size in {"a": 1, "b": 3, "c": 20}.items():
        sizes = f"reading.batch_size={size}", "latent.micro_batch=10"
        (store,) = build(inside, f"cache.dir={name}", "latent.device=cuda", *sizes, "data.split=train").stores
        stores.append(store.path.read_bytes())
    assert stores[0] == stores[1] == stores[2]


def test_pin_memory_reaches_the_encoder_and_not_the_identity(inside: Path) -> None:
    config = configure(inside, "training.pin_memory=false")
    assert config.latent is not None
    assert not config.latent.pin_memory
    assert hash_of(inside, "training.pin_memory=false") == hash_of(inside)
    assert not plan_store(config, "burgers1d", "train").encoder._pin_memory  # type: ignore[union-attr]


def test_missing_gpu_is_told_and_the_cpu_makes_the_same_store(folder: Path) -> None:
    done = run(folder, "--device", "cuda:7", "--splits", "test", "--json")
    assert done.returncode == 0
    assert "there is no cuda:7; the CPU is used instead" in done.stderr
    (store,) = json.loads(done.stdout)["stores"]
    assert json.loads(run(folder, "--splits", "test", "--json").stdout)["stores"][0]["reused"]
    assert store["seconds"]["load"] > 0
