"""The earlier script's command line: what it takes where it names no configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ups.cli import precompute
from ups_store.build import load_config

DEFAULTS = ["--config", "configs/cache_precompute_defaults.yaml"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--parallel", "--overwrite"], DEFAULTS),
        (["--config", "demo"], []),
        (["--config=demo"], []),
        (["--task", "burgers1d"], []),
        (["data.tasks=burgers1d"], []),
    ],
)
def test_defaults_hold_where_nothing_says_what_to_build(
    monkeypatch: pytest.MonkeyPatch, words: list[str], added: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(precompute, "main", lambda begin: seen.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["precompute_latent_cache.py", *words])
    precompute.precompute()
    assert seen == ["latent={}", *added, *words]


def test_shipped_defaults_are_the_latents_that_a_training_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = load_config(Path(DEFAULTS[1]), overrides=["latent={}"])
    assert found == load_config(Path("train_burgers_32dim"))
    assert found.latent is not None
    Path("configs").mkdir()
    Path(DEFAULTS[1]).write_text("data: {tasks: advection1d}\n")
    assert load_config(Path(DEFAULTS[1]), overrides=["latent={}"]).data.tasks == ("advection1d",)
