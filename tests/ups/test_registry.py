"""Users' own code by name: registered, or `module:attribute`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ups.errors import CheckpointError, ConfigError
from ups.registry import ALLOWED_CODE, Registry


@pytest.fixture
def things() -> Registry[Any]:
    """One is registered, another comes from the standard library."""
    registry: Registry[Any] = Registry("loss", key="training.losses", homes={"home": "ups.grid"})
    registry("h1")(42)
    return registry


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the present folder."""
    (tmp_path / "mine_of_registry.py").write_text("class A:\n    value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_of_registry", raising=False)
    return "mine_of_registry"


def test_names_are_found_registered_or_in_a_module(things: Registry[Any], mine: str) -> None:
    assert things.find("h1") == 42
    assert things.find(f"{mine}:A.value") == 7
    assert things.names() == ["h1", "home"]


def test_an_unknown_name_lists_what_is_known_and_how_to_name_ones_own(things: Registry[Any]) -> None:
    with pytest.raises(ConfigError, match=r"training\.losses: expected one of h1, home") as caught:
        things.find("sobolev")
    assert caught.value.kind == "unknown_loss"
    assert "mylab.model:sobolev" in str(caught.value)
    for name in (":sobolev", ".mylab:sobolev"):  # which no module can be called
        with pytest.raises(ConfigError, match=r"mylab\.model:sobolev") as caught:
            things.find(name, allow_code=())
        assert caught.value.kind == "unknown_loss"
    with pytest.raises(ConfigError, match="no_such_module") as caught:
        things.find("no_such_module:f")
    assert caught.value.kind == "no_code"


def test_a_name_that_a_module_lacks_has_those_that_it_has_beside_it(things: Registry[Any], mine: str) -> None:
    with pytest.raises(ConfigError, match="has no attribute 'AA'; it has A") as caught:
        things.find(f"{mine}:AA")
    assert caught.value.kind == "no_code"


def test_code_that_a_file_names_is_imported_if_allowed_only(
    things: Registry[Any], mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=f"--allow-code {mine}") as caught:
        things.find(f"{mine}:A", allow_code=())
    assert caught.value.kind == "foreign_code"
    assert mine not in sys.modules
    assert things.find(f"{mine}:A", allow_code=mine).value == 7
    assert things.find(f"{mine}:A", allow_code=()).value == 7  # it is imported by now
    monkeypatch.delitem(sys.modules, mine)
    monkeypatch.setenv(ALLOWED_CODE, f"other,{mine}")
    assert things.find(f"{mine}:A", allow_code=()).value == 7
