"""Files of a training state: shards beside their document, torn writes, writing while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_training import CPU, Waves, make_config
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ups.train.state
from ups.errors import CheckpointError, OutputError
from ups.train.state import StateFiles, read_tensors, remove_state
from ups.train.trainer import Trainer
from ups.trained.checkpoint import save_checkpoint

RNG = {"rng.cpu": torch.arange(4)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "operator.training.safetensors"


def tensors_of(value: float, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    weight = torch.full((3, 2), value)
    return {
        "model.weight": weight if mesh is None else distribute_tensor(weight, mesh, [Shard(0)]),
        "optimizer.weight.step": torch.tensor(value),
    }


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    tensors, document = read_tensors(path, form_of=lambda name: None)
    return tensors, document["step"]


def check(path: Path, value: float) -> None:
    tensors, step = read(path)
    torch.testing.assert_close(tensors, tensors_of(value) | RNG, rtol=0, atol=0)
    assert step == value


def save(files: StateFiles, value: float, mesh: DeviceMesh | None = None) -> None:
    files.save(tensors_of(value, mesh), rng=RNG, document={"step": value})


def folders(path: Path) -> list[Path]:
    return [place for place in path.parent.iterdir() if place.is_dir()]


class Disk:
    """Takes the place of `save_checkpoint`: may fail for some kind of file, and waits until it is let."""

    def __init__(self, *, full_for: str | None = None, is_waiting: bool = False) -> None:
        self.full_for, self.may_write = full_for, threading.Event()
        if not is_waiting:
            self.may_write.set()

    def __call__(self, path: Path, tensors: Any, *, kind: str, **options: Any) -> None:
        assert self.may_write.wait(60)
        if kind == self.full_for:
            raise OutputError("no space left", path=path)
        save_checkpoint(path, tensors, kind=kind, **options)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Disk], Disk]:
    def use(disk: Disk) -> Disk:
        monkeypatch.setattr(ups.train.state, "save_checkpoint", disk)
        return disk

    return use


def test_state_in_shards_comes_back_and_the_next_one_takes_its_place(path: Path, mesh: DeviceMesh) -> None:
    files = StateFiles(path)
    for value in (1.0, 2.0):
        save(files, value, mesh)
        check(path, value)
        assert len(folders(path)) == 1
    save(files, 3.0)  # whole
    check(path, 3.0)
    assert folders(path) == []
    save(files, 4.0, mesh)
    remove_state(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("full_for", ["training-shards", "training"])
def test_torn_state_is_none_and_leaves_the_one_before(
    path: Path, mesh: DeviceMesh, use: Callable[[Disk], Disk], full_for: str
) -> None:
    files = StateFiles(path)
    save(files, 1.0, mesh)
    use(Disk(full_for=full_for))
    with pytest.raises(OutputError, match="no space left"):
        save(files, 2.0, mesh)
    check(path, 1.0)
    use(Disk())
    save(files, 3.0, mesh)
    check(path, 3.0)
    assert len(folders(path)) == 1  # what was torn is gone


@pytest.mark.parametrize(
    ("damage", "kind"), [("missing", "missing"), ("cut", "truncated"), ("bit", "damaged")]
)
def test_shards_that_are_not_whole_are_refused(path: Path, mesh: DeviceMesh, damage: str, kind: str) -> None:
    save(StateFiles(path), 1.0, mesh)
    (shard,) = folders(path)[0].iterdir()
    content = shard.read_bytes()
    shard.unlink()
    if damage != "missing":
        shard.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"\x11")
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert (caught.value.kind, caught.value.path) == (kind, str(shard))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_is_written_later_is_the_state_of_when_it_was_saved(
    path: Path, mesh: DeviceMesh, use: Callable[[Disk], Disk], is_sharded: bool
) -> None:
    files = StateFiles(path, is_async=True)
    tensors = tensors_of(1.0, mesh if is_sharded else None)
    buffers = []
    for value in (1.0, 2.0):
        disk = use(Disk(is_waiting=True))
        files.save(tensors, rng=RNG, document={"step": value})
        for tensor in tensors.values():
            tensor.add_(1)  # training goes on
        disk.may_write.set()
        files.wait()
        check(path, value)
        buffers.append([buffer.data_ptr() for buffer in files._buffers.values()])
    assert buffers[0] == buffers[1]  # one copy of the state, kept


def test_state_waits_for_the_one_before(
    path: Path, use: Callable[[Disk], Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, disk = StateFiles(path, is_async=True), use(Disk(is_waiting=True))
    join, waited = threading.Thread.join, []

    def let_write(thread: threading.Thread) -> None:
        waited.append(path.exists())
        disk.may_write.set()
        join(thread)

    monkeypatch.setattr("threading.Thread.join", let_write)
    save(files, 1.0)
    assert waited == []  # it is copied, and training goes on
    save(files, 2.0)
    assert waited == [False]
    files.wait()
    check(path, 2.0)


def test_error_of_the_thread_ends_the_training_at_a_later_step(
    tmp_path: Path, use: Callable[[Disk], Disk]
) -> None:
    steps = []
    stage = Waves(on_batch=steps.append)
    settings = ("training.async_checkpoint=true", "checkpoint.interval=1", "training.device=cpu")
    trainer = Trainer(stage, make_config(tmp_path, *settings), device=CPU)
    use(Disk(full_for="training"))
    with pytest.raises(OutputError, match="no space left"):
        trainer.fit()
    assert trainer.step == 2
    assert not trainer.files.has_failed


def test_training_that_is_saved_by_a_thread_ends_as_it_does_without(tmp_path: Path) -> None:
    ends = []
    for is_async in (False, True):
        folder = tmp_path / str(is_async)
        settings = (f"training.async_checkpoint={is_async}", "checkpoint.interval=1", "training.device=cpu")
        Trainer(Waves(), make_config(folder, *settings), device=CPU).fit()
        ends.append(read_tensors(folder / "autoencoder.training.safetensors", form_of=lambda name: None)[0])
    torch.testing.assert_close(*ends, rtol=0, atol=0)
