from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import blake3
import h5py
import numpy as np
import pytest
from build_helpers import Recorder, hash_of, settings, write_burgers
from pdebench_files import write_diffsorp

from ups_store.building.plan import DigestCache, DigestKind
from ups_store.errors import SourceError
from ups_store.sources import digest as digests

CACHE_NAME = ".source_digests.json"


def digest_of(
    path: Path, kind: DigestKind = "full", *, folder: Path | None = None, rehash: bool = False
) -> str:
    cache = DigestCache(path.parent if folder is None else folder, rehash=rehash)
    return cache.digest(path, kind, lambda nbytes: None)


def edit_in_place(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_burgers(tmp_path / "source.h5")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes are digested."""
    seen: list[str] = []
    for name in ("full_digest", "sampled_digest"):
        take = getattr(digests, name)

        def spy(path: Path, *rest, take=take):
            seen.append(path.name)
            return take(path, *rest)

        monkeypatch.setattr(digests, name, spy)
    return seen


# --- digests ------------------------------------------------------------------------------------------


def test_full_digest_is_blake3_of_all_bytes(source: Path) -> None:
    assert digest_of(source) == blake3.blake3(source.read_bytes()).hexdigest()


def test_sampled_digest_covers_first_and_last_block_and_size_and_structure(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.zeros(3_000_000, "u8")  # 64 blocks of 64 KiB are a sixth of it
    before = digest_of(path, "sampled")
    assert before == digest_of(path, "sampled", rehash=True)
    edit_in_place(path, path.stat().st_size - 1, b"\1")
    at_the_end = digest_of(path, "sampled")
    with path.open("ab") as raw:
        raw.write(b"\0")
    longer = digest_of(path, "sampled")
    with h5py.File(path, "a") as file:
        file.move("tensor", "tensos")
    renamed = digest_of(path, "sampled")
    assert len({before, at_the_end, longer, renamed}) == 4


def test_sampled_digest_reads_a_part_only(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["tensor"] = np.zeros(3_000_000, "u8")
        offset = file["tensor"].id.get_offset()
    before = digest_of(path, "sampled")
    edit_in_place(path, offset + 100_000, b"\1")  # between the first block and the second
    assert digest_of(path, "sampled") == before
    assert digest_of(path) != before


def test_sampled_digest_of_damaged_structure_is_a_source_error(tmp_path: Path) -> None:
    path = write_diffsorp(tmp_path / "a.h5")
    raw = path.read_bytes()
    path.write_bytes(raw[:96] + raw[96:].replace(b"TREE", b"TREF"))
    with pytest.raises(SourceError) as caught:
        digest_of(path, "sampled")
    assert (caught.value.kind, caught.value.path) == ("read_failed", str(path))


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_source_that_can_not_be_read_is_a_source_error(
    kind: DigestKind, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: object, *arguments: Any, **options: Any) -> int:
        if str(path) == str(source):
            raise OSError(5, "Input/output error")
        return opened(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match="Input/output error") as caught:
        digest_of(source, kind)
    assert (caught.value.kind, caught.value.path) == ("unreadable", str(source))


def test_source_that_changes_while_it_is_digested_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(path: Path, progress: object) -> str:
        edit_in_place(path, 0, b"\x89")
        os.utime(path, ns=(1, 1))
        return "digest"

    monkeypatch.setattr(digests, "full_digest", slowly)
    with pytest.raises(SourceError) as caught:
        digest_of(source)
    assert (caught.value.kind, caught.value.path) == ("source_changed", str(source))
    assert not (source.parent / CACHE_NAME).exists()


# --- the cache ----------------------------------------------------------------------------------------


def test_unchanged_file_is_not_read_again(source: Path, reads: list[str]) -> None:
    advanced: list[int] = []
    first = digest_of(source)
    again = DigestCache(source.parent).digest(source, "full", advanced.append)
    assert (again, reads) == (first, ["source.h5"])
    assert advanced == [source.stat().st_size]


def test_kinds_of_digests_are_kept_apart(source: Path, reads: list[str]) -> None:
    full, sampled = digest_of(source), digest_of(source, "sampled")
    assert full != sampled
    assert (digest_of(source), digest_of(source, "sampled")) == (full, sampled)
    assert len(reads) == 2


def test_links_to_a_file_share_its_digest(source: Path, reads: list[str]) -> None:
    link = source.with_name("link.h5")
    link.symlink_to(source.name)
    assert digest_of(source) == digest_of(link)
    assert len(reads) == 1


def test_file_changed_in_place_is_read_again(source: Path, reads: list[str]) -> None:
    before = digest_of(source)
    status = source.stat()
    edit_in_place(source, 2000, b"changed")
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # only ctime tells
    assert digest_of(source) != before
    assert len(reads) == 2


def test_touched_or_replaced_file_is_read_again_and_has_the_same_digest(
    source: Path, reads: list[str]
) -> None:
    before = digest_of(source)
    os.utime(source, ns=(1, 1))
    assert digest_of(source) == before
    content = source.read_bytes()
    source.unlink()
    source.write_bytes(content)
    assert digest_of(source) == before
    assert len(reads) == 3


def test_rehash_reads_the_file_whatever_is_known(source: Path, reads: list[str]) -> None:
    digest_of(source)
    path = source.parent / CACHE_NAME
    path.write_text(path.read_text().replace(digest_of(source), "wrong"))
    assert digest_of(source) == "wrong"
    assert digest_of(source, rehash=True) != "wrong"
    assert digest_of(source) != "wrong"
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"full:',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b"[" * 100_000,
        b'{"KEY": 3}',
        b'{"KEY": {"signature": 3}}',
    ],
)
def test_damaged_cache_is_replaced(damage: bytes, source: Path, reads: list[str]) -> None:
    before = digest_of(source)
    path = source.parent / CACHE_NAME
    path.write_bytes(damage.replace(b"KEY", f"full:{source}".encode()))
    assert digest_of(source) == before
    assert digest_of(source) == before
    assert len(reads) == 2
    assert list(json.loads(path.read_text())) == [f"full:{source}"]


def test_cache_entry_without_a_digest_is_replaced(source: Path) -> None:
    before = digest_of(source)
    path = source.parent / CACHE_NAME
    known = json.loads(path.read_text())
    del known[f"full:{source}"]["digest"]
    path.write_text(json.dumps(known))
    assert digest_of(source) == before


def test_folder_where_no_cache_can_be_written_is_no_error(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stores"
    (folder / CACHE_NAME).mkdir(parents=True)
    assert (
        digest_of(source, folder=folder) == digest_of(source, folder=tmp_path / "gone") == digest_of(source)
    )
    assert [path.name for path in folder.iterdir()] == [CACHE_NAME]


def test_cache_that_is_a_fifo_does_not_hang(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stores"
    folder.mkdir()
    os.mkfifo(folder / CACHE_NAME)
    assert digest_of(source, folder=folder) == digest_of(source)


# --- in the identity ----------------------------------------------------------------------------------


def test_kind_of_digest_is_recorded_in_the_identity(tmp_path: Path) -> None:
    write_burgers(tmp_path / "source" / "burgers1d_train.h5")
    hashes = {hash_of(settings(tmp_path, split="train", source_digest=kind)) for kind in ("full", "sampled")}
    assert len(hashes) == 2


def test_progress_covers_the_size_of_the_sources(tmp_path: Path) -> None:
    path = write_burgers(tmp_path / "a.h5")
    watcher = Recorder()
    watcher.stage("sources", path.stat().st_size, unit="bytes")
    DigestCache(tmp_path).digest(path, "full", watcher.advance)
    assert watcher.stages[-1][3] == path.stat().st_size
