"""Data in other files: refused unless a folder is allowed, and then read as it is there, or not at all."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from outer_data import (
    FIELDS,
    SAMPLES,
    write_fields,
    write_halves,
    write_linked,
    write_raw,
    write_source,
    write_virtual,
)
from pdebench_files import T, X, values
from well_files import write_well_2d

from ups_store.errors import ConfigError, SourceError
from ups_store.sources import Selection, get_task, open_source
from ups_store.sources.declaration import TaskDeclaration
from ups_store.sources.digest import sampled_digest
from ups_store.sources.hdf5 import open_hdf5, tree
from ups_store.sources.reader_pool import ReaderPool
from ups_store.sources.reader_process import describe_request
from ups_store.sources.source import Source

SECRET = b"root:x:0:0:root:/root:/bin/sh\n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data in a folder, and a secret beside it."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def opened(path: Path, root: Path | None = None, **options: object) -> Source:
    return open_source(path, task=get_task("burgers1d"), follow=root, **options)  # type: ignore[arg-type]


def fields_of(path: Path, root: Path | None = None, **options: object) -> np.ndarray:
    with opened(path, root, **options) as source:
        return source.read(range(source.info.num_samples))["fields"][..., 0]


def error_of(path: Path, root: Path | None = None) -> SourceError:
    with pytest.raises(SourceError) as caught:
        fields_of(path, root)
    assert "/proc/" not in str(caught.value)
    return caught.value


def by_link(folder: Path) -> Path:
    write_fields(folder / "u.h5")
    return write_linked(folder / "main.h5", "u.h5")


def by_soft_link(folder: Path) -> Path:
    write_fields(folder / "u.h5")
    outside = h5py.ExternalLink("u.h5", "/u")
    return write_source(folder / "main.h5", elsewhere=outside, tensor=h5py.SoftLink("/elsewhere"))


def by_link_to_group(folder: Path) -> Path:
    write_fields(folder / "u.h5")
    outside = h5py.ExternalLink("u.h5", "/")
    return write_source(folder / "main.h5", all=outside, tensor=h5py.SoftLink("all/u"))


def by_bytes(folder: Path) -> Path:
    (folder / "u.bin").write_bytes(b"head" + FIELDS.tobytes())
    return write_raw(folder / "main.h5", str(folder / "u.bin"), offset=4)


def by_virtual(folder: Path) -> Path:
    return write_virtual(folder / "main.h5", *write_halves(folder), fields_each=SAMPLES // 2)


def by_link_to_virtual(folder: Path) -> Path:
    (folder / "inner").mkdir()
    by_virtual(folder / "inner")
    return write_linked(folder / "main.h5", "inner/main.h5", "/tensor")


def by_virtual_of_bytes(folder: Path) -> Path:
    (folder / "inner").mkdir()
    by_bytes(folder / "inner")
    return write_virtual(folder / "main.h5", "inner/main.h5", fields_each=SAMPLES, name="tensor")


def by_virtual_of_link(folder: Path) -> Path:
    """In the file itself, but its source is a link to another one."""
    path = by_link(folder)
    with h5py.File(path, "a") as file:
        file.move("tensor", "linked")
        layout = h5py.VirtualLayout(FIELDS.shape, "<f4")
        layout[...] = h5py.VirtualSource(".", "linked", FIELDS.shape)
        file.create_virtual_dataset("tensor", layout)
    return path


WAYS = [
    by_link,
    by_soft_link,
    by_link_to_group,
    by_bytes,
    by_virtual,
    by_link_to_virtual,
    by_virtual_of_bytes,
    by_virtual_of_link,
]
Way = Callable[[Path], Path]


@pytest.mark.parametrize("way", WAYS)
def test_data_in_another_file_is_refused_by_name(way: Way, folder: Path) -> None:
    error = error_of(way(folder))
    assert isinstance(error, SourceError)
    assert (error.kind, error.dataset, error.path) == ("external_data", "tensor", str(folder / "main.h5"))
    assert Path(error.outer).name in ("u.h5", "u.bin", "a.h5", "main.h5")
    assert error.outer in str(error)


@pytest.mark.parametrize("way", WAYS)
def test_data_below_the_folder_is_read_as_it_is_there(way: Way, folder: Path) -> None:
    path = way(folder)
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS)
    reduced = fields_of(path, folder, selection=Selection(3, 2))
    np.testing.assert_array_equal(reduced, FIELDS[:, ::2, ::3])
    with opened(path, folder) as source:
        shuffled = source.read([4, 0, 3])["fields"][..., 0]
        names = {file.path.name for file in source.info.outer}
    np.testing.assert_array_equal(shuffled, FIELDS[[4, 0, 3]])
    assert names == {file.name for file in folder.rglob("*") if file.is_file()} - ({"main.h5"} - names)


@pytest.mark.parametrize("way", WAYS)
def test_data_outside_the_folder_is_refused(way: Way, folder: Path, tmp_path: Path) -> None:
    path = way(folder)
    (tmp_path / "allowed").mkdir()
    error = error_of(path, tmp_path / "allowed")
    assert (error.kind, error.dataset) == ("external_outside", "tensor")


@pytest.mark.parametrize("way", WAYS)
def test_data_that_went_away_is_an_error(way: Way, folder: Path) -> None:
    path = way(folder)
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS)
    gone = [file for file in folder.rglob("*") if file.is_file() and file != path]
    for file in gone:
        file.rename(file.with_suffix(".gone"))
        assert error_of(path, folder).kind in ("external_missing", "virtual_missing")
        file.with_suffix(".gone").rename(file)


@pytest.mark.parametrize("name", ["sub/../../secret", "link", "linked_folder/secret"])
@pytest.mark.parametrize("write", [write_raw, write_linked, write_virtual])
def test_no_name_leads_out_of_the_folder(
    write: Callable[[Path, str], Path], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "sub").mkdir()
    (folder / "link").symlink_to("../secret")
    (folder / "linked_folder").symlink_to("..")
    assert error_of(write(folder / "main.h5", name)).kind == "external_data"
    assert error_of(write(folder / "main.h5", name), folder).kind == "external_outside"
    assert error_of(write(folder / "main.h5", str(folder / name)), folder).kind == "external_outside"


def test_place_that_no_file_can_have_is_not_that_of_the_source(folder: Path) -> None:
    assert error_of(write_linked(folder / "main.h5", f"{'x' * 300}/main.h5")).kind == "external_data"


def test_folder_behind_a_symbolic_link_is_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to("data")
    assert np.array_equal(fields_of(by_link(folder), tmp_path / "name"), FIELDS)
    with pytest.raises(ConfigError):
        opened(folder / "main.h5", folder / "nowhere")


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("way", [by_link, by_bytes, by_virtual])
def test_name_that_becomes_a_link_after_the_check_leads_nowhere(
    way: Way, is_folder: bool, folder: Path, tmp_path: Path
) -> None:
    (folder / "sub").mkdir()
    inner = way(folder / "sub")
    (tmp_path / "away").mkdir()
    for file in (folder / "sub").iterdir():
        shutil.copy(file, tmp_path / "away")

    def swap(name: str) -> None:
        name_of_all = folder / "sub" if is_folder else Path(name)
        if (folder / "sub") in Path(name).parents and not name_of_all.is_symlink():
            name_of_all.rename(folder / "moved")
            name_of_all.symlink_to(tmp_path / "away" / ("" if is_folder else name_of_all.name))

    with pytest.raises(SourceError) as caught:
        fields_of(inner, folder, note=swap)
    assert caught.value.kind in ("source_changed", "external_outside")


@pytest.mark.parametrize("write", [write_raw, write_linked, write_virtual])
def test_pipe_is_refused_without_waiting(write: Callable[[Path, str], Path], folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    path = write(folder / "main.h5", str(folder / "pipe"))
    assert error_of(path).kind == "external_data"
    assert error_of(path, folder).kind == "not_a_file"
    sampled_digest(path, path.stat().st_size, lambda num: None)
    with open_hdf5(path) as file:
        assert "x-coordinate" in tree(file)


def test_open_source_that_is_cut_is_an_error_not_zeros(folder: Path) -> None:
    path = by_bytes(folder)
    with opened(path, folder) as source:
        os.truncate(folder / "u.bin", 100)
        with pytest.raises(SourceError) as caught:
            source.read([5])
    assert (caught.value.kind, caught.value.path) == ("source_changed", str(folder / "u.bin"))


def test_bytes_that_end_too_early_are_an_error_not_zeros(folder: Path) -> None:
    path = by_bytes(folder)
    os.truncate(folder / "u.bin", FIELDS.nbytes)  # the last 4 bytes are missing
    with pytest.raises(SourceError) as caught:
        opened(path, folder)
    assert caught.value.kind == "truncated"


def test_bytes_in_several_files_are_joined(folder: Path) -> None:
    raw, names = FIELDS.tobytes(), [str(folder / name) for name in ("1.bin", "2.bin", "3.bin")]
    for name, part in zip(names, (raw[:100], b"...." + raw[100:1001], raw[1001:]), strict=True):
        Path(name).write_bytes(part)
    path = write_source(folder / "main.h5")
    external = [(names[0], 0, 100), (names[1], 4, 901), (names[2], 0, h5py.h5f.UNLIMITED)]
    with h5py.File(path, "a") as file:
        file.create_dataset("tensor", FIELDS.shape, "<f4", external=external)
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS)


def test_virtual_dataset_of_parts_of_other_ranks_and_strides_is_that_of_hdf5(folder: Path) -> None:
    for i in range(SAMPLES):
        write_fields(folder / f"{i}.h5", np.repeat(FIELDS[i], 2, axis=0), chunks=(2, 5))
    path = write_source(folder / "main.h5")
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((SAMPLES, T, X), "<f8")
        for i in range(SAMPLES):
            source = h5py.VirtualSource(f"{i}.h5", "u", (2 * T, X))
            layout[i, :, ::2], layout[i, :, 1::2] = source[::2, ::2], source[1::2, 1::2]
        file.create_virtual_dataset("tensor", layout, fillvalue=7)
    with h5py.File(path) as file:
        expected = file["tensor"][...]
    np.testing.assert_array_equal(expected, FIELDS)
    np.testing.assert_array_equal(fields_of(path, folder), expected)
    reduced = fields_of(path, folder, selection=Selection(3, 2))
    np.testing.assert_array_equal(reduced, expected[:, ::2, ::3])


def test_virtual_dataset_without_end_goes_as_far_as_its_source(folder: Path) -> None:
    write_fields(folder / "u.h5", FIELDS[:4], maxshape=(None, T, X))
    path, no_end = write_source(folder / "main.h5"), h5py.h5s.UNLIMITED
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((4, T, X), "<f4", maxshape=(None, T, X))
        source = h5py.VirtualSource("u.h5", "u", (4, T, X), maxshape=(None, T, X))
        layout[0:no_end] = source[0:no_end]
        file.create_virtual_dataset("tensor", layout)
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS[:4])
    write_fields(folder / "u.h5", FIELDS, maxshape=(None, T, X))
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS)
    assert error_of(path).kind == "external_data"


def test_virtual_dataset_of_numbered_sources_is_refused(folder: Path) -> None:
    path = write_source(folder / "main.h5")
    with h5py.File(path, "a") as file:
        no_end = h5py.h5s.UNLIMITED
        space = h5py.h5s.create_simple((2, T, X), (no_end, T, X))
        space.select_hyperslab((0, 0, 0), (no_end, 1, 1), (1, 1, 1), (1, T, X))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_virtual(space, b"part%b.h5", b"u", h5py.h5s.create_simple((T, X)))
        extent = h5py.h5s.create_simple((2, T, X), (no_end, T, X))
        h5py.h5d.create(file.id, b"tensor", h5py.h5t.IEEE_F32LE, extent, plist)
    for root in (None, folder):
        error = error_of(path, root)
        assert (error.kind, error.found) == ("virtual_unsupported", "u of part%b.h5")


def _irregular(space: h5py.h5s.SpaceID) -> None:
    space.select_hyperslab((0, 0, 0), (1, 1, 1), block=(1, 1, 1))
    space.select_hyperslab((2, 3, 0), (1, 1, 1), block=(1, 1, 1), op=h5py.h5s.SELECT_OR)


def _blocks(space: h5py.h5s.SpaceID) -> None:
    space.select_hyperslab((0, 0, 0), (2, 1, 1), (3, 1, 1), (2, 1, 1))


def _line(space: h5py.h5s.SpaceID) -> None:
    space.select_hyperslab((0, 0, 0), (1, 1, 1), block=(1, 2, 2))


def _column(space: h5py.h5s.SpaceID) -> None:
    space.select_hyperslab((0, 0, 0), (1, 1, 1), block=(4, 1, 1))


@pytest.mark.parametrize(
    ("target", "source"), [(_irregular, _irregular), (_blocks, _blocks), (_column, _line)]
)
def test_virtual_dataset_of_other_parts_than_blocks_is_refused(
    target: Callable[[h5py.h5s.SpaceID], None], source: Callable[[h5py.h5s.SpaceID], None], folder: Path
) -> None:
    write_fields(folder / "u.h5")
    path = write_source(folder / "main.h5")
    spaces = [h5py.h5s.create_simple(FIELDS.shape) for _ in range(2)]
    target(spaces[0])
    source(spaces[1])
    with h5py.File(path, "a") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_virtual(spaces[0], b"u.h5", b"u", spaces[1])
        extent = h5py.h5s.create_simple(FIELDS.shape)
        h5py.h5d.create(file.id, b"tensor", h5py.h5t.IEEE_F32LE, extent, plist)
    assert error_of(path, folder).kind == "virtual_unsupported"


def test_source_of_another_rank_than_its_virtual_dataset_says_is_an_error(folder: Path) -> None:
    path = write_source(folder / "main.h5")
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout(FIELDS.shape, "<f4")
        layout[...] = h5py.VirtualSource("u.h5", "u", (SAMPLES + 1, T, X))[1:]
        file.create_virtual_dataset("tensor", layout)
    write_fields(folder / "u.h5", FIELDS[0])
    assert error_of(path, folder).kind == "shapes_differ"
    write_fields(folder / "u.h5")
    assert error_of(path, folder).kind == "shapes_differ"


def write_many(folder: Path) -> Path:
    """A virtual dataset of 40 sources."""
    names = [f"{i}.h5" for i in range(40)]
    for i, name in enumerate(names):
        write_fields(folder / name, FIELDS[:1] + i)
    return write_virtual(folder / "main.h5", *names)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Twenty more than are open may be, by the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_descriptors_for_sources_are_an_error_not_fill_values(
    folder: Path, few_descriptors: None
) -> None:
    error = error_of(write_many(folder), folder)
    assert (error.kind, "ulimit" in str(error)) == ("no_descriptors", True)


@pytest.mark.multi_process
def test_reader_opens_as_many_sources_as_the_hard_limit_allows(folder: Path, few_descriptors: None) -> None:
    with ReaderPool(1, slot_nbytes=1 << 20) as pool:
        assert len(pool.ask(describe_request(write_many(folder), follow=folder)).outer) == 40


def test_percent_sign_in_the_name_of_a_source_is_itself(folder: Path) -> None:
    write_fields(folder / "10%b.h5")
    path = write_virtual(folder / "main.h5", "10%%b.h5", fields_each=SAMPLES)
    np.testing.assert_array_equal(fields_of(path, folder), FIELDS)


def test_virtual_dataset_within_one_file_needs_no_folder(folder: Path) -> None:
    for name in (".", "main.h5"):
        path = write_source(folder / "main.h5", u=FIELDS)
        with h5py.File(path, "a") as file:
            layout = h5py.VirtualLayout(FIELDS.shape, "<f4")
            layout[...] = h5py.VirtualSource(name, "u", FIELDS.shape)
            file.create_virtual_dataset("tensor", layout)
        np.testing.assert_array_equal(fields_of(path), FIELDS)
        with h5py.File(path, "a") as file:
            del file["u"]
        assert error_of(path).kind == "virtual_missing"


def test_links_that_lead_back_to_themselves_are_an_error(folder: Path) -> None:
    path = write_source(folder / "main.h5", tensor=h5py.SoftLink("/tensor"))
    assert error_of(path).kind == "link_loop"
    path = write_linked(folder / "one.h5", "two.h5", "/tensor")
    write_linked(folder / "two.h5", "one.h5", "/tensor")
    assert error_of(path, folder).kind == "link_loop"
    path = write_virtual(folder / "main.h5", "other.h5", fields_each=SAMPLES, name="tensor")
    write_virtual(folder / "other.h5", "main.h5", fields_each=SAMPLES, name="tensor")
    assert error_of(path, folder).kind == "virtual_unsupported"


def test_link_that_is_not_needed_does_not_matter(folder: Path) -> None:
    path = write_source(folder / "main.h5", tensor=FIELDS, other=h5py.ExternalLink("/etc/passwd", "/"))
    np.testing.assert_array_equal(fields_of(path), FIELDS)


@pytest.mark.parametrize(("variable", "way"), [("HDF5_EXT_PREFIX", by_link), ("HDF5_VDS_PREFIX", by_virtual)])
def test_prefix_of_the_environment_comes_first(
    variable: str, way: Way, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = way(folder), tmp_path / "other"
    for file in folder.glob("[abu].h5"):
        with h5py.File(file) as old:
            write_fields(other / file.name, old["u"][...] + 1)
    monkeypatch.setenv(variable, f"/nowhere:{other}")
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["tensor"][...], FIELDS + 1)
    np.testing.assert_array_equal(fields_of(path, tmp_path), FIELDS + 1)
    assert error_of(path, folder).kind == "external_outside"


def test_names_of_bytes_start_from_the_prefix_or_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_raw(folder / "main.h5", "u.bin")
    for where, add in ((folder, 0), (tmp_path / "work", 1), (folder / "prefix", 2)):
        where.mkdir(exist_ok=True)
        (FIELDS + np.float32(add)).tofile(where / "u.bin")
    np.testing.assert_array_equal(fields_of(path, tmp_path), FIELDS)
    monkeypatch.chdir(tmp_path / "work")
    np.testing.assert_array_equal(fields_of(path, tmp_path), FIELDS + 1)
    monkeypatch.setenv("HDF5_EXTFILE_PREFIX", "${ORIGIN}/prefix")
    np.testing.assert_array_equal(fields_of(path, tmp_path), FIELDS + 2)


def test_source_that_moved_with_its_data_finds_it_beside_itself(folder: Path, tmp_path: Path) -> None:
    write_fields(folder / "u.h5")
    path = write_linked(folder / "main.h5", str(folder / "u.h5"))
    folder.rename(tmp_path / "moved")
    assert np.array_equal(fields_of(tmp_path / "moved" / path.name, tmp_path / "moved"), FIELDS)


def test_group_per_sample_behind_links_knows_all_files_at_once(folder: Path) -> None:
    path = folder / "main.h5"
    data = values("groups", (3, T, X, 1))
    with h5py.File(path, "w") as file:
        for i in range(3):
            with h5py.File(folder / f"{i}.h5", "w") as outer:
                outer["data"], outer["grid/x"], outer["grid/t"] = data[i], np.arange(X), np.arange(T)
            file[f"{i:04d}"] = h5py.ExternalLink(f"{i}.h5", "/")
    with open_source(path, follow=folder) as source:
        assert [file.name for file in source.info.outer] == ["0.h5", "1.h5", "2.h5"]
        np.testing.assert_array_equal(source.read(range(3))["fields"], data)
    (folder / "2.h5").unlink()
    with pytest.raises(SourceError):
        open_source(path, follow=folder)


@pytest.mark.parametrize("name", ["0002", "0002/data"])
def test_link_in_a_later_group_is_found_before_a_sample_is_read(folder: Path, name: str) -> None:
    path, data = folder / "main.h5", values("groups", (3, T, X, 1))
    with h5py.File(path, "w") as file:
        for i in range(3):
            file[f"{i:04d}/data"] = data[i]
            file[f"{i:04d}/grid/x"], file[f"{i:04d}/grid/t"] = np.arange(X), np.arange(T)
        del file[name]
        file[name] = h5py.ExternalLink("other.h5", "/")
    with pytest.raises(SourceError) as caught:
        open_source(path)
    assert (caught.value.kind, caught.value.dataset, caught.value.outer) == (
        "external_data",
        name,
        "other.h5",
    )


def test_attributes_of_virtual_datasets_are_read(folder: Path) -> None:
    """The Well says in attributes of a dataset which axes it has."""
    plain = write_well_2d(folder / "plain.h5")
    path = Path(shutil.copy(plain, folder / "main.h5"))
    with h5py.File(path, "a") as file:
        names = list[str]()
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            attrs, old = dict(file[name].attrs), file[name]
            layout = h5py.VirtualLayout(old.shape, old.dtype)
            layout[...] = h5py.VirtualSource("plain.h5", name, old.shape)
            del file[name]
            file.create_virtual_dataset(name, layout).attrs.update(attrs)
    with open_source(plain) as one, open_source(path, follow=folder) as other:
        expected, found = one.read([0, 1]), other.read([0, 1])
        assert {file.path for file in other.info.outer} == {plain}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_declared_groups_behind_links_are_refused_or_followed(folder: Path) -> None:
    write_fields(folder / "u.h5", FIELDS[0])
    path = folder / "main.h5"
    with h5py.File(path, "w") as file:
        file["run/1"] = h5py.ExternalLink("u.h5", "/")
    declared = TaskDeclaration.model_validate(
        {"layout": {"groups": "run/*", "fields": [{"dataset": "u", "axes": "time x"}]}}
    )
    task = get_task("burgers1d")
    task = type(task)("own", 1, (), {}, "last", steady=None, layout=declared.layout)
    with pytest.raises(SourceError):
        open_source(path, task=task)
    with open_source(path, task=task, follow=folder) as source:
        np.testing.assert_array_equal(source.read([0])["fields"][0, ..., 0], FIELDS[0])
