"""The wheel with each extra, and the source distribution, installed in fresh environments; `make package`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import extra_features
import pytest
from extra_features import FEATURES
from test_missing_extras import FOR_USERS, OTHERS, PROJECT, ROOT, expected_with, extras_in, name_of

from tools.make_wheel import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CORE_MB = 100  # it is 78 MB (docs/results/log.md): room for another release of NumPy
CORE = {"ups-store", *(name_of(item) for item in PROJECT["dependencies"])}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel."""
    return make(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """The interpreter of an empty environment, which goes with the test: some hold gigabytes."""
    venv.create(tmp_path / "env", with_pip=False)
    yield tmp_path / "env" / "bin" / "python"
    shutil.rmtree(tmp_path / "env")


def install(python: Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--constraint", ROOT / "constraints.txt", requirement], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Away from the repository, and with nothing of it on the path."""
    where = python.parents[2]
    return subprocess.run([python, "-I", *arguments], capture_output=True, text=True, cwd=where, timeout=600)


def outcomes(python: Path) -> dict[str, str]:
    program = python.parents[2] / "extra_features.py"
    shutil.copy(extra_features.__file__, program)
    done = run(python, str(program))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_package_without_extras_is_small_and_has_the_core(
    kind: str, made: tuple[Path, Path], python: Path
) -> None:
    sdist, wheel = made
    install(python, str(wheel if kind == "wheel" else sdist))
    assert outcomes(python) == expected_with(None)
    listed = "import importlib.metadata as m; print(*(d.name for d in m.distributions()))"
    assert {name.replace("_", "-") for name in run(python, "-c", listed).stdout.split()} == CORE
    installed = (python.parents[1] / "lib").rglob("*")
    assert sum(path.stat().st_size for path in installed if path.is_file()) < CORE_MB * 10**6
    compiled = run(python, "-c", "from ups_store.system.runs import compiled; print(bool(compiled))")
    assert compiled.stdout == "True\n"


@pytest.mark.parametrize("extra", [*FOR_USERS, *OTHERS, "all"])
def test_features_of_an_extra_work_once_it_is_installed(
    extra: str, made: tuple[Path, Path], python: Path
) -> None:
    _, wheel = made
    install(python, f"ups-store[{extra}] @ {wheel.as_uri()}")
    there, found = extras_in(extra), outcomes(python)
    for name, (needed, _) in FEATURES.items():
        # What an extra's packages bring in turn may be enough for a feature that needs another.
        allowed = {"works", *(set(needed) - there)} if set(needed) - there else {"works"}
        assert found[name] in allowed, name


@pytest.mark.parametrize(
    ("program", "extra"),
    [("ups-store", "cli"), ("-m ups_store", "cli"), ("-m ups_store.build", "hdf5"), ("ups", "train")],
)
def test_commands_without_their_extra_say_it_in_one_sentence(
    program: str, extra: str, made: tuple[Path, Path], python: Path
) -> None:
    _, wheel = made
    install(python, str(wheel))
    script = python.parent / program
    command = [script, "--help"] if script.exists() else [python, *program.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=python.parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: \w+ isn't installed; pip install 'ups-store\[{extra}\]'\n", done.stderr)


def test_wheel_is_typed_and_serves_every_later_python(made: tuple[Path, Path]) -> None:
    _, wheel = made
    assert re.fullmatch(r"ups_store-[\d.]+-cp311-abi3-(manylinux|linux|macosx|win)\w*.*\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ups/py.typed", "ups_store/py.typed", "ups_store/_runs.abi3.so"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "tools", "docs")) or name.endswith(".c")]


def test_description_has_no_link_that_an_index_can_not_follow(made: tuple[Path, Path]) -> None:
    _, wheel = made
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    text = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert "License-Expression: Apache-2.0" in text
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []


def test_tests_of_the_source_distribution_run_from_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, _ = made
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("ups_store-*")
    command = [sys.executable, "-m", "pytest", "-q", "tests/store/format"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    assert [name for name in tracked if name and not (source / name).exists()] == []
