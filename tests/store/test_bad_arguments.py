"""What a newcomer types by mistake ends in a `SpecError` or `FormatError` that says what was expected."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store
from ups_store import ArraySpec, FormatError, SpecError
from ups_store.read.open import open_store

GOOD: dict[str, Any] = {"arrays": {"u": ArraySpec((3, 4), "float32")}, "identity": {}}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("identity", None),
        ("identity", "x"),
        ("identity", []),
        ("attrs", "x"),
        ("constants", [1]),
        ("arrays", [ArraySpec((3, 4), "float32")]),
        ("arrays", {"u": (3, 4)}),
    ],
)
def test_create_names_the_argument_of_a_wrong_type(tmp_path: Path, argument: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.create(tmp_path / "a.zarr.zip", **{**GOOD, argument: value})
    assert caught.value.kind == "argument"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("commit", [lambda w: w.commit(1, None), lambda w: w.commit_many([1], [1])])
def test_commit_refuses_what_is_no_mapping(tmp_path: Path, commit: Any) -> None:
    with ups_store.create(tmp_path / "a.zarr.zip", **GOOD) as writer:
        with pytest.raises(SpecError) as caught:
            commit(writer)
        assert caught.value.kind == "argument"
        assert writer.missing().tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"precious", b"PK\3\4 another archive" + bytes(40)])
def test_create_never_takes_the_place_of_another_programs_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.zarr.zip"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        ups_store.create(path, **GOOD)
    assert caught.value.kind == "foreign"
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["a.zarr.zip", "a.zarr.zip.building"])
def test_create_refuses_a_folder_in_its_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(FormatError) as caught:
        ups_store.create(tmp_path / "a.zarr.zip", **GOOD, on_mismatch="restart")
    assert caught.value.kind == "not_a_file"


@pytest.fixture
def store(tmp_path: Path) -> ups_store.Store:
    arrays = {
        "u": ArraySpec((3, 5, 2), "float32", dims=("sample", "time", "x")),
        "w": ArraySpec((3, 5), "float32"),
    }
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit_many(range(3), {"u": np.ones((3, 5, 2), "float32"), "w": np.ones((3, 5), "float32")})
        writer.finish()
    return ups_store.open(tmp_path / "a.zarr.zip")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"names": ["w"], "length": 2}, "window"),  # no array has the dimension
        ({"names": ["w"], "stride": 0}, "window"),
        ({"names": ["u"], "length": 1.0}, "window"),
        ({"names": ["u"], "stride": 1.5}, "window"),
        ({"names": ["u"], "out": {"typo": np.zeros((2, 5, 2), "float32")}}, "out"),
        ({"names": ["u"], "out": {"u": [1]}}, "out"),
        ({"names": ["u"], "out": [1]}, "out"),
    ],
)
def test_gather_refuses_arguments_without_effect_or_of_a_wrong_type(
    store: ups_store.Store, arguments: dict[str, Any], kind: str
) -> None:
    with pytest.raises(SpecError) as caught:
        store.gather([0, 1], **arguments)
    assert caught.value.kind == kind


LONGEST = 255 - len(".building.0123456789abcdef")  # such names does a building file have first


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (b"a.zarr.zip", "path: expected a str or os.PathLike[str], found bytes; give text"),
        (None, "path: expected a str or os.PathLike[str], found NoneType"),
        ("a\0b", "path holds a NUL character; check"),
        ("a" * 300, "file name too long: expected at most"),
        (
            "a" * 300 + "/b",
            "folder name too long: expected at most 255 bytes, found 300; choose",
        ),
        ("a/" * 2500 + "b", "path too long: expected at most"),
    ],
)
def test_what_can_not_be_a_path_is_said(path: Any, problem: str) -> None:
    for attempt in (
        lambda: ups_store.create(path, **GOOD),
        lambda: open_store(path),
        lambda: ups_store.join(path, identity={}),
    ):
        with pytest.raises(SpecError) as caught:
            attempt()
        assert caught.value.kind == "path"
        assert problem in str(caught.value)


def test_create_takes_names_that_leave_room_for_its_building_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.create(tmp_path / ("a" * (LONGEST + 1)), **GOOD)
    assert (caught.value.expected, caught.value.found) == (f"at most {LONGEST} bytes", LONGEST + 1)
    with ups_store.create(tmp_path / ("a" * LONGEST), **GOOD) as writer:
        writer.commit_many(range(3), {"u": np.zeros((3, 4), np.float32)})
        path = writer.finish()
    longest = path.rename(tmp_path / ("b" * 255))
    with ups_store.open(longest) as store:
        assert len(store) == 3
    with pytest.raises(ups_store.StoreNotFoundError):
        ups_store.open(tmp_path / ("c" * 255))


def test_open_has_the_name_that_users_call_it_by(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^open\(\) got an unexpected keyword argument 'acess'"):
        ups_store.open(tmp_path, acess="pread")  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(ups_store.open)) is ups_store.open
