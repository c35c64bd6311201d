"""docs/guides/own-data.md: its arrays become a store, and its configuration trains on that."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from operator_runs import build_here

from ups.config import load_config
from ups.data.splits import open_fields
from ups.pipeline.training import run_all
from ups_store.build import load_config as load_build_config
from ups_store.errors import SourceError
from ups_store.sources import open_source

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "own-data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's stores and configuration, in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ups.pipeline.training.run_process", build_here)
    for code in blocks("python"):
        exec(compile(code, "snippet", "exec"), {})
    Path("mine.yaml").write_text(blocks("yaml")[0])
    return Path("mine.yaml")


def test_page_trains_on_its_arrays(config: Path) -> None:
    size = ["operator.width=16", "operator.depths=[1,1]", "operator.num_heads=2"]
    overrides = [*size, "stages.operator.steps=2", "training.max_val_frames=8"]
    report = run_all(load_config(config, overrides=overrides), config_path=config, overrides=overrides)
    assert report["stages"]["operator"]["steps"] == 2
    fields = open_fields(load_build_config(config), "waves", "train", source="store")
    assert (fields.info.channels, fields.info.boundary) == (("u",), {"x": "periodic"})
    assert fields.info.parameters == ("speed",)
    assert fields.info.domain_lengths == {"x": 1.0}
    np.testing.assert_allclose(fields.times(), 0.1 * np.arange(6))
    samples = np.arange(len(fields.num_steps))
    x, t, speed = fields.info.coordinates["x"], 0.3, fields.parameters(samples)["speed"]
    first, later = (fields.read("fields", samples, np.full(len(samples), step))[..., 0] for step in (0, 3))
    moved = np.fft.irfft(
        np.fft.rfft(first) * np.exp(-2j * np.pi * np.outer(speed * t, np.arange(17))), n=len(x)
    )
    np.testing.assert_allclose(later, moved, atol=1e-5)


def test_page_s_other_store_says_itself_what_it_holds(config: Path) -> None:
    config.write_text(f"data: {{task: noise, root: .}}\n{blocks('yaml')[1]}")
    fields = open_fields(load_build_config(config), "noise", "val", source="hdf5")
    assert (fields.info.channels, fields.info.boundary) == (("u",), {"x": "periodic"})
    assert fields.info.parameters == ("nu",)
    assert fields.num_steps.tolist() == [6] * 2  # validation has every second one


def test_reduced_store_has_every_second_point_and_step(config: Path) -> None:
    build = load_build_config(config, overrides=["data.reduce_space=2", "data.reduce_time=3"])
    whole, reduced = (
        open_fields(each, "waves", "test", source="hdf5") for each in (load_build_config(config), build)
    )
    samples = np.arange(4)
    np.testing.assert_array_equal(
        reduced.read("fields", samples, np.ones(4, int)), whole.read("fields", samples, np.full(4, 3))[:, ::2]
    )


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("fields=[{dataset: v, axes: sample time x}]", "missing_dataset"),
        ("fields=[{dataset: u, axes: time sample x}]", "wrong_rank"),
        ("coordinates.x=t", "wrong_length"),
        ("coordinates.x=z", "missing_dataset"),
        ("parameters.other={attribute: none}", "bad_parameter"),
    ],
)
def test_what_a_store_lacks_is_told_with_what_it_has(config: Path, key: str, kind: str) -> None:
    task = load_build_config(config, overrides=[f"tasks.waves.layout.{key}"]).get_task("waves")
    with pytest.raises(SourceError) as caught:
        open_source("waves.zarr.zip", task=task)
    assert caught.value.kind == kind
    assert str(caught.value.path) == "waves.zarr.zip"
