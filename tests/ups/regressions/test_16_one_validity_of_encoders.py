"""An encoder of another architecture than the configured one is refused by all that would use it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from operator_runs import build_here
from small_runs import make_small_run

from ups.config import load_config
from ups.errors import ConfigError
from ups.pipeline.config_checks import check_config
from ups.pipeline.training import run_all
from ups.train.run import run_stage
from ups_store.build import Watcher, build_all
from ups_store.build import load_config as load_build_config

CHANGED = ("encoder.patch_size=2", "encoder.residual=false", "encoder.width=8", "decoder.depth=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose autoencoder is trained, and whose latents are there."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr("ups.pipeline.training.run_process", build_here)
        run = make_small_run(folder)
        config = load_config(run, overrides=["stages.operator.epochs=0"])
        run_all(config, config_path=run, overrides=["stages.operator.epochs=0"])
    return folder


@pytest.mark.parametrize("override", CHANGED)
def test_other_encoder_is_refused_by_builds_stages_and_checks(
    trained: Path, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    store = Path("latents/burgers1d_train.zarr.zip")
    before = store.read_bytes()
    with pytest.raises(ConfigError) as caught:
        load_build_config(Path("run.yaml"), overrides=["latent={}", override])
    assert (caught.value.kind, caught.value.exit_code) == ("other_encoder", 2)
    assert override.split("=")[0] in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        run_stage("operator", load_config(Path("run.yaml"), overrides=[override]))
    assert caught.value.kind == "other_encoder"
    lines = [line.text for line in check_config(Path("run.yaml"), [override]).warnings]
    assert any("will be made again with its encoder" in line for line in lines)
    assert store.read_bytes() == before


def test_same_encoder_and_fields_are_built_as_before(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    same = load_build_config(Path("run.yaml"), overrides=["latent={}", "training.lr=0.5"])
    assert all(result.reused for result in build_all(same, watcher=Watcher()).stores)
    assert load_build_config(Path("run.yaml"), overrides=["latent.encoder=none", CHANGED[0]]).latent is None


def test_given_encoder_is_used_whatever_is_configured(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    given = ["latent.checkpoint=checkpoints/autoencoder.safetensors", "checkpoint.dir=other"]
    assert load_build_config(Path("run.yaml"), overrides=[*given, CHANGED[0]]).latent is not None
