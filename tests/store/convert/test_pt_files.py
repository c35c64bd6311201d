"""Files that `import_pt` meets: any mapping of names to tensors, and hostile ones, refused with a reason."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_stores import all_arrays

from ups_store.convert import import_pt as import_module
from ups_store.convert.import_pt import Names, RefusedFilesError, import_pt
from ups_store.errors import SourceError, SpecError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One good sample; tests add another one."""
    where = tmp_path / "pt"
    where.mkdir()
    torch.save({"x": torch.arange(6.0).reshape(2, 3)}, where / "sample_0.pt")
    return where


def saved(document: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(document, stream)
    return stream.getvalue()


def read(raw: bytes, **names: Any) -> dict[str, np.ndarray]:
    return Names(names.get("map", {}), names.get("ignore", ())).read(raw, path=Path("sample_1.pt"))[0]


def reason(folder: Path) -> str:
    """Why the second file is refused."""
    with pytest.raises(RefusedFilesError) as caught:
        import_pt(folder, folder.parent / "out")
    assert list(caught.value.refused) == ["sample_1.pt"]
    assert "weights_only" not in str(caught.value)
    return caught.value.refused["sample_1.pt"]


# --- which arrays -------------------------------------------------------------------------------------


def test_mapping_of_names_to_tensors_gives_arrays_of_these_names() -> None:
    found = read(
        saved({"x": torch.ones(2, 3), "meta": {"nu": 0.5, "inner": {"k": 3}}, "none": None, 7: True})
    )
    assert {name: value.tolist() for name, value in found.items()} == {
        "x": [[1, 1, 1], [1, 1, 1]],
        "meta.nu": 0.5,
        "meta.inner.k": 3,
        "7": True,
    }


def test_keys_are_mapped_to_other_names_and_ignored_with_all_within_them(
    folder: Path, tmp_path: Path
) -> None:
    for i in range(2):
        document = {
            "image": torch.full((2,), float(i)),
            "fields": {"a": torch.zeros(i + 1)},
            "params": {"y": i},
        }
        torch.save(document, folder / f"sample_{i}.pt")
    done = import_pt(folder, tmp_path / "out", map={"image": "x", "params.y": "z"}, ignore=["fields"])
    assert done.keys == {"x": "image", "z": "params.y"}
    assert all_arrays(done.path)["x"].tolist() == [[0, 0], [1, 1]]
    assert all_arrays(done.path)["z"].tolist() == [0, 1]


def test_value_that_is_ignored_may_be_anything_but_of_a_class_of_one_s_own() -> None:
    raw = saved({"x": torch.ones(2), "fields": {"text": "a", ("k", 1): {3, 4}}})
    assert read(raw, ignore=["fields"])["x"].tolist() == [1, 1]
    with pytest.raises(SourceError, match=r"holds a test_pt_files\.Odd"):
        read(saved({"x": torch.ones(2), "fields": {"odd": Odd()}}), ignore=["fields"])


class Odd:
    """Of a class that only the writer of a file knows."""

    def __init__(self) -> None:
        self.items = [1, 2]


@pytest.mark.parametrize(
    ("names", "problem"),
    [({"map": {"x": "../x"}}, "names of arrays"), ({"map": {"a.b": "c"}, "ignore": ["a"]}, "different keys")],
)
def test_names_that_can_not_be_meant_are_refused(names: Any, problem: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=problem):
        import_pt(folder, folder.parent / "out", **names)


def test_mapped_key_that_a_file_lacks_is_named_with_those_that_it_has() -> None:
    with pytest.raises(SourceError, match=r"no 'image', which --map names; it has x"):
        read(saved({"x": 1.0}), map={"image": "x"})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("dtype", "protocol"), [(torch.uint16, 2), (torch.bfloat16, 3), (torch.bool, 2)])
def test_views_and_dtypes_are_read_as_torch_reads_them(dtype: torch.dtype, protocol: int) -> None:
    whole = torch.arange(24).reshape(2, 3, 4).to(dtype)
    views = {"t": whole.permute(2, 0, 1), "row": whole[1, ::2], "none": whole[:0], "one": whole[1, 2, 3]}
    stream = io.BytesIO()
    torch.save(views, stream, pickle_protocol=protocol)
    for name, value in read(stream.getvalue()).items():
        expected = views[name].double().numpy() if dtype == torch.bfloat16 else views[name].numpy()
        assert value.shape == expected.shape
        np.testing.assert_array_equal(value.astype(expected.dtype), expected)


def test_arrays_of_other_shapes_name_the_first_two_files_that_differ(folder: Path) -> None:
    for i in (1, 2):
        torch.save({"x": torch.zeros(2 + i, 3)}, folder / f"sample_{i}.pt")
    with pytest.raises(RefusedFilesError) as caught:
        import_pt(folder, folder.parent / "out")
    assert caught.value.kind == "shapes_differ"
    first = caught.value.refused["sample_1.pt"]
    assert first == "array 'x' is float32 (3, 3), but float32 (2, 3) in sample_0.pt"


# --- what isn't a regular file ------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (_fifo, "expected a regular file, found a FIFO"),
    "folder": (lambda path: path.mkdir(), "expected a regular file, found a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "expected a regular file, found a device"),
    "dangling": (lambda path: path.symlink_to("gone"), "a symbolic link to what isn't there"),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_refused_without_being_read(kind: str, folder: Path) -> None:
    make, problem = NO_FILES[kind]
    make(folder / "sample_1.pt")
    assert reason(folder) == problem


def test_file_that_memory_does_not_hold_is_refused_unread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"x": torch.zeros(1000, 3)}, folder / "sample_1.pt")
    monkeypatch.setattr(import_module.memory, "available_bytes", lambda: 20_000)
    assert "and reading it takes twice its size" in reason(folder)


# --- what would take memory or time -------------------------------------------------------------------


def rewritten(
    raw: bytes, changes: dict[str, bytes] | None = None, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """The archive with other entries, by the ends of their names."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for entry in old.infolist():
            end = entry.filename.partition("/")[2]
            new.writestr(entry.filename, (changes or {}).get(end, old.read(entry)))
    return out.getvalue()


def of_pickle(stream: bytes) -> bytes:
    return rewritten(saved({"x": torch.zeros(6)}), {"data.pkl": stream})


def numbers(*values: int) -> bytes:
    """Opcodes that make a tuple."""
    return b"(" + b"".join(b"\x8a\x09" + value.to_bytes(9, "little", signed=True) for value in values) + b"t"


def of_tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, num_stored: int = 6
) -> bytes:
    """A file with a tensor of any shape and strides, and six stored numbers."""
    storage = (
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuJ"
        + struct.pack("<i", num_stored)
        + b"tQ"
    )
    arguments = b"(" + storage + b"K" + bytes([offset]) + numbers(*shape) + numbers(*strides) + b"\x89}t"
    return of_pickle(b"\x80\2}X\1\0\0\0xctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs.")


def shared(depth: int) -> dict[str, Any]:
    """Few bytes for 2 ** depth keys: each dict holds the next one twice."""
    inner: dict[str, Any] = {"leaf": 1.0}
    for _ in range(depth):
        inner = {"a": inner, "b": inner}
    return inner


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


NOT_SAVED = "cut off, damaged, or not what torch.save writes since version 1.6"


def of_one_tuple() -> bytes:
    """`{tuples(60): 1.0}`, which Python couldn't make."""
    return b"\x80\2})" + b"q\0h\0\x86" * 60 + b"G?\xf0\0\0\0\0\0\0s."


def _with_entries() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for i in range(21_000):
            archive.writestr(str(i), b"")
    return out.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (
        lambda: rewritten(saved({"x": torch.zeros(1 << 20)}), compression=zipfile.ZIP_DEFLATED),
        "compressed, which torch.save never does",
    ),
    "larger_inside": (lambda: _with_size(saved({"x": torch.zeros(6)}), 1 << 31), "it expands to 2,147,"),
    "long_directory": (lambda: _with_directory(saved({}), 1 << 40), "its directory is longer than"),
    "many_entries": (_with_entries, "its directory is longer than"),
    "comment": (lambda: _with_comment(saved({})), "cut off, damaged, or not"),
    "beyond_its_storage": (lambda: of_tensor((2, 3), (3, 2)), NOT_SAVED),
    "repeated": (lambda: saved({"x": torch.zeros(1).expand(1 << 40)}), "repeats its elements"),
    "shared_dicts": (lambda: saved(shared(60)), "more than 8192 keys"),
    "deep_dicts": (lambda: saved(nested(50)), "32 dicts within each other"),
    "long_key": (lambda: saved({"x" * 2000: 1.0}), "1000 letters of a key"),
    "slow_key": (lambda: of_pickle(of_one_tuple()), "tuples of more than 1,048,576 objects"),
    "long_pickle": (lambda: saved({"x": "a" * (5 << 20)}), "aren't tensors, expected at most 4,194,304"),
    "strange_opcode": (lambda: of_pickle(pickle.dumps([bytearray(8)], 5)), NOT_SAVED),
    "no_dict": (lambda: saved(torch.zeros(2)), "expected a dict of names to tensors, found a tensor"),
    "old_format": (lambda: pickle.dumps({"x": 1.0}), NOT_SAVED),
    "empty_stack": (lambda: of_pickle(b"\x80\x02s."), "cut off, damaged, or not"),
}


def _with_size(raw: bytes, nbytes: int) -> bytes:
    """The directory says that the first entry has another size."""
    where = raw.index(b"PK\1\2") + 20
    return raw[:where] + struct.pack("<2I", nbytes, nbytes) + raw[where + 8 :]


def _with_directory(raw: bytes, nbytes: int) -> bytes:
    where = raw.index(b"PK\6\6") + 40
    return raw[:where] + struct.pack("<Q", nbytes) + raw[where + 8 :]


def _with_comment(raw: bytes) -> bytes:
    return raw[:-2] + b"\3\0abc"


@pytest.mark.parametrize("defect", HOSTILE)
def test_hostile_file_is_refused_with_a_reason(defect: str, folder: Path) -> None:
    make, problem = HOSTILE[defect]
    (folder / "sample_1.pt").write_bytes(make())
    assert problem in reason(folder)


def test_damaged_byte_of_a_tensor_is_found_by_the_archive_s_checksum(folder: Path) -> None:
    raw = saved({"x": torch.full((2, 3), 7.0)})
    where = raw.index(struct.pack("<f", 7.0))
    (folder / "sample_1.pt").write_bytes(raw[:where] + b"\1" + raw[where + 1 :])
    assert "data/0 is damaged" in reason(folder)


def test_tensors_of_one_storage_are_refused_where_together_they_exceed_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.zeros(10_000)
    raw = saved({f"x{i}": whole[i:] for i in range(50)})
    assert len(read(raw)) == 50
    monkeypatch.setattr(import_module.memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(SourceError, match="takes too much memory"):
        read(raw)


def test_negated_view_is_read_as_its_numbers() -> None:
    raw = saved({"x": torch.ones(2, dtype=torch.complex64).conj().imag})
    assert read(raw)["x"].tolist() == [0, 0]


@pytest.mark.no_cover
def test_any_changed_byte_of_a_pickle_gives_arrays_or_a_refusal() -> None:
    document = {"x": torch.zeros(2, 3), "y": {"z": 1}, "w": torch.nn.Parameter(torch.ones(2))}
    with zipfile.ZipFile(io.BytesIO(saved(document))) as archive:
        stream = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    for i in range(0, len(stream), 3):
        for value in (stream[i] ^ 1, ord("R"), ord("t")):
            changed = stream[:i] + bytes([value]) + stream[i + 1 :]
            with contextlib.suppress(SourceError):
                read(of_pickle(changed))
