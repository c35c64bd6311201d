"""Checkpoints: round trip, atomic writes, the hash of weights, and damaged files."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import save_file

from ups.errors import CheckpointError, OtherTensorsError, OutputError
from ups.trained.checkpoint import fill_weights, hash_tensors, load_checkpoint, read_document, save_checkpoint

DOCUMENT = {"lr": 0.1 + 0.2, "nan": math.nan, "nested": {"list": [1, "ä"]}}


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "encoder.weight": torch.randn(3, 4, generator=generator),
        "encoder.count": torch.tensor(7),
        "decoder.weight": torch.randn(2, generator=generator).bfloat16(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "a.safetensors", make_tensors(), kind="test", document=DOCUMENT)
    return tmp_path / "a.safetensors"


def test_tensors_and_document_come_back_to_the_bit(path: Path) -> None:
    tensors, document = load_checkpoint(path, kind="test")
    for name, tensor in make_tensors().items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
    assert math.isnan(document.pop("nan"))
    assert document == {key: value for key, value in DOCUMENT.items() if key != "nan"}


def test_same_content_gives_the_same_bytes(path: Path) -> None:
    again = path.with_name("b.safetensors")
    save_checkpoint(again, dict(reversed(make_tensors().items())), kind="test", document=DOCUMENT)
    assert again.read_bytes() == path.read_bytes()


def test_tensors_sharing_memory_are_saved_each(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    save_checkpoint(tmp_path / "a", {"one": tensor, "other": tensor.T}, kind="test", document={})
    tensors, _ = load_checkpoint(tmp_path / "a", kind="test")
    torch.testing.assert_close(tensors["other"], tensor.T, rtol=0, atol=0)


def test_failed_write_is_an_error_of_ours_and_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("ups.output.os.fsync", fail)
    with pytest.raises(OutputError, match="no room") as caught:
        save_checkpoint(path, make_tensors(), kind="test", document={"other": 1})
    assert (caught.value.kind, caught.value.exit_code, caught.value.path) == ("not_written", 6, str(path))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


# --- the hash ------------------------------------------------------------------------------------------


def test_hash_is_sha256_of_sorted_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    tensors = {"m.b": torch.tensor([1.0, 2.0]), "m.a": torch.tensor([[3]], dtype=torch.int64)}
    save_file(tensors, tmp_path / "a.safetensors")
    expected = hashlib.sha256(
        b'["a","I64",[1,1]]\n' + struct.pack("<q", 3) + b'["b","F32",[2]]\n' + struct.pack("<2f", 1, 2)
    ).hexdigest()
    assert hash_tensors(tmp_path / "a.safetensors", prefix="m.") == expected


def test_hash_agrees_with_one_made_from_numpy_arrays(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in make_tensors().items() if name.startswith("encoder.")}
    save_checkpoint(tmp_path / "a", tensors, kind="test", document={})
    digest = hashlib.sha256()
    dtypes = {"float32": "F32", "int64": "I64"}
    for name, array in sorted(load_numpy(tmp_path / "a").items()):
        shown = [name.removeprefix("encoder."), dtypes[array.dtype.name], list(array.shape)]
        digest.update(json.dumps(shown, separators=(",", ":")).encode() + b"\n" + array.tobytes())
    assert hash_tensors(tmp_path / "a", prefix="encoder.") == digest.hexdigest()


def test_hash_depends_on_own_weights_alone(path: Path) -> None:
    reference = hash_tensors(path, prefix="encoder.")

    def changed(name: str, tensor: torch.Tensor) -> str:
        other = path.with_name("other.safetensors")
        save_checkpoint(other, {**make_tensors(), name: tensor}, kind="test", document={"else": 1})
        return hash_tensors(other, prefix="encoder.")

    weight = make_tensors()["encoder.weight"]
    assert changed("decoder.weight", torch.zeros(5)) == reference
    assert changed("encoder.weight", torch.nextafter(weight, weight + 1)) != reference
    assert changed("encoder.weight", weight.reshape(4, 3)) != reference
    assert changed("encoder.weight", weight.double()) != reference
    assert changed("encoder.new", torch.zeros(1)) != reference


def test_hash_and_document_need_no_torch(path: Path) -> None:
    code = (
        "import sys; from ups.trained.checkpoint import fill_weights, hash_tensors, read_document;"
        f"hash_tensors({str(path)!r}); read_document({str(path)!r}, kind='test');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- damage --------------------------------------------------------------------------------------------


def kind_of(path: Path, *, kind: str = "test") -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, kind=kind)
    assert str(path) in str(caught.value)
    return caught.value.kind


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "nowhere.safetensors") == "missing"


@pytest.mark.parametrize("nbytes", [5, -1])
def test_truncated_file_is_named(path: Path, nbytes: int) -> None:
    path.write_bytes(path.read_bytes()[:nbytes])
    assert kind_of(path) == "truncated"


@pytest.mark.parametrize("content", [b"\x80\x02}q\x00." + b"\xff" * 40, struct.pack("<Q", 2) + b"[]"])
def test_file_of_something_else_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert kind_of(path) == "not_a_checkpoint"


@pytest.mark.parametrize("back", [1, 60])
def test_flipped_bit_in_a_tensor_is_found(path: Path, back: int) -> None:
    content = bytearray(path.read_bytes())
    content[-back] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256") as caught:
        load_checkpoint(path, kind="test")
    assert (caught.value.kind, caught.value.path) == ("damaged", str(path))


def test_safetensors_of_others_are_refused(tmp_path: Path) -> None:
    save_file(make_tensors(), tmp_path / "theirs.safetensors")
    assert kind_of(tmp_path / "theirs.safetensors") == "not_a_checkpoint"


def test_checkpoint_of_another_kind_is_refused(path: Path) -> None:
    assert kind_of(path, kind="operator") == "other_kind"


def test_checkpoint_of_a_newer_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.trained.checkpoint.CHECKPOINT_VERSION", 2)
    save_checkpoint(path, make_tensors(), kind="test", document={})
    monkeypatch.undo()
    assert kind_of(path) == "too_new"


def test_hash_of_no_tensors_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor is named operator\.") as caught:
        hash_tensors(path, prefix="operator.")
    assert caught.value.kind == "no_tensors"
    assert read_document(path, kind="test")["nested"]["list"] == [1, "ä"]


def test_weights_of_another_model_are_refused_by_name(path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    fill_weights(model, {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, path=path)
    assert float(model.weight.detach().sum()) == 12.0
    other = {"weight": torch.ones(3, 5), "scale": torch.zeros(3)}
    says = r"missing bias; unexpected scale; of another shape weight \(3, 5\) and not \(3, 4\)"
    with pytest.raises(OtherTensorsError, match=says) as caught:
        fill_weights(model, other, path=path)
    assert (caught.value.kind, caught.value.path) == ("other_weights", str(path))
    found = caught.value.missing, caught.value.unexpected, caught.value.reshaped
    assert found == (("bias",), ("scale",), ("weight",))
    assert float(model.weight.detach().sum()) == 12.0


def _tensor(first: object, end: object, **changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [first, end], **changes}


HEADERS: dict[str, object] = {
    "deep": "[" * 200_000,
    "deep_in_a_tensor": '{"m.a": ' * 200_000,
    "no_object": [1],
    "no_tensor": {"m.a": 3},
    "no_offsets": {"m.a": {"dtype": "F32", "shape": [2]}},
    "three_offsets": {"m.a": _tensor(0, 8, data_offsets=[0, 8, 8])},
    "unknown_dtype": {"m.a": _tensor(0, 8, dtype="F33")},
    "dtype_of_another_kind": {"m.a": _tensor(0, 8, dtype=[1])},
    "negative_length": {"m.a": _tensor(0, 8, shape=[-1, -2])},
    "length_of_another_kind": {"m.a": _tensor(0, 8, shape=[2.0])},
    "long_shape": {"m.a": _tensor(0, 8, shape=[1] * 1000)},
    "huge_length": {"m.a": _tensor(0, 8, shape=[1 << 64, 0])},
    "shape_of_another_kind": {"m.a": _tensor(0, 8, shape=2)},
    "negative_offsets": {"m.a": _tensor(-8, 0), "m.b": _tensor(0, 8)},
    "reversed_offsets": {"m.a": _tensor(8, 0)},
    "offsets_of_another_kind": {"m.a": _tensor("0", 8), "m.b": _tensor(0, 8)},
    "overlapping": {"m.a": _tensor(0, 8), "m.b": _tensor(4, 12)},
    "with_a_gap": {"m.a": _tensor(0, 8), "m.b": _tensor(12, 20)},
    "other_size": {"m.a": _tensor(0, 12)},
}


@pytest.mark.parametrize("defect", HEADERS)
def test_header_that_can_not_be_is_a_typed_error(defect: str, tmp_path: Path) -> None:
    header, path = HEADERS[defect], tmp_path / "a.safetensors"
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(20))
    for read in (hash_tensors, lambda path: load_checkpoint(path, kind="test")):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert caught.value.kind == "not_a_checkpoint"


def test_name_that_is_too_long_for_a_message_is_cut(tmp_path: Path) -> None:
    text = json.dumps({"n" * 10_000: _tensor(1, 9)}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + bytes(9))
    with pytest.raises(CheckpointError, match="nnn") as caught:
        hash_tensors(tmp_path / "a")
    assert len(str(caught.value)) < 1000


def test_tensor_beyond_the_end_of_the_file_is_a_typed_error(tmp_path: Path) -> None:
    text = json.dumps({"m.a": _tensor(0, 8)}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + bytes(7))
    with pytest.raises(CheckpointError) as caught:
        hash_tensors(tmp_path / "a")
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    "ours", ["[" * 200_000, "[]", "3", '{"version": "1", "kind": "test", "document": {}}', '{"version": 1}']
)
def test_document_of_another_kind_is_a_typed_error(ours: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a", metadata={"ups": ours})
    assert kind_of(tmp_path / "a") == "not_a_checkpoint"
