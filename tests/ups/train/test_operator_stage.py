"""The stage `operator`: stores that fit, batches, losses, training on latents and fields, several tasks."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from noted import noted
from numbered_batches import batch_of
from operator_runs import AUTOENCODER, TASKS, build, change_weights, configure

import ups
import ups_store
from ups.config import load_config
from ups.config.operator_size import operator_size
from ups.data.splits import open_fields
from ups.data.stores import open_field_states, open_latents
from ups.errors import CheckpointError, ConfigError, ConfigWarning, UpsError
from ups.eval.metrics import nrmse_per_sample
from ups.locks import TRAINING_LOCK
from ups.models.operator_size import SIZES, OperatorSize
from ups.train.operator import OperatorStage, make_operator_stage
from ups.train.run import run_stage
from ups.trained.autoencoder import load_autoencoder
from ups.trained.checkpoint import hash_tensors, read_document
from ups_store.torch import map_tensors

CPU = torch.device("cpu")


# Holds a lock until its stdin ends.
HOLDING = """
import sys
from pathlib import Path
from ups.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def make_stage(folder: Path, *overrides: str) -> OperatorStage:
    return make_operator_stage(configure(folder, *overrides), device=CPU)


def only(task: str) -> str:
    return f"data.tasks=[{task}]"


# --- stores --------------------------------------------------------------------------------------------


def test_store_of_the_checkpoint_is_taken(run: Path) -> None:
    store = open_latents(configure(run), "burgers1d", "train", autoencoder_path=AUTOENCODER)
    assert store.arrays["latent"].shape == (16, 9, 8, 2)
    assert open_field_states(configure(run), "burgers1d", "train").arrays["fields"].shape == (16, 9, 32, 1)


def batches_of_epoch(run: Path) -> tuple[list[Any], str]:
    """All batches of the first epoch on one task's finished store, and what the log says of that."""
    config = configure(run, only("burgers1d"), "training.cache_mode=store")
    with noted() as notes:
        stage = make_operator_stage(config, device=CPU)
    batches = list(stage.loader)
    stage.close()
    (line,) = [note for note in notes if ": latents " in note]
    return batches, line


def test_batches_of_packed_stores_are_those_of_mapped_ones_and_the_log_says_so(run: Path) -> None:
    expected, said = batches_of_epoch(run)
    assert "packed by" not in said
    assert all(build(run, only("burgers1d"), "cache.codec=blosc"))  # valid, and only packed
    batches, said = batches_of_epoch(run)
    assert "packed by blosc, decoded into RAM in " in said
    for found, wanted in zip(batches, expected, strict=True):
        assert torch.equal(found.states, wanted.states)


def test_fields_of_packed_stores_are_those_of_mapped_ones(run: Path) -> None:
    numbers = np.array([0, 3, 3]), np.array([1, 8, 0])
    config = configure(run, only("burgers1d"))
    expected = open_fields(config.build, "burgers1d", "train", source="store").read("fields", *numbers)
    build(run, only("burgers1d"), "latent.encoder=none", "cache.codec=pcodec")
    with ups_store.open(run / "cache" / "burgers1d_train.zarr.zip") as store:
        assert store.codec == "pcodec"
    found = open_fields(config.build, "burgers1d", "train", source="store").read("fields", *numbers)
    assert np.array_equal(found, expected)


def test_store_of_another_encoder_is_refused_saying_what_differs(run: Path) -> None:
    change_weights(AUTOENCODER)
    with pytest.raises(ConfigError, match="its latents are those of another encoder") as caught:
        open_latents(configure(run), "burgers1d", "train", autoencoder_path=AUTOENCODER)
    assert caught.value.kind == "other_encoder"
    assert "weights_sha256: " in str(caught.value)
    assert "statistics" not in str(caught.value)


def rewrite(
    path: Path, *, num_tokens: int | None = None, attrs: dict[str, Any] | None = None, **content: Any
) -> None:
    """The same store with another identity, fewer tokens, and other attributes."""
    with ups_store.open(path) as store:
        arrays, identity = store.gather(range(len(store))), dict(store.identity)
        arrays["latent"] = np.ascontiguousarray(arrays["latent"][:, :, :num_tokens])
        given: dict[str, Any] = {"constants": store.constants, "attrs": {**store.attrs, **(attrs or {})}}
        given["dims"] = {name: store.dims[name] for name in store.constants}
        specs = {**store.arrays}
        specs["latent"] = dataclasses.replace(specs["latent"], shape=arrays["latent"].shape)
    path.unlink()
    with ups_store.create(path, specs, **given, identity={**identity, **content}) as writer:
        writer.commit_many(range(len(arrays["latent"])), arrays)
        writer.finish()


def test_store_of_an_unknown_encoder_needs_permission(run: Path) -> None:
    rewrite(run / "latents" / "burgers1d_train.zarr.zip", encoder="unknown")
    given = {"autoencoder_path": AUTOENCODER}
    with pytest.raises(ConfigError, match="nothing says which weights") as caught:
        open_latents(configure(run), "burgers1d", "train", **given)
    assert caught.value.kind == "unknown_encoder"
    assert len(open_latents(configure(run), "burgers1d", "train", **given, allow_unknown_encoder=True)) == 16


def test_store_of_an_unknown_encoder_has_to_have_the_shape_of_the_latents(run: Path) -> None:
    rewrite(run / "latents" / "burgers1d_train.zarr.zip", num_tokens=4, encoder="unknown")
    overrides = ["training.allow_unknown_encoder=true", "training.cache_mode=store"]
    with pytest.raises(ConfigError, match="expected 8 x 2 a frame, found 4 x 2") as caught:
        make_stage(run, only("burgers1d"), *overrides)
    assert caught.value.kind == "latent_size"


@pytest.mark.parametrize("override", ["data.reduce_time=2", "data.split_fractions=[0.5,0.4,0.1]"])
def test_store_of_another_selection_is_refused(run: Path, override: str) -> None:
    for open_store in (
        lambda config: open_latents(config, "burgers1d", "train", autoencoder_path=AUTOENCODER),
        lambda config: open_field_states(config, "burgers1d", "train"),
    ):
        with pytest.raises(ConfigError, match="another selection of the data") as caught:
            open_store(configure(run, override))
        assert caught.value.kind == "other_data"
        assert override.partition("=")[0] in str(caught.value)


def test_missing_store_says_how_to_build_it(run: Path) -> None:
    (run / "latents" / "burgers1d_train.zarr.zip").unlink()
    with pytest.raises(ConfigError, match=r"burgers1d_train\.zarr\.zip: no latent store") as caught:
        make_stage(run, only("burgers1d"), "training.cache_mode=store")
    assert caught.value.kind == "no_store"
    assert "ups-store build" in str(caught.value)


def test_missing_autoencoder_says_how_to_train_it(run: Path) -> None:
    AUTOENCODER.unlink()
    with pytest.raises(CheckpointError, match="no such checkpoint; train it with `--stage autoencoder`"):
        make_stage(run)


def test_autoencoder_of_another_size_or_for_other_tasks_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="8 tokens x 4 channels, as configured, found 8 x 2") as caught:
        make_stage(run, "latent.dim=4")
    assert caught.value.kind == "latent_size"
    with pytest.raises(ConfigError, match="advection1d or burgers1d or darcy2d, found cfd1d") as caught:
        make_stage(run, only("cfd1d"))
    assert caught.value.kind == "other_task"


def test_split_without_samples_is_named(run: Path) -> None:
    overrides = ("data.split_fractions=[0.9,0.0,0.1]", "operator.state=fields", only("burgers1d"))
    rewrite_fields = run / "cache" / "burgers1d_train.zarr.zip"
    rewrite_fields.unlink()
    build(run, "latent.encoder=none", "data.split=train", overrides[0], overrides[2])
    with pytest.raises(ConfigError, match="burgers1d val would be empty") as caught:
        make_stage(run, *overrides)
    assert caught.value.kind == "empty_split"


def test_horizon_longer_than_the_trajectory_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="at least 10 time steps, found at most 9") as caught:
        make_stage(run, only("burgers1d"), "training.horizon=9")
    assert caught.value.kind == "horizon"


def test_inverse_losses_are_refused_as_encoder_and_decoder_are_frozen(run: Path) -> None:
    with pytest.raises(ConfigError, match="frozen in stage operator") as caught:
        make_stage(run, "training.use_inverse_losses=true")
    assert caught.value.kind == "inverse_losses_frozen"
    make_stage(run, "training.use_inverse_losses=true", "stages.joint.epochs=1")


# --- the stage -----------------------------------------------------------------------------------------


def test_specification_comes_from_stores_and_checkpoint(run: Path) -> None:
    spec = make_stage(run, "training.stride=2").model.spec
    assert set(spec.tasks) == set(TASKS)
    assert spec.parameters == ("beta", "nu")
    assert spec.autoencoder_sha256 == hash_tensors(AUTOENCODER)
    burgers, darcy = spec.tasks["burgers1d"], spec.tasks["darcy2d"]
    assert burgers.dt == pytest.approx(2 * 2.0 / 8)
    assert burgers.parameters == {"nu": (0.1, 0.1)}
    assert (burgers.tokens, darcy.tokens) == ((8,), (2, 4))
    assert (burgers.boundary, darcy.boundary) == (("periodic",), ("dirichlet", "dirichlet"))
    assert darcy.steady
    assert set(darcy.statistics) == {"fields", "coefficient"}
    with ups_store.open(run / "latents" / "burgers1d_train.zarr.zip") as store:
        latent = store["latent"].astype(np.float64)
    np.testing.assert_allclose(burgers.statistics["fields"]["mean"], latent.mean((0, 1, 2)), rtol=1e-6)
    one_scale = np.sqrt(latent.var((0, 1, 2)).mean())  # not a channel's own: that would be whitening
    np.testing.assert_allclose(burgers.statistics["fields"]["std"], [one_scale] * 2, rtol=1e-6)


def test_boundary_types_are_those_of_the_store_and_the_grid_says_what_is_periodic(run: Path) -> None:
    """Latents that were imported have no boundary types; the autoencoder knows which axes are periodic."""
    for task, boundary in (("darcy2d", {"x": "neumann"}), ("burgers1d", {})):
        attrs = {"boundary": boundary}
        rewrite(run / "latents" / f"{task}_train.zarr.zip", attrs=attrs)
    tasks = make_stage(run, "training.cache_mode=store").model.spec.tasks
    assert tasks["darcy2d"].boundary == ("unknown", "neumann")
    assert tasks["burgers1d"].boundary == ("periodic",)


def test_untrained_operator_on_fields_scores_as_persistence(run: Path) -> None:
    stage = make_stage(run, only("burgers1d"), "operator.state=fields")
    stage.model.eval()
    metrics = stage.validate()
    stage.export(metrics, stage.model.state_dict())
    report = stage.finish()
    assert metrics["score"] == metrics["val/nrmse/burgers1d"]
    assert report["score"] == pytest.approx(report["persistence_nrmse"]["burgers1d"], rel=1e-5)


def test_batch_is_a_function_of_its_number_with_augmentation_and_noise(run: Path) -> None:
    overrides = ["operator.noise=0.1", "training.horizon=2"]
    stage, other = make_stage(run, *overrides), make_stage(run, *overrides)
    for number in (4, 0, 11):
        first, second = batch_of(stage, number), batch_of(other, number)
        assert first.task == second.task
        assert torch.equal(first.states, second.states)
    plain = make_stage(run, "training.horizon=2", "training.augment=false")
    noisy = make_stage(run, *overrides, "training.augment=false")
    number = next(i for i in range(20) if batch_of(plain, i).task == "burgers1d")
    one, with_noise = batch_of(plain, number).states, batch_of(noisy, number).states
    assert torch.equal(one[:, 1:], with_noise[:, 1:])
    std = torch.tensor(plain.model.spec.tasks["burgers1d"].statistics["fields"]["std"])
    level = ((with_noise - one)[:, 0] / std).std().item()
    assert level == pytest.approx(0.1, rel=0.2)


def test_curriculum_lengthens_rollouts_and_short_tasks_stay_as_they_are(run: Path) -> None:
    stage = make_stage(run, "training.horizon=3", "operator.curriculum=0.5")
    assert [stage.curriculum.steps_at(number) for number in (0, 6, 7, 14, 39)] == [1, 1, 2, 3, 3]
    lengths = {"burgers1d": set(), "advection1d": set(), "darcy2d": set()}
    for number in range(40):
        batch = batch_of(stage, number)
        lengths[batch.task].add(batch.states.shape[1])
    assert lengths["darcy2d"] == {2}
    assert lengths["burgers1d"] | lengths["advection1d"] == {2, 3, 4}
    assert make_stage(run, "training.horizon=3").curriculum.steps_at(0) == 3


def test_losses_are_those_of_normalised_rollouts(run: Path) -> None:
    overrides = [
        "training.horizon=2",
        "training.rollout_loss=mse",
        "training.lambda_relative=0.5",
        "training.lambda_spectral=0.1",
    ]
    stage = make_stage(run, *overrides)
    for number in range(12):
        batch = batch_of(stage, number)
        losses = stage.losses(stage.model, batch)
        longer = {"rollout"} if batch.task != "darcy2d" else set()
        assert losses.keys() == {"one_step", "relative", "spectral"} | longer
        if batch.task != "darcy2d":  # untrained, so the state stays
            states = stage.model.normalise(batch.states, task=batch.task)
            expected = (states[:, 1] - states[:, 0]).square().mean()
            torch.testing.assert_close(losses["one_step"], expected)


def test_pushforward_has_gradients_through_its_last_step_alone(run: Path) -> None:
    overrides = ["training.horizon=3", "training.pushforward=true", "training.rollout_loss=mse"]
    stage = make_stage(run, only("burgers1d"), *overrides)
    torch.nn.init.normal_(stage.model.operator.out.weight, std=0.1)  # untrained it is the identity
    drawn = set()
    for number in range(12):
        batch = batch_of(stage, number)
        num = batch.pushed
        found = stage.losses(stage.model, batch)
        states = stage.model.normalise(batch.states.flatten(0, 1), task=batch.task).unflatten(0, (-1, 4))
        given = states[:, 0]
        for _ in range(num):
            given = stage.model.step(given, batch.parameters, task=batch.task, dt_B=batch.dt).detach()
        predicted = stage.model.step(given, batch.parameters, task=batch.task, dt_B=batch.dt)
        expected = (predicted - states[:, num + 1]).square().mean()
        torch.testing.assert_close(found, {"one_step": expected})
        weight = stage.model.operator.out.weight
        torch.testing.assert_close(
            *(torch.autograd.grad(one, weight)[0] for one in (*found.values(), expected))
        )
        drawn.add(num)
    assert drawn == {0, 1, 2}


def test_losses_of_a_batch_are_the_weighted_means_of_those_of_its_rows(run: Path) -> None:
    """As ranks share it; augmentation and noise are drawn before."""
    overrides = ["training.horizon=2", "training.lambda_relative=1", "training.lambda_spectral=1"]
    stage = make_stage(run, *overrides, "operator.noise=0.1")
    for number in range(4):
        batch = batch_of(stage, number)
        whole = stage.losses(stage.model, batch)
        parts = [
            stage.losses(stage.model, map_tensors(batch, lambda tensor, rows=rows: tensor[rows]))
            for rows in (slice(0, 3), slice(3, None))
        ]
        for name, loss in whole.items():
            torch.testing.assert_close(
                (3 * parts[0][name] + (len(batch) - 3) * parts[1][name]) / len(batch), loss
            )


def scores_of(folder: Path) -> list[float]:
    lines = (folder / "checkpoints" / "operator.jsonl").read_text().splitlines()
    return [record["score"] for record in map(json.loads, lines) if record["event"] == "epoch"]


@pytest.mark.parametrize("state", ["latent", "fields"])
def test_training_beats_persistence_and_the_file_predicts_alone(run: Path, state: str) -> None:
    overrides = [only("burgers1d"), f"operator.state={state}", "stages.operator.steps_per_epoch=40"]
    config = configure(run, *overrides, "training.lambda_relative=1")
    report = run_stage("operator", config)
    scores = scores_of(run)
    assert scores[-1] < scores[0] < report["persistence_nrmse"]["burgers1d"]
    assert report["score"] == pytest.approx(min(scores), rel=1e-4)
    assert report["states"] == state
    assert report["rollout_steps"] == {"burgers1d": 8}
    assert set(report["floor_nrmse"]) == ({"burgers1d"} if state == "latent" else set())
    assert 0 < report["data_wait_share"] < 1
    AUTOENCODER.unlink()
    simulator = ups.load(run / "checkpoints" / "operator.safetensors")
    fields = open_fields(config.build, "burgers1d", "val")
    frames = np.stack([fields.read("fields", np.arange(1), np.full(1, step)) for step in range(9)], axis=1)
    predicted = simulator.rollout(frames[:, 0], 8)
    error = nrmse_per_sample(predicted.double(), torch.from_numpy(frames[:, 1:]).double()).mean().item()
    assert error == pytest.approx(report["score"], rel=1e-3)
    document = read_document(run / "checkpoints" / "operator.safetensors", kind="operator")
    assert document["config"]["data"]["tasks"] == ["burgers1d"]


def test_missing_latents_are_made_while_training(run: Path) -> None:
    path = run / "latents" / "burgers1d_train.zarr.zip"
    built = path.read_bytes()
    path.unlink()
    report = run_stage("operator", configure(run, only("burgers1d")))
    assert report["score"] < report["persistence_nrmse"]["burgers1d"]
    assert path.read_bytes() == built


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("training.losses={sobolev: 1}", "unknown_loss"),
        ("training.use_inverse_losses=true", "inverse_losses_frozen"),
        ("training.num_gpus=3", "num_gpus"),
        ("training.horizon=1", "run_locked"),
    ],
)
def test_what_can_not_be_trained_is_refused_before_latents_are_made(
    run: Path, override: str, kind: str
) -> None:
    path = run / "latents" / "burgers1d_train.zarr.zip"
    path.unlink()
    config = configure(run, only("burgers1d"), override)
    held = HOLDING if kind == "run_locked" else "pass"
    other = [sys.executable, "-c", held, str(config.checkpoint.dir / TRAINING_LOCK)]
    with subprocess.Popen(other, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UpsError) as caught:
            run_stage("operator", config)
        process.communicate(b"")
    assert caught.value.kind == kind
    assert not path.exists()


def test_transient_and_steady_task_of_different_grids_train_together(run: Path) -> None:
    overrides = ["data.tasks=[advection1d,darcy2d]", "training.horizon=2", "training.augment=false"]
    report = run_stage("operator", configure(run, *overrides))
    assert set(report["nrmse"]) == {"advection1d", "darcy2d"}
    assert set(report["persistence_nrmse"]) == {"advection1d"}
    assert report["rollout_steps"] == {"advection1d": 8, "darcy2d": 1}
    stage = make_stage(run, *overrides)
    before = _mean_loss(stage)
    stage.model.load_state_dict(ups.load(stage.path).state_dict())
    after = _mean_loss(stage)
    assert after["advection1d"] < before["advection1d"]
    assert after["darcy2d"] < before["darcy2d"]
    simulator = ups.load(stage.path)
    assert simulator.rollout(np.ones((2, 16, 16), np.float32), 1, task="darcy2d").shape == (2, 1, 16, 16, 1)


def _mean_loss(stage: OperatorStage) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for number in range(len(stage.loader)):
            batch = batch_of(stage, number)
            loss = sum(stage.losses(stage.model, batch).values())
            found.setdefault(batch.task, []).append(float(loss))
    return {name: float(np.mean(values)) for name, values in found.items()}


def test_fields_of_tasks_with_different_grids_share_an_operator(run: Path) -> None:
    stage = make_stage(run, "operator.state=fields")
    assert stage.model.spec.state_dim == 16
    assert {name: task.tokens for name, task in stage.model.spec.tasks.items()} == {
        "advection1d": (8,),
        "burgers1d": (8,),
        "darcy2d": (4, 4),
    }
    for number in range(6):
        losses = stage.losses(stage.model, batch_of(stage, number))
        assert torch.stack(list(losses.values())).isfinite().all()
    assert set(stage.validate()) == {"score", *(f"val/nrmse/{name}" for name in TASKS)}


def test_resumed_training_equals_an_undisturbed_one(run: Path) -> None:
    """Batches with augmentation and noise don't depend on when they are drawn."""
    from ups.train.trainer import Trainer

    def train(folder: str, parts: tuple[int, ...]) -> dict[str, torch.Tensor]:
        overrides = [only("burgers1d"), "operator.noise=0.05", "training.horizon=2"]
        config = configure(run, *overrides)
        config = config.model_copy(
            update={"checkpoint": config.checkpoint.model_copy(update={"dir": run / folder})}
        )
        shutil.copytree(run / "checkpoints", run / folder)
        for steps in parts:
            trainer = Trainer(make_operator_stage(config, device=CPU), config, device=CPU)
            for _ in range(steps):
                trainer.train_step()
            trainer.save()
        return trainer.stage.model.state_dict()

    through, resumed = train("a", (6,)), train("b", (3, 3))
    for name, tensor in through.items():
        assert torch.equal(tensor, resumed[name]), name


# --- architecture --------------------------------------------------------------------------------------


def size_of(*overrides: str) -> OperatorSize:
    return operator_size(load_config(overrides=["data.tasks=burgers1d", *overrides]).operator)


def test_size_is_named_and_pdet_changes_parts_of_it() -> None:
    assert size_of("operator.size=S") == SIZES["S"]
    changed = size_of("operator.size=tiny", "operator.depths=[4]", "operator.window_size=32")
    assert (changed.width, changed.depths, changed.window) == (SIZES["tiny"].width, (4,), 32)
    stack = size_of("operator.architecture_type=pdet_stack", "operator.depth=12")
    assert stack.depths == (12,)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["operator.mixer=attention", "operator.width=30"],
            "a multiple of operator.num_heads = 4",
        ),
        (
            ["operator.mixer=[spectral,attention]"],
            "expected one for each of 3 levels, depths [2, 2, 2], found 2",
        ),
        (["operator.architecture_type=pdet_stack"], "one level: operator.depth, found depths [2, 2, 2]"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size_of(*overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize("override", ["operator.pdet.group_size=12", "operator.pdet.qk_norm=false"])
def test_settings_without_effect_warn(override: str, notes: list[str]) -> None:
    size_of(override)
    assert f"{override.partition('=')[0]} has no effect" in "".join(notes)


@pytest.mark.parametrize(
    ("overrides", "mixers"),
    [
        ([], ("spectral",)),
        (["operator.depths=[2,2]"], ("spectral",)),
        (["operator.mixer=convolution"], ("convolution",)),
        (["operator.mixer=[spectral,spectral,hybrid]"], ("spectral", "spectral", "hybrid")),
        (["operator.num_heads=4"], ("attention",)),
        (["operator.window_size=4"], ("attention",)),
        (["operator.pdet.attention_type=standard"], ("attention",)),
        (["operator.mixer=hybrid", "operator.num_heads=4"], ("hybrid",)),
    ],
)
def test_mixer_is_spectral_unless_attention_is_configured(
    overrides: list[str], mixers: tuple[str, ...]
) -> None:
    assert size_of(*overrides).mixers == mixers


@pytest.mark.parametrize(
    "overrides",
    [
        ["operator.mixer=spectral", "operator.num_heads=4"],
        ["operator.mixer=convolution", "operator.mlp_ratio=2"],
        ["operator.dropout=0.1"],
        ["operator.mixer=attention", "operator.spectral.modes=4"],
    ],
)
def test_settings_of_another_mixer_warn(overrides: list[str]) -> None:
    with pytest.warns(ConfigWarning, match="has no effect: operator.mixer = "):
        size_of(*overrides)


@pytest.mark.parametrize(
    "override", ["operator.mixer=fourier", "operator.mixer=[]", "operator.spectral.modes=0"]
)
def test_mixers_and_modes_that_are_not_there_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        size_of(override)


def test_depth_and_depths_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        size_of("operator.depth=3", "operator.depths=[1,1]")


def test_autoencoder_of_the_checkpoint_is_in_the_file(run: Path) -> None:
    stage = make_stage(run, only("burgers1d"))
    stage.export(stage.validate(), stage.model.state_dict())
    loaded, own = ups.load(stage.path), load_autoencoder(AUTOENCODER)
    assert loaded.autoencoder is not None
    for name, tensor in own.state_dict().items():
        assert torch.equal(loaded.autoencoder.state_dict()[name], tensor)
