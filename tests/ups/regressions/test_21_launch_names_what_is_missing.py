"""A launch that couldn't work on the machine says so before anything is rented."""

from __future__ import annotations

import pytest
from command_line import run_ups

KEYS = ("B2_KEY_ID", "B2_APP_KEY", "WANDB_API_KEY", "VAST_API_KEY", "WANDB_MODE")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


def test_dry_run_names_the_keys_and_the_package_that_are_missing() -> None:
    done = run_ups("launch", "vast", "--config", "demo", "--dry-run", "logging.wandb.enabled=true")
    assert done.exit_code == 0, done.output
    for name in ("B2_KEY_ID", "B2_APP_KEY", "WANDB_API_KEY", "--package"):
        assert f"warning: {name}" in done.stderr
    done = run_ups("launch", "slurm", "--config", "demo", "--dry-run", "--results", "B2TRAIN:b/runs")
    assert ("warning: B2_KEY_ID" in done.stderr, "WANDB_API_KEY" in done.stderr) == (True, False)


def test_keys_that_are_set_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS[:3]:
        monkeypatch.setenv(name, "some")
    words = ("launch", "vast", "--config", "demo", "--dry-run", "--package", "")
    done = run_ups(*words, "logging.wandb.enabled=true")
    assert not any(f"warning: {name}" in done.stderr for name in (*KEYS, "--package"))


def test_launch_without_a_package_is_refused_before_an_offer_is_accepted() -> None:
    done = run_ups("launch", "vast", "--config", "demo")
    assert (done.exit_code, "--package: expected" in done.stderr) == (2, True)
