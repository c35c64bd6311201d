"""Shared caches by the verbs: push, pull, ls-remote, gc --remote; kills, races and damage (issue 24).

Small stores go to a folder, and to a bucket of a server in this process; the slow tests have a store of
several parts, and a real server.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from remote_stores import Counted, object_server, use_small_parts
from seaweed import BUCKET, serving_s3
from small_stores import build, flip, names_in

from ups_store.remote.shared_place import open_shared

pytestmark = pytest.mark.multi_process
NAME = "waves_train.zarr.zip"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of 400 KB."""
    return make_store_of(tmp_path, 2500)


@pytest.fixture
def large_store(tmp_path: Path) -> Path:
    """A store of 40 MB: three parts of an upload, and ten ranges."""
    return make_store_of(tmp_path, 250_000)


def make_store_of(folder: Path, width: int) -> Path:
    values = {"fields": np.random.default_rng(0).standard_normal((40, width)).astype(np.float32)}
    return build(folder / NAME, values, dims={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty shared cache."""
    place = tmp_path / "shared"
    place.mkdir()
    return place


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty shared cache: a folder, or a bucket where stores are uploaded in four parts."""
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        yield str(tmp_path / "shared")
        return
    use_small_parts(monkeypatch, 120_000)
    with object_server(monkeypatch):
        yield "s3://bucket/team"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty prefix in a real S3 server, whose variables are set."""
    with serving_s3(tmp_path_factory.mktemp("weed")) as variables, pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield f"s3://{BUCKET}"


def listed(place: object) -> list[dict[str, object]]:
    done = run_ups_store("ls-remote", place, "--json")
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["stores"])


def check_round_trip(store: Path, place: str, into: Path) -> None:
    """Push twice, list, and pull the same bytes."""
    for is_new in (True, False):
        done = run_ups_store("push", store, place, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["is_new"] is is_new
    (found,) = listed(place)
    assert (found["name"], found["nbytes"]) == (store.name, store.stat().st_size)
    done = run_ups_store("pull", place, str(found["config_hash"])[:8], "--into", into, "--json")
    assert done.exit_code == 0, done.output
    assert (into / store.name).read_bytes() == store.read_bytes()
    assert names_in(into) == [store.name], "nothing else is left"
    assert [each for each in names_in(store.parent) if each.endswith((".push", ".lock"))] == []


def test_store_goes_through_a_shared_cache(store: Path, place: str, tmp_path: Path) -> None:
    check_round_trip(store, place, tmp_path / "into")


@pytest.mark.slow
def test_store_goes_through_a_real_bucket(large_store: Path, bucket: str, tmp_path: Path) -> None:
    check_round_trip(large_store, f"{bucket}/a", tmp_path / "into")


@pytest.mark.slow
def test_without_keys_for_parts_a_store_is_uploaded_aside_and_copied(
    large_store: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Google's and Azure's buckets."""
    monkeypatch.setattr("ups_store.remote.shared_bucket.Signer.from_environment", lambda: None)
    check_round_trip(large_store, f"{bucket}/b", tmp_path / "into")
    cache, (entry,) = open_shared(f"{bucket}/b"), open_shared(f"{bucket}/b").entries()[0]
    monkeypatch.setattr("ups_store.remote.shared_bucket.is_there", lambda *args, **options: False)  # a race
    assert not cache.create(entry.key, large_store, replace=False, progress=Counted())
    assert cache.entries()[1] == []


def start(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ups_store", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def check_kills(store: Path, place: str, into: Path, *, num_kills: int, longest_s: float) -> None:
    """What is killed at random moments leaves nothing that is taken for whole, and another run ends it."""
    rng = random.Random(num_kills)
    for words in (("push", store, place), ("pull", place, "--into", into)):
        for _ in range(num_kills):
            process = start(*words)
            time.sleep(rng.uniform(0.3, longest_s))
            process.send_signal(signal.SIGKILL)
            process.wait()
            if (into / NAME).exists():
                assert (into / NAME).read_bytes() == store.read_bytes()
        done = run_ups_store(*words)
        assert done.exit_code == 0, done.output
    assert (into / NAME).read_bytes() == store.read_bytes()
    assert len(listed(place)) == 1


@pytest.mark.slow
def test_killed_pushes_and_pulls_of_a_folder(large_store: Path, folder: Path, tmp_path: Path) -> None:
    check_kills(large_store, str(folder), tmp_path / "into", num_kills=10, longest_s=1.5)
    assert open_shared(folder).entries()[1] == []


@pytest.mark.slow
def test_killed_pushes_and_pulls_of_a_bucket(large_store: Path, bucket: str, tmp_path: Path) -> None:
    check_kills(large_store, f"{bucket}/killed", tmp_path / "into", num_kills=8, longest_s=3.0)


def check_race(store: Path, place: str) -> None:
    racing = [
        subprocess.Popen(
            [sys.executable, "-m", "ups_store", "push", str(path), place, "--json"], stdout=subprocess.PIPE
        )
        for path in (store, _copy_of(store))
    ]
    answers = [json.loads(process.communicate()[0]) for process in racing]
    assert sorted(answer["is_new"] for answer in answers) == [False, True]
    assert len(listed(place)) == 1


def _copy_of(store: Path) -> Path:
    other = store.parent / "other machine" / store.name
    other.parent.mkdir()
    other.write_bytes(store.read_bytes())
    return other


def test_two_that_race_publish_once_in_a_folder(store: Path, folder: Path) -> None:
    check_race(store, str(folder))
    assert open_shared(folder).entries()[1] == []


@pytest.mark.slow
def test_two_that_race_publish_once_in_a_bucket(large_store: Path, bucket: str) -> None:
    check_race(large_store, f"{bucket}/raced")


def test_damaged_file_is_not_pulled_and_force_replaces_it(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    (file,) = folder.glob("*/*")
    flip(file, file.stat().st_size // 2)
    done = run_ups_store("pull", folder, "--into", tmp_path / "into")
    assert done.exit_code == 1
    assert "damaged" in done.stderr
    assert names_in(tmp_path / "into") == []
    assert run_ups_store("push", store, folder, "--force").exit_code == 0
    assert run_ups_store("pull", folder, "--into", tmp_path / "into").exit_code == 0


def test_damaged_store_is_not_pushed(store: Path, folder: Path) -> None:
    flip(store, store.stat().st_size // 2)
    assert run_ups_store("push", store, folder).exit_code == 1
    assert names_in(folder) == []


def test_pull_replaces_another_store_only_by_force(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    into = tmp_path / "into"
    into.mkdir()
    other = build(into / NAME, {"fields": np.zeros((2, 3))}, dims={}).read_bytes()
    assert run_ups_store("pull", folder, "waves_train", "--into", into).exit_code == 7
    assert (into / NAME).read_bytes() == other
    assert run_ups_store("pull", folder, "waves_train", "--into", into, "--force").exit_code == 0
    assert (into / NAME).read_bytes() == store.read_bytes()


def test_gc_removes_what_dead_pushes_left_and_old_stores(store: Path, folder: Path) -> None:
    run_ups_store("push", store, folder)
    (file,) = folder.glob("*/*")
    dead, alive = (file.with_name(f"{NAME}.{name}.pushing") for name in ("dead", "alive"))
    foreign = folder / "README"
    for path in (dead, alive, foreign):
        path.write_text("")
    long_ago_s = time.time() - 10 * 86400
    os.utime(dead, (long_ago_s, long_ago_s))
    done = run_ups_store("gc", "--remote", folder, "--delete", "--json")
    found = {Path(each["key"]).name: each["removed"] for each in map(json.loads, done.stdout.splitlines())}
    assert found == {dead.name: True, alive.name: False, "README": False}
    os.utime(file, (long_ago_s, long_ago_s))
    assert run_ups_store("gc", "--remote", folder, "--older-than", 20, "--delete").exit_code == 0
    assert file.exists()
    run_ups_store("gc", "--remote", folder, "--older-than", 5, "--delete")
    assert not file.exists()


def test_wrong_words_are_errors_that_say_what_there_is(store: Path, folder: Path, tmp_path: Path) -> None:
    run_ups_store("push", store, folder)
    done = run_ups_store("pull", folder, "wave_train")
    assert done.exit_code == 1
    assert "waves_train" in done.stderr
    assert run_ups_store("ls-remote", "ftp://host/a").exit_code == 2
    assert run_ups_store("ls-remote", tmp_path / "absent").exit_code == 1
    assert run_ups_store("gc", "--older-than", 3).exit_code == 2
