"""Latents go where the training reads them, whatever the command line says of stores of fields."""

from __future__ import annotations

from pathlib import Path

import pytest
from operator_runs import build_here
from run_nodes import build_stores
from small_runs import make_small_run

import ups_store
from ups.config import load_config
from ups.config.seeds import seed_overrides
from ups.pipeline.training import run_all
from ups_store.build import load_config as load_build_config

NAME = "burgers1d_train.zarr.zip"
WORDS = ["cache.dir=X", "training.latent_cache_dir=Y", "cache.dtype=float64"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    return make_small_run(tmp_path).relative_to(tmp_path)


def test_latents_and_fields_go_to_the_folders_that_are_said(run: Path) -> None:
    words = [*WORDS, "encoder.residual=false"]
    config = load_config(run, overrides=words)
    report = run_all(config, config_path=run, overrides=words)
    assert list(report["stages"]) == ["autoencoder", "operator"]
    build_stores("field-stores", run, *words, "training.field_source=store")
    with ups_store.open(Path("Y") / NAME) as latents, ups_store.open(Path("X") / NAME) as fields:
        assert ("latent" in latents, "fields" in fields) == (True, True)
        assert [str(latents.arrays["latent"].dtype), str(fields.arrays["fields"].dtype)] == [
            "float16",
            "float64",
        ]


def test_seeds_have_latents_of_their_own(run: Path) -> None:
    words = ["cache.dir=X", "encoder.residual=false", "stages.operator.epochs=0"]
    for seed in (0, 1):
        own = [*words, *seed_overrides(load_config(run, overrides=words), seed)]
        run_all(load_config(run, overrides=own), config_path=run, overrides=own)
        assert Path(f"latents/seed-{seed}", NAME).exists()
    assert not Path("X", NAME).exists()


def test_build_of_latents_by_itself_takes_their_folder(run: Path) -> None:
    assert load_build_config(run, overrides=["latent={}", *WORDS[:2]]).cache.dir == Path("Y")
    assert load_build_config(run, overrides=["latent={}", "cache.dir=X"]).cache.dir == Path("X")
    assert load_build_config(run, overrides=["latent.encoder=none", *WORDS[:2]]).cache.dir == Path("X")
