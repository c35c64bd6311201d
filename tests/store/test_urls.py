"""A URL is refused as such wherever a path is taken, never made a name on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ups, run_ups_store
from small_stores import MakeStore

import ups
import ups_store
from ups_store.build import BuildConfig, load_config
from ups_store.check import save_preview
from ups_store.check.doctor import examine
from ups_store.convert import export_store
from ups_store.convert.import_pt import import_pt
from ups_store.errors import ConfigError, SpecError
from ups_store.packed.pack import pack_store
from ups_store.sources import open_source
from ups_store.sources.source_files import find_sources
from ups_store.sources.tasks import get_task
from ups_store.system.paths import check_local
from ups_store.writing.concat import concat_stores, split_store

URL = "s3://bucket/a.zarr.zip"
ARRAYS = {"u": ups_store.ArraySpec((1, 2), "float32")}
EXTRA = "ups-store[s3]"

READERS: dict[str, Callable[[Any], object]] = {
    "join": lambda url: ups_store.join(url, identity={}),
    "create": lambda url: ups_store.create(url, ARRAYS, identity={}),
    "doctor": examine,
    "import-pt": lambda url: import_pt(url, "out.zarr.zip"),
    "source": open_source,
    "sources": lambda url: find_sources(url, task=get_task("burgers1d"), split="train"),
    "checkpoint": ups.load,
}
WRITERS: dict[str, Callable[[Any, Any], object]] = {
    "export": lambda store, url: export_store(store, url, to="zarr"),
    "pack": pack_store,
    "concat": lambda store, url: concat_stores([store], url),
    "split": lambda store, url: split_store(store, [url], samples=[(0, 1)]),
    "preview": save_preview,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("as_given", [str, Path], ids=["text", "path"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_url_that_is_read_is_refused_with_the_extra_that_will_read_it(
    read: Callable[[Any], object], as_given: Callable[[str], object]
) -> None:
    with pytest.raises(SpecError) as caught:
        read(as_given(URL))
    assert (caught.value.kind, caught.value.path) == ("url", URL)
    assert EXTRA in str(caught.value)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_url_that_is_written_is_refused_and_nothing_is_made(
    write: Callable[[Any, Any], object], make_store: MakeStore
) -> None:
    with ups_store.open(make_store()) as store, pytest.raises(SpecError) as caught:
        write(store, URL)
    assert (caught.value.kind, caught.value.path) == ("url", URL)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "url", ["gs://b/a", "https://host/a", "memory://a", "simplecache::s3://b/a", "S3://b"]
)
def test_url_of_any_scheme_is_refused_as_text_and_as_path(url: str) -> None:
    for given in (url, Path(url)):
        with pytest.raises(SpecError) as caught:
            check_local(given)
        assert caught.value.path == url


def test_url_of_a_file_says_its_path() -> None:
    for given in ("file:///data/a", Path("file:///data/a"), "file:/data/a"):
        with pytest.raises(SpecError, match=r"say /data/a$") as caught:
            check_local(given)
        assert caught.value.path == "file:///data/a"


@pytest.mark.parametrize(
    "path", ["a.zarr.zip", "/a/s3:/b", "./s3://b", "c:/a", "12:30", "a:b/c", "", ":memory:"]
)
def test_path_that_is_no_url_is_taken(path: str) -> None:
    check_local(path)


def test_folder_that_looks_like_a_scheme_is_taken_once_it_is_there() -> None:
    Path("run:").mkdir()
    ups_store.create("run:/a.zarr.zip", ARRAYS, identity={}).close()
    assert Path("run:/a.zarr.zip.building").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "a.zarr.zip", "--repair", "https://host/a.yaml"),
        ("doctor", URL),
        ("doctor", "a.zarr.zip", "--salvage", URL),
        ("gc", "gs://bucket"),
        ("preview", "a.zarr.zip", "--out", URL),
        ("import-pt", "folder", URL),
        ("export", URL, "out", "--to", "zarr"),
        ("concat", "a.zarr.zip", "b.zarr.zip", URL),
        ("unpack", URL, "out"),
    ],
    ids=" ".join,
)
def test_verb_refuses_a_url_before_all_else(words: tuple[str, ...]) -> None:
    done = run_ups_store(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "this is a URL" in done.stderr
    assert any(f"error: {word}: " in done.stderr for word in words)


@pytest.mark.parametrize(
    "words", [("predict", URL, "--checkpoint", "a", "--out", "b"), ("train", "--config", URL)]
)
def test_verb_of_the_training_stack_refuses_a_url(words: tuple[str, ...]) -> None:
    done = run_ups(*words)
    assert done.exit_code == 2
    assert f"error: {URL}: this is a URL" in done.stderr


@pytest.mark.parametrize("key", ["data.stage_dir", "cache.dir"])
def test_configuration_names_the_key_that_has_a_url(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}: expected a path on this machine, found s3://b/a;"
    ) as caught:
        load_config(overrides=["data.tasks=burgers1d", f"{key}=s3://b/a"])
    assert caught.value.kind == "url"


def test_configuration_does_not_include_a_url() -> None:
    Path("a.yaml").write_text("include: https://host/b.yaml\n")
    with pytest.raises(SpecError, match=r"https://host/b\.yaml: this is a URL"):
        load_config(Path("a.yaml"))


@pytest.mark.parametrize("url", ["memory://a", "simplecache::s3://b/a", "s3://bucket", "ftp://h/a"])
def test_open_refuses_a_url_that_names_no_object(url: str) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.open(url)
    assert (caught.value.kind, caught.value.path) == ("url", url)


def test_files_of_a_configuration_are_no_urls() -> None:
    settings: BuildConfig = load_config(
        overrides=["data.tasks=burgers1d", "data.root=.", "data.files=s3://b/*.h5"]
    )
    with pytest.raises(SpecError, match=r"s3://b/\*\.h5: this is a URL"):
        find_sources(settings.data.root, task=get_task("burgers1d"), split="train", files=settings.data.files)
