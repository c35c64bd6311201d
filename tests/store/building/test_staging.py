"""Builds of sources that are copied or fetched first: the same stores, whole copies, and what is missing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from build_helpers import Recorder, build, hash_of, settings, write_burgers
from command_line import run_ups_store
from file_server import FileServer, serving, use_as_s3
from tiny_disk import DISK_BYTES, mounted

from ups_store.build import BuildConfig, load_config, stage_sources
from ups_store.building.staging import Sources
from ups_store.building.stores import explain_all
from ups_store.errors import ConfigError, DiskFullError, SourceError
from ups_store.remote.fetch import LocalFile
from ups_store.sources.reader_process import Call, Reader
from ups_store.sources.tasks import get_task

BURGERS = get_task("burgers1d")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as running:
        yield running


def published(server: FileServer, path: Path, *, under: str = "") -> str:
    """Serve a file; returns its sha256."""
    data = path.read_bytes()
    server.files[f"{under}{path.name}"] = data
    return hashlib.sha256(data).hexdigest()


def fetched(folder: Path, server: FileServer, **keys: Any) -> BuildConfig:
    return settings(folder, root=server.url, **keys)


def names(copies: list[Path]) -> list[str]:
    return sorted(copy.name for copy in copies)


def test_a_staged_source_gives_the_same_store(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=4)
    plain = settings(tmp_path, split="train")
    staged = settings(
        tmp_path, split="train", stage_dir=str(tmp_path / "disk"), cache_dir=str(tmp_path / "b")
    )
    watcher = Recorder()
    one, other = build(plain), build(staged, watcher)
    assert one.stores[0].config_hash == other.stores[0].config_hash
    name, total, unit, done = watcher.stages[0]
    size = (tmp_path / "source" / "burgers1d_train.h5").stat().st_size
    assert (name, total, unit, done) == ("staging 1 source", size, "bytes", size)
    assert names(stage_sources(staged)) == ["burgers1d_train.h5"]


def test_a_staged_copy_is_used_until_its_source_changes(tmp_path: Path) -> None:
    source = write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=4)
    config = settings(tmp_path, split="train", stage_dir=str(tmp_path / "disk"))
    (copy,) = stage_sources(config)
    inode = copy.stat().st_ino
    assert stage_sources(config) == [copy]
    assert copy.stat().st_ino == inode
    write_burgers(source, num_samples=5)
    assert stage_sources(config) == [copy]
    assert copy.stat().st_ino != inode
    assert copy.read_bytes() == source.read_bytes()


def test_several_sources_are_fetched_side_by_side_by_readers(tmp_path: Path, server: FileServer) -> None:
    for split in ("train", "valid", "test"):
        published(server, write_burgers(tmp_path / f"burgers1d_{split}.h5", num_samples=2))
    config = fetched(tmp_path, server, num_workers=2)
    watcher = Recorder()
    report = build(config, watcher)
    assert {store.split: store.num_samples for store in report.stores} == {"train": 2, "val": 2, "test": 2}
    assert watcher.stages[0][0] == "staging 3 sources"
    assert watcher.stages[0][1] == watcher.stages[0][3] == sum(map(len, server.files.values()))
    copies = list((tmp_path / "cache" / "sources").rglob("*.h5"))
    assert names(copies) == ["burgers1d_test.h5", "burgers1d_train.h5", "burgers1d_valid.h5"]


def test_train_is_needed_and_others_are_skipped_with_a_note(tmp_path: Path, server: FileServer) -> None:
    published(server, write_burgers(tmp_path / "burgers1d_test.h5", num_samples=2))
    with pytest.raises(SourceError) as caught:
        build(fetched(tmp_path, server))
    assert caught.value.kind == "no_source"
    assert "burgers1d train" in str(caught.value)
    published(server, write_burgers(tmp_path / "burgers1d_train.h5", num_samples=2))
    watcher = Recorder()
    report = build(fetched(tmp_path, server), watcher)
    assert [store.split for store in report.stores] == ["train", "test"]
    assert [note for note in watcher.notes if note.startswith("skipped burgers1d val")]


def test_published_files_are_shared_out_and_need_no_server_once_their_digest_is_known(
    tmp_path: Path, server: FileServer
) -> None:
    source = write_burgers(tmp_path / "source" / "1D_Burgers_Sols_Nu0.01.hdf5", num_samples=20)
    digest = published(server, source)
    url = f"{server.url}/{source.name}#sha256={digest}"
    config = settings(tmp_path, files=[url], split="train", stage_dir=str(tmp_path / "disk"))
    assert hash_of(config) == hash_of(settings(tmp_path, split="train"))
    server.files.clear()
    server.asked.clear()
    assert hash_of(config) == hash_of(settings(tmp_path, split="train"))
    assert server.asked == []


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path, server: FileServer) -> None:
    with pytest.raises(SourceError) as caught:
        stage_sources(fetched(tmp_path, server, files=["burgers1d_train.h5"]))
    assert (caught.value.kind, caught.value.path) == ("missing_file", f"{server.url}/burgers1d_train.h5")


def test_patterns_need_a_listing(tmp_path: Path, server: FileServer) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_sources(fetched(tmp_path, server, files=["burgers1d_train_*.h5"]))
    assert caught.value.kind == "no_listing"


@pytest.mark.parametrize("files", [None, ["**/burgers1d_train_*.h5"]])
def test_a_bucket_is_looked_through_as_a_folder_is(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch, files: list[str] | None
) -> None:
    use_as_s3(server, monkeypatch)
    for number in (10, 9):
        source = write_burgers(tmp_path / "source" / f"burgers1d_train_{number}.h5", num_samples=2)
        published(server, source, under="bucket/pde/a/")
    server.files["bucket/pde/readme.txt"] = b"x"
    keys = {"split": "train"} | ({"files": files} if files else {})
    config = settings(tmp_path, root="s3://bucket/pde", **keys)
    found = Sources(config).of(BURGERS, "train")
    assert [source.path.name for source in found] == ["burgers1d_train_9.h5", "burgers1d_train_10.h5"]
    assert hash_of(config) == hash_of(settings(tmp_path, split="train"))


def test_a_pattern_that_matches_nothing_in_a_bucket_is_an_error(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    published(server, write_burgers(tmp_path / "burgers1d_train.h5", num_samples=2), under="bucket/pde/")
    with pytest.raises(SourceError) as caught:
        stage_sources(settings(tmp_path, root="s3://bucket/pde", files=["other/*.h5", "burgers1d_*.h5"]))
    assert (caught.value.kind, caught.value.path) == ("missing_file", "s3://bucket/pde/other/*.h5")


def test_a_bucket_is_listed_once_for_all_splits(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    for split in ("train", "valid", "test"):
        source = write_burgers(tmp_path / f"burgers1d_{split}.h5", num_samples=2)
        published(server, source, under="bucket/pde/")
    listings: list[str] = []
    really = Call.run

    def counted(call: Call, reader: Reader) -> object:
        if call.subject == "its files":
            listings.append(call.path)
        return really(call, reader)

    monkeypatch.setattr(Call, "run", counted)
    copies = stage_sources(settings(tmp_path, root="s3://bucket/pde"))
    assert names(copies) == ["burgers1d_test.h5", "burgers1d_train.h5", "burgers1d_valid.h5"]
    assert listings == ["s3://bucket/pde"]


def test_a_pattern_in_a_url_needs_its_folder_as_root(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.files") as caught:
        stage_sources(settings(tmp_path, files=["https://host/pde/burgers1d_*.h5"]))
    assert caught.value.kind == "no_listing"


def test_files_of_this_machine_and_of_a_server_make_one_split(tmp_path: Path, server: FileServer) -> None:
    here = write_burgers(tmp_path / "here" / "burgers1d_train_1.h5", num_samples=2)
    there = write_burgers(tmp_path / "there" / "burgers1d_train_2.h5", num_samples=2)
    published(server, there)
    config = fetched(tmp_path, server, split="train", files=[str(here), there.name])
    found = Sources(config).of(BURGERS, "train")
    assert [source.path.name for source in found] == [here.name, there.name]
    assert found[0].path.read_bytes() == here.read_bytes()
    assert not any(source.path in (here, there) for source in found)


def test_a_copy_that_is_changed_right_after_it_was_made_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=2)
    config = settings(tmp_path, split="train", stage_dir=str(tmp_path / "disk"))
    really = Call.run

    def overtaken(call: Call, reader: Reader) -> object:
        fetched = really(call, reader)
        _, version, folder, _ = call.arguments
        (folder / version.name).write_bytes(b"by another program")
        return fetched

    monkeypatch.setattr(Call, "run", overtaken)
    with pytest.raises(SourceError, match="changed or removed meanwhile") as caught:
        stage_sources(config)
    assert caught.value.kind == "source_changed"


def test_a_source_that_goes_between_two_looks_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=2)
    config = settings(tmp_path, split="train", stage_dir=str(tmp_path / "disk"))
    monkeypatch.setattr(LocalFile, "look", lambda original: None)
    with pytest.raises(SourceError) as caught:
        stage_sources(config)
    assert (caught.value.kind, caught.value.path) == ("missing_file", str(source))


def test_a_dry_run_copies_nothing(tmp_path: Path, server: FileServer) -> None:
    source = write_burgers(tmp_path / "source" / "burgers1d_train.h5", num_samples=4)
    config = settings(tmp_path, split="train", stage_dir=str(tmp_path / "disk"))
    (explained,) = explain_all(config, watcher=Recorder())
    assert explained.action == "build"
    assert list(explained.plan["sources"]) == [str(source)]
    published(server, source)
    with pytest.raises(SourceError) as caught:
        explain_all(fetched(tmp_path, server, split="train"), watcher=Recorder())
    assert caught.value.kind == "not_fetched"
    assert not (tmp_path / "disk").exists()
    assert not (tmp_path / "cache" / "sources").exists()


def test_no_room_is_known_before_anything_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source" / "burgers1d_train.h5"
    write_burgers(source, num_samples=2)
    with h5py.File(source, "r+") as file:
        file["more than the disk has"] = np.ones(2 * DISK_BYTES, "u1")
    with mounted(tmp_path / "disk") as disk:
        config = settings(tmp_path, split="train", stage_dir=str(disk / "copies"))
        with pytest.raises(DiskFullError) as caught:
            stage_sources(config)
        assert os.listdir(disk / "copies") == []
    assert caught.value.needed_bytes == source.stat().st_size


def test_files_that_sources_need_beside_them_can_not_be_left_behind(tmp_path: Path) -> None:
    config = settings(tmp_path, stage_dir=str(tmp_path / "disk"), follow_external=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        stage_sources(config)
    assert caught.value.kind == "not_together"


def test_command_fetches_without_building(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    published(server, write_burgers(tmp_path / "burgers1d_train.h5", num_samples=2))
    words = ("build", "--tasks", "burgers1d", "--root", server.url, "--stage-dir", "disk", "--stage-only")
    done = run_ups_store(*words, "--num-workers", "0")
    assert done.exit_code == 0, done.stderr
    (copy,) = (tmp_path / "disk").rglob("*.h5")
    assert done.stdout == f"{copy.relative_to(tmp_path)}\n"
    assert not (tmp_path / "cache").exists()


def test_copies_can_not_lie_where_they_would_be_taken_for_sources(tmp_path: Path) -> None:
    config = settings(tmp_path, stage_dir=str(tmp_path / "source" / "copies"))
    with pytest.raises(ConfigError) as caught:
        stage_sources(config)
    assert (caught.value.kind, caught.value.path) == ("not_together", str(tmp_path / "source" / "copies"))


def test_nothing_to_stage_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.stage_dir"):
        stage_sources(settings(tmp_path))


def test_a_remote_root_stays_as_it_was_said() -> None:
    config = load_config(flags={"data.tasks": "burgers1d", "data.root": "s3://bucket/a"})
    assert config.data.root == "s3://bucket/a"
    assert config.stage_dir == Path("cache/sources")
    assert BuildConfig.model_validate_json(config.model_dump_json()).data.root == "s3://bucket/a"
    assert load_config(flags={"data.tasks": "burgers1d", "data.root": "a"}).data.root == Path("a")


@pytest.mark.parametrize("root", ["ftp://host/a", "b2:bucket/pdebench", "file:///data", 3])
def test_roots_that_can_not_be_are_refused(root: object) -> None:
    with pytest.raises(ConfigError, match=r"data\.root"):
        load_config(flags={"data.tasks": "burgers1d", "data.root": root})


def test_an_rclone_remote_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    flags = {"data.tasks": "burgers1d", "data.root": "b2:bucket/pdebench"}
    with pytest.raises(ConfigError, match=r"data\.root.*say s3://bucket/pdebench.*AWS_ENDPOINT_URL"):
        load_config(flags=flags)
    for work in (stage_sources, build):
        with pytest.raises(ConfigError, match=r"say s3://bucket/x\.h5") as caught:
            work(settings(tmp_path, files=["b2:bucket/x.h5"]))  # type: ignore[operator]
        assert caught.value.kind == "rclone"


def test_command_of_the_page_on_migrating_fetches_from_what_speaks_s3(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "migrate.md"
    rows = [
        row for row in page.read_text().splitlines() if row.startswith("| `scripts/fetch_datasets_b2.sh`")
    ]
    command = next(row for row in rows if "--stage-only" in row).split("`")[3]
    settings, words = command.split(" ups-store ")
    use_as_s3(server, monkeypatch)
    assert {each.partition("=")[0] for each in settings.split()} >= {"AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"}
    published(server, write_burgers(tmp_path / "burgers1d_train.h5", num_samples=2), under="BUCKET/FOLDER/")
    words = words.replace("...", "burgers1d").replace('"$PDEBENCH_ROOT"', str(tmp_path / "disk"))
    done = run_ups_store(*words.split(), "--num-workers", "0")
    assert done.exit_code == 0, done.stderr
    assert [copy.name for copy in (tmp_path / "disk").rglob("*.h5")] == ["burgers1d_train.h5"]
