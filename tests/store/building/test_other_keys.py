"""A configuration that serves more than a build: other packages say which keys are theirs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from ups_store import ConfigError
from ups_store.build import load_config
from ups_store.building.other_keys import ENTRY_POINTS


def to_build(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key != "kitchen"}
    return {**kept, "reading": {"num_workers": values["kitchen"]["cooks"]}}


def without_effect(values: dict[str, Any]) -> Iterator[str]:
    yield from (f"kitchen.{name} has no effect" for name in values["kitchen"] if name != "cooks")


@pytest.fixture
def kitchen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a section of its own is installed, and no other."""
    keys = SimpleNamespace(to_build=to_build, without_effect=without_effect)
    entry = SimpleNamespace(name="kitchen", load=lambda: keys)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == ENTRY_POINTS else [])


def test_section_of_another_package_says_to_the_build_what_it_says(kitchen: None) -> None:
    config = load_config(overrides=["data.tasks=burgers1d", "kitchen.cooks=3"])
    assert config.reading.num_workers == 3


def test_key_without_effect_of_another_package_is_noted(kitchen: None) -> None:
    notes: list[str] = []
    load_config(overrides=["data.tasks=burgers1d", "kitchen.cooks=3", "kitchen.sinks=1"], note=notes.append)
    assert notes == ["kitchen.sinks has no effect"]


def test_section_that_no_package_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["data.tasks=burgers1d", "training.lr=1"])
    assert caught.value.kind == "unknown_key"


def test_configuration_of_a_build_alone_asks_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(metadata, "entry_points", fail)
    load_config(overrides=["data.tasks=burgers1d", "cache.dtype=float16", "reading.num_workers=0"])


def test_latent_encoder_none_is_a_build_of_fields_without_other_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    config = load_config(overrides=["data.tasks=burgers1d", "latent.encoder=none", "cache.dtype=float16"])
    assert (config.latent, config.cache.dtype) == (None, "float16")
