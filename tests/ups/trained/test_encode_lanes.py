"""Lanes: as many micro-batches at a time as memory allows, and the same bytes whatever their number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burgers_encoder import T, X, make_checkpoint
from noted import noted
from test_encode_loop import N

from ups.errors import ConfigError
from ups.trained.encode_lanes import CUDA_LANES, Lanes, num_lanes
from ups.trained.encode_loop import MICRO_BATCH_BYTES, BatchEncoder
from ups.trained.encoder import ComputeDtype, LatentEncoder

CPU = torch.device("cpu")


class LittleMemory:
    """Stands for a device that holds so many micro-batches at a time.

    Each waits until as many as there are lanes are there, as they would overlap on a GPU, but not for ever:
    the last ones are fewer.
    """

    def __init__(self, room: int) -> None:
        self.room, self.most, self._num = room, 0, 0
        self.encoder: BatchEncoder | None = None
        self._changed = threading.Condition()

    def _is_crowded(self) -> bool:
        assert self.encoder is not None
        assert self.encoder._lanes is not None
        return self._num >= self.encoder._lanes.num

    def use(self) -> None:
        with self._changed:
            self._num += 1
            self._changed.notify_all()
            self._changed.wait_for(self._is_crowded, timeout=2)
            num = self._num
            is_too_much = num > self.room
            self._changed.wait(0.01)
            self._num -= 1
            if is_too_much:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
            self.most = max(self.most, num)


def encoder_of(path: Path, memory: LittleMemory | None = None, **options: Any) -> BatchEncoder:
    encoder = LatentEncoder.load(path)
    if memory is not None:
        encode: Callable[..., torch.Tensor] = encoder.encode_on_device

        def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
            memory.use()
            return encode(*args, **kwargs)

        encoder.encode_on_device = limited  # type: ignore[method-assign]
    looped = BatchEncoder(encoder, micro_batch=T, **options)
    if memory is not None:
        memory.encoder = looped
    return looped


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lanes"))


@pytest.fixture
def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    fields = random.standard_normal((4 * N, T, X, 1)).astype(np.float32)
    return {"fields": fields, "nu": random.uniform(0.001, 0.01, 4 * N)}


def latents(encoder: BatchEncoder, batch: dict[str, np.ndarray]) -> bytes:
    return encoder.encode(batch, samples=np.arange(4 * N))["latent"].tobytes()


@pytest.mark.parametrize(("lanes", "dtype"), [(2, "float32"), (8, "float32"), (3, "bfloat16")])
def test_number_of_lanes_changes_no_byte(
    checkpoint: Path, batch: dict[str, np.ndarray], lanes: int, dtype: ComputeDtype
) -> None:
    alone, together = (encoder_of(checkpoint, num_lanes=num) for num in (1, lanes))
    alone.encoder.dtype = together.encoder.dtype = dtype
    assert latents(together, batch) == latents(alone, batch)


@pytest.mark.parametrize(("room", "told"), [(8, []), (1, [8, 4, 2])])
def test_out_of_memory_halves_the_lanes_until_they_fit_and_changes_no_byte(
    checkpoint: Path, batch: dict[str, np.ndarray], room: int, told: list[int], notes: list[str]
) -> None:
    memory = LittleMemory(room)
    encoder = encoder_of(checkpoint, memory, num_lanes=8)
    assert latents(encoder, batch) == latents(encoder_of(checkpoint, num_lanes=1), batch)
    assert memory.most <= room
    expected = [f"cpu ran out of memory with {num} micro-batches of {T} frames at a time" for num in told]
    assert [note.removeprefix("warning: ").partition("; ")[0] for note in notes] == expected
    assert all("changes no byte" in note for note in notes)


def test_micro_batch_that_does_not_fit_alone_is_an_error_that_says_what_to_do(
    checkpoint: Path, batch: dict[str, np.ndarray]
) -> None:
    encoder = encoder_of(checkpoint, LittleMemory(0), num_lanes=2)
    with pytest.raises(ConfigError, match=f"room for {T} frames.*smaller latent.micro_batch") as caught:
        latents(encoder, batch)
    assert (caught.value.kind, caught.value.found) == (
        "no_memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    )


def test_other_errors_of_a_forward_are_raised_as_they_are(
    checkpoint: Path, batch: dict[str, np.ndarray]
) -> None:
    encoder = encoder_of(checkpoint, num_lanes=2)
    error = RuntimeError("device-side assert triggered")

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise error

    encoder.encoder.encode_on_device = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        latents(encoder, batch)
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_begun_batch_does_not_need_its_memory_any_more(
    checkpoint: Path, batch: dict[str, np.ndarray]
) -> None:
    encoder = encoder_of(checkpoint, num_lanes=2)
    expected = latents(encoder, batch)
    finish = encoder.begin(batch, samples=np.arange(4 * N))
    batch["fields"][:] = np.nan  # the reader fills its memory again
    assert finish()["latent"].tobytes() == expected


def test_batches_that_overlap_give_what_they_give_one_after_the_other(
    checkpoint: Path, batch: dict[str, np.ndarray]
) -> None:
    encoder = encoder_of(checkpoint, num_lanes=3)
    expected = encoder.encode(batch, samples=np.arange(4 * N))["latent"]
    halves = [np.arange(2 * N), np.arange(2 * N, 4 * N)]
    begun = [
        encoder.begin({name: values[rows] for name, values in batch.items()}, samples=rows) for rows in halves
    ]
    np.testing.assert_array_equal(np.concatenate([finish()["latent"] for finish in begun]), expected)


def test_no_more_jobs_are_taken_than_lanes_and_the_next_one() -> None:
    lanes = Lanes(2, device=CPU, micro_batch=1)
    gate, taken = threading.Event(), []

    def submit_all() -> None:
        for i in range(6):
            lanes.submit(gate.wait)
            taken.append(i)

    submitting = threading.Thread(target=submit_all)
    submitting.start()
    while len(taken) < 3:  # two at work, one laid out
        time.sleep(0.01)
    submitting.join(0.2)
    assert len(taken) == 3
    gate.set()
    submitting.join(60)
    assert len(taken) == 6


def test_lanes_are_as_many_as_cores_and_memory_allow() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert num_lanes(CPU, micro_batch_nbytes=1 << 20) == 4
        assert num_lanes(CPU, micro_batch_nbytes=1 << 50) == 1
        torch.set_num_threads(64)
        assert num_lanes(CPU, micro_batch_nbytes=1) == 8
    finally:
        torch.set_num_threads(before)
    assert num_lanes(torch.device("cuda"), micro_batch_nbytes=1 << 50) == CUDA_LANES


def test_lanes_leave_the_threads_of_the_caller_alone(checkpoint: Path, batch: dict[str, np.ndarray]) -> None:
    before, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(6)
        encoder = encoder_of(checkpoint, num_lanes=2)
        latents(encoder, batch)
        assert encoder._lanes is not None
        inside = encoder._lanes.submit(torch.get_num_threads).result()
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (inside, torch.get_num_threads(), found) == (3, 6, [6])
    finally:
        torch.set_num_threads(before)


def test_micro_batch_of_large_frames_holds_fewer(checkpoint: Path) -> None:
    encoder = LatentEncoder.load(checkpoint)
    assert BatchEncoder(encoder, micro_batch=10**9).micro_batch == MICRO_BATCH_BYTES // (4 * X)
    assert BatchEncoder(encoder, micro_batch=7).identity()["micro_batch"] == 7


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_on_a_gpu_make_the_bytes_of_one_after_the_other(
    checkpoint: Path, batch: dict[str, np.ndarray], lanes: int
) -> None:
    def encode(device: str, num: int) -> np.ndarray:
        encoder = LatentEncoder.load(checkpoint, device=device, latent_dtype="float32")
        looped = BatchEncoder(encoder, micro_batch=T, num_lanes=num)
        return looped.encode(batch, samples=np.arange(4 * N))["latent"]

    found = encode("cuda", lanes)
    assert found.tobytes() == encode("cuda", 1).tobytes()
    np.testing.assert_allclose(found, encode("cpu", 1), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_memory_limit_of_a_gpu_halves_the_lanes(checkpoint: Path) -> None:
    random = np.random.default_rng(0)
    fields = random.standard_normal((512, 64, X, 1)).astype(np.float32)
    batch = {"fields": fields, "nu": np.full(512, 0.01)}

    def encode(num: int) -> tuple[bytes, list[str]]:
        encoder = BatchEncoder(LatentEncoder.load(checkpoint, device="cuda"), micro_batch=8192, num_lanes=num)
        with noted() as notes:
            return encoder.encode(batch, samples=np.arange(512))["latent"].tobytes(), notes

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected, _ = encode(1)
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        1.5 * needed / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        found, notes = encode(4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found == expected
    assert notes
