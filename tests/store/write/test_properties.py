"""Round trips of random stores: any shapes, dtypes and bits, any order of commits, any JSON."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from small_stores import all_arrays, assert_same_bits, begin, build, samples_of

import ups_store
from ups_store import ArraySpec
from ups_store.format.metadata import DTYPE_NAMES, dtype_of, is_name
from ups_store.format.root import config_hash
from ups_store.writing.plan import identity_of

# Sample shapes: numbers, nothing, small ones, and both sides of 4096 bytes for every item size.
SAMPLE_SHAPES = [(), (0,), (1,), (3, 2), (5, 0, 2), (511,), (2, 1025), (4097,), (1, 3, 2, 700)]

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,12}", fullmatch=True).filter(is_name)


@dataclass(frozen=True)
class Content:
    """A random store: arrays with a sample axis and constants, of random bits."""

    values: dict[str, npt.NDArray[Any]]
    constants: dict[str, npt.NDArray[Any]]

    @property
    def num_samples(self) -> int:
        return next((len(value) for value in self.values.values()), 0)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> npt.NDArray[Any]:
    """An array of any bits at all, NaNs with payloads among them; booleans are 0 and 1."""
    kind = dtype_of(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return bits.view(kind).reshape(shape)


@st.composite
def contents(draw: st.DrawFn) -> Content:
    num_samples = draw(st.integers(0, 6))
    chosen = draw(st.lists(names, max_size=5, unique=True))
    values, constants = {}, {}
    for name in chosen:
        shape, dtype = draw(st.sampled_from(SAMPLE_SHAPES)), draw(st.sampled_from(DTYPE_NAMES))
        seed = draw(st.integers(0, 2**32 - 1))
        if draw(st.booleans()):
            constants[name] = random_bits(shape, dtype, seed)
        else:
            values[name] = random_bits((num_samples, *shape), dtype, seed)
    return Content(values, constants)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(content=contents(), data=st.data())
def test_store_reads_back_bit_by_bit_whatever_the_commits(content: Content, data: st.DataObject) -> None:
    """Any order, batches, durability, interruptions: the same bytes, good for any ZIP reader."""
    rest = data.draw(st.permutations(range(content.num_samples)), label="order")
    durability = data.draw(st.sampled_from(["durable", "lazy"]), label="durability")
    options = {"constants": content.constants, "dims": {}}
    with folder() as where:
        path = where / "a.zarr.zip"
        while rest:
            num = data.draw(st.integers(1, len(rest)), label="batch")
            batch, rest = rest[:num], rest[num:]
            with begin(path, content.values, durability=durability, **options) as writer:
                assert writer.commit_many(batch, samples_of(content.values, batch)).all()
                assert set(writer.missing()) == set(rest)
        with begin(path, content.values, **options) as writer:
            writer.finish()
        assert_same_bits(all_arrays(path), content.values)
        with ups_store.open(path) as store:
            assert_same_bits(store.constants, content.constants)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        expected = build(where / "b.zarr.zip", content.values, **options).read_bytes()
        assert path.read_bytes() == expected


@given(content=contents(), data=st.data())
def test_gather_is_indexing_for_any_content(content: Content, data: st.DataObject) -> None:
    with folder() as where:
        path = build(where / "a.zarr.zip", content.values, constants=content.constants, dims={})
        with ups_store.open(path) as store:
            out = None
            num = data.draw(st.integers(0, 8)) if len(store) else 0
            batches = st.lists(st.integers(0, max(0, len(store) - 1)), min_size=num, max_size=num)
            for _ in range(2):  # new memory, then the same again
                indices = data.draw(batches)
                out = store.gather(indices, out=out)
                assert_same_bits(out, samples_of(content.values, indices))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4)),
    axis=st.integers(0, 2),
    data=st.data(),
)
def test_windows_are_slices_over_time_on_any_axis(
    shape: tuple[int, ...], axis: int, data: st.DataObject
) -> None:
    """A window of whatever start, length and stride that fits equals slicing each sample."""
    num_steps = shape[axis]
    dims = ["sample", "a", "b", "c"]
    dims[axis + 1] = "time"
    values = {"u": random_bits((3, *shape), "bfloat16", 0)}
    stride = data.draw(st.integers(1, num_steps), label="stride")
    length = data.draw(st.integers(1, 1 + (num_steps - 1) // stride), label="length")
    latest = num_steps - 1 - (length - 1) * stride
    indices = data.draw(st.lists(st.integers(0, 2), max_size=4), label="indices")
    start = [data.draw(st.integers(0, latest), label="start") for _ in indices]
    with folder() as where, ups_store.open(build(where / "a", values, dims={"u": dims})) as store:
        found = store.gather(indices, start=start, length=length, stride=stride)["u"]
    steps = [first + stride * np.arange(length) for first in start]
    expected = [values["u"][i].take(s, axis=axis) for i, s in zip(indices, steps, strict=True)]
    assert found.shape == (len(indices), *shape[:axis], length, *shape[axis + 1 :])
    assert [sample.tobytes() for sample in found] == [sample.tobytes() for sample in expected]


# --- documents ----------------------------------------------------------------------------------------

MAX_INTEGER = 2**53 - 1
numbers = st.integers(-MAX_INTEGER, MAX_INTEGER) | st.floats(allow_nan=False, allow_infinity=False)
documents = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=6), documents, max_size=4)


@given(identity=objects, attrs=objects, array_attrs=objects)
def test_documents_read_back_whatever_they_hold(
    identity: dict[str, Any], attrs: dict[str, Any], array_attrs: dict[str, Any]
) -> None:
    """Identity and attributes are the same values, the hash fits, and a killed build is recognised by it."""
    arrays = {"u": ArraySpec((1,), "int8", attrs=array_attrs)}
    with folder() as where:
        path = where / "a.zarr.zip"
        ups_store.create(path, arrays, identity=identity, attrs=attrs).close()
        ups_store.join(path, identity=identity).close()
        with ups_store.create(path, arrays, identity=identity, attrs=attrs) as writer:
            writer.commit(0, {"u": 1})
            writer.finish()
        with ups_store.open(path) as store:
            assert store.identity == identity
            assert store.config_hash == config_hash(identity_of(arrays, identity=identity))
            assert store.attrs == attrs
            assert store.arrays["u"].attrs == array_attrs
            assert store.verify().ok
