"""Configurations that a package ships are found by name, wherever the command is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups_store.building.config import load_config
from ups_store.building.shipped import find_config, near_config, shipped_configs
from ups_store.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, without a checkout around it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "./demo", "configs/demo.yaml", "pdebench/burgers1d"])
def test_shipped_configuration_is_found_by_name(name: str) -> None:
    assert load_config(Path(name)).data.tasks == ("burgers1d",)


def test_file_of_one_s_own_comes_first_and_a_folder_of_the_name_does_not(elsewhere: Path) -> None:
    (elsewhere / "demo").mkdir()
    assert load_config(Path("demo")).data.tasks == ("burgers1d",)
    (elsewhere / "demo.yaml").write_text("data: {tasks: cfd1d}\n")
    assert load_config(Path("demo.yaml")).data.tasks == ("cfd1d",)


def test_relative_paths_of_a_shipped_file_are_below_the_present_folder() -> None:
    assert load_config(Path("demo"), overrides=["latent.encoder=none"]).cache.dir == Path("demo/cache")


def test_own_file_includes_a_shipped_one_and_a_shipped_one_its_neighbour(elsewhere: Path) -> None:
    (elsewhere / "runs").mkdir()
    (elsewhere / "runs" / "mine.yaml").write_text("include: demo\ndata: {limit: 3}\n")
    config = load_config(elsewhere / "runs" / "mine.yaml")
    assert (config.data.reduce_space, config.data.limit) == (4, 3)
    assert load_config(Path("small_burgers")).data.reduce_space == 4


def test_misspelled_name_names_the_nearest(elsewhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path("dmo"))
    assert caught.value.hint == "did you mean demo?"
    (elsewhere / "run.yaml").touch()
    assert near_config(Path("rnu.yaml")) == "run.yaml"
    assert find_config(Path("nothing-like-it")) == Path("nothing-like-it")


def test_every_shipped_file_is_a_build_s_configuration_too() -> None:
    names = shipped_configs()
    assert len(names) > 15
    for name in names:
        assert load_config(Path(name), overrides=["latent.encoder=none"]).data.tasks
