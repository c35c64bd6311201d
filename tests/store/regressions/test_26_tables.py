"""Tables and several data sets at once are refused with what to write instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ups_store


def test_data_frame_is_refused_and_its_columns_are_taken(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4], "t": ["x", "yz"]})
    with pytest.raises(ups_store.SpecError, match=r"frame\.columns") as caught:
        ups_store.write(tmp_path / "a.zarr.zip", frame)
    assert caught.value.kind == "argument"
    columns = {name: frame[name].to_numpy() for name in frame.columns}
    with ups_store.write(tmp_path / "a.zarr.zip", columns) as store:
        assert (store["a"].tolist(), store["b"].tolist(), list(store["t"])) == ([1, 2], [3, 4], ["x", "yz"])


def test_table_of_arrow_is_refused_and_its_columns_are_taken(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": [1.0, 2.0], "b": [3, 4]})
    with pytest.raises(ups_store.SpecError, match=r"table\.column_names") as caught:
        ups_store.write(tmp_path / "a.zarr.zip", table)
    assert caught.value.kind == "argument"
    columns = {name: table[name].to_numpy() for name in table.column_names}
    with ups_store.write(tmp_path / "a.zarr.zip", columns) as store:
        assert store["b"].tolist() == [3, 4]


class Split(list[dict[str, np.ndarray]]):
    """Of a data set of Hugging Face what is asked of it."""

    features, _fingerprint = None, "f00"

    def with_format(self, kind: str, **options: object) -> Split:
        return self


class DatasetDict(dict[str, Split]):
    pass


def test_data_sets_of_several_splits_are_refused_by_name(tmp_path: Path) -> None:
    splits = DatasetDict({"train": Split([{"u": np.zeros(3)}] * 4), "test": Split([{"u": np.zeros(3)}])})
    with pytest.raises(ups_store.SpecError, match=r"found a DatasetDict; .* samples\['train'\]") as caught:
        ups_store.write(tmp_path / "a.zarr.zip", splits)
    assert caught.value.kind == "argument"
    assert len(ups_store.write(tmp_path / "a.zarr.zip", splits["train"])) == 4
