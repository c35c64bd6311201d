"""A key decides whether a stage is kept only where the stage uses it; a sweep keeps encoder and latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_runs import build_here
from small_runs import SETTINGS, make_small_run

from ups.config import load_config
from ups.config.stage_keys import stage_keys
from ups.pipeline.training import run_all

TASK = "data.tasks=burgers1d"
NO_NETWORKS = "encoder.residual=false"


def is_same(stage: str, before: list[str], after: list[str]) -> bool:
    """Whether a training of a stage goes on, by the configurations before and after."""
    first, second = (stage_keys(load_config(overrides=[TASK, *words]), stage) for words in (before, after))
    return first == second


@pytest.mark.parametrize(
    ("stage", "before", "after", "same"),
    [
        ("autoencoder", [], ["training.lr=1e-4"], False),
        (
            "autoencoder",
            [NO_NETWORKS],
            [NO_NETWORKS, "training.lr=1e-4", "stages.autoencoder.epochs=3"],
            True,
        ),
        ("autoencoder", [NO_NETWORKS], [NO_NETWORKS, "latent.dim=3"], False),
        ("autoencoder", [], ["stages.operator.optimizer.lr=1e-4", "stages.operator.batch_size=4"], True),
        ("operator", ["training.lr=1e-4"], ["stages.operator.optimizer.lr=1e-4"], True),
        ("operator", [], ["stages.operator.epochs=10"], True),  # as it is by default
        ("operator", [], ["training.amp_dtype=float16", "training.compile_mode=max-autotune"], True),
        ("operator", ["training.amp=true"], ["training.amp=true", "training.amp_dtype=float16"], False),
        (
            "operator",
            [],
            ["stages.operator.optimizer.momentum=0.5", "stages.operator.scheduler.gamma=0.5"],
            True,
        ),
        ("operator", [], ["training.grad_clip=3"], False),
        ("fno", [], ["training.lr=0.1", "stages.operator.optimizer.lr=0.1"], True),
        ("fno", [], ["stages.operator.grad_clip=3"], False),
    ],
)
def test_keys_count_where_they_are_used(stage: str, before: list[str], after: list[str], same: bool) -> None:
    assert is_same(stage, before, after) == same


@pytest.mark.parametrize("has_networks", [True, False])
def test_sweep_of_the_guide_keeps_encoder_and_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_networks: bool
) -> None:
    """The guide's three commands; of an encoder that is measured alone the earlier system's, as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    run = make_small_run(tmp_path).relative_to(tmp_path)
    run.write_text(yaml.safe_dump(SETTINGS | {"encoder": SETTINGS["encoder"] | {"residual": has_networks}}))

    def trained(*words: str) -> dict[str, Any]:
        config = load_config(run, overrides=words)
        return run_all(config, config_path=run, overrides=words)

    trained()
    store, encoder = Path("latents/burgers1d_train.zarr.zip"), Path("checkpoints/autoencoder.safetensors")
    before = store.stat().st_mtime_ns
    given = [f"latent.checkpoint={encoder}"] if has_networks else []
    for word in ("training.lr=1e-4", "training.batch_size=8"):
        own = [*given, f"checkpoint.dir=sweep/{word}"] if has_networks else []
        report = trained(word, *own)
        assert report["cache"]["startup/cache_reused"] == 1.0
        assert list(report["stages"])[-1] == "operator"
    assert store.stat().st_mtime_ns == before
