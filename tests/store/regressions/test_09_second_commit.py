"""A sample that is committed again with other values is an error, not silently the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups_store

N = 6
SPECS = {
    "u": ups_store.ArraySpec((N, 40, 40), "float32"),
    "n": ups_store.ArraySpec((N,), "int64"),
    "r": ups_store.ArraySpec((N, None, 2), "float64", lengths=[i + 1 for i in range(N)]),
}


def sample(i: int, **other: Any) -> dict[str, Any]:
    return {"u": np.full((40, 40), i, "f4"), "n": np.int64(i), "r": np.full((i + 1, 2), float(i)), **other}


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    with ups_store.create(tmp_path / "a.zarr.zip", SPECS, identity={}) as made:
        yield made


CHANGES = [{"u": np.zeros((40, 40), "f4")}, {"n": np.int64(9)}, {"r": np.zeros((3, 2))}]


@pytest.mark.parametrize("change", CHANGES)
def test_commit_of_other_values_names_sample_and_array_and_keeps_the_first(
    writer: Any, change: dict[str, Any]
) -> None:
    assert writer.commit(2, sample(2))
    assert not writer.commit(2, sample(2))
    with pytest.raises(ups_store.SpecError) as caught:
        writer.commit(2, sample(2, **change))
    assert (caught.value.kind, caught.value.sample, caught.value.array) == ("committed", 2, *change)
    for i in {*range(N)} - {2}:
        writer.commit(i, sample(i))
    with ups_store.open(writer.finish()) as store:
        assert store[2]["u"][0, 0] == store[2]["n"] == store[2]["r"][0, 0] == 2


@pytest.mark.parametrize("change", CHANGES)
def test_batch_refuses_other_values_of_a_sample_that_waits(writer: Any, change: dict[str, Any]) -> None:
    with writer.batched(save_every_s=1e9) as batch:
        batch.commit(1, sample(1))
        batch.commit(2, sample(2))
        batch.commit(2, sample(2))
        with pytest.raises(ups_store.SpecError) as caught:
            batch.commit(2, sample(2, **change))
        assert (caught.value.kind, caught.value.sample, caught.value.array) == ("committed", 2, *change)
    assert writer.missing().tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize("change", CHANGES)
def test_batch_refuses_other_values_of_a_sample_that_is_committed(
    writer: Any, change: dict[str, Any]
) -> None:
    writer.commit(2, sample(2))
    batch = writer.batched(save_every_s=1e9)
    batch.commit(2, sample(2, **change))
    with pytest.raises(ups_store.SpecError) as caught:
        batch.flush()
    assert (caught.value.kind, caught.value.sample, caught.value.array) == ("committed", 2, *change)


def test_many_of_which_one_differs_write_none(writer: Any) -> None:
    numbers = range(N)
    writer.commit(3, sample(3))
    values: Any = {name: [sample(i)[name] for i in numbers] for name in SPECS}
    values = {**values, "u": np.stack(values["u"]), "n": np.array([0, 1, 2, 7, 4, 5])}
    with pytest.raises(ups_store.SpecError, match="sample 3"):
        writer.commit_many(numbers, values)
    assert writer.missing().tolist() == [0, 1, 2, 4, 5]
    values["n"][3] = 3
    assert writer.commit_many(numbers, values).tolist() == [True, True, True, False, True, True]
