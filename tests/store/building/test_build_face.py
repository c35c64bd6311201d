"""`ups_store.build` as callers from Python see it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, settings, write_burgers

import ups_store
import ups_store.build
import ups_store.check
import ups_store.sources
from ups_store.build import BuildConfig, BuildRank, build_all, explain, open_build

REPOSITORY = Path(__file__).parents[3]
FACES = {"ups_store", "ups_store.build", "ups_store.check", "ups_store.errors"}
FACES |= {"ups_store.sources", "ups_store.torch"}


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    write_burgers(tmp_path / "source" / BURGERS)
    return settings(tmp_path, split="train")


def test_import_of_the_face_brings_nothing_that_takes_time() -> None:
    code = (
        "import sys, ups_store.build, ups_store.sources\n"
        "print(*({'numpy', 'pydantic', 'h5py', 'torch', 'yaml', 'typing'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], text=True, capture_output=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("face", [ups_store, ups_store.build, ups_store.check, ups_store.sources])
def test_every_public_name_is_there_and_documented(face: object) -> None:
    names = face.__all__  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(face, name)
        assert not callable(value) or value.__doc__, name


def test_module_is_found_beside_what_an_older_checkout_left(tmp_path: Path) -> None:
    left = tmp_path / "ups_store" / "build" / "__pycache__"
    shutil.copytree(
        REPOSITORY / "ups_store", tmp_path / "ups_store", ignore=shutil.ignore_patterns("__pycache__")
    )
    left.mkdir(parents=True)
    (left / "command.cpython-311.pyc").write_bytes(b"of then")
    code = "import ups_store.build as face; print(face.__file__, face.BuildConfig.__name__)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "ups_store" / "build.py"), "BuildConfig"], done.stderr


def test_scripts_import_public_faces_only() -> None:
    imported = set()
    for path in (REPOSITORY / "scripts").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    behind = {name for name in imported if name.startswith("ups_store") and name not in FACES}
    assert behind <= {"ups_store.console"}


def test_build_step_by_step_is_the_command_s_store(config: BuildConfig, tmp_path: Path) -> None:
    (result,) = build_all(
        settings(tmp_path, split="train", cache_dir=str(tmp_path / "all")), watcher=Recorder()
    ).stores
    with open_build(config, "burgers1d", "train") as build:
        assert explain(build).action == "build"
        assert not build.path.parent.exists()
        build.begin()
        assert (build.is_reused, build.is_finished) == (False, False)
        build.fill(np.array([3, 5]))
        assert not {3, 5} & set(build.missing().tolist())
        assert len(build.missing()) == build.num_samples - 2
        build.fill()
        store = build.finish()
    with store:
        assert store.path.read_bytes() == result.path.read_bytes()


def test_build_that_was_left_goes_on_with_what_is_committed(config: BuildConfig) -> None:
    with open_build(config, "burgers1d", "train") as build:
        build.begin()
        build.fill(np.arange(4))
    with open_build(config, "burgers1d", "train") as build:
        assert explain(build).action == "continue"
        build.begin()
        assert len(build.missing()) == build.num_samples - 4
        build.finish().close()
    assert build.num_committed == build.num_samples - 4


def test_store_that_is_being_built_is_locked(config: BuildConfig) -> None:
    with open_build(config, "burgers1d", "train") as builder:
        builder.begin()
        with pytest.raises(ups_store.BuildLockedError):
            open_build(config, "burgers1d", "train").begin()


def test_build_in_memory_is_shared_and_leaves_no_file(config: BuildConfig) -> None:
    first = open_build(config, "burgers1d", "train", rank=BuildRank(0, 2))
    second = open_build(config, "burgers1d", "train", rank=BuildRank(1, 2))
    first.begin_in_memory()
    second.begin_in_memory(str(first.path_in_memory))
    second.fill()
    first.fill()
    assert len(first.missing()) == 0
    with first, second, first.finish() as store:
        assert len(store) == first.num_samples
        second.finish().close()
    assert not first.path.exists()


def test_samples_are_read_without_a_store(config: BuildConfig) -> None:
    build = open_build(config, "burgers1d", "train")
    numbers = np.concatenate([batch.samples for batch in build.read()])
    assert numbers.tolist() == list(range(build.num_samples))
    assert not build.path.parent.exists()
