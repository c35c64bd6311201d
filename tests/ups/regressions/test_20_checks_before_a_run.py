"""What `ups train` refuses, `ups validate config` refuses, by the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config import load_config
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.errors import ConfigError
from ups.pipeline.config_checks import check_config
from ups.train.checks import check_sizes

GIVEN = [
    *("data.tasks=burgers1d", "data.root=data", "cache.dir=cache", "checkpoint.dir=checkpoints"),
    *("encoder.patch_size=4", "latent.tokens=8", "latent.dim=2", "reading.num_workers=0"),
    *("stages.autoencoder.epochs=1", "stages.operator.epochs=1"),
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_dataset("burgers1d", tmp_path / "data", num_samples=20, points=32, frames=6, nu=0.1)


def problems(*overrides: str) -> list[str]:
    return [check.kind for check in check_config(None, [*GIVEN, *overrides]).problems]


def test_prior_without_a_law_of_the_task_is_a_problem() -> None:
    assert problems("training.physics_priors.residual=0.1") == []
    assert problems("training.physics_priors.divergence=0.1") == ["no_law"]


def test_one_sample_of_validation_is_a_problem_where_a_report_is_of_the_others() -> None:
    single = "data.split_fractions=[0.9,0.05,0.05]"
    assert problems(single) == []
    enabled = [single, "evaluation.enabled=true"]
    assert problems(*enabled) == ["empty_split"]
    config = load_config(overrides=[*GIVEN, *enabled])
    for refusal in (
        lambda: check_sizes(config),  # before anything is built or trained
        lambda: open_fields(config.build, "burgers1d", "dev"),
    ):
        with pytest.raises(ConfigError) as caught:
            refusal()
        assert caught.value.kind == "empty_split"


def test_preloading_is_switched_off_by_the_word_that_yaml_reads_as_false(tmp_path: Path) -> None:
    assert load_config(overrides=[*GIVEN, "training.preload=off"]).training.preload == "off"
    (tmp_path / "run.yaml").write_text("training: {preload: off}\n")
    assert load_config(tmp_path / "run.yaml", overrides=GIVEN).training.preload == "off"
    with pytest.raises(ConfigError):
        load_config(overrides=[*GIVEN, "training.preload=on"])


def test_fields_in_the_place_of_latents_are_a_problem() -> None:
    from ups_store.build import Watcher, build_all

    build_all(load_config(overrides=[*GIVEN, "latent.encoder=none"]).build, watcher=Watcher())
    assert "other_kind" in problems()
