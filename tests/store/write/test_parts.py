"""Stores of unknown lengths: parts, merging them, sets that grow, and continuing after an interruption."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ragged_stores
from command_line import run_ups_store
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_stores import IDENTITY, check_same, ragged_specs, ragged_values

import ups_store
from ups_store import ArraySpec, PartsWriter
from ups_store.check.garbage import find_garbage, remove_garbage
from ups_store.system import files
from ups_store.write import part_files, parts

LENGTHS = (3, 0, 700, 1, 40, 5, 2, 0)
N = len(LENGTHS)
VALUES = ragged_values(LENGTHS)
CONSTANTS = {"x": np.linspace(0, 1, 9)}
SPECS = {
    name: replace(spec, shape=(None, *spec.shape[1:]), lengths=None)
    for name, spec in ragged_specs(VALUES).items()
}


def samples(first: int = 0, end: int = N) -> Iterator[dict[str, Any]]:
    for i in range(first, end):
        yield {name: value[i] for name, value in VALUES.items()}


def begin(path: Path, **options: Any) -> PartsWriter:
    options = {"identity": IDENTITY, "constants": CONSTANTS, "attrs": {"by": "test"}, **options}
    return ups_store.write_parts(path, SPECS, **{"buffer_bytes": 10_000, **options})


def directly(path: Path) -> bytes:
    """The bytes of the store that `create` makes of the same samples."""
    options: dict[str, Any] = {"identity": IDENTITY, "constants": CONSTANTS, "attrs": {"by": "test"}}
    return ragged_stores.build_ragged(path, VALUES, **options).read_bytes()


@pytest.mark.parametrize("buffer_bytes", [1, 10_000, 1 << 30], ids=["each", "some", "all"])
def test_merged_parts_are_the_store_that_create_makes(tmp_path: Path, buffer_bytes: int) -> None:
    """Spec 15.5: byte for byte, however the samples were spread over parts; nothing else is left."""
    path = tmp_path / "a.zarr.zip"
    with begin(path, buffer_bytes=buffer_bytes) as writer:
        writer.extend(samples())
        assert writer.num_samples == N
        assert writer.finish() == path
    assert path.read_bytes() == directly(tmp_path / "b.zarr.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr.zip", "b.zarr.zip"]
    with ups_store.open(path) as store:
        assert store.verify().ok


def test_store_of_no_samples_is_made_of_no_parts(tmp_path: Path) -> None:
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.finish()
    with ups_store.open(tmp_path / "a.zarr.zip") as store:
        assert len(store) == 0
        assert store.verify().ok


def test_fixed_arrays_alone_are_written_without_their_number(tmp_path: Path) -> None:
    fields = np.random.default_rng(0).random((7, 1500))
    arrays = {"u": ArraySpec((None, 1500), "float64"), "i": ArraySpec((None,), "int8")}
    writer = ups_store.write_parts(tmp_path / "a.zarr.zip", arrays, identity={}, buffer_bytes=30_000)
    with writer:
        for i in range(7):
            writer.add({"u": fields[i], "i": np.int8(i)})
        writer.finish()
    with ups_store.open(tmp_path / "a.zarr.zip") as store:
        np.testing.assert_array_equal(store["u"], fields)
        assert store["i"].tolist() == list(range(7))


def test_samples_are_copied_when_they_are_added(tmp_path: Path) -> None:
    memory = np.zeros((2, 3), np.float32)
    with ups_store.write_parts(
        tmp_path / "a.zarr.zip", {"u": ArraySpec((None, None, 3), "float32")}, identity={}
    ) as writer:
        for i in range(3):
            memory[:] = i
            writer.add({"u": memory[: i + 1 if i < 2 else 2]})
        writer.finish()
    with ups_store.open(tmp_path / "a.zarr.zip") as store:
        assert [float(u[0, 0]) for u in store["u"]] == [0, 1, 2]


@pytest.mark.parametrize("stop", [0, 1, 5, N])
def test_interrupted_run_continues_behind_its_finished_parts(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path) as writer:
        writer.extend(samples(0, stop))  # and then the process dies
    with begin(path, buffer_bytes=20_000) as writer:
        assert writer.num_found <= stop
        assert stop == 0 or writer.num_found or stop < 3
        writer.extend(samples())
        writer.finish()
    assert path.read_bytes() == directly(tmp_path / "b.zarr.zip")


def test_function_of_the_first_sample_is_asked_for_what_is_missing_only(tmp_path: Path) -> None:
    path, asked = tmp_path / "a.zarr.zip", []

    def source(first: int) -> Iterator[dict[str, Any]]:
        asked.append(first)
        return samples(first)

    with begin(path) as writer:
        writer.extend(samples(0, 6))
    with begin(path) as writer:
        found = writer.num_found
        writer.extend(source)
        writer.finish()
    assert asked == [found]
    assert found > 0
    assert path.read_bytes() == directly(tmp_path / "b.zarr.zip")


def test_iterable_that_does_not_repeat_itself_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path) as writer:
        writer.extend(samples())
    with begin(path) as writer, pytest.raises(ups_store.IdentityMismatchError) as error:
        writer.extend(reversed(list(samples())))
    assert error.value.kind == "not_repeated"
    with begin(path) as writer:
        writer.extend(samples(0, 1))
        with pytest.raises(ups_store.IdentityMismatchError):
            writer.finish()
    with begin(path, on_mismatch="restart") as writer:
        assert writer.num_found > 0  # of the same identity: they are kept
        writer.extend(samples())
        writer.finish()


def test_iterable_of_other_samples_begins_again_with_restart(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path, buffer_bytes=1) as writer:
        writer.extend(samples(4, 7))
    with begin(path, on_mismatch="restart") as writer:
        assert writer.num_found == 3
        writer.extend(samples())
        assert writer.num_found == 0
        writer.finish()
    assert path.read_bytes() == directly(tmp_path / "b.zarr.zip")


def test_copies_that_killed_merges_left_are_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "a.zarr.zip", tmp_path / f"b.zarr.zip.building.{'0' * 16}"
    left = tmp_path / f"a.zarr.zip.building.{'0' * 16}"
    for file in (left, other):
        file.write_bytes(b"a part of a copy")
    with begin(path) as writer:
        writer.extend(samples())
        writer.finish()
    assert (left.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize("options", [{"path": ":memory:"}, {"buffer_bytes": -5}], ids=str)
def test_write_parts_refuses_memory_and_negative_buffers(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ups_store.SpecError, match="a file, and a number of bytes"):
        begin(**{"path": tmp_path / "a.zarr.zip", **options})
    assert list(tmp_path.iterdir()) == []


def test_name_of_a_manifest_is_no_target_of_other_verbs(tmp_path: Path) -> None:
    manifest = tmp_path / "a.zarr.json"
    with begin(manifest, merge=False) as writer:
        writer.extend(samples())
        writer.finish()
    before = manifest.read_bytes()
    for source in (manifest, tmp_path / "a.parts" / "00000.zarr.zip"):
        done = run_ups_store("concat", source, manifest, "--force")
        assert done.exit_code == 2
        assert "set's manifest" in done.stderr
    assert manifest.read_bytes() == before


def test_manifest_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zarr.json").mkdir()
    os.mkfifo(tmp_path / "b.zarr.json")
    for name in ("a.zarr.json", "b.zarr.json"):
        with pytest.raises(ups_store.FormatError) as caught:
            ups_store.open(tmp_path / name)
        assert caught.value.kind == "not_a_file"
        with pytest.raises(ups_store.FormatError) as caught:
            begin(tmp_path / name)
        assert caught.value.kind == "not_a_file"


@pytest.mark.parametrize("operation", ["create_folder", "create_new", "open_existing"])
def test_folder_that_takes_no_parts_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files, operation, refuse)
    with pytest.raises(ups_store.CommitError, match="not begun") as caught:
        begin(tmp_path / "a.zarr.zip")
    assert caught.value.path == str(tmp_path / "a.parts")


@pytest.mark.parametrize("name", ["a.parts", "a.parts/lock"])
def test_link_to_nothing_in_the_place_of_parts_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ups_store.CommitError, match="a link there points to nothing"):
        begin(tmp_path / "a.zarr.zip")


def test_set_that_another_process_finished_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is a set is looked at under the lock of its parts."""

    def overtaken(folder: Path) -> int:
        monkeypatch.undo()
        _make_set(tmp_path / "a.zarr.zip")
        return part_files.locked(folder)

    monkeypatch.setattr(parts, "locked", overtaken)
    with pytest.raises(ups_store.SpecError) as caught:
        begin(tmp_path / "a.zarr.zip")
    assert caught.value.kind == "exists"


@pytest.mark.parametrize("merge", [True, False])
def test_no_lock_is_left_behind(tmp_path: Path, merge: bool) -> None:
    with begin(tmp_path / "a.zarr.zip", merge=merge):
        assert (tmp_path / "a.parts" / "lock").exists()
    assert list(tmp_path.iterdir()) == []  # nor the folder: nothing is in it
    with begin(tmp_path / "a.zarr.zip", merge=merge) as writer:
        writer.extend(samples())
        writer.finish()
    assert not (tmp_path / "a.parts" / "lock").exists()
    assert (tmp_path / "a.parts").exists() is not merge


def test_number_of_samples_is_counted_and_not_given(tmp_path: Path) -> None:
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.write_parts(tmp_path / "a.zarr.zip", {"u": ArraySpec((7, 3), "int8")}, identity={})
    assert (caught.value.kind, caught.value.array, caught.value.found) == ("shape", "u", (7, 3))
    assert "ups_store.create" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_append_to_a_read_only_set_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "a.zarr.json"
    with begin(manifest, merge=False) as writer:
        writer.extend(samples())
        writer.finish()
    manifest.chmod(0o444)
    with pytest.raises(ups_store.ReadOnlyError):
        ups_store.append(manifest)
    ups_store.append(manifest, on_mismatch="restart").close()


def test_set_of_more_parts_than_files_may_be_open_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "a.zarr.json"
    with begin(manifest, merge=False, buffer_bytes=1) as writer:
        writer.extend(samples())
        writer.finish()
    opened, real = [], os.open

    def open_few(path: Any, *args: Any, **options: Any) -> int:
        opened.append(path)
        if len(opened) > 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", open_few)
    with pytest.raises(ups_store.StoreError, match="ulimit -n") as caught:
        ups_store.open(manifest)
    assert caught.value.kind == "open_files"


def test_parts_of_another_identity_are_refused_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path) as writer:
        writer.extend(samples())
    with pytest.raises(ups_store.IdentityMismatchError):
        begin(path, identity={"kind": "others"})
    with begin(path, identity={"kind": "others"}, on_mismatch="restart") as writer:
        assert writer.num_found == 0
        assert not list((tmp_path / "a.parts").glob("*.zip"))


def test_damaged_part_is_refused_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path) as writer:
        writer.extend(samples())
    part = tmp_path / "a.parts" / "00000.zarr.zip"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ups_store.FormatError):
        begin(path)
    with begin(path, on_mismatch="restart") as writer:
        assert writer.num_found == 0


def test_parts_have_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with begin(path), pytest.raises(ups_store.BuildLockedError):
        begin(path)
    begin(path).close()


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        ({"u": [1.0]}, "arrays"),
        ([1.0], "arrays"),
        ({"u": np.zeros((2, 2), np.int8), "i": 0}, "dtype"),
        ({"u": np.zeros((2, 3), np.float32), "i": 0}, "shape"),
        ({"u": np.float32(1), "i": 0}, "shape"),
    ],
)
def test_add_refuses_samples_of_other_arrays(tmp_path: Path, sample: Any, kind: str) -> None:
    arrays = {"u": ArraySpec((None, None, 2), "float32"), "i": ArraySpec((None,), "int8")}
    writer = ups_store.write_parts(tmp_path / "a.zarr.zip", arrays, identity={})
    with writer, pytest.raises(ups_store.SpecError) as error:
        writer.add(sample)
    assert error.value.kind == kind
    with pytest.raises(ups_store.StoreClosedError):
        writer.add(sample)


def test_write_parts_refuses_lengths_and_missing_folders(tmp_path: Path) -> None:
    arrays = {"u": ArraySpec((None, None), "int8", lengths=[1])}
    with pytest.raises(ups_store.SpecError):
        ups_store.write_parts(tmp_path / "a.zarr.zip", arrays, identity={})
    with pytest.raises(ups_store.StoreNotFoundError):
        begin(tmp_path / "nowhere" / "a.zarr.zip")
    with pytest.raises(ups_store.SpecError):
        begin(tmp_path / "a.zarr.zip", on_mismatch="no")


def _make_set(path: Path, end: int = N) -> Path:
    with begin(path, merge=False) as writer:
        writer.extend(samples(0, end))
        return writer.finish()


@pytest.mark.parametrize("access", ["map", "pread"])
def test_set_is_read_like_one_store(tmp_path: Path, access: Any) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip")
    assert manifest == tmp_path / "a.zarr.json"
    with ups_store.open(manifest, access=access, verify="touch") as store:
        assert isinstance(store, ups_store.StoreSet)
        assert len(store) == N
        assert len(store.partitions) > 1
        assert store.identity == IDENTITY
        check_same(store.gather([7, 0, 2, 2, 5]), VALUES, [7, 0, 2, 2, 5])
        check_same(store.gather([]), VALUES, [])
        batch = store.gather([4, 0, 1], ["points", "label"], ragged="padded")
        assert batch["points"].shape == (3, 40, 3)
        assert batch["points.lengths"].tolist() == [40, 3, 0]
        np.testing.assert_array_equal(store.sample(-3)["points"], VALUES["points"][5])
        assert store.verify().ok
        assert "8 samples" in repr(store)
        with pytest.raises(ups_store.SpecError):
            _ = store["points"]


def test_append_adds_to_a_set_and_open_stores_keep_it_as_it_was(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip", 5)
    with ups_store.open(manifest) as before:
        with ups_store.append(manifest) as writer:
            writer.extend(samples(5))
            assert writer.finish() == manifest
        assert len(before) == 5
        check_same(before.gather(range(5)), VALUES, range(5))
        with ups_store.open(manifest) as after:
            assert after.config_hash == before.config_hash
            check_same(after.gather(range(N)), VALUES, range(N))
            np.testing.assert_array_equal(after["x"], CONSTANTS["x"])


def test_append_of_samples_made_from_something_else_names_both(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip", 5)
    with ups_store.append(manifest, identity={"kind": "more"}) as writer:
        writer.extend(samples(5))
        writer.finish()
    with ups_store.open(manifest) as store:
        assert store.identity == {
            "kind": "set",
            "parents": list(dict.fromkeys(part.config_hash for part in store.partitions)),
        }
        assert len(store.identity["parents"]) == 2
        check_same(store.gather(range(N)), VALUES, range(N))


def test_interrupted_append_changes_nothing_and_can_be_continued(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip", 5)
    before = manifest.read_bytes()
    with ups_store.append(manifest, buffer_bytes=1) as writer:
        writer.extend(samples(5, 7))
    assert manifest.read_bytes() == before
    with ups_store.append(manifest) as writer:
        assert writer.num_found == 2
        writer.extend(samples(5))
        writer.finish()
    with ups_store.open(manifest) as store:
        check_same(store.gather(range(N)), VALUES, range(N))


def test_append_of_nothing_leaves_the_manifest(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip")
    before = manifest.read_bytes()
    with ups_store.append(manifest) as writer:
        writer.finish()
    assert manifest.read_bytes() == before


def test_set_of_no_samples_can_be_opened_and_appended_to(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip", 0)
    with ups_store.open(manifest) as store:
        assert len(store) == 0
    with ups_store.append(manifest) as writer:
        writer.extend(samples())
        writer.finish()
    with ups_store.open(manifest) as store:
        check_same(store.gather(range(N)), VALUES, range(N))


def test_write_parts_never_replaces_a_set(tmp_path: Path) -> None:
    _make_set(tmp_path / "a.zarr.zip")
    with pytest.raises(ups_store.SpecError) as error:
        begin(tmp_path / "a.zarr.zip")
    assert error.value.kind == "exists"


def test_missing_or_replaced_part_is_refused_by_name(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip")
    there = sorted((tmp_path / "a.parts").glob("*.zip"))
    there[0].replace(there[1])
    with pytest.raises(ups_store.StoreNotFoundError) as missing:
        ups_store.open(manifest)
    assert missing.value.path == str(there[0])
    there[1].rename(there[0])
    with pytest.raises(ups_store.StoreNotFoundError):
        ups_store.open(manifest)
    ragged_stores.build_ragged(there[1], VALUES, identity={"kind": "stranger"})
    with pytest.raises(ups_store.FormatError) as replaced:
        ups_store.open(manifest)
    assert replaced.value.kind == "set"


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b" ",
        lambda raw: raw.replace(b'"1.0"', b'"1.1"'),
        lambda raw: raw.replace(b"ups_store_set", b"ups_store_sat"),
        lambda raw: raw.replace(b"00001.zarr.zip", b"00000.zarr.zip"),
        lambda raw: raw.replace(b"00001.zarr.zip", b"../b.zarr.zip"),
        lambda raw: raw.replace(b'"count":', b'"count": '),
        lambda raw: raw.replace(b'"count":', b'"num":'),
        lambda raw: b'{"format_version":"1.0","kind":"ups_store_set","parts":[]}',
        lambda raw: re.sub(rb'"count":[0-9]+', b'"count":%d' % 2**53, raw),
        lambda raw: re.sub(rb'"count":[0-9]+', b'"count":true', raw),
        lambda raw: re.sub(rb'"count":[0-9]+', b'"count":1e999', raw),
        lambda raw: b"[" * 10_000,
        lambda raw: b"[]",
    ],
)
def test_manifest_of_any_other_text_is_refused(tmp_path: Path, change: Any) -> None:
    """Spec 15.3: canonical, known keys, names of files in the folder of parts only."""
    manifest = _make_set(tmp_path / "a.zarr.zip")
    raw = change(manifest.read_bytes())
    assert raw != manifest.read_bytes()
    manifest.write_bytes(raw)
    with pytest.raises(ups_store.FormatError) as error:
        ups_store.open(manifest)
    assert (error.value.clause, error.value.path) == ("15.3", str(manifest))


def test_gc_lists_and_removes_parts_that_no_manifest_names(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip", 5)
    with ups_store.append(manifest, buffer_bytes=1) as writer:
        writer.extend(samples(5, 7))
        assert not [g for g in find_garbage(tmp_path) if g.kind == "part"]  # it is being written
    found = find_garbage(tmp_path)
    assert [(g.kind, g.num_samples) for g in found] == [("part", 1), ("part", 1)]
    assert all(remove_garbage(garbage) for garbage in found)
    assert not find_garbage(tmp_path)
    with ups_store.open(manifest) as store:
        assert store.verify().ok


def test_gc_lists_parts_of_an_interrupted_build(tmp_path: Path) -> None:
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.extend(samples())
    found = find_garbage(tmp_path)
    assert found
    assert {garbage.kind for garbage in found} == {"part"}
    assert all(remove_garbage(garbage) for garbage in found)
    assert not files.exists(tmp_path / "a.parts")


def test_gc_lists_the_lock_of_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / "a.parts").mkdir()
    (tmp_path / "a.parts" / "lock").touch()
    done = run_ups_store("gc", tmp_path, "--delete")
    assert "lock: lock of parts that no process writes, 0 B, written just now, removed" in done.stdout
    assert list(tmp_path.iterdir()) == []
    with begin(tmp_path / "a.zarr.zip"):
        assert find_garbage(tmp_path) == []


def test_commands_take_a_set_like_a_store(tmp_path: Path) -> None:
    manifest = _make_set(tmp_path / "a.zarr.zip")
    assert run_ups_store("verify", manifest).exit_code == 0
    assert " parts ·" in run_ups_store("info", manifest).stdout
    assert run_ups_store("concat", manifest, tmp_path / "b.zarr.zip").exit_code == 0
    with ups_store.open(tmp_path / "b.zarr.zip") as store:
        check_same(store.gather(range(N)), VALUES, range(N))


def test_open_of_a_store_that_is_still_in_parts_says_so(tmp_path: Path) -> None:
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.extend(samples())
    with pytest.raises(ups_store.StoreNotFoundError) as error:
        ups_store.open(tmp_path / "a.zarr.zip")
    assert "parts" in str(error.value.hint)


def test_merge_never_replaces_another_programs_file(tmp_path: Path) -> None:
    (tmp_path / "a.zarr.zip").write_text("mine")
    with pytest.raises(ups_store.FormatError) as error:
        begin(tmp_path / "a.zarr.zip")
    assert error.value.kind == "foreign"
    assert (tmp_path / "a.zarr.zip").read_text() == "mine"


def test_copy_between_file_systems_goes_without_the_kernels_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    path = tmp_path / "a.zarr.zip"
    with begin(path) as writer:
        writer.extend(samples())
        writer.finish()
    assert path.read_bytes() == directly(tmp_path / "b.zarr.zip")


def test_part_that_is_cut_while_it_is_merged_leaves_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zarr.zip"
    monkeypatch.setattr(files, "copy_range", lambda *arguments: 0)
    with begin(path) as writer:
        writer.extend(samples())
        with pytest.raises(ups_store.TruncatedError):
            writer.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parts"]


def test_failing_copy_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.extend(samples())
        with pytest.raises(ups_store.DiskFullError):
            writer.finish()
    monkeypatch.undo()
    with begin(tmp_path / "a.zarr.zip") as writer:
        writer.extend(samples())
        writer.finish()
    assert (tmp_path / "a.zarr.zip").read_bytes() == directly(tmp_path / "b.zarr.zip")


def test_forked_child_does_not_keep_the_parts_locked(tmp_path: Path) -> None:
    writer = begin(tmp_path / "a.zarr.zip")
    pid = os.fork()
    if not pid:
        os._exit(0 if writer.fd < 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.close()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parts_of_any_size_interrupted_anywhere_give_the_store_that_create_makes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 30), max_size=8), label="lengths")
    rows = [np.arange(n, dtype=np.int16) for n in lengths]
    folder = tmp_path_factory.mktemp("any")
    whole = ArraySpec((len(rows), None), "int16", lengths=lengths)
    with ups_store.create(folder / "b.zarr.zip", {"u": whole}, identity={}) as direct:
        direct.commit_many(range(len(rows)), {"u": rows})
        direct.finish()
    path, spec = folder / "a.zarr.zip", {"u": ArraySpec((None, None), "int16")}
    stops = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3), label="stops"))
    for stop in [*stops, None]:
        size = data.draw(st.sampled_from([1, 50, 1000]), label="buffer")
        with ups_store.write_parts(path, spec, identity={}, buffer_bytes=size) as writer:
            assert writer.num_found <= max([*stops, 0])
            writer.extend({"u": row} for row in (rows if stop is None else rows[:stop]))
            if stop is None:
                writer.finish()
    assert path.read_bytes() == (folder / "b.zarr.zip").read_bytes()
