"""`ups_store.make_loader`: dictionaries of NumPy arrays, without torch, in its order and with its state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ragged_stores import LENGTHS, build_ragged, ragged_values
from small_stores import MakeStore

import ups_store
from ups_store.errors import BatchTimeoutError, ConfigError, SpecError
from ups_store.read import loader as loading
from ups_store.read import prefetch
from ups_store.read.items import StoreItems

N = 50


@pytest.fixture
def path(make_store: MakeStore) -> Path:
    """Sample i holds the number i, over time i + step / 100."""
    steps = np.arange(N)[:, None] + np.arange(6) / 100
    values = {"fields": steps[:, :, None] + np.zeros(4), "nu": np.arange(N) / 2, "count": np.arange(N)}
    return make_store(values, dims={"fields": ("sample", "time", "x")})


def items_of(batches: Any) -> list[list[int]]:
    return [np.asarray(batch["index"]).tolist() for batch in batches]


def test_batches_are_dictionaries_of_arrays_and_torch_is_not_imported(path: Path) -> None:
    program = (
        "import sys, ups_store\n"
        "loader = ups_store.make_loader(sys.argv[1], batch_size=4, shuffle=True, dtype='float32')\n"
        "for batch in loader:\n"
        "    assert type(batch) is dict and batch.keys() == {'fields', 'nu', 'count', 'index'}\n"
        "    assert (batch['fields'][:, 0, 0] == batch['index']).all() and batch['nu'].dtype == 'float32'\n"
        "print(loader.report().num_samples, 'torch' in sys.modules, loader)"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith("50 False <Loader: steps: 13 of 4 samples"), ended.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True, "seed": 3},
        {"global_batch_size": 8, "shuffle": "block", "rank": 1, "world_size": 2, "pad_last": True},
        {"batch_size": 7, "drop_last": True, "window": ups_store.Window(horizon=2, samples_per_trajectory=2)},
        {"batch_size": 4, "dtype": None, "names": ["nu"], "num_workers": 0},
    ],
)
def test_torch_gives_the_same_batches_and_each_goes_on_where_the_other_stopped(
    path: Path, options: dict[str, Any]
) -> None:
    torch_room = pytest.importorskip("ups_store.torch")
    ours, theirs = ups_store.make_loader(path, **options), torch_room.make_loader(path, **options)
    for _ in range(2):
        for batch, tensors in zip(ours, theirs, strict=True):
            assert batch.keys() == tensors.keys() - {"task"}
            for key, value in batch.items():
                if key == "params":
                    assert value.keys() == tensors[key].keys()
                else:
                    assert np.array_equal(value, tensors[key].numpy())
    for one, other in ((ours, theirs), (theirs, ours)):
        batches = iter(one)
        next(batches), next(batches)
        state = one.state_dict()
        rest = items_of(batches)
        other.load_state_dict(state)
        assert items_of(other) == rest


def test_transform_collate_fn_and_batch_transform_make_the_batches(path: Path) -> None:
    def named(sample: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * sample["fields"], "number": int(sample["count"]), "name": f"{sample['index']}"}

    loader = ups_store.make_loader(
        path,
        batch_size=25,
        transform=named,
        batch_transform=lambda batch, step: {**batch, "step": step.number},
    )
    first, second = list(loader)
    assert (first["twice"].shape, second["step"], second["name"][0]) == ((25, 6, 4), 1, "25")
    assert second["number"].tolist() == list(range(25, 50))
    sums = ups_store.make_loader(
        path, batch_size=25, collate_fn=lambda rows: sum(row["count"] for row in rows)
    )
    assert list(sums) == [sum(range(25)), sum(range(25, 50))]
    for transform in (lambda s: s["fields"][: 1 + s["count"] % 2], lambda s: {str(s["count"]): 1}):
        with pytest.raises(SpecError) as caught:
            list(ups_store.make_loader(path, batch_size=5, transform=transform))
        assert caught.value.kind == "mixed"


@pytest.mark.parametrize(("option", "wrong"), [("window", 3), ("dtype", "floot")])
def test_option_of_a_wrong_kind_is_an_error_of_its_name(path: Path, option: str, wrong: Any) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.make_loader(path, batch_size=5, **{option: wrong})
    assert caught.value.kind == option


def test_ragged_arrays_are_padded_or_lists_and_a_transform_sees_a_sample_alone(tmp_path: Path) -> None:
    values = ragged_values(seed=1)
    path, num = build_ragged(tmp_path / "r.zarr.zip", values), len(LENGTHS)
    names = ["points", "text"]
    for form in ("padded", "views"):
        (batch,) = ups_store.make_loader(path, names=names, ragged=form, batch_size=num)
        assert batch["text"] == values["text"]
        for row, length in enumerate(LENGTHS):
            np.testing.assert_array_equal(batch["points"][row][:length], values["points"][row])
    seen: list[int] = []

    def noted(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(sample["points"]))
        return sample

    options: dict[str, Any] = {"names": names, "ragged": "padded", "batch_size": num, "num_workers": 0}
    (batch,) = ups_store.make_loader(path, transform=noted, **options)
    assert seen == batch["points.lengths"].tolist() == list(LENGTHS)
    assert batch["points"].shape[1] == max(LENGTHS)
    for wrong in (None, "nested"):
        with pytest.raises(SpecError) as caught:
            ups_store.make_loader(path, batch_size=2, ragged=wrong)
        assert caught.value.kind == "ragged"


def test_ranks_come_from_the_variables_and_auto_shuffle_wants_an_answer_of_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ups_store.make_loader(path, batch_size=5)
    taken = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        taken += [i for items in items_of(ups_store.make_loader(path, batch_size=5)) for i in items]
    assert sorted(taken) == list(range(N))
    assert len(loader) == 5
    with pytest.raises(ConfigError) as caught:
        ups_store.make_loader(path, batch_size=5, shuffle="auto")
    assert caught.value.kind == "shuffle"


def test_batches_that_take_less_than_a_hand_over_are_made_by_the_loop_and_others_by_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    makers: list[str] = []
    fetch = StoreItems.fetch

    def noted(self: StoreItems, *args: Any, **options: Any) -> dict[str, Any]:
        makers.append(threading.current_thread().name)
        return fetch(self, *args, **options)

    monkeypatch.setattr(StoreItems, "fetch", noted)
    monkeypatch.setattr(loading, "HAND_OVER_S", 0.0)  # none are made together
    expected = items_of(ups_store.make_loader(path, batch_size=2, shuffle=True, num_workers=0))
    for limit, last in ((60.0, threading.current_thread().name), (0.0, "ups_store loader")):
        makers.clear()
        monkeypatch.setattr(loading, "CALLER_S", limit)
        loader = ups_store.make_loader(path, batch_size=2, shuffle=True)
        assert items_of(loader) == expected
        loader.close()
        assert makers[0] == "ups_store loader"
        assert makers[24] == last


def test_batch_that_does_not_come_is_an_error_with_its_samples(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    released = threading.Event()
    monkeypatch.setattr(StoreItems, "fetch", lambda self, *args, **options: released.wait(60))
    monkeypatch.setattr(prefetch, "POLL_S", 0.01)
    with pytest.raises(BatchTimeoutError) as caught:
        next(iter(ups_store.make_loader(path, batch_size=2, timeout=0.01)))
    released.set()
    assert caught.value.samples == (0, 1)


def test_appended_stores_are_mixed_in_a_batch(tmp_path: Path) -> None:
    pattern = str(tmp_path / "days-*.zarr.zip")
    for day in range(3):
        values = ({"u": np.full(4, 4 * day + hour, "f4")} for hour in range(4))
        ups_store.append(pattern, values, identity={"version": 1}, key=f"day {day}").close()
    loader = ups_store.make_loader(pattern, batch_size=6, seed=0)
    batches = [batch["u"][:, 0] // 4 for batch in loader]
    assert [len(days) for days in batches] == [6, 6]
    assert all(len(np.unique(days)) > 1 for days in batches)
