"""The autoencoder's file, the encoder that builds use, and the stage that trains both."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Done, run_ups
from tiny_autoencoders import make_autoencoder

from ups.config import RunConfig, load_config
from ups.data.solvers import make_dataset
from ups.errors import CheckpointError, ConfigError, ShapeError
from ups.models.any_point_decoder import grid_queries
from ups.pipeline.lineage import lineage_of
from ups.train.run import run_stage
from ups.trained.autoencoder import load_autoencoder, save_autoencoder
from ups.trained.checkpoint import hash_tensors, load_checkpoint, read_document, save_checkpoint
from ups.trained.encoder import LatentEncoder
from ups_store.format.metadata import ArraySpec

torch.set_num_threads(1)
REPO = Path(__file__).resolve().parents[3]
SCRIPT = REPO / "scripts" / "train.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "autoencoder.safetensors"
    save_autoencoder(path, make_autoencoder(), config={"seed": 1}, report={"score": 0.5})
    return path


def make_batch(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


# --- the model and its file ----------------------------------------------------------------------------


def test_tasks_on_the_same_grid_share_weights_and_not_statistics() -> None:
    model = make_autoencoder()
    assert set(model.encoder) == {"16p_fields1", "8bx8b_fields1_coefficient1"}
    values, nothing = torch.full((1, 16, 1), 1.5), torch.full((1, 2), torch.nan)
    normalised = [
        model.normalizer_of(task, "fields")(values).mean().item() for task in ("burgers1d", "advection1d")
    ]
    assert normalised == [0.5, 0.0]
    tokens = [model.encode(values, nothing, task=task) for task in ("burgers1d", "advection1d")]
    assert not torch.allclose(*tokens)


def test_decoded_values_are_physical() -> None:
    model = make_autoencoder()
    nothing = torch.full((2, 2), torch.nan)
    tokens = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    query = grid_queries((16,))
    physical = model.decode(tokens, query, nothing, task="advection1d")
    condition = model.condition("advection1d", nothing)
    normalised = model.decoder["16p_fields1"](tokens, query, condition)
    torch.testing.assert_close(physical, normalised * 0.25 + 1.5)


def test_file_gives_the_same_model_back(checkpoint: Path) -> None:
    model, loaded = make_autoencoder(), load_autoencoder(checkpoint)
    assert loaded.spec == model.spec
    assert not loaded.training
    batch = make_batch(values=(3, 8, 8, 1))
    values, parameters = torch.from_numpy(batch["values"]), torch.zeros(3, 2)
    which: dict[str, Any] = {"task": "darcy2d", "array": "coefficient"}
    query = grid_queries((5, 5))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(values, query, parameters, **which),
            model(values, query, parameters, **which),
            rtol=0,
            atol=0,
        )


def test_statistics_are_in_the_document_and_not_among_the_weights(checkpoint: Path) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="autoencoder")
    assert all(name.startswith(("encoder.", "decoder.")) for name in tensors)
    assert document["spec"]["tasks"]["advection1d"]["statistics"]["fields"] == {"mean": [1.5], "std": [0.25]}


@pytest.mark.parametrize("missing", ["statistics", "grid"])
def test_incomplete_specification_is_refused(checkpoint: Path, tmp_path: Path, missing: str) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="autoencoder")
    del document["spec"]["tasks"]["darcy2d"][missing]
    save_checkpoint(tmp_path / "a", tensors, kind="autoencoder", document=document)
    for load in (load_autoencoder, LatentEncoder.load):
        with pytest.raises(CheckpointError, match="specification is incomplete") as caught:
            load(tmp_path / "a")
        assert caught.value.kind == "no_spec"


def test_weights_of_another_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="autoencoder")
    document["spec"]["latent_dim"] = 5
    save_checkpoint(tmp_path / "a", tensors, kind="autoencoder", document=document)
    with pytest.raises(CheckpointError) as caught:
        load_autoencoder(tmp_path / "a")
    assert caught.value.kind == "other_weights"


# --- the encoder that builds use -----------------------------------------------------------------------


def test_latents_are_those_of_the_model(checkpoint: Path) -> None:
    batch = {**make_batch(fields=(2, 5, 16, 1)), "nu": np.array([0.1, 0.2])}
    latent = LatentEncoder.load(checkpoint, task="burgers1d").encode(batch)["latent"]
    assert (latent.shape, latent.dtype) == ((2, 5, 4, 3), np.float32)
    model = make_autoencoder()
    for sample in range(2):
        parameters = torch.tensor([[torch.nan, batch["nu"][sample]]] * 5)
        with torch.no_grad():
            tokens = model.encode(torch.from_numpy(batch["fields"][sample]), parameters, task="burgers1d")
        np.testing.assert_allclose(latent[sample], tokens.numpy(), rtol=1e-5, atol=1e-6)


def test_constant_field_becomes_latent_input(checkpoint: Path) -> None:
    encoder = LatentEncoder.load(checkpoint, task="darcy2d")
    batch = make_batch(fields=(2, 1, 8, 8, 1), coefficient=(2, 8, 8))
    encoded = encoder.encode(batch)
    assert {name: array.shape for name, array in encoded.items()} == {
        "latent": (2, 1, 4, 3),
        "latent_input": (2, 4, 3),
    }
    swapped = {
        "fields": batch["coefficient"][:, None, ..., None],
        "coefficient": batch["fields"][:, 0, ..., 0],
    }
    assert not np.allclose(encoder.encode(swapped)["latent"][:, 0], encoded["latent_input"])  # field type


def test_output_spec_replaces_fields_and_keeps_the_rest(checkpoint: Path) -> None:
    given = {
        "fields": ArraySpec((7, 1, 8, 8, 1), "float32", dims=("sample", "time", "y", "x", "channel")),
        "coefficient": ArraySpec((7, 8, 8), "float32", dims=("sample", "y", "x")),
        "beta": ArraySpec((7,), "float64", dims=("sample",)),
    }
    made = LatentEncoder.load(checkpoint, task="darcy2d", latent_dtype="bfloat16").output_spec(given)
    assert made["beta"] is given["beta"]
    assert set(made) == {"latent", "latent_input", "beta"}
    assert made["latent"] == ArraySpec(
        (7, 1, 4, 3), "bfloat16", dims=("sample", "time", "token", "latent_channel")
    )
    assert made["latent_input"] == ArraySpec(
        (7, 4, 3), "bfloat16", dims=("sample", "token", "latent_channel")
    )


@pytest.mark.parametrize("shape", [(7, 5, 32, 1), (7, 5, 16, 2), (7, 5, 16)])
def test_fields_on_another_grid_are_refused_with_both_shapes(
    checkpoint: Path, shape: tuple[int, ...]
) -> None:
    encoder = LatentEncoder.load(checkpoint, task="burgers1d")
    with pytest.raises(ShapeError, match=r"expected \(7, 5, 16, 1\), found") as caught:
        encoder.output_spec({"fields": ArraySpec(shape, "float32")})
    assert caught.value.found == shape
    with pytest.raises(ShapeError, match="no 'fields' of burgers1d"):
        encoder.output_spec({"nu": ArraySpec((7,), "float64")})


def test_task_that_was_not_trained_is_refused(checkpoint: Path) -> None:
    for task in ("cfd1d", None):
        with pytest.raises(ConfigError, match="advection1d or burgers1d or darcy2d") as caught:
            LatentEncoder.load(checkpoint, task=task)
        assert caught.value.kind == "other_task"


def test_identity_holds_what_decides_the_latents(checkpoint: Path) -> None:
    identity = LatentEncoder.load(checkpoint, task="advection1d").identity()
    assert len(identity["weights_sha256"]) == 64
    assert identity["statistics"] == {"fields": {"mean": [1.5], "std": [0.25]}}
    assert identity["configuration"]["latent_dim"] == 3
    assert str(checkpoint) not in json.dumps(identity)


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ("encoder.16p_fields1.out.weight", True),
        ("encoder.8bx8b_fields1_coefficient1.out.weight", False),
        ("decoder.16p_fields1.keys.weight", False),
        ("statistics of the task", True),
        ("statistics of another task", False),
        ("report", False),
    ],
)
def test_identity_changes_with_what_the_task_depends_on(
    checkpoint: Path, tmp_path: Path, change: str, matters: bool
) -> None:
    tensors, document = load_checkpoint(checkpoint, kind="autoencoder")
    if change in tensors:
        tensors[change] = torch.nextafter(tensors[change], tensors[change] + 1)
    elif change == "report":
        document["report"] = {"score": 0.25}
    else:
        task = "burgers1d" if change.endswith("the task") else "darcy2d"
        document["spec"]["tasks"][task]["statistics"]["fields"]["mean"] = [0.75]
    save_checkpoint(tmp_path / "a", tensors, kind="autoencoder", document=document)
    before, after = (LatentEncoder.load(p, task="burgers1d").identity() for p in (checkpoint, tmp_path / "a"))
    assert (before != after) == matters


def test_pickled_encoder_loads_its_weights_itself(checkpoint: Path) -> None:
    encoder = LatentEncoder.load(checkpoint, task="burgers1d")
    batch = make_batch(fields=(1, 2, 16, 1))
    latent = encoder.encode(batch)["latent"]
    pickled = pickle.dumps(encoder)
    assert len(pickled) < 10_000
    np.testing.assert_array_equal(pickle.loads(pickled).encode(batch)["latent"], latent)


def test_identity_and_spec_need_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from ups.trained.encoder import LatentEncoder; from ups_store import ArraySpec;"
        f"e = LatentEncoder.load({str(checkpoint)!r}, task='burgers1d'); e.identity();"
        "e.output_spec({'fields': ArraySpec((2, 3, 16, 1), 'float32')});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPO)


def test_bfloat16_latents_are_close_to_float32_ones(checkpoint: Path) -> None:
    batch = make_batch(fields=(1, 4, 16, 1))
    exact = LatentEncoder.load(checkpoint, task="burgers1d").encode(batch)["latent"]
    rounded = LatentEncoder.load(checkpoint, task="burgers1d", dtype="bfloat16").encode(batch)["latent"]
    assert rounded.dtype == np.float32
    np.testing.assert_allclose(rounded, exact, atol=0.05 * np.abs(exact).max())
    assert not np.array_equal(rounded, exact)


# --- the stage -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset("advection1d", folder, num_samples=20, points=32, frames=4)
    make_dataset("darcy2d", folder, num_samples=10, points=16)
    return folder


def overrides_of(root: Path, folder: Path, *more: str) -> list[str]:
    sizes = ["encoder.width=16", "encoder.depth=1", "decoder.width=16", "decoder.depth=1"]
    cut = ["encoder.patch_size=4", "latent.tokens=8", "latent.dim=2", "reading.num_workers=0"]
    length = ["stages.autoencoder.epochs=2", "stages.autoencoder.steps_per_epoch=25"]
    return [f"data.root={root}", f"checkpoint.dir={folder}", "training.lr=1e-2", *sizes, *cut, *length, *more]


def make_config(root: Path, folder: Path, *more: str, task: str = "advection1d") -> RunConfig:
    return load_config(overrides=[f"data.tasks={task}", *overrides_of(root, folder, *more)])


@pytest.mark.rendered
def test_training_lowers_the_error_and_reports_size_and_floor(root: Path, tmp_path: Path) -> None:
    report = run_stage("autoencoder", make_config(root, tmp_path))
    epochs = [
        json.loads(line)["score"]
        for line in (tmp_path / "autoencoder.jsonl").read_text().splitlines()
        if '"event": "epoch"' in line
    ]
    assert min(epochs) < report["start_score"] < 0.9  # as the basis alone has it
    assert report["compression"] == {"advection1d": 2.0}
    assert report["floor_nrmse"]["advection1d"] == pytest.approx(min(epochs), rel=1e-4)
    assert (tmp_path / "autoencoder.png").stat().st_size > 10_000
    document = read_document(tmp_path / "autoencoder.safetensors", kind="autoencoder")
    assert document["config"]["data"]["tasks"] == ["advection1d"]
    statistics = document["spec"]["tasks"]["advection1d"]["statistics"]["fields"]
    assert abs(statistics["mean"][0]) < 0.1  # sums of sines
    encoder = LatentEncoder.load(tmp_path / "autoencoder.safetensors")
    assert encoder.encode(make_batch(fields=(1, 2, 32, 1)))["latent"].shape == (1, 2, 8, 2)


def test_transient_and_steady_task_train_together(root: Path, tmp_path: Path) -> None:
    more = ["stages.autoencoder.epochs=1", "stages.autoencoder.steps_per_epoch=6"]
    config = make_config(root, tmp_path, *more, task="[advection1d,darcy2d]")
    report = run_stage("autoencoder", config)
    assert set(report["floor_nrmse"]) == {"advection1d", "darcy2d", "darcy2d/coefficient"}
    assert report["compression"]["darcy2d"] == 16.0
    encoder = LatentEncoder.load(tmp_path / "autoencoder.safetensors", task="darcy2d")
    assert set(encoder.encode(make_batch(fields=(1, 1, 16, 16, 1), coefficient=(1, 16, 16)))) == {
        "latent",
        "latent_input",
    }


def test_basis_alone_is_exported_without_training(root: Path, tmp_path: Path) -> None:
    config = make_config(root, tmp_path, "encoder.residual=false", task="[advection1d,darcy2d]")
    report = run_stage("autoencoder", config)
    assert report["steps"] == 0
    assert report["best_step"] is None
    left = {path.name for path in tmp_path.iterdir() if path.name != ".lock"}
    assert left == {"autoencoder.safetensors", "autoencoder.card.md", "autoencoder.png"}
    assert all(condition == pytest.approx(1, abs=1e-4) for condition in report["decoder_condition"].values())
    assert set(report["floor_by_step"]["advection1d"]) == {0, 1, 2, 3}
    assert set(report["floor_by_step"]["darcy2d/coefficient"]) == {0}
    steps = report["floor_by_step"]["advection1d"].values()
    assert report["floor_nrmse"]["advection1d"] == pytest.approx(sum(steps) / 4, rel=1e-5)
    digest = hash_tensors(tmp_path / "autoencoder.safetensors")
    run_stage("autoencoder", config)
    assert hash_tensors(tmp_path / "autoencoder.safetensors") == digest  # stores stay valid


def test_trained_autoencoder_is_isometric(root: Path, tmp_path: Path) -> None:
    config = make_config(root, tmp_path, "encoder.basis=none")
    report = run_stage("autoencoder", config)
    before, after = (report[f"decoder_condition{of}"]["advection1d"] for of in ("_before_isometry", ""))
    assert after < min(1.3, before)
    (data,) = lineage_of(tmp_path / "autoencoder.safetensors").made_from
    assert (data.state, data.origin.kind) == ("same", "source")  # also in what was written again
    digest = hash_tensors(tmp_path / "autoencoder.safetensors")
    again = run_stage("autoencoder", config)  # nothing is left to train, nor to rescale
    assert again["decoder_condition_before_isometry"] == {}
    assert hash_tensors(tmp_path / "autoencoder.safetensors") == digest


def test_tokens_that_do_not_fit_the_grid_are_refused_before_training(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"latent\.tokens = 7"):
        run_stage("autoencoder", make_config(root, tmp_path, "latent.tokens=7"))
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])


# --- the command ---------------------------------------------------------------------------------------


def run_command(*arguments: str) -> Done:
    return run_ups("train", *arguments)


def test_command_shows_the_resolved_configuration() -> None:
    done = run_command("--config", "demo", "--print-config", "training.lr=1e-4")
    assert done.exit_code == 0
    assert "  lr: 0.0001\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["data.tasks=burgers1d", "training.lrr=1"], 2, "did you mean training.lr?"),
        (["data.tasks=burgers1d", "--stage", "operatr"], 2, "did you mean operator?"),
        (
            ["--stage", "autoencoder", "data.tasks=burgers1d", "data.root=nowhere"],
            3,
            "nowhere: no such folder",
        ),
        (["--config", "nowhere.yaml"], 2, "nowhere.yaml: can't be read"),
    ],
)
def test_command_ends_mistakes_with_a_sentence_and_its_code(
    arguments: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command(*arguments)
    assert done.exit_code == code
    assert says in done.stderr


@pytest.mark.timeout(400)
@pytest.mark.multi_process
def test_terminated_command_continues_where_it_was(root: Path, tmp_path: Path) -> None:
    overrides = ["data.tasks=advection1d", *overrides_of(root, tmp_path), "training.log_every=1"]
    words = ["--stage", "autoencoder", *overrides]
    command = [sys.executable, str(SCRIPT), "--json", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "autoencoder.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 120
        while not (log.exists() and '"event": "step"' in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 5, stderr
    assert "stopped by SIGTERM after step" in stderr
    done = run_command("--json", *words)
    assert done.exit_code == 0, done.stderr
    assert "continuing after step" in done.stderr
    assert json.loads(done.stdout)["steps"] == 50
    shown = run_command(*words)  # nothing is left to train
    assert shown.exit_code == 0, shown.stderr
    assert "8 x 2" in shown.stdout
    assert "2x" in shown.stdout
    assert str(tmp_path / "autoencoder.safetensors") in shown.stdout
