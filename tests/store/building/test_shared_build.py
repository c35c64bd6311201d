"""Builds with a shared cache: pulled, or built and pushed; what is wrong there is a warning (issue 24)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from build_helpers import Recorder, build, settings, write_burgers
from file_server import closed_port, serving, use_as_s3
from object_server import s3_environment, serving_objects
from small_stores import flip, names_in

import ups_store
from ups_store.building.config import load_config
from ups_store.errors import ConfigError

NAME = "burgers1d_train.zarr.zip"


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Folders of two machines with the same source, beside an empty folder `shared`."""
    (tmp_path / "shared").mkdir()
    for name in ("one", "other"):
        write_burgers(tmp_path / name / "source" / "1D_Burgers_Sols_Nu0.01.hdf5")
    return [tmp_path / "one", tmp_path / "other"]


def run(
    machine: Path, remote: Path | str | None = None, **keys: object
) -> tuple[dict[str, object], list[str]]:
    """Build the training split there; what became of it, and the notes."""
    watcher = Recorder()
    place = str(machine.parent / "shared") if remote is None else str(remote)
    config = settings(machine, split="train", cache_remote=place, cache_remote_timeout_s=20, **keys)
    report = build(config, watcher)
    return report.stores[0].to_json(), watcher.notes


def shared_file(machines: list[Path]) -> Path:
    (found,) = (machines[0].parent / "shared").glob(f"*/{NAME}")
    return found


def test_first_machine_pushes_and_second_pulls_the_same_bytes(machines: list[Path]) -> None:
    done, notes = run(machines[0])
    assert (done["pushed"], done["pulled"], done["reused"]) == (True, False, False)
    assert shared_file(machines).parent.name == done["config_hash"]
    assert any("pushed" in note for note in notes)
    done, notes = run(machines[1])
    assert (done["pushed"], done["pulled"], done["num_committed"]) == (False, True, 0)
    one, other = (machine / "cache" / NAME for machine in machines)
    assert one.read_bytes() == other.read_bytes() == shared_file(machines).read_bytes()
    assert ".pulls" not in names_in(machines[1] / "cache")
    done, notes = run(machines[1])
    assert (done["pushed"], done["pulled"], done["reused"]) == (False, False, True)


def test_store_that_is_here_already_is_pushed(machines: list[Path]) -> None:
    build(settings(machines[0], split="train"))
    done, _ = run(machines[0])
    assert (done["reused"], done["pushed"]) == (True, True)


def test_push_of_a_build_says_that_something_else_is_there(machines: list[Path]) -> None:
    run(machines[0])
    file = shared_file(machines)
    ups_store.save(machines[0] / "other.zarr.zip", x=np.arange(5.0))
    (machines[0] / "other.zarr.zip").replace(file)
    done, notes = run(machines[0])
    assert (done["reused"], done["pushed"]) == (True, False)
    (warning,) = [note for note in notes if note.startswith("warning: ")]
    assert "another store of the same identity is there" in warning


@pytest.mark.parametrize("place", ["absent", "a file"])
def test_remote_that_is_not_there_is_a_warning(machines: list[Path], place: str) -> None:
    (machines[0].parent / "a file").write_text("")
    done, notes = run(machines[0], machines[0].parent / place)
    assert (done["pushed"], done["num_committed"]) == (False, 16)
    (warning,) = [note for note in notes if note.startswith("warning: ")]
    assert "not pulled" in warning
    assert "left alone" in warning


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_a_warning(machines: list[Path]) -> None:
    (machines[0].parent / "shared").chmod(0o555)
    done, notes = run(machines[0])
    assert not done["pushed"]
    assert any("not pushed" in note for note in notes)


@pytest.mark.parametrize("damage", ["payload", "end", "empty"])
def test_damaged_object_is_a_warning_and_the_store_is_built(machines: list[Path], damage: str) -> None:
    run(machines[0])
    file = shared_file(machines)
    if damage == "payload":
        flip(file, file.stat().st_size // 2)
    else:
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 1)
    broken = file.read_bytes()
    done, notes = run(machines[1])
    assert (done["pulled"], done["pushed"], done["num_committed"]) == (False, False, 16)
    assert any(note.startswith("warning: ") and "not pulled" in note for note in notes)
    assert file.read_bytes() == broken, "nothing there is ever overwritten"
    one, other = (machine / "cache" / NAME for machine in machines)
    assert one.read_bytes() == other.read_bytes()
    assert not (machines[1] / "cache" / ".pulls").exists()


def test_object_of_another_identity_is_not_believed(machines: list[Path]) -> None:
    run(machines[0])
    file = shared_file(machines)
    write_burgers(machines[1] / "source" / "1D_Burgers_Sols_Nu0.01.hdf5", num_samples=21)
    wanted = str(build(settings(machines[1], split="train")).stores[0].config_hash)
    file.parent.rename(file.parent.with_name(wanted))
    (machines[1] / "cache" / NAME).unlink()
    done, notes = run(machines[1])
    assert (done["pulled"], done["config_hash"]) == (False, wanted)
    assert any("made from something else" in note for note in notes)


def test_pull_replaces_a_stale_store_as_a_build_does(machines: list[Path]) -> None:
    run(machines[0])
    build(settings(machines[1], split="train", limit=3))
    done, _ = run(machines[1])
    assert done["pulled"]
    with ups_store.open(machines[1] / "cache" / NAME) as store:
        assert len(store) == 16


def test_packed_partitions_are_pulled_together(machines: list[Path]) -> None:
    pytest.importorskip("numcodecs")
    keys = {"cache_codec": "blosc", "cache_partitions": 2}
    assert run(machines[0], **keys)[0]["pushed"]
    assert len(list((machines[0].parent / "shared").glob("*/*.zip"))) == 2
    done, _ = run(machines[1], **keys)
    assert (done["pulled"], done["num_files"], done["codec"]) == (True, 2, "blosc")
    with (
        ups_store.open(str(done["path"])) as other,
        ups_store.open(machines[0] / "cache" / "burgers1d_train-*-of-00002.zarr.zip") as one,
    ):
        everything = np.arange(len(one))
        np.testing.assert_array_equal(one.gather(everything)["fields"], other.gather(everything)["fields"])


def test_pulled_mapped_store_is_packed_where_that_is_configured(machines: list[Path]) -> None:
    pytest.importorskip("numcodecs")
    run(machines[0])
    done, _ = run(machines[1], cache_codec="blosc")
    assert (done["pulled"], done["codec"]) == (True, "blosc")


def hanging_server() -> socket.socket:
    """A server that takes connections and never answers."""
    return socket.create_server(("127.0.0.1", 0), backlog=64)


@pytest.mark.multi_process  # a transfer that hangs is ended with its process
@pytest.mark.parametrize(("is_down", "num_workers"), [(True, 0), (False, 1)])
def test_server_that_is_down_or_hangs_is_a_warning_within_the_deadline(
    machines: list[Path], monkeypatch: pytest.MonkeyPatch, is_down: bool, num_workers: int
) -> None:
    pytest.importorskip("obstore", reason="the extra [s3]")
    with hanging_server() as server:
        port = closed_port() if is_down else server.getsockname()[1]
        for name, value in s3_environment(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        watcher = Recorder()
        keys = {"cache_remote": "s3://bucket/team", "cache_remote_timeout_s": 1.0}
        report = build(settings(machines[0], split="train", num_workers=num_workers, **keys), watcher)
    assert report.stores[0].num_committed == 16
    assert len([note for note in watcher.notes if note.startswith("warning: ")]) == 1


def test_read_only_bucket_is_a_warning(machines: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        use_as_s3(server, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        done, notes = run(machines[0], "s3://bucket/team", num_workers=1)
    assert (done["pushed"], done["num_committed"]) == (False, 16)
    assert len([note for note in notes if note.startswith("warning: ") and "not pushed" in note]) == 1


def test_web_server_is_pulled_from_and_nothing_is_pushed(machines: list[Path]) -> None:
    pytest.importorskip("obstore", reason="the extra [s3]")
    with serving_objects() as server:
        done, notes = run(machines[0], f"{server.url}/team")
        assert (done["pushed"], [note for note in notes if "warning" in note]) == (False, [])
        data = (machines[0] / "cache" / NAME).read_bytes()
        server.objects[f"team/{done['config_hash']}/{NAME}"] = data
        done, _ = run(machines[1], f"{server.url}/team")
    assert done["pulled"]
    assert (machines[1] / "cache" / NAME).read_bytes() == data


def test_wrong_place_is_an_error_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"cache\.remote: expected s3://"):
        load_config(overrides=["data.tasks=burgers1d", "data.root=.", "cache.remote=ftp://a/b"])
