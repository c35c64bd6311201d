"""What is said last about how long a stage is trained, wins, whichever of the three keys says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config import RunConfig, load_config

TASK = "data.tasks=burgers1d"
FILE = """
stages:
  operator: {epochs: 8, budget: {flops: 1.0e+12}}
  autoencoder: {epochs: 8, steps: 500}
"""


def length(config: RunConfig, stage: str) -> tuple[int, int | None, float | None]:
    """Epochs, steps and how much of a budget."""
    said = config.stage(stage)
    return said.epochs, said.steps, said.budget.allowed if said.budget else None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.operator.epochs=1", (1, None, None)),
        ("stages.operator.steps=6", (8, 6, None)),
        ("stages.operator.budget.samples=9", (8, None, 9)),
        ("stages.operator.steps_per_epoch=6", (8, None, 1e12)),  # from one validation to the next
        ("stages.autoencoder.epochs=1", (1, None, None)),
        ("stages.autoencoder.budget.samples=9", (8, None, 9)),
        ("stages.autoencoder.steps_per_epoch=6", (8, 500, None)),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_length_that_is_said_last_wins(
    tmp_path: Path, override: str, expected: tuple[float | None, ...], is_file: bool, notes: list[str]
) -> None:
    first = path = tmp_path / "first.yaml"
    first.write_text(FILE)
    key, _, value = override.partition("=")
    if is_file:
        path = tmp_path / "second.yaml"
        inner = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(key.split(".")))
        path.write_text(f"include: first.yaml\n{inner.rstrip()} {value}\n")
    config = load_config(path, overrides=[TASK, *([] if is_file else [override])])
    assert length(config, key.split(".")[1]) == expected
    is_same_key = "steps_per_epoch" in override or "operator.budget" in override
    assert any("takes the place of" in note for note in notes) == (not is_file and not is_same_key)


def test_budget_and_epochs_that_are_said_together_are_kept() -> None:
    both = ["stages.operator.epochs=4", "stages.operator.budget.flops=1e9"]
    assert length(load_config("demo", overrides=both), "operator") == (4, None, 1e9)
