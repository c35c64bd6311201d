"""`gather` against NumPy's indexing: every way of copying, every kind of output, windows over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from small_stores import assert_same_bits, build

import ups_store
from ups_store import SampleIndexError, SpecError, Store, StoreClosedError
from ups_store.format.layout import ArrayLayout
from ups_store.format.metadata import dtype_of
from ups_store.read import gather as gather_module
from ups_store.read import store as store_module
from ups_store.read.store_file import StoreFile
from ups_store.system import runs

NUM_SAMPLES = 7
SIZES = (1, 8, 4095, 4096, 8192, 20_000)  # from 4096 on samples have slots
ORDERS = {
    "permuted": [5, 0, 6, 2, 1],
    "repeated": [3, 3, 0, 3],
    "many": [1, 2] * 40,
    "none": [],
}


def bytes_of(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, (NUM_SAMPLES, nbytes), np.uint8)


VALUES = {f"u{nbytes}": bytes_of(nbytes) for nbytes in SIZES}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = build(tmp_path_factory.mktemp("gather") / "a.zarr.zip", VALUES, dims={})
    with ups_store.open(path) as store:
        yield store


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who copies: all here holds with a C compiler at installation and without."""
    if request.param == "numpy":
        monkeypatch.setattr(runs, "compiled", None)
    elif runs.compiled is None:
        pytest.skip("ups_store._runs wasn't compiled: no C compiler when ups-store was installed")
    return str(request.param)


# --- every output, every way of copying -----------------------------------------------------------------


def empty(num: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full((num, nbytes), 0xAA, np.uint8)


def with_gaps(num: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full((num, -(-(nbytes + 4) // 64) * 64), 0xAA, np.uint8)[:, :nbytes]


def transposed(num: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full((nbytes, num), 0xAA, np.uint8).T


def reversed_rows(num: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.full((num, nbytes), 0xAA, np.uint8)[::-1]


@pytest.mark.parametrize("make", [None, with_gaps, transposed, reversed_rows])
def test_gather_is_indexing_by_samples(store: Store, make: Callable[..., Any]) -> None:
    for order, indices in ORDERS.items():
        for options in ({}, {"num_threads": 3}):
            out = None if make is None else {f"u{n}": make(len(indices), n) for n in SIZES}
            batch = store.gather(indices, out=out, **options)
            assert_same_bits(batch, {name: value[indices] for name, value in VALUES.items()})
            assert out is None or all(batch[name] is out[name] for name in batch), order


@pytest.mark.parametrize("long_run_bytes", [0, 1 << 40], ids=["views", "items"])
@pytest.mark.parametrize("block_bytes", [1, 10_000])
def test_gather_copies_the_same_either_way(
    store: Store, monkeypatch: pytest.MonkeyPatch, long_run_bytes: int, block_bytes: int
) -> None:
    monkeypatch.setattr(runs, "LONG_RUN_BYTES", long_run_bytes)
    monkeypatch.setattr(runs, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(gather_module, "BLOCK_BYTES", block_bytes)
    for make in (empty, with_gaps):
        batch = store.gather([6, 0, 6, 1, 2], out={f"u{n}": make(5, n) for n in SIZES})
        assert_same_bits(batch, {name: value[[6, 0, 6, 1, 2]] for name, value in VALUES.items()})


@pytest.mark.parametrize("name", ["u8", b"u8", np.str_("u8")])
def test_name_outside_a_list_is_refused_and_not_taken_for_its_letters(store: Store, name: Any) -> None:
    with pytest.raises(SpecError, match=r"expected a list of names, found .*'u8'.*; write \['u8'\]"):
        store.gather([0], name)


@pytest.mark.parametrize(
    ("out", "found"),
    [
        (np.empty((2, 9), np.uint8), "writeable uint8 (2, 9)"),
        (np.empty((3, 8), np.uint8), "writeable uint8 (3, 8)"),
        (np.empty((2, 8), np.int8), "writeable int8 (2, 8)"),
        (np.broadcast_to(np.uint8(0), (2, 8)), "read-only uint8 (2, 8)"),
    ],
)
def test_gather_refuses_an_output_that_does_not_fit(store: Store, out: npt.NDArray[Any], found: str) -> None:
    with pytest.raises(SpecError) as caught:
        store.gather([0, 1], ["u8"], out={"u8": out})
    error = caught.value
    assert (error.kind, error.array) == ("out", "u8")
    assert (error.expected, error.found) == ("writeable uint8 (2, 8)", found)


@pytest.mark.parametrize(
    ("out", "found"),
    [
        ({"u8": [[0] * 8]}, "list"),
        ({"u9": np.zeros((1, 8), np.uint8)}, ["u9"]),
        (np.zeros((1, 8), np.uint8), np.ndarray),
    ],
)
def test_gather_refuses_an_output_that_is_none(store: Store, out: Any, found: Any) -> None:
    with pytest.raises(SpecError) as caught:
        store.gather([0], ["u8"], out=out)
    assert (caught.value.kind, caught.value.found) == ("out", found)


# --- conversion -----------------------------------------------------------------------------------------

CONVERTED = {  # from, to: what outputs may ask for
    "float16-float32": ("float16", "float32"),
    "bfloat16-float32": ("bfloat16", "float32"),
    "float32-bfloat16": ("float32", "bfloat16"),
    "uint8-float32": ("uint8", "float32"),
    "float32-big": ("float32", ">f4"),
}


@pytest.mark.parametrize("access", ["map", "pread"])
@pytest.mark.parametrize("pair", CONVERTED)
def test_output_of_another_dtype_is_converted_to(tmp_path: Path, pair: str, access: Any) -> None:
    """Short and long runs, in slots and without, windows, outputs with gaps."""
    source, target = (dtype_of(name) if name != ">f4" else np.dtype(name) for name in CONVERTED[pair])
    shapes = {"small": (3,), "slots": (3, 900), "large": (3, 6000)}
    numbers = np.random.default_rng(0).integers(0, 2 if source.kind == "b" else 100, 7 * 3 * 6000)
    values = {name: np.resize(numbers, (7, *shape)).astype(source) for name, shape in shapes.items()}
    dims = {name: ("sample", "time", name)[: len(shape) + 1] for name, shape in shapes.items()}
    path = build(tmp_path / "a.zarr.zip", values, dims=dims)
    indices = [6, 1, 1, 0]
    with ups_store.open(path, access=access) as store:
        for options, steps in (({}, slice(None)), ({"start": 1, "length": 2}, slice(1, 3))):
            expected = {name: value[indices][:, steps].astype(target) for name, value in values.items()}
            for layout in "CF":
                out = {name: np.empty(value.shape, target, layout) for name, value in expected.items()}
                assert_same_bits(store.gather(indices, out=out, **options), expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "int32"), ("int64", "float32"), ("int8", "uint8")],
)
def test_output_that_would_lose_numbers_is_refused(tmp_path: Path, source: str, target: str) -> None:
    values = {"u": np.zeros((2, 3), source)}
    path = build(tmp_path / "a.zarr.zip", values, dims={})
    with ups_store.open(path) as store, pytest.raises(SpecError) as caught:
        store.gather([0], out={"u": np.empty((1, 3), target)})
    error = caught.value
    assert (error.kind, error.expected, error.found) == (
        "out",
        f"writeable {source} (1, 3)",
        f"writeable {target} (1, 3)",
    )
    assert "floating-point" in str(error.hint)


# --- windows over time ----------------------------------------------------------------------------------

NUM_STEPS = 9
TIMED = {
    "fields": np.arange(4 * NUM_STEPS * 300, dtype=np.float32).reshape(4, NUM_STEPS, 300),
    "late": np.arange(4 * 3 * NUM_STEPS, dtype=np.int16).reshape(4, 3, NUM_STEPS),
    "latent": np.arange(4 * NUM_STEPS * 2).reshape(4, NUM_STEPS, 2).astype(dtype_of("bfloat16")),
    "nu": np.arange(4.0),
}
TIMED_DIMS = {
    "fields": ("sample", "time", "x"),
    "late": ("sample", "face", "time"),
    "latent": ("sample", "time", "width"),
    "nu": ("sample",),
}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = build(tmp_path_factory.mktemp("windows") / "a.zarr.zip", TIMED, dims=TIMED_DIMS)
    with ups_store.open(path) as store:
        yield store


def windows(indices: list[int], steps: list[range]) -> dict[str, npt.NDArray[Any]]:
    """Windows by plain indexing."""
    pairs = list(zip(indices, steps, strict=True))
    return {
        "fields": np.array([TIMED["fields"][i, list(s)] for i, s in pairs]),
        "late": np.array([TIMED["late"][i][:, list(s)] for i, s in pairs]),
        "latent": np.array([TIMED["latent"][i, list(s)] for i, s in pairs]),
        "nu": TIMED["nu"][indices],
    }


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"start": 0, "length": 9}, [range(9), range(9)]),
        ({"start": 2, "length": 3}, [range(2, 5), range(2, 5)]),
        ({"start": [1, 5], "length": 4}, [range(1, 5), range(5, 9)]),
        ({"start": np.array([5, 0], np.uint16), "length": 2}, [range(5, 7), range(2)]),
        ({"start": [0, 2], "length": 3, "stride": 3}, [range(0, 7, 3), range(2, 9, 3)]),
        ({"start": [2, 6]}, [range(2, 5), range(6, 9)]),
        ({"stride": 2}, [range(0, 9, 2), range(0, 9, 2)]),
        ({"start": 3, "length": 1, "stride": 2**70}, [range(3, 4), range(3, 4)]),
        ({"start": np.int8(2), "length": np.int16(2)}, [range(2, 4), range(2, 4)]),
    ],
)
def test_windows_are_slices_over_time(timed: Store, options: dict[str, Any], steps: list[range]) -> None:
    expected = windows([3, 1], steps)
    assert_same_bits(timed.gather([3, 1], **options), expected)
    for order in "CF":
        out = {name: np.empty_like(value, order=order) for name, value in expected.items()}
        assert_same_bits(timed.gather([3, 1], out=out, **options), expected)


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"start": -1, "length": 2}, "steps 0..8", "-1..0"),
        ({"start": 8, "length": 2}, "steps 0..8", "8..9"),
        ({"start": [0, 7], "length": 3}, "steps 0..8", "0..9"),
        ({"start": [0, -2]}, "steps 0..8", "-2..8"),
        ({"start": np.array([0, 2**63], np.uint64), "length": 1}, "steps 0..8", f"0..{2**63}"),
        ({"length": 2**70}, "steps 0..8", f"0..{2**70 - 1}"),
    ],
)
def test_windows_outside_the_time_steps_are_refused(
    timed: Store, options: dict[str, Any], expected: str, found: str
) -> None:
    with pytest.raises(SampleIndexError) as caught:
        timed.gather([0, 1], **options)
    error = caught.value
    assert (error.kind, error.array, error.expected, error.found) == ("window", "fields", expected, found)


@pytest.mark.parametrize(
    "options",
    [
        {"start": 0, "length": 0},
        {"start": 0.5},
        {"start": [0, 1, 2], "length": 1},
        {"start": [True, False], "length": 1},
    ],
)
def test_windows_without_meaning_are_refused(timed: Store, options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        timed.gather([0, 1], **options)
    assert (caught.value.kind, caught.value.array) == ("window", "fields")


def test_array_first_used_during_a_preload_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would show the file, which may be cut once there is a copy and nobody looks at its length."""
    path = build(tmp_path / "a.zarr.zip", {"u": VALUES["u8192"]}, dims={})
    with ups_store.open(path) as store:
        sampled_array = store_module.SampledArray

        class Preloaded(sampled_array):  # type: ignore[misc, valid-type]
            def __init__(self, layout: ArrayLayout, file: StoreFile) -> None:
                super().__init__(layout, file)
                monkeypatch.setattr(store_module, "SampledArray", sampled_array)
                store.preload("copy")

        monkeypatch.setattr(store_module, "SampledArray", Preloaded)
        store.gather([0])
        path.write_bytes(bytes(path.stat().st_size))  # the same length: a mapping shows zeros
        assert_same_bits(store.gather([3]), {"u": VALUES["u8192"][[3]]})


def test_closed_amid_a_read_it_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread; the number of the descriptor may at once be that of another file."""
    path = build(tmp_path / "a.zarr.zip", {"u": VALUES["u8192"]}, dims={})
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    store, read_samples, others = ups_store.open(path, access="pread"), gather_module.read_samples, []

    def close_and_read(*args: Any, **options: Any) -> None:
        store.close()
        others.extend((tmp_path / "other").open("rb") for _ in range(20))
        read_samples(*args, **options)

    monkeypatch.setattr(gather_module, "read_samples", close_and_read)
    assert_same_bits(store.gather([3]), {"u": VALUES["u8192"][[3]]})
    for other in others:
        other.close()
    with pytest.raises(StoreClosedError):
        store.gather([3])


@pytest.mark.parametrize("wrong", [2**63, -(2**70), np.uint64(2**63 + 1)])
def test_gather_names_an_index_beyond_64_bits(store: Store, wrong: Any) -> None:
    for indices in ([wrong], np.array([wrong]), [wrong, 2]):
        with pytest.raises(SampleIndexError) as caught:
            store.gather(indices)
        assert (caught.value.kind, caught.value.found) == ("index", int(wrong))


def test_every_float16_number_is_converted_as_numpy_does(tmp_path: Path) -> None:
    """NaN payloads, infinities and subnormal numbers included."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(16, 4096)
    with ups_store.open(build(tmp_path / "a.zarr.zip", {"u": values}, dims={})) as store:
        out = {"u": np.empty((16, 4096), np.float32)}
        store.gather(range(16), out=out)
    assert_same_bits(out, {"u": values.astype(np.float32)})
