"""The stage `corrector`: held-out residuals in stores, training, resuming, files bound to operators."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numbered_batches import batch_of, end_batches
from operator_runs import build, configure, made_once
from test_quiet_step import BY_AUTOGRAD, MADE, META, Watching, on_meta

import ups
import ups_store
from ups.config import load_config
from ups.data.held_out import divided
from ups.data.residuals import ResidualBuild, held_out
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.errors import CheckpointError, ConfigError, GateMissedError, MissedGatesWarning
from ups.pipeline.lineage import lineage_of
from ups.train.flow import CorrectorStage, make_corrector_stage
from ups.train.run import run_stage, train_unless_valid
from ups.train.stage import StageStart
from ups.train.trainer import Trainer
from ups.trained.checkpoint import hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.corrected import CorrectedSimulator, load_corrected
from ups.trained.simulator import load_simulator
from ups.trained.specs import OPERATOR
from ups_store.torch import map_tensors

CPU = torch.device("cpu")
OPERATOR_PATH = Path("checkpoints/operator.safetensors")
CORRECTOR_PATH = Path("checkpoints/corrector.safetensors")
_MADE: list[CorrectorStage] = []  # by a test
SETTINGS: dict[str, Any] = {
    "data": {"task": "burgers1d", "root": "data", "split_fractions": [0.5, 0.4, 0.1]},
    "cache": {"dir": "cache"},
    "reading": {"num_workers": 0},
    "latent": {"dim": 2, "tokens": 8},
    "encoder": {"patch_size": 4, "width": 8, "depth": 1, "num_heads": 2},
    "decoder": {"width": 8, "depth": 1, "num_heads": 2},
    "operator": {"state": "fields", "width": 16, "depths": [1], "val_trajectories": 4},
    "diffusion": {"hidden_dim": 8, "num_sampler_steps": 2, "export_anyway": True},
    "training": {"batch_size": 16, "lr": 1e-2, "num_workers": 0, "device": "cpu", "log_every": 5},
    "stages": {
        "operator": {"epochs": 1, "steps_per_epoch": 30},
        "corrector": {"epochs": 2, "steps_per_epoch": 5},
    },
    "checkpoint": {"dir": "checkpoints"},
}


def prepare(folder: Path) -> None:
    make_dataset("burgers1d", folder / "data", num_samples=40, points=32, frames=9, nu=0.1)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    build(folder, "latent.encoder=none")
    run_stage("operator", load_config(folder / "run.yaml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare)


def make_stage(folder: Path, *overrides: str) -> CorrectorStage:
    stage = make_corrector_stage(configure(folder, *overrides), device=CPU, start=StageStart())
    assert isinstance(stage, CorrectorStage)
    _MADE.append(stage)
    return stage


@pytest.fixture(autouse=True)
def close_stages() -> Iterator[None]:
    """Their loaders' threads would outlive the test."""
    yield
    while _MADE:
        stage = _MADE.pop()
        end_batches(stage)
        stage.close()


def change_operator() -> None:
    tensors, document = load_checkpoint(OPERATOR_PATH, kind=OPERATOR)
    changed = {name: tensor + 0.01 for name, tensor in tensors.items()}
    save_checkpoint(OPERATOR_PATH, changed, kind=OPERATOR, document=document)


def residual_store(part: str) -> ups_store.Store:
    store = ups_store.open(f"checkpoints/residuals/burgers1d_{part}_residuals.zarr.zip")
    assert isinstance(store, ups_store.Store)
    return store


# --- held-out trajectories and their residuals ------------------------------------------------------------


@pytest.mark.parametrize(("num", "share", "expected"), [(8, 0.5, 4), (9, 0.3, 3), (3, 0.9, 3), (2, 0.1, 0)])
def test_parts_share_no_trajectory_and_leave_none_out(num: int, share: float, expected: int) -> None:
    parts = divided(num, share)
    assert len(parts["fit"]) == expected
    assert sorted([*parts["fit"], *parts["check"]]) == list(range(num))


def test_residuals_are_of_trajectories_that_the_operator_was_not_trained_on(run: Path) -> None:
    config = configure(run)
    parts = held_out(config, "burgers1d")
    trained = open_fields(config.build, "burgers1d", "train")
    first_frames = {
        trained.read("fields", np.array([number]), np.zeros(1, np.int64)).tobytes()
        for number in range(len(trained.num_steps))
    }
    seen = set[bytes]()
    for some in parts.values():
        for number in range(len(some)):
            seen.add(some.read(np.array([number])).given.numpy().tobytes())
    assert len(seen) == sum(map(len, parts.values())) == 8  # "val", without the odd samples, which are "dev"
    assert not seen & first_frames


def test_too_few_held_out_trajectories_are_refused_saying_how_many_there_are(run: Path) -> None:
    with pytest.raises(ConfigError, match="0 to train on and 8 to measure on") as caught:
        make_stage(run, "diffusion.residual_share=0.01")
    assert caught.value.kind == "too_few_trajectories"


def test_residuals_are_those_of_rollouts_from_true_states(run: Path) -> None:
    stage = make_stage(run, "diffusion.lead_times=3")
    simulator, trajectories = load_simulator(OPERATOR_PATH), stage._wanted["burgers1d"]["fit"].trajectories
    store = residual_store("fit")
    num_starts = trajectories.horizon - 3 + 1
    assert len(store) == len(trajectories) * num_starts * 3
    batch = trajectories.read(np.array([1]))
    truth = torch.cat([batch.given[:, None], batch.truth], dim=1)
    start = 2
    rolled = simulator.rollout(truth[:, start], 3, parameters={"nu": 0.1}, dt=trajectories.dt)
    arrays = store.gather(np.arange(3) + (num_starts + start) * 3)
    assert arrays["lead"].tolist() == [1, 2, 3]
    for lead in (1, 2, 3):
        predicted = simulator.normalise(rolled[:, lead - 1], task="burgers1d")
        true = simulator.normalise(truth[:, start + lead], task="burgers1d")
        given = (
            arrays["predicted"][lead - 2]
            if lead > 1
            else simulator.normalise(truth[:, start], task="burgers1d").numpy()[0]
        )
        np.testing.assert_allclose(arrays["given"][lead - 1], given, atol=1e-6)
        np.testing.assert_allclose(arrays["predicted"][lead - 1], predicted[0], atol=1e-5)
        np.testing.assert_allclose(arrays["residual"][lead - 1], (true - predicted)[0], atol=1e-5)


def test_sigma_is_the_root_mean_square_of_what_seams_leave_of_the_residuals(run: Path) -> None:
    stage = make_stage(run)
    arrays = residual_store("fit").gather(np.arange(len(residual_store("fit"))), ["predicted", "residual"])
    predicted, residual = (torch.from_numpy(arrays[name]) for name in ("predicted", "residual"))
    left = residual - stage.model.offset(predicted, task="burgers1d")
    sigma = stage.model.corrector_spec.sigma["burgers1d"]
    assert sigma == pytest.approx(float(left.double().square().mean().sqrt()), rel=1e-6)
    assert sigma < float(residual.double().square().mean().sqrt())


def test_stores_are_reused_until_operator_or_settings_change(run: Path, notes: list[str]) -> None:
    make_stage(run)
    assert sum("are computed" in note for note in notes) == 2
    notes.clear()
    make_stage(run)
    assert sum("reused" in note for note in notes) == 2
    notes.clear()
    make_stage(run, "diffusion.residual_dtype=float16")
    assert sum("are computed" in note for note in notes) == 2
    assert residual_store("fit").arrays["residual"].dtype == np.float16
    change_operator()
    notes.clear()
    make_stage(run, "diffusion.residual_dtype=float16")
    assert sum("are computed" in note for note in notes) == 2


def test_interrupted_build_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_stage(run)
    expected = residual_store("fit").gather(np.arange(len(residual_store("fit"))))
    del whole
    shutil.rmtree("checkpoints/residuals")
    before = ResidualBuild._residuals
    monkeypatch.setattr("ups.data.residuals._STATES_AT_ONCE", 1)  # one trajectory at a time

    def interrupted(self: ResidualBuild, simulator: Any) -> Any:
        for number, each in enumerate(before(self, simulator)):
            if number == 2:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(ResidualBuild, "_residuals", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_stage(run)
    monkeypatch.setattr(ResidualBuild, "_residuals", before)
    make_stage(run)
    found = residual_store("fit").gather(np.arange(len(residual_store("fit"))))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


def test_number_of_residuals_is_bounded(run: Path) -> None:
    make_stage(run, "diffusion.num_pairs=10")
    assert len(residual_store("fit")) == 10
    assert sorted(set(residual_store("fit").gather(np.arange(10), ["lead"])["lead"])) == [1, 2]


def test_rollouts_longer_than_trajectories_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="at most 8") as caught:
        make_stage(run, "diffusion.lead_times=9")
    assert caught.value.kind == "lead_times"


# --- training ---------------------------------------------------------------------------------------------


def test_stage_trains_and_leaves_a_file_that_gives_ensembles(run: Path) -> None:
    report = run_stage("corrector", configure(run))
    json.dumps(report)
    assert report["steps"] == 10
    assert report["residuals"]["burgers1d"] == {"fit": 4 * 7 * 2, "check": 4 * 7 * 2}
    rows = report["ensembles"]["burgers1d"]
    assert {"mean_nrmse", "crps", "energy_score", "spread_skill", "ms_per_step"} <= set(rows["corrected"])
    assert rows["operator"]["crps"] > 0
    for name in ("nrmse", "operator_nrmse", "spread", "spread_skill"):
        assert report[name]["burgers1d"] >= 0
    OPERATOR_PATH.unlink()
    with pytest.warns(MissedGatesWarning, match="spread over skill of the corrector on burgers1d"):
        model = ups.load(CORRECTOR_PATH)
    assert isinstance(model, CorrectedSimulator)
    assert model.corrector_spec.sampling.num_steps == 2
    given = held_out(configure(run), "burgers1d")["check"].read(np.arange(2)).given
    assert model.rollout(given, 3, members=4).shape == (2, 4, 3, 32, 1)


def test_score_is_the_flow_matching_error_of_the_kept_residuals(run: Path) -> None:
    stage = make_stage(run)
    first, again = stage.validate(), stage.validate()
    assert first == again
    assert first["score"] == first["val/flow/burgers1d"]
    with torch.no_grad():
        stage.model.corrector.skip.bias.fill_(0.5)
    assert stage.validate()["score"] != first["score"]


def test_file_names_what_it_was_made_from(run: Path) -> None:
    run_stage("corrector", configure(run))
    lineage = lineage_of(CORRECTOR_PATH)
    assert lineage.is_whole
    found = {link.origin.role: link for link in lineage.made_from}
    assert Path(found["operator"].found or "").name == "operator.safetensors"
    residuals = found["training data of burgers1d"]
    assert {link.origin.role for link in residuals.made_from} == {"operator", "held-out trajectories"}
    change_operator()
    assert not lineage_of(CORRECTOR_PATH).is_whole


def test_operator_stays_as_it_is(run: Path) -> None:
    before = hash_tensors(OPERATOR_PATH)
    run_stage("corrector", configure(run, "training.ema_decay=0.9"))
    model = load_corrected(CORRECTOR_PATH)
    assert hash_tensors(CORRECTOR_PATH, prefix="simulator.") == before == model.corrector_spec.operator_sha256
    assert not any(weight.requires_grad for weight in model.simulator.parameters())
    assert not model.train().simulator.training


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.ema_decay=0.9", "training.amp=true", "training.tau_distribution={type: beta, alpha: 1.2}"),
    ],
)
def test_training_goes_on_to_the_bit(run: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = configure(run, *overrides)
    through = Trainer(make_stage(run, *overrides), config, device=CPU)
    through.fit()
    expected = load_checkpoint(CORRECTOR_PATH, kind="corrector")[0]
    own = ("checkpoint.dir=parts", f"diffusion.operator={OPERATOR_PATH}")
    parts = configure(run, *overrides, *own)
    (run / "parts").mkdir()
    first = Trainer(make_corrector_stage(parts, device=CPU), parts, device=CPU)
    for _ in range(7):
        first.train_step()
    first.save()
    Trainer(make_corrector_stage(parts, device=CPU), parts, device=CPU).fit()
    found = load_checkpoint(run / "parts" / "corrector.safetensors", kind="corrector")[0]
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_training_is_not_continued_for_another_operator_but_begun_again_by_a_run(
    run: Path, notes: list[str]
) -> None:
    run_stage("corrector", configure(run))
    change_operator()
    with pytest.raises(CheckpointError) as caught:
        run_stage("corrector", configure(run))
    assert caught.value.kind == "other_data"
    report = train_unless_valid("corrector", configure(run), restart=False)
    assert report["resumed_at"] == 0
    assert any("trained again" in note for note in notes)
    assert load_corrected(CORRECTOR_PATH).corrector_spec.operator_sha256 == hash_tensors(OPERATOR_PATH)


def test_lost_corrector_is_exported_again(run: Path) -> None:
    run_stage("corrector", configure(run))
    whole = hash_tensors(CORRECTOR_PATH)
    CORRECTOR_PATH.unlink()
    run_stage("corrector", configure(run))
    assert hash_tensors(CORRECTOR_PATH) == whole


def test_lost_candidate_isnt_taken_for_what_an_earlier_training_exported(run: Path) -> None:
    run_stage("corrector", configure(run))
    own, earlier = ("training.lr=3e-3", "diffusion.export_anyway=false"), hash_tensors(CORRECTOR_PATH)
    candidate = CORRECTOR_PATH.with_name("corrector.candidate.safetensors")
    with pytest.raises(GateMissedError):
        run_stage("corrector", configure(run, *own), restart=True)
    found = hash_tensors(candidate)
    candidate.unlink()
    with pytest.raises(GateMissedError):
        run_stage("corrector", configure(run, *own))
    assert (hash_tensors(candidate), hash_tensors(CORRECTOR_PATH)) == (found, earlier)


def test_missing_operator_is_named_with_what_makes_it(run: Path) -> None:
    OPERATOR_PATH.unlink()
    with pytest.raises(CheckpointError, match="--stage operator"):
        make_stage(run)


@pytest.mark.slow
def test_compiled_velocity_trains_as_the_plain_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_stage("corrector", configure(run))
    expected = load_checkpoint(CORRECTOR_PATH, kind="corrector")[0]
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **{**options, "mode": None})
    )
    overrides = ("training.compile=true", "training.activation_checkpointing=full")
    compiled = run_stage("corrector", configure(run, *overrides), restart=True)
    assert compiled["start_score"] == pytest.approx(plain["start_score"], rel=1e-5)
    found = load_checkpoint(CORRECTOR_PATH, kind="corrector")[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def test_step_makes_no_constant_and_copies_nothing(run: Path) -> None:
    stage = make_stage(run)
    batch = map_tensors(batch_of(stage, 0), lambda tensor: tensor.to(META))
    stage = on_meta(stage)
    stage.model.train()
    with Watching() as watching:
        (loss,) = stage.losses(stage.model, batch).values()
        loss.backward()
    assert set(watching.names) & {*(MADE - BY_AUTOGRAD), "copy"} == set()


def test_batches_are_residuals_shifted_by_whole_tokens_with_noise_and_times(run: Path) -> None:
    stage, plain = make_stage(run), make_stage(run, "training.augment=false")
    batch, still = batch_of(stage, 0), batch_of(plain, 0)
    assert batch.noise.shape == still.noise.shape == (16, 8, 4)
    assert 0 <= float(batch.tau.min()) < float(batch.tau.max()) <= 1
    assert torch.equal(batch_of(stage, 0).states, batch.states)  # a function of its number
    moved = 0
    for row, before in zip(batch.states, still.states, strict=True):
        by = [shift for shift in range(8) if torch.equal(before.roll(shift, dims=1), row)]
        assert by
        moved += by != [0]
    assert moved > 8


# --- gates ------------------------------------------------------------------------------------------------


def test_corrector_that_missed_a_gate_is_not_exported_and_its_state_is_kept(run: Path) -> None:
    anyway = "diffusion.export_anyway=true"
    config = configure(run, "diffusion.export_anyway=false", "stages.corrector.steps_per_epoch=1")
    with pytest.raises(GateMissedError, match="spread over skill of the corrector on burgers1d = ") as caught:
        run_stage("corrector", config)
    assert caught.value.exit_code == 10
    assert {verdict["gate"] for verdict in caught.value.verdicts if not verdict["passed"]} >= {"spread_skill"}
    assert not CORRECTOR_PATH.exists()
    assert Path("checkpoints/corrector.candidate.safetensors").exists()
    lines = [json.loads(line) for line in Path("checkpoints/corrector.jsonl").read_text().splitlines()]
    missed = next(line for line in lines if line["event"] == "gate_missed")
    assert missed["report"]["ensembles"]["burgers1d"]["corrected"]["spread_skill"] < 0.8
    config = configure(run, anyway, "stages.corrector.steps_per_epoch=1")
    report = run_stage("corrector", config)
    assert report["resumed_at"] == report["steps"] == 2
    assert report["gates_missed"]
    assert not Path("checkpoints/corrector.candidate.safetensors").exists()
    document = load_checkpoint(CORRECTOR_PATH, kind="corrector")[1]
    assert [gate["says"] for gate in document["gates"] if not gate["passed"]] == report["gates_missed"]
    assert "**missed**" in CORRECTOR_PATH.with_name("corrector.card.md").read_text()
    again = run_stage("corrector", config)
    assert again["ensembles"]["burgers1d"]["corrected"]["crps"] == pytest.approx(
        report["ensembles"]["burgers1d"]["corrected"]["crps"]
    )
