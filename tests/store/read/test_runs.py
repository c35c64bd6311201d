"""`_runs.c`: copies and their checks in compiled code, against NumPy's indexing."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import assert_same_bits, build

import ups_store
from ups_store import SampleIndexError, SpecError, Store
from ups_store.format.checksum import crc32c
from ups_store.read import gather as sampled_array
from ups_store.system import runs

compiled: Any = runs.compiled

needs_compiled = pytest.mark.skipif(
    compiled is None, reason="ups_store._runs wasn't compiled: no C compiler when ups-store was installed"
)

MEMORY = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
STREAMED_BYTES = 300_000  # in the tests of it `_runs.c` passes the caches by from here on
GUARD = 100  # bytes around an output that stay as they are


def test_it_is_compiled_where_a_compiler_is() -> None:
    """Installation goes on without it, so only this tells that the C file is broken."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which(sysconfig.get_config_var("CC").split()[0]) is None or not header.exists():
        pytest.skip("no C compiler, or no headers of Python")
    assert compiled is not None


# --- copies ---------------------------------------------------------------------------------------------


def copied(firsts: npt.NDArray[np.int64], nbytes: int, *, shift: int = 0) -> npt.NDArray[np.uint8]:
    """What `copy` makes of runs of `MEMORY`, shape (n, nbytes), where the output begins `shift` bytes on."""
    memory = np.full(len(firsts) * nbytes + shift + 2 * GUARD, 0xAA, np.uint8)
    out = memory[GUARD + shift : len(memory) - GUARD]
    compiled.copy(MEMORY, firsts, nbytes, out)
    assert (memory[: GUARD + shift] == 0xAA).all()
    assert (memory[len(memory) - GUARD :] == 0xAA).all()
    return out.reshape(len(firsts), nbytes)


def indexed(firsts: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.uint8]:
    return MEMORY[firsts[:, None] + np.arange(nbytes)]


@needs_compiled
@given(st.data())
def test_copy_is_indexing(data: st.DataObject) -> None:
    nbytes = data.draw(st.one_of(st.integers(1, 300), st.integers(1, 20_000)))
    first = st.integers(0, len(MEMORY) - nbytes)
    firsts = np.array(data.draw(st.lists(first, max_size=20)), np.int64)
    assert (copied(firsts, nbytes, shift=data.draw(st.integers(0, 70))) == indexed(firsts, nbytes)).all()


@pytest.fixture
def streams_early() -> Iterator[None]:
    compiled.stream_from(STREAMED_BYTES)
    yield
    compiled.stream_from(runs.streamed_bytes())


@needs_compiled
@pytest.mark.usefixtures("streams_early")
@pytest.mark.parametrize("nbytes", [1, 63, 65, 128, 4096, 70_001])
@pytest.mark.parametrize("shift", [0, 5])
def test_large_output_is_copied_past_the_caches(nbytes: int, shift: int) -> None:
    """Where an output begins within a line, and where a run ends, there is no whole line to stream."""
    num = STREAMED_BYTES // nbytes + 3
    firsts = np.random.default_rng(nbytes).integers(0, len(MEMORY) - nbytes + 1, num)
    out = copied(firsts, nbytes, shift=shift)
    for rows in (slice(0, 50), slice(num // 2, num // 2 + 50), slice(-50, None)):
        assert (out[rows] == indexed(firsts[rows], nbytes)).all()
    assert int(out.sum(dtype=np.uint64)) == checksum(firsts, nbytes)


def checksum(firsts: npt.NDArray[np.int64], nbytes: int) -> int:
    """Sum of all bytes of runs of `MEMORY`."""
    before = np.concatenate(([0], np.cumsum(MEMORY, dtype=np.uint64)))
    return int((before[firsts + nbytes] - before[firsts]).sum(dtype=np.uint64))


@needs_compiled
@pytest.mark.parametrize(
    ("firsts", "nbytes", "out_nbytes"),
    [
        ([0, -1], 10, 20),
        ([2**63 - 1], 10, 10),
        ([0], len(MEMORY) + 1, len(MEMORY) + 1),
        ([0, 1], 10, 19),
        ([0, 1], 10, 21),
        ([0], 0, 0),
        ([0], -1, 1),
    ],
)
def test_copy_refuses_what_is_not_there(firsts: list[int], nbytes: int, out_nbytes: int) -> None:
    out = np.full(out_nbytes, 0xAA, np.uint8)
    with pytest.raises(ValueError, match="reach outside the memory, or don't fill"):
        compiled.copy(MEMORY, np.array(firsts, np.int64), nbytes, out)
    assert (out == 0xAA).all()


# --- checks ---------------------------------------------------------------------------------------------


@needs_compiled
@given(st.data())
@settings(deadline=None)
def test_damaged_slots_are_those_that_the_package_finds(data: st.DataObject) -> None:
    nbytes = data.draw(st.one_of(st.integers(0, 200), st.integers(4000, 9000)))
    num, pad = data.draw(st.integers(0, 19)), data.draw(st.integers(0, 60))
    slots = np.zeros((num, nbytes + 4 + pad), np.uint8)
    slots[:, :nbytes] = np.random.default_rng(nbytes).integers(0, 256, (num, nbytes))
    for slot in slots:
        slot[nbytes : nbytes + 4].view("<u4")[0] = crc32c(slot[:nbytes].tobytes())
    changed = data.draw(st.sets(st.integers(0, num - 1))) if num else set()
    for number in changed:
        slots[number, data.draw(st.integers(0, slots.shape[1] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = runs.damaged_slots(slots, nbytes)
    if found is None:
        pytest.skip("the processor has no instruction for CRC-32C")
    assert np.flatnonzero(found).tolist() == sorted(changed)


@needs_compiled
@given(st.data())
@settings(deadline=None)
def test_sealed_slots_are_runs_with_their_crc32c(data: st.DataObject) -> None:
    nbytes = data.draw(st.one_of(st.integers(1, 200), st.integers(4000, 9000)))
    firsts = data.draw(st.lists(st.integers(0, len(MEMORY) - nbytes), max_size=19))
    memory = np.full(len(firsts) * (nbytes + 4 + 3) + 2 * GUARD, 0xAA, np.uint8)
    slots = memory[GUARD : len(memory) - GUARD].reshape(len(firsts), nbytes + 4 + 3)
    if not runs.seal_slots(MEMORY, runs.Runs(np.array(firsts, np.int64), nbytes), slots):
        pytest.skip("the processor has no instruction for CRC-32C")
    for slot, first in zip(slots, firsts, strict=True):
        payload = MEMORY[first : first + nbytes].tobytes()
        assert slot.tobytes() == payload + crc32c(payload).to_bytes(4, "little") + b"\xaa" * 3
    assert (memory[:GUARD] == 0xAA).all()
    assert (memory[len(memory) - GUARD :] == 0xAA).all()


@needs_compiled
@pytest.mark.parametrize(
    ("firsts", "nbytes", "stride"),
    [
        ([0, -1], 10, 20),
        ([0, 1], 0, 20),
        ([0, 1], 17, 20),
        ([0, 1], 10, 13),
        ([0, 1, 2], 10, 20),
    ],
)
def test_seal_refuses_what_is_not_there(firsts: list[int], nbytes: int, stride: int) -> None:
    slots = np.full(40, 0xAA, np.uint8)
    with pytest.raises(ValueError, match="reach outside the memory, or don't fit"):
        compiled.seal(MEMORY, np.array(firsts, np.int64), nbytes, slots, stride)
    assert (slots == 0xAA).all()


# --- the usual `gather` ---------------------------------------------------------------------------------

NUM_SAMPLES, NUM_STEPS = 6, 9
VALUES: dict[str, npt.NDArray[Any]] = {
    "fields": np.random.default_rng(1).random((NUM_SAMPLES, NUM_STEPS, 5, 40), np.float32),
    "late": np.random.default_rng(2).random((NUM_SAMPLES, 3, NUM_STEPS, 2)),
    "nu": np.arange(NUM_SAMPLES, dtype=np.int32),
}
DIMS = {"fields": ("sample", "time", "c", "x"), "late": ("sample", "k", "time", "y")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = build(tmp_path_factory.mktemp("runs") / "a.zarr.zip", VALUES, dims=DIMS)
    with ups_store.open(path) as store:
        store.gather([0])  # what every call needs is worked out by the first
        yield store


@pytest.fixture
def only_compiled(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, whose other ways of copying fail."""
    if compiled is None:
        pytest.skip("ups_store._runs wasn't compiled: no C compiler when ups-store was installed")
    monkeypatch.setattr(sampled_array.SampledArray, "gather", None)
    return store


def windowed(samples: Any, starts: Any, length: int, stride: int) -> dict[str, npt.NDArray[Any]]:
    steps = np.asarray(starts)[:, None] + np.arange(length) * stride
    late = VALUES["late"].swapaxes(1, 2)[np.asarray(samples)[:, None], steps].swapaxes(1, 2)
    return {"fields": VALUES["fields"][np.asarray(samples)[:, None], steps], "late": late}


@pytest.mark.parametrize("indices", [[2, 0, 5, 5], [3], []])
@pytest.mark.parametrize("has_out", [False, True])
def test_usual_samples_take_one_call(only_compiled: Store, indices: list[int], has_out: bool) -> None:
    expected = {name: VALUES[name][indices] for name in ("fields", "late", "nu")}
    out = {name: np.ones_like(value) for name, value in expected.items()} if has_out and indices else None
    batch = only_compiled.gather(np.array(indices, np.int64), list(expected), out=out)
    if indices:
        assert_same_bits(batch, expected)
    assert {name: value.shape for name, value in batch.items()} == {n: v.shape for n, v in expected.items()}
    assert out is None or all(batch[name] is out[name] for name in out)


@needs_compiled
@given(st.data())
@settings(deadline=None)
def test_usual_windows_are_indexing(store: Store, data: st.DataObject) -> None:
    length, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    num = data.draw(st.integers(1, 5))
    samples = np.array(data.draw(st.lists(st.integers(0, NUM_SAMPLES - 1), min_size=num, max_size=num)))
    start = st.integers(0, NUM_STEPS - 1 - (length - 1) * stride)
    starts = np.array(data.draw(st.lists(start, min_size=num, max_size=num)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_array.SampledArray, "gather", None)
        batch = store.gather(samples, ["fields", "late", "nu"], start=starts, length=length, stride=stride)
    expected = {**windowed(samples, starts, length, stride), "nu": VALUES["nu"][samples]}
    assert_same_bits(batch, expected)


@pytest.mark.parametrize(
    ("indices", "options", "error"),
    [
        ([0, NUM_SAMPLES], {}, SampleIndexError),
        ([0, -NUM_SAMPLES - 1], {}, SampleIndexError),
        ([0, 1], {"start": np.array([0, 7]), "length": 3}, SampleIndexError),
        ([0, 1], {"start": np.array([0, 2**62]), "length": 3}, SampleIndexError),
        ([0, 1], {"start": np.array([0, 0]), "length": NUM_STEPS + 1}, SampleIndexError),
        ([0, 1], {"start": np.array([0, 0]), "length": 2**62, "stride": 2}, SampleIndexError),
        ([0, 1], {"start": np.array([0, 0]), "length": 2, "stride": -1}, SpecError),
        ([0, 1], {"start": np.array([0]), "length": 2}, SpecError),
        ([0, 1], {"start": np.array([0.0, 1.0]), "length": 2}, SpecError),
        ([[0, 1]], {}, SpecError),
        (1, {}, SpecError),
        ([False, True], {}, SpecError),
    ],
)
def test_what_is_wrong_copies_nothing_and_says_why(
    store: Store, indices: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    shape = (2, int(options["length"]) if 0 < options.get("length", 0) < 99 else NUM_STEPS, 5, 40)
    out = np.full(shape, 7, np.float32)
    with pytest.raises(error):
        store.gather(np.array(indices), ["fields"], out={"fields": out}, **options)
    assert (out == 7).all()


@needs_compiled
def test_unusual_output_of_one_array_leaves_the_others_usual(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    gather = sampled_array.SampledArray.gather

    def spy(array: sampled_array.SampledArray, *args: Any, **options: Any) -> Any:
        copied.append(array.layout.meta.name)
        return gather(array, *args, **options)

    monkeypatch.setattr(sampled_array.SampledArray, "gather", spy)
    out = {"late": np.zeros((2, *VALUES["late"].shape[1:]), np.float32)}
    batch = store.gather(np.array([4, 1]), ["fields", "late"], out=out)
    assert list(batch) == ["fields", "late"]
    assert copied == ["late"]
    assert (batch["late"] == VALUES["late"][[4, 1]].astype(np.float32)).all()


@needs_compiled
@pytest.mark.parametrize(
    ("stride", "nbytes", "num"), [(10, 7, 10), (0, 0, 10), (10, -1, 10), (10, 6, 9), (7, 3, 14)]
)
def test_slots_that_are_not_there_are_refused(stride: int, nbytes: int, num: int) -> None:
    marks = np.full(num, 7, np.uint8)
    with pytest.raises(ValueError, match="not so many slots"):
        compiled.damaged(np.zeros(100, np.uint8), stride, nbytes, marks)
    assert (marks == 7).all()
