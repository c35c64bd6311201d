"""Words of earlier versions in configurations: read as today's, and hashed as they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ups.config import load_config
from ups.config.legacy import as_hashed, earlier_stage, stage_file
from ups.config.stage_keys import stage_keys
from ups.errors import ConfigError
from ups.stages import STAGE_NAMES
from ups.train.saved_state import differing_keys

# Of commit d0699444: stages and keys of the operator had their earlier names, and there were 11 keys more.
GOLDEN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "hashes_of_d0699444.json").read_text()
)
EARLIER = ["stages.diff_residual.epochs=3", "operator.pdet.hidden_dim=48", "steady_prior.observed_points=5"]
PRESENT = ["stages.corrector.epochs=3", "operator.width=48", "prior.observed_points=5"]
TASK = "data.tasks=[darcy2d]"


def sha(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", GOLDEN)
def test_shipped_configurations_hash_as_before_the_names_changed(name: str) -> None:
    config = load_config(name, overrides=["data.root=/x"])
    stages = [stage for stage in STAGE_NAMES if earlier_stage(stage) in GOLDEN[name]]
    hashes = {earlier_stage(stage): sha(as_hashed(stage_keys(config, stage))) for stage in stages}
    hashes["all"] = sha(as_hashed(config.model_dump(mode="json")))
    assert hashes == GOLDEN[name]


def test_earlier_words_are_todays_in_files_overrides_gates_and_references(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "steady_prior: {observed_points: 7}\noperator: {pdet: {depths: [1]}}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "include: base.yaml\n"
        "operator: {pdet: {hidden_dim: '${stages.diff_residual.epochs}'}}\n"
        "stages: {diff_residual: {epochs: 48}, steady_prior: {epochs: 2}}\n"
        "pipeline: {full: {gates: {throughput: {diff_residual: 5}}}}\n"
    )
    overrides = [TASK, "stages.consistency_distill.epochs=4", "stages.steady_prior.epochs=0"]
    config = load_config(tmp_path / "run.yaml", overrides=overrides)
    assert {name: stage.epochs for name, stage in config.stages.items()} == {
        "corrector": 48,
        "student": 4,
        "prior": 0,
    }
    assert (config.operator.width, config.operator.depths) == (48, (1,))
    assert config.prior.observed_points == 7
    assert config.pipeline.full.gates.throughput == {"corrector": 5}
    assert load_config(overrides=[TASK, *EARLIER]) == load_config(overrides=[TASK, *PRESENT])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stages.corrector.epochs=1", EARLIER[0]], "diff_residual is the earlier name of stages.corrector"),
        (["training.use_fsdp2=true", "training.parallel=ddp"], "use_fsdp2 means training.parallel = fsdp2"),
        (["diffusion.latent_dim=7"], "diffusion.latent_dim = 7, but latent.dim = 4"),
    ],
)
def test_words_that_contradict_each_other_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(overrides=[TASK, *overrides])


def test_a_state_of_before_is_of_the_same_configuration() -> None:
    config = load_config(overrides=[TASK, *PRESENT])
    was = as_hashed(config.model_dump(mode="json"))
    assert {"diff_residual"} == was["stages"].keys()
    assert was["operator"]["pdet"]["qk_norm"] is True
    for stage in STAGE_NAMES:
        assert differing_keys(was, config, stage=stage) == []
    was["operator"]["pdet"]["hidden_dim"] = 32
    assert differing_keys(was, config, stage="corrector") == ["operator.width was 32 and is 48"]


def test_files_of_a_run_that_began_under_an_earlier_name_are_found(tmp_path: Path) -> None:
    new, old = tmp_path / "corrector.training.safetensors", tmp_path / "diff_residual.training.safetensors"
    assert stage_file(new) == new
    old.touch()
    assert stage_file(new) == old
    new.touch()
    assert stage_file(new) == new


def test_a_section_that_there_never_was_says_where_its_keys_are() -> None:
    with pytest.raises(ConfigError, match=r"say it of each stage: stages\.operator\.optimizer"):
        load_config({"data": {"tasks": "darcy2d"}, "optimizer": {"name": "muon_hybrid"}})
