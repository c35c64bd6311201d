"""Without what an extra brings, all else works, and what needs it names the extra; a command ends with 2."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import extra_features
import pytest
from extra_features import FEATURES

import ups
import ups_store
from ups_store.errors import MissingExtraError, check_installed, needs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = (
    "cli",
    "hdf5",
    "zarr",
    "bfloat16",
    "pack",
    "plot",
    "torch",
    "train",
    "xarray",
)  # and those of the next line
OTHERS = ("wandb", "tensorboard", "torchao", "neuraloperator", "tune", "s3", "dask")
MODULE_OF = {"ml-dtypes": "ml_dtypes", "pyyaml": "yaml", "neuraloperator": "neuralop"}
BROUGHT_BY_OTHERS = {
    "cli": {"pydantic"},
    "zarr": {"numcodecs", "yaml"},
    "tune": {"yaml"},
}  # by what the extra brings


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found
    return found[0]


def extras_in(extra: str) -> set[str]:
    """An extra, and those that it is made of."""
    inner = [item for item in EXTRAS[extra] if item.startswith("ups-store[")]
    names = [name for item in inner for name in item.partition("[")[2].rstrip("]").split(",")]
    return {extra}.union(*(extras_in(name) for name in names))


def modules_of(extra: str) -> set[str]:
    """What is importable with an extra."""
    names = extras_in(extra)
    packages = {name_of(item) for name in names for item in EXTRAS[name]} - {"ups-store"}
    indirect = (BROUGHT_BY_OTHERS.get(name, set()) for name in names)
    return {MODULE_OF.get(name, name) for name in packages}.union(*indirect)


def run_with(extra: str | None, *flags: str) -> dict[str, str]:
    """Outcomes of features in an environment as one extra makes it."""
    there = modules_of(extra) if extra else set()
    missing = {module for name in (*FOR_USERS, *OTHERS) for module in modules_of(name)} - there
    without = [flag for name in sorted(missing) for flag in ("--without", name)]
    command = [sys.executable, extra_features.__file__, *without, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def expected_with(extra: str | None) -> dict[str, str]:
    """Which features work with one extra, and what the others name: the first that is missing."""
    there = extras_in(extra) if extra else set()
    wanted = {name: needed for name, (needed, _) in FEATURES.items()}
    return {
        name: next((one for one in needed if one not in there), "works") for name, needed in wanted.items()
    }


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(extra, marks=() if extra in (None, "zarr") else pytest.mark.slow, id=extra or "none")
        for extra in (None, *FOR_USERS)
    ],
)
def test_features_work_with_their_extra_and_name_it_without(extra: str | None) -> None:
    assert run_with(extra) == expected_with(extra)


@pytest.mark.multi_process
def test_every_module_is_imported_by_the_core_or_names_an_extra() -> None:
    outcomes = run_with(None, "--modules")
    assert len(outcomes) > 150
    assert set(outcomes.values()) == {"works", "cli", "hdf5", "zarr", "torch", "train", "xarray"}
    assert outcomes["ups_store.read.open"] == outcomes["ups_store.writing.create"] == "works"


def test_extras_are_those_that_are_promised() -> None:
    assert {*FOR_USERS, *OTHERS} == extras_in("all") - {"all"}
    assert set(EXTRAS) == {*FOR_USERS, *OTHERS, "vast", "all", "dev", "bench", "docs", "interop"}
    assert {name_of(item) for item in PROJECT["dependencies"]} == {"crc32c", "numpy", "rfc8785", "zlib-ng"}


def test_every_dependency_has_one_version_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    groups = (*FOR_USERS, *OTHERS, "dev", "bench", "docs")
    wanted = {name_of(item) for group in groups for item in EXTRAS[group]}
    assert {name.lower().replace("_", "-") for name in wanted} - {"ups-store"} <= pinned


def test_missing_extra_error_tells_its_module_and_extra_also_after_pickling() -> None:
    error = MissingExtraError.of("h5py", extra="hdf5")
    same = pickle.loads(pickle.dumps(error))
    assert (same.module, same.extra, same.kind, same.exit_code) == ("h5py", "hdf5", "missing_extra", 2)
    assert str(same) == str(error) == "h5py isn't installed; pip install 'ups-store[hdf5]'"
    assert isinstance(error, ImportError)
    assert isinstance(error, ups_store.StoreError)


def test_needs_passes_on_what_no_extra_mends() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ups_store\.nothing"), needs("hdf5"):
        import ups_store.nothing  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name") as caught, needs("hdf5"):
        from json import nothing  # type: ignore[attr-defined]  # noqa: F401
    assert not isinstance(caught.value, MissingExtraError)


def test_check_installed_names_the_first_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("json", "numpy", extra="torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError) as caught:
        check_installed("numpy", "torch", "nowhere", extra="torch")
    assert caught.value.module == "torch"


def test_page_of_installing_lists_every_extra_for_users() -> None:
    table = (ROOT / "docs/install.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() if row for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(EXTRAS.keys() - {"bench", "dev", "docs", "interop"})


def test_both_packages_know_their_version() -> None:
    assert ups.__version__ == ups_store.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", ups_store.__version__)


@pytest.mark.multi_process
def test_import_of_the_package_and_its_version_import_nothing_else() -> None:
    code = "import sys, ups_store; ups_store.__version__; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split()
    assert [name for name in imported if name.startswith(("ups", "numpy"))] == [
        "ups_store.lazy",
        "ups_store",
    ]
