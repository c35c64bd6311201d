"""The examples of docs/guides/layouts.md: their YAML builds what it says from files as it draws them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from build_helpers import build
from pdebench_files import coordinate, values
from well_files import CHANNELS_2D, write_well_2d

import ups_store
from ups_store.building.config import BuildConfig, load_config
from ups_store.errors import SourceError
from ups_store.sources.conventions import CONVENTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "guides" / "layouts.md").read_text()
CONFIGS = REPOSITORY / "ups" / "configs"
EXAMPLES = {path.stem: path for path in (CONFIGS / "own").glob("*.yaml")}
EXAMPLES["active_matter"] = CONFIGS / "the_well" / "active_matter.yaml"
N = 10


def configure(name: str, folder: Path) -> BuildConfig:
    """The example with its folders below `folder`."""
    flags = {"data.root": str(folder / "data"), "cache.dir": str(folder / "cache")}
    return load_config(EXAMPLES[name], flags=flags, overrides=["latent.encoder=none"])


def write_one_file(root: Path) -> None:
    for nu in ("0.001", "1e-4"):
        with h5py.File(root / f"vorticity_nu{nu}.h5", "w") as file:
            file["sol"] = values(f"sol{nu}", (N, 6, 5, 4))
            file["f"] = values(f"f{nu}", (N, 6, 5))
            file["re"] = np.arange(N)
            file["mesh/x"], file["mesh/y"] = coordinate(6), coordinate(5)


def write_groups(root: Path) -> None:
    for split in ("train", "val", "test"):
        (root / split).mkdir()
        with h5py.File(root / split / "a.h5", "w") as file:
            file["grid/x"] = coordinate(8)
            file.attrs["g"] = 9.81
            for i in (1, 2, 10):
                run = file.create_group(f"runs/run_{i}")
                run["height"] = values(f"{split}h{i}", (4, 8))
                run["flow/momentum"] = values(f"{split}m{i}", (4, 2, 8))
                run["t"] = coordinate(4)
                run.attrs["friction"] = i / 10
                run["flow"].attrs["seed"] = i


def write_the_well(root: Path) -> None:
    for split in ("train", "valid", "test"):
        write_well_2d(root / "active_matter" / "data" / split / "a.hdf5", seed=split)


WRITERS: dict[str, Callable[[Path], None]] = {
    "one_file": write_one_file,
    "group_per_sample": write_groups,
    "active_matter": write_the_well,
}


def written(name: str, folder: Path) -> BuildConfig:
    (folder / "data").mkdir()
    WRITERS[name](folder / "data")
    return configure(name, folder)


def opened(folder: Path, name: str) -> ups_store.Store:
    return ups_store.open(folder / "cache" / f"{name}.zarr.zip")


def test_page_shows_every_example_as_it_is() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert sorted(blocks) == sorted(path.read_text() for path in EXAMPLES.values())
    assert EXAMPLES.keys() == WRITERS.keys()


def test_page_lists_every_layout() -> None:
    assert set(re.findall(r"`([a-z0-9-]+)`", PAGE.split("## The Well")[0])) >= {
        each.name for each in CONVENTIONS
    }


def test_example_of_one_file_builds_what_the_page_says(tmp_path: Path) -> None:
    build(written("one_file", tmp_path))
    with opened(tmp_path, "vorticity2d_train") as train, opened(tmp_path, "vorticity2d_test") as test:
        assert (len(train), len(test)) == (16, 2)
        assert train["nu"].tolist() == [1e-4] * 8 + [0.001] * 8
        assert train["reynolds"].tolist() == [*range(8), *range(8)]
        np.testing.assert_array_equal(test["reynolds"], [9, 9])
        np.testing.assert_array_equal(train.constants["t"], [0, 0.5, 1, 1.5])
        expected = values("sol0.001", (N, 6, 5, 4)).transpose(0, 3, 2, 1)[..., None]
        np.testing.assert_array_equal(train["fields"][8:], expected[:8])
        np.testing.assert_array_equal(train["forcing"][8:], values("f0.001", (N, 6, 5)).swapaxes(1, 2)[:8])
        assert train.attrs["boundary"] == {"x": "periodic", "y": "periodic"}


def test_example_of_groups_builds_what_the_page_says(tmp_path: Path) -> None:
    build(written("group_per_sample", tmp_path))
    for split in ("train", "val", "test"):
        with opened(tmp_path, f"channel1d_{split}") as store:
            assert store.attrs["channels"] == ["height", "hu", "hv"]
            assert store["friction"].tolist() == [0.1, 0.2, 1.0]
            assert store["seed"].tolist() == [1, 2, 10]
            assert store["gravity"].tolist() == [9.81] * 3
            np.testing.assert_array_equal(store["fields"][2, ..., 0], values(f"{split}h10", (4, 8)))
            np.testing.assert_array_equal(
                store["fields"][2, ..., 1:], values(f"{split}m10", (4, 2, 8)).swapaxes(1, 2)
            )


def test_example_of_the_well_builds_what_the_page_says(tmp_path: Path) -> None:
    build(written("active_matter", tmp_path))
    with opened(tmp_path, "active_matter_val") as store:
        assert store.attrs["channels"] == list(CHANNELS_2D)


def test_error_on_the_page_is_the_one_that_is_raised(tmp_path: Path) -> None:
    config = written("group_per_sample", tmp_path)
    misspelled = tmp_path / "build.yaml"
    example = (REPOSITORY / "ups" / "configs" / "own" / "group_per_sample.yaml").read_text()
    misspelled.write_text(example.replace("dataset: height", "dataset: hight"))
    flags = {"data.root": str(config.data.root), "cache.dir": str(config.cache.dir)}
    changed = load_config(misspelled, flags=flags)
    with pytest.raises(SourceError) as caught:
        build(changed)
    shown = PAGE.split("### When something is missing")[1].split("```")[1]
    start, end = " ".join(shown.split()).split(": found ")
    assert str(caught.value).removeprefix(f"{config.data.root}/").startswith(start + ": found grid/x (8,), ")
    assert str(caught.value).endswith(end.split("...; ")[1])
