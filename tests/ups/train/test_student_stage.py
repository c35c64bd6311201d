"""The stage `student`: pairs in stores, both methods, gates, resuming, files of teachers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_line import run_ups
from noted import noted
from operator_runs import build, made_once
from run_nodes import training_nodes

import ups
import ups_store
from ups.config import RunConfig, load_config
from ups.data.residuals import held_out
from ups.data.solvers import make_dataset
from ups.data.windows import TrajectoryBatch
from ups.errors import CheckpointError, ConfigError, GateMissedError, MissedGatesWarning
from ups.eval.ensembles import Climate, ensemble_numbers, measure_ensemble
from ups.eval.evaluate import evaluate_run
from ups.eval.forecasters import CorrectedForecaster, OperatorForecaster, kind_of
from ups.eval.runs import find_corrected
from ups.pipeline.config_checks import check_config
from ups.train.flow import Measured
from ups.train.run import run_stage, train_unless_valid
from ups.train.stage import StageStart
from ups.train.student import ConsistencyStage, StudentStage, make_student_stage
from ups.train.trainer import Trainer
from ups.trained.checkpoint import hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.corrected import CorrectedSimulator, load_corrected
from ups.trained.specs import CORRECTOR, OPERATOR, STUDENT

torch.set_num_threads(1)
CPU = torch.device("cpu")
OPERATOR_PATH = Path("checkpoints/operator.safetensors")
TEACHER_PATH = Path("checkpoints/corrector.safetensors")
STUDENT_PATH = Path("checkpoints/student.safetensors")
CANDIDATE_PATH = Path("checkpoints/student.candidate.safetensors")
STAGE = "student"
SETTINGS: dict[str, Any] = {
    "data": {"task": "burgers1d", "root": "data", "split_fractions": [0.5, 0.4, 0.1]},
    "cache": {"dir": "cache"},
    "reading": {"num_workers": 0},
    "encoder": {"patch_size": 4},
    "operator": {"state": "fields", "width": 8, "depths": [1], "val_trajectories": 2},
    "diffusion": {"hidden_dim": 8, "num_sampler_steps": 4, "export_anyway": True},
    "training": {
        **{"batch_size": 16, "lr": 1e-2, "num_workers": 0, "device": "cpu", "log_every": 5},
        **{"distill_num_pairs": 64},
    },
    "stages": {
        "operator": {"epochs": 1, "steps_per_epoch": 10},
        "corrector": {"epochs": 1, "steps_per_epoch": 5},
        STAGE: {"epochs": 2, "steps_per_epoch": 5},
    },
    "checkpoint": {"dir": "checkpoints"},
}


def prepare(folder: Path) -> None:
    make_dataset("burgers1d", folder / "data", num_samples=20, points=32, frames=5, nu=0.1)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    build(folder, "latent.encoder=none")
    for stage in ("operator", "corrector"):
        run_stage(stage, load_config(folder / "run.yaml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, prepare)


def configured(*overrides: str) -> RunConfig:
    return load_config(Path("run.yaml"), overrides=overrides)


def make_stage(*overrides: str) -> StudentStage:
    return make_student_stage(configured(*overrides), device=CPU, start=StageStart())


def pair_store(part: str) -> ups_store.Store:
    store = ups_store.open(f"checkpoints/pairs/burgers1d_{part}_pairs.zarr.zip")
    assert isinstance(store, ups_store.Store)
    return store


def change_teacher() -> None:
    tensors, document = load_checkpoint(TEACHER_PATH, kind=CORRECTOR)
    changed = {name: t + 0.01 if name.startswith("corrector.") else t for name, t in tensors.items()}
    save_checkpoint(TEACHER_PATH, changed, kind=CORRECTOR, document=document)


METHODS = {"reflow": (), "consistency": (f"stages.{STAGE}.method=consistency",)}


# --- pairs ------------------------------------------------------------------------------------------------


def test_pairs_are_what_the_teacher_makes_of_their_noise(run: Path) -> None:
    make_stage()
    teacher, store = load_corrected(TEACHER_PATH), pair_store("fit")
    arrays = {name: torch.from_numpy(values) for name, values in store.gather(np.arange(64)).items()}
    expected = teacher.residual(
        arrays["noise"],
        (arrays["given"], arrays["predicted"]),
        arrays["parameters"],
        task="burgers1d",
        dt_B=arrays["dt"],
        sampling=teacher.corrector_spec.sampling,
    ).detach()
    torch.testing.assert_close(arrays["residual"], expected, rtol=1e-4, atol=1e-5)
    assert abs(float(arrays["noise"].std()) - 1) < 0.05
    check = torch.from_numpy(pair_store("check").gather(np.arange(64), ["noise"])["noise"])
    assert not torch.isin(arrays["noise"][:, 0, 0], check[:, 0, 0]).any()


def test_pairs_are_reused_until_teacher_sampler_number_or_seed_change(run: Path) -> None:
    def drawn(*overrides: str) -> int:
        with noted() as notes:
            make_stage(*overrides)
        return sum("the teacher draws" in note for note in notes)

    assert drawn() == 2
    assert drawn("training.lr=0.1") == 0
    assert drawn("training.distill_num_pairs=65") == 1
    assert drawn("training.distill_num_pairs=65", "seed=1") == 2
    change_teacher()
    assert drawn("training.distill_num_pairs=65", "seed=1") == 2
    assert drawn("training.distill_num_pairs=65", "seed=1", *METHODS["consistency"]) == 0


# --- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_steps", [1, 2])
def test_student_of_either_method_comes_closer_to_its_teacher(run: Path, method: str, num_steps: int) -> None:
    overrides = (f"training.distill_num_steps={num_steps}", "training.lr=3e-3", "training.ema_decay=0.9")
    stage = make_stage(*METHODS[method], *overrides)
    before = stage.validate()["score"]
    trainer = Trainer(stage, configured(*METHODS[method], *overrides), device=CPU)
    for _ in range(30):
        trainer.train_step()
    assert trainer.measure()["score"] < 0.8 * before


@pytest.mark.parametrize("method", METHODS)
def test_student_is_exported_whole_and_bound_to_its_teacher(run: Path, method: str) -> None:
    report = run_stage(STAGE, configured(*METHODS[method], "training.distill_num_steps=2"))
    json.dumps(report)
    assert report["method"] == method
    rows = report["ensembles"]["burgers1d"]
    assert set(rows) == {"student", "teacher", "operator"}
    assert {"crps", "energy_score", "spread_skill", "band_low", "ms_per_step"} <= set(rows["student"])
    teacher_sha256 = hash_tensors(TEACHER_PATH)
    TEACHER_PATH.unlink()
    with pytest.warns(MissedGatesWarning):
        model = ups.load(STUDENT_PATH)
    assert isinstance(model, CorrectedSimulator)
    spec = model.corrector_spec
    assert spec.taught is not None
    assert (spec.taught.teacher_sha256, spec.taught.method) == (teacher_sha256, method)
    assert (spec.sampling.sampler, spec.sampling.num_steps) == ("euler", 2)
    given = held_out(configured(), "burgers1d")["check"].read(np.arange(2)).given
    assert model.rollout(given, 3, members=4).shape == (2, 4, 3, 32, 1)
    assert f"Distilled ({method})" in STUDENT_PATH.with_name("student.card.md").read_text()


def test_target_follows_the_student_and_teacher_and_operator_stay_as_they_are(run: Path) -> None:
    overrides = (*METHODS["consistency"], "training.distill_target_decay=0.75")
    stage = make_stage(*overrides)
    assert isinstance(stage, ConsistencyStage)
    frozen = {name: t.clone() for name, t in stage.model.simulator.state_dict().items()}
    taught = {name: t.clone() for name, t in stage._teacher.corrector.state_dict().items()}
    before = [weight.clone() for weight in stage.model.target.parameters()]
    Trainer(stage, configured(*overrides), device=CPU).train_step()
    for old, new, own in zip(
        before, stage.model.target.parameters(), stage.model.corrector.parameters(), strict=True
    ):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * own.detach())
    assert not stage.model.target.training
    assert all(torch.equal(frozen[name], t) for name, t in stage.model.simulator.state_dict().items())
    assert all(torch.equal(taught[name], t) for name, t in stage._teacher.corrector.state_dict().items())
    assert not stage._teacher.training


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_to_the_bit(run: Path, method: str) -> None:
    common = (*METHODS[method], "training.distill_num_taus=2", "training.distill_micro_batch=10")
    through = Trainer(make_stage(*common), configured(*common), device=CPU)
    for _ in range(8):
        through.train_step()
    parts = (*common, "checkpoint.dir=parts", f"training.distill_teacher={TEACHER_PATH}")
    Path("parts").mkdir()
    first = Trainer(make_stage(*parts), configured(*parts), device=CPU)
    for _ in range(5):
        first.train_step()
    first.save()
    second = Trainer(make_stage(*parts), configured(*parts), device=CPU)
    assert second.step == 5
    for _ in range(3):
        second.train_step()
    found = second.stage.model.state_dict()
    for name, tensor in through.stage.model.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("method", METHODS)
def test_step_in_parts_is_that_of_the_whole_batch(run: Path, method: str) -> None:
    found = []
    for overrides in ((), ("training.distill_micro_batch=5",)):
        own = (*METHODS[method], *overrides)
        stage = make_stage(*own)
        assert stage.num_micro_batches == (4 if overrides else 1)
        trainer = Trainer(stage, configured(*own), device=CPU)
        trainer.train_step()
        found.append((trainer.gradient_norm, trainer.meter.read()))
    (whole, losses), (parts, losses_of_parts) = found
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert losses_of_parts == pytest.approx(losses, rel=1e-4)


def test_smaller_student_begins_with_the_linear_correction_alone(run: Path) -> None:
    stage = make_stage("training.distill_hidden_dim=4", "training.distill_depths=[1]")
    teacher = sum(weight.numel() for weight in stage._teacher.corrector.parameters())
    assert sum(weight.numel() for weight in stage.model.corrector.parameters()) < teacher / 2
    batch = next(iter(stage.loader))
    x = torch.randn_like(batch.noise)
    given = batch.states[:, :2].unbind(1)
    drawn = stage.model.residual(
        x,
        given,
        batch.parameters,
        task="burgers1d",
        dt_B=batch.dt,
        sampling=stage.model.corrector_spec.sampling,
    )
    assert torch.equal(drawn, stage.model.offset(given[1], task="burgers1d"))


def test_training_is_begun_again_for_another_teacher(run: Path) -> None:
    run_stage(STAGE, configured())
    change_teacher()
    with pytest.raises(CheckpointError) as caught:
        run_stage(STAGE, configured())
    assert caught.value.kind == "other_data"
    report = train_unless_valid(STAGE, configured(), restart=False)
    assert report["resumed_at"] == 0
    taught = load_corrected(STUDENT_PATH, kind=STUDENT).corrector_spec.taught
    assert taught is not None
    assert taught.teacher_sha256 == hash_tensors(TEACHER_PATH)


def test_missing_teacher_is_named_with_what_makes_it(run: Path) -> None:
    TEACHER_PATH.unlink()
    with pytest.raises(CheckpointError, match="--stage corrector"):
        make_stage()


def test_teacher_of_another_operator_is_refused_before_anything_is_built(run: Path) -> None:
    teacher = f"training.distill_teacher={TEACHER_PATH.rename('given.safetensors')}"
    tensors, document = load_checkpoint(OPERATOR_PATH, kind=OPERATOR)
    of_teacher = hash_tensors(OPERATOR_PATH)
    changed = {name: tensor + 0.01 for name, tensor in tensors.items()}
    save_checkpoint(OPERATOR_PATH, changed, kind=OPERATOR, document=document)
    shutil.rmtree("checkpoints/residuals")
    with pytest.raises(ConfigError, match=f"found {of_teacher[:12]}.*diffusion.operator") as caught:
        make_stage(teacher)
    assert hash_tensors(OPERATOR_PATH)[:12] in str(caught.value)
    assert not Path("checkpoints/residuals").exists()
    assert not Path("checkpoints/pairs").exists()
    wanted = (teacher, "stages.corrector.epochs=0")
    (problem,) = check_config(Path("run.yaml"), wanted).problems
    assert (problem.kind, of_teacher[:12] in problem.text) == ("other_operator", True)
    (problem,) = check_config(Path("run.yaml"), (*wanted, "checkpoint.dir=elsewhere")).problems
    assert "than the one that this run would train" in problem.text
    given = (*wanted, "checkpoint.dir=elsewhere", "stages.operator.epochs=0")
    assert check_config(Path("run.yaml"), given).exit_code == 0


def test_run_distils_after_the_corrector_and_again_for_another_one(run: Path) -> None:
    nodes = {node.name: node for node in training_nodes(configured())}
    assert list(nodes)[-3:] == ["operator", "corrector", STAGE]
    assert str(STUDENT_PATH) in nodes[STAGE].outputs()
    before = nodes[STAGE].key()
    change_teacher()
    assert nodes[STAGE].key() != before


# --- gates ------------------------------------------------------------------------------------------------


def test_student_that_missed_a_gate_is_not_exported_and_its_state_is_kept(run: Path) -> None:
    stops = "diffusion.export_anyway=false"
    with pytest.raises(GateMissedError, match="of the student on burgers1d") as caught:
        run_stage(STAGE, configured(stops))
    assert caught.value.exit_code == 10
    assert CANDIDATE_PATH.exists()
    assert not STUDENT_PATH.exists()
    report = run_stage(STAGE, configured())
    assert report["resumed_at"] == report["steps"] == 10
    assert STUDENT_PATH.exists()
    assert not CANDIDATE_PATH.exists()


NUM, STEPS, POINTS, MEMBERS = 40, 2, 32, 64
TRUTH = torch.randn(NUM, STEPS, POINTS, 1, generator=torch.Generator().manual_seed(0))
DRAWN = torch.randn(NUM, STEPS, MEMBERS, POINTS, 1, generator=torch.Generator().manual_seed(1))


def measured(members: torch.Tensor) -> Measured:
    """Of members that predict noise, whose truth is noise."""
    climate = Climate(torch.ones(1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64))
    batch = TrajectoryBatch(np.arange(NUM), TRUTH[:, 0], TRUTH, {})
    errors = measure_ensemble(iter(members.unbind(1)), batch, climate, seed=0)
    return Measured({"burgers1d": errors}, {"burgers1d": ensemble_numbers(errors)})


def overfilled(members: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(members, dim=-2)
    spectrum[..., 12:, :] *= 1.5
    return torch.fft.irfft(spectrum, n=POINTS, dim=-2)


# What became of a student's members, and the gates that it has to miss.
STUDENTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    "as good as its teacher": (lambda members: members.roll(1, dims=2), set()),
    "returns zero": (lambda members: 0 * members, {"energy_score", "spread", "spread_skill", "crps"}),
    "copies its teacher's mean": (
        lambda members: members.mean(2, keepdim=True).expand_as(members),
        {"energy_score", "spread", "spread_skill", "crps"},
    ),
    "over-fills the high band": (overfilled, {"band_high"}),
    "was stopped early": (lambda members: 0.75 * members, {"spread_skill"}),
}


@pytest.mark.parametrize("name", STUDENTS)
def test_collapsed_student_misses_the_gate_that_it_should(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    become, expected = STUDENTS[name]
    stage = make_stage("diffusion.export_anyway=false")

    def measure(forecaster: CorrectedForecaster | OperatorForecaster) -> Measured:
        if isinstance(forecaster, OperatorForecaster):
            return measured(torch.zeros(NUM, STEPS, 1, POINTS, 1))
        return measured(DRAWN if forecaster.model is stage._teacher else become(DRAWN))

    monkeypatch.setattr(stage, "measure", measure)
    stage.export({"score": 0.0}, stage.model.state_dict())
    if not expected:
        assert stage.finish()["gates_missed"] == []
        assert isinstance(ups.load(STUDENT_PATH), CorrectedSimulator)  # without a warning
        return
    with pytest.raises(GateMissedError) as caught:
        stage.finish()
    missed = {verdict["gate"] for verdict in caught.value.verdicts if not verdict["passed"]}
    assert expected <= missed
    assert missed <= expected | ({"band_low", "band_mid", "band_high"} if len(expected) > 2 else set())
    assert caught.value.report["ensembles"]["burgers1d"]["student"]["crps"] > 0
    assert CANDIDATE_PATH.exists()
    assert not STUDENT_PATH.exists()
    monkeypatch.setattr(stage, "_config", configured())
    assert stage.finish()["gates_missed"]
    with pytest.warns(MissedGatesWarning, match=r"the student on burgers1d"):
        ups.load(STUDENT_PATH)


@pytest.mark.filterwarnings("ignore::ups.errors.MissedGatesWarning")
def test_evaluation_has_rows_of_corrector_and_student_where_members_are_asked_for(
    run: Path, notes: list[str]
) -> None:
    run_stage(STAGE, configured())
    evaluated = partial(evaluate_run, None, config_path=Path("run.yaml"), overrides=())
    (task,) = evaluated(members=4).tasks
    assert [row.name for row in task.rows][:3] == ["operator", "corrected", "student"]
    members = {row.name: row.ensemble.num_members for row in task.rows if row.ensemble is not None}
    assert (members["operator"], members["corrected"], members["student"]) == (1, 4, 4)
    assert not {"corrected", "student"} & {row.name for row in evaluated().tasks[0].rows}  # costly, unasked
    Path("checkpoints/operator.training.safetensors").unlink()
    run_stage("operator", configured("seed=5"))
    (task,) = evaluated(members=4).tasks
    assert "corrected" not in {row.name for row in task.rows}
    assert any("corrector.safetensors is left out: it corrects another operator" in text for text in notes)


def test_evaluation_says_which_gates_were_missed_and_that_there_is_only_a_candidate(
    run: Path, notes: list[str]
) -> None:
    with pytest.raises(GateMissedError) as caught:
        run_stage(STAGE, configured("diffusion.export_anyway=false"))
    missed = next(verdict["says"] for verdict in caught.value.verdicts if not verdict["passed"])
    notes.clear()
    found = find_corrected(OPERATOR_PATH, device="cpu")
    assert [kind_of(model) for model in found] == [CORRECTOR]
    assert notes[0].startswith(f"warning: {TEACHER_PATH} was exported although it missed gates: ")
    assert notes[1].startswith(
        f"warning: {STUDENT_PATH} isn't there, so it isn't evaluated: {CANDIDATE_PATH}"
    )
    run_stage(STAGE, configured())
    notes.clear()
    _, student = find_corrected(OPERATOR_PATH, device="cpu")
    assert missed in notes[1]
    assert missed in CorrectedForecaster(student).note  # of its row in the report


def test_evaluation_of_a_correctors_file_names_its_operator(run: Path) -> None:
    refused = run_ups("evaluate", "--checkpoint", TEACHER_PATH)
    assert f"found corrector; give the operator that it corrects, such as {OPERATOR_PATH}" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_student_trains_as_the_plain_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain = run_stage(STAGE, configured(*METHODS[method]))
    expected = load_checkpoint(STUDENT_PATH, kind=STUDENT)[0]
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="eager", **{**options, "mode": None})
    )
    switches = ("training.compile=true", "training.distill_compile_teacher=true")
    compiled = run_stage(STAGE, configured(*METHODS[method], *switches), restart=True)
    assert compiled["start_score"] == pytest.approx(plain["start_score"], rel=1e-5)
    found = load_checkpoint(STUDENT_PATH, kind=STUDENT)[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_command_ends_with_10_and_exports_marked_if_asked_to(run: Path) -> None:
    command = [sys.executable, "-m", "ups", "train", "--config", "run.yaml", "--stage", STAGE]
    refused = subprocess.run([*command, "diffusion.export_anyway=false"], capture_output=True, text=True)
    assert refused.returncode == 10
    assert "of the student on burgers1d" in refused.stderr
    assert not STUDENT_PATH.exists()
    subprocess.run([*command, "--export-anyway"], check=True, capture_output=True)
    assert STUDENT_PATH.exists()
