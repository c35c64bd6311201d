"""`ups_store.write`: all kinds of samples, the specs that are found, identities, continuing after kills."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ups_store
from ups_store import SpecError
from ups_store.system import files

N = 50
FIELDS = np.random.default_rng(0).standard_normal((N, 3, 4)).astype("f4")
IDENTITY = {"kind": "test", "version": 1}


def fixed(num: int = N) -> Iterator[dict[str, Any]]:
    for i in range(num):
        yield {"u": FIELDS[i], "y": i}


def mixed(num: int = N) -> Iterator[dict[str, Any]]:
    for i in range(num):
        yield {
            "p": np.full((i % 4, 2), i, "f4"),
            "text": "é" * (i % 5),
            "raw": bytes([i]),
            "in": {"x": i / 2},
        }


def check_mixed(store: ups_store.AnyStore, num: int = N) -> None:
    assert len(store) == num
    for i, expected in enumerate(mixed(num)):
        sample = store[i]
        assert (sample["text"], sample["raw"]) == (expected["text"], expected["raw"])
        assert float(sample["in.x"]) == i / 2
        np.testing.assert_array_equal(sample["p"], expected["p"])
    assert store.verify().ok


def check_fixed(store: ups_store.AnyStore) -> None:
    np.testing.assert_array_equal(store["u"], FIELDS)
    assert store["y"].tolist() == list(range(N))
    assert store.arrays["y"].dtype == "int64"
    assert store.verify().ok


class Pair(NamedTuple):
    u: Any
    y: int


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        (lambda: fixed(), None),
        (lambda: list(fixed()), None),
        (lambda: [(s["u"], s["y"]) for s in fixed()], ["u", "y"]),
        (lambda: [Pair(s["u"], s["y"]) for s in fixed()], None),
        (lambda: {"u": FIELDS, "y": np.arange(N)}, None),
        (lambda: {"u": FIELDS, "y": list(range(N))}, None),
        (lambda: {"u": FIELDS.astype(">f4"), "y": np.arange(N)}, None),
    ],
    ids=["generator", "list", "tuples", "named tuples", "arrays", "columns", "big-endian"],
)
def test_every_kind_of_samples_makes_the_same_store(tmp_path: Path, samples: Any, names: Any) -> None:
    with ups_store.write(tmp_path / "a.zarr.zip", samples(), identity=IDENTITY, names=names) as store:
        check_fixed(store)
        assert store.identity == IDENTITY
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr.zip"]


def test_tensors_and_torch_data_sets(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Data(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return torch.from_numpy(FIELDS[i]), i

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            return ({"u": torch.from_numpy(s["u"]), "y": s["y"]} for s in fixed())

        def __len__(self) -> int:
            return N

    with ups_store.write(tmp_path / "a.zarr.zip", Data(), identity={}, names=["u", "y"]) as store:
        check_fixed(store)
    with ups_store.write(tmp_path / "b.zarr.zip", Stream(), identity={}) as store:
        check_fixed(store)
    half = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    with ups_store.write(tmp_path / "c.zarr.zip", half) as store:
        assert store.arrays["data"].dtype == "bfloat16"
        assert store["data"].astype("f4").tolist() == half.float().tolist()


def test_zarr_group_and_xarray_data_set(tmp_path: Path) -> None:
    zarr, xarray = pytest.importorskip("zarr"), pytest.importorskip("xarray")
    group = zarr.create_group(tmp_path / "folder", attributes={"by": "test"})
    group.create_array("u", data=FIELDS, dimension_names=("sample", "x", "c"))
    group.create_array("y", data=np.arange(N))
    with ups_store.write(tmp_path / "a.zarr.zip", group, identity=IDENTITY) as store:
        check_fixed(store)
        assert store.dims["u"] == ("sample", "x", "c")
        assert store.attrs["by"] == "test"
    variables = {"u": (("x", "run", "c"), FIELDS.swapaxes(0, 1)), "y": ("run", np.arange(N))}
    data = xarray.Dataset(variables, {"x": [0.0, 0.5, 1.0]}, {"by": np.float32(2)})
    with ups_store.write(tmp_path / "b.zarr.zip", data[["y", "u"]], identity=IDENTITY) as store:
        check_fixed(store)
        assert store.dims["u"] == ("sample", "x", "c")
        assert store.constants["x"].tolist() == [0, 0.5, 1]
    with ups_store.write(tmp_path / "c.zarr.zip", data) as store:
        assert list(store.identity) == ["unnamed"]  # it may be larger than the memory: no digest


def test_hugging_face_data_set_has_its_dtypes_and_its_fingerprint(tmp_path: Path) -> None:
    class Data(list[dict[str, Any]]):
        features: ClassVar = {"u": None, "y": None}
        _fingerprint = "f00"

        def with_format(self, name: str, **options: Any) -> Any:
            assert (name, options) == ("numpy", {"dtype": None})
            return list(fixed())

    plain = Data({"u": s["u"].tolist(), "y": s["y"]} for s in fixed())
    with ups_store.write(tmp_path / "a.zarr.zip", plain) as store:
        check_fixed(store)
        assert store.identity == {"huggingface_fingerprint": "f00"}


def test_store_of_the_same_identity_is_opened_and_no_sample_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.write(path, fixed(), identity=IDENTITY).close()
    before = path.stat()

    def never() -> Iterator[Any]:
        raise AssertionError
        yield

    with ups_store.write(path, never(), identity=IDENTITY) as store:
        check_fixed(store)
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"identity": {**IDENTITY, "version": 2}}, "version"),
        ({"samples": list(fixed(N - 1))}, "number of samples"),
        ({"constants": {"x": np.arange(4.0)}}, "constant x"),
    ],
)
def test_store_of_something_else_is_refused_or_replaced(tmp_path: Path, change: Any, key: str) -> None:
    path, options = tmp_path / "a.zarr.zip", {"constants": {"x": np.arange(3.0)}, "identity": IDENTITY}
    ups_store.write(path, list(fixed()), **options).close()
    options |= {"samples": list(fixed()), **change}
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, **options)
    assert list(caught.value.differences) == [key]
    with ups_store.write(path, **options, on_mismatch="restart") as store:
        assert len(store) == len(options["samples"])


def test_samples_without_an_identity_are_never_taken_for_others(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.write(path, fixed()).close()
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.write(path, fixed())
    assert caught.value.kind == "exists"
    first = ups_store.open(path).config_hash
    assert ups_store.write(path, fixed(), on_mismatch="restart").config_hash != first


def test_arrays_without_an_identity_have_a_digest_of_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    ups_store.write(path, FIELDS).close()
    node = path.stat().st_ino
    ups_store.write(path, FIELDS.copy()).close()
    assert path.stat().st_ino == node
    with pytest.raises(ups_store.IdentityMismatchError):
        ups_store.write(path, FIELDS + 1)


def late(value: Any) -> Iterator[dict[str, Any]]:
    for i in range(60):
        yield {"u": np.zeros((4, 2), "f4") if i < 40 else value}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros((5, 2), "f4"), "shape (5, 2)"),
        (np.zeros((4, 2)), "float64"),
        ("text", "str"),
        (np.float32(1), "shape ()"),
    ],
)
def test_sample_that_contradicts_the_first_ones_is_named(tmp_path: Path, value: Any, found: str) -> None:
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", late(value), identity=IDENTITY)
    error = caught.value
    assert (error.kind, error.array, error.sample, error.found) == ("mixed", "u", 40, found)
    assert error.hint
    assert not (tmp_path / "a.zarr.zip").exists()


def test_array_that_turns_out_ragged_is_written_once_that_is_said(tmp_path: Path) -> None:
    path, samples = tmp_path / "a.zarr.zip", lambda: late(np.ones((5, 2), "f4"))
    with pytest.raises(ups_store.SpecError, match="ragged") as caught:
        ups_store.write(path, samples(), identity=IDENTITY)
    assert "on_mismatch='restart'" in str(caught.value)
    with ups_store.write(path, samples(), identity=IDENTITY, ragged=["u"], on_mismatch="restart") as store:
        assert store.lengths("u").tolist() == [4] * 40 + [5] * 20


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        ([{"u": np.zeros((2, 3))}, {"u": np.zeros((2, 4))}], "mixed"),
        ([{"u": np.zeros(2)}, {"v": np.zeros(2)}], "arrays"),
        ([{"u": None}], "value"),
        ([{"u": "a"}, {"u": b"a"}], "mixed"),
        ([{"u": 1}, {"u": "a"}], "mixed"),
        ([{"u": np.zeros(2, "f4")}, {"u": np.zeros(2)}], "mixed"),
        ([{"u": ["a", "b"]}], "value"),
        ([{"u": np.zeros(2, complex)}], "dtype"),
        ([(1, 2)], "names"),
        ([{"no name": 1}], "names"),
        ([], "empty"),
        ({"u": np.zeros(3), "v": np.zeros(4)}, "shape"),
        ({"u": np.float64(1)}, "shape"),
        ("text", "argument"),
        (7, "argument"),
    ],
    ids=str,
)
def test_what_makes_no_store_is_an_error_that_says_so(tmp_path: Path, samples: Any, kind: str) -> None:
    with pytest.raises(ups_store.SpecError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", samples, identity={})
    assert caught.value.kind == kind
    assert not list(tmp_path.glob("*.zip"))


def test_failing_iterable_leaves_what_it_gave_for_the_next_call(tmp_path: Path) -> None:
    path, made = tmp_path / "a.zarr.zip", []

    def failing(stop: int) -> Iterator[dict[str, Any]]:
        for i, sample in enumerate(mixed()):
            if i == stop:
                raise RuntimeError("no more")
            made.append(i)
            yield sample

    with pytest.raises(RuntimeError):
        ups_store.write(path, failing(40), identity=IDENTITY)
    with ups_store.open(path, partial=True) as spool:
        assert len(spool) == 40
        assert spool[39]["text"] == "é" * 4
    with ups_store.write(path, failing(N), identity=IDENTITY) as store:
        check_mixed(store)


def test_data_set_is_asked_for_what_is_missing_only(tmp_path: Path) -> None:
    asked: list[int] = []

    class Data:
        def __init__(self, stop: int) -> None:
            self.stop = stop

        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> dict[str, Any]:
            asked.append(i)
            if i == self.stop:
                raise RuntimeError("no more")
            return {"u": FIELDS[i], "y": i}

    path = tmp_path / "a.zarr.zip"
    with pytest.raises(RuntimeError):
        ups_store.write(path, Data(45), identity=IDENTITY)
    asked.clear()
    with ups_store.write(path, Data(N), identity=IDENTITY) as store:
        check_fixed(store)
    # The first ones for the specs, some of those that are there to be compared, and what is missing.
    assert asked[:32] == list(range(32))
    assert asked[-(N - 45) :] == list(range(45, N))
    assert set(asked[32 : -(N - 45)]) <= set(range(32, 45))
    assert 44 in asked
    assert len(asked) <= 32 + 8 + N - 45


WRITER = """
import os, signal, sys
import numpy as np
import ups_store
sys.path.insert(0, sys.argv[3])
import test_write
def samples():
    for i, sample in enumerate(test_write.mixed()):
        if i == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield sample
ups_store.write(sys.argv[1], samples(), identity=test_write.IDENTITY, buffer_bytes=200)
"""


@pytest.mark.parametrize("stop", [3, 49])
def test_generator_killed_in_the_middle_is_continued(tmp_path: Path, stop: int) -> None:
    path, here = tmp_path / "a.zarr.zip", os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", WRITER, path, str(stop), here], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    if stop > 32:  # before that its arrays aren't known
        with ups_store.open(path, partial=True) as spool:
            assert stop - 25 < len(spool) <= stop
    with ups_store.write(path, mixed(), identity=IDENTITY, buffer_bytes=200) as store:
        check_mixed(store)
    ups_store.write(tmp_path / "b.zarr.zip", mixed(), identity=IDENTITY).close()
    assert path.read_bytes() == (tmp_path / "b.zarr.zip").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zarr.zip", "b.zarr.zip"]


@settings(max_examples=4)
@given(stops=st.lists(st.integers(0, N), max_size=3), buffer_bytes=st.integers(150, 3000))
def test_samples_interrupted_any_number_of_times_are_all_there_once(
    stops: list[int], buffer_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.zarr.zip"

    def stopping(stop: int) -> Iterator[dict[str, Any]]:
        for i, sample in enumerate(mixed()):
            if i == stop:
                raise KeyboardInterrupt
            yield sample

    for stop in stops:
        if stop < N and not path.exists():
            with pytest.raises(KeyboardInterrupt):
                ups_store.write(path, stopping(stop), identity=IDENTITY, buffer_bytes=buffer_bytes)
    with ups_store.write(path, mixed(), identity=IDENTITY, buffer_bytes=buffer_bytes) as store:
        check_mixed(store)


def test_iterable_that_does_not_repeat_itself_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with pytest.raises(ups_store.SpecError):
        ups_store.write(path, late("text"), identity=IDENTITY)
    other = ({"u": np.ones((4, 2), "f4")} for _ in range(60))
    with pytest.raises(ups_store.IdentityMismatchError) as caught:
        ups_store.write(path, other, identity=IDENTITY)
    assert caught.value.kind == "not_repeated"


@pytest.mark.parametrize("samples", [mixed, lambda: list(fixed())], ids=["spool", "directly"])
def test_full_disk_is_a_typed_error_and_room_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: Any
) -> None:
    path = tmp_path / "a.zarr.zip"

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "allocate", full)
    with pytest.raises(ups_store.DiskFullError):
        ups_store.write(path, samples(), identity=IDENTITY)
    monkeypatch.undo()
    assert not path.exists()
    with ups_store.write(path, samples(), identity=IDENTITY) as store:
        assert len(store) == N


def test_really_full_disk_keeps_the_samples_that_fit(tiny_disk: Path) -> None:
    big = np.random.default_rng(0).random((40, 8000))

    def samples(num: int) -> Iterator[dict[str, Any]]:
        for row in big[:num]:
            yield {"u": row}

    with pytest.raises(ups_store.DiskFullError):
        ups_store.write(tiny_disk / "a.zarr.zip", samples(40), identity={}, buffer_bytes=100_000)
    with ups_store.open(tiny_disk / "a.zarr.zip", partial=True) as spool:
        assert 0 < len(spool) < 40
    assert not (tiny_disk / "a.zarr.zip").exists()


def test_spool_that_a_kill_left_beside_its_store_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with pytest.raises(ups_store.SpecError):
        ups_store.write(path, late("text"), identity=IDENTITY)
    spool = tmp_path / "a.zarr.zip.building"
    saved = spool.read_bytes()
    ups_store.write(path, ({"u": np.zeros((4, 2), "f4")} for _ in range(60)), identity=IDENTITY).close()
    spool.write_bytes(saved)
    ups_store.write(path, iter(()), identity=IDENTITY).close()
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr.zip"]


def test_help_shows_the_function() -> None:
    parameters = inspect.signature(ups_store.write).parameters
    assert list(parameters)[:2] == ["path", "samples"]
    assert "identity" in parameters
    assert "Write" in str(ups_store.write.__doc__)


# --- what would be lost, or has no effect ---------------------------------------------------------------


def _odd_at(number: int, odd: Any) -> Iterator[Any]:
    for i in range(100):
        yield odd if i == number else {"u": np.zeros(4, np.float32), "n": i, "t": "text"}


@pytest.mark.parametrize("number", [0, 70])
@pytest.mark.parametrize(
    ("change", "array", "words"),
    [
        ({"u": np.ma.array(np.zeros(4, np.float32), mask=[1, 0, 0, 0])}, "u", "a mask would be lost"),
        ({"n": 2**70}, "n", "of more than 64 bits"),
        ({"n": {1, 2}}, "n", "found set (an array of dtype object)"),
        ({"t": "\ud800"}, "t", "surrogates not allowed"),
    ],
)
def test_value_that_can_not_be_stored_names_sample_and_array(
    tmp_path: Path, number: int, change: dict[str, Any], array: str, words: str
) -> None:
    odd = {"u": np.zeros(4, np.float32), "n": 1, "t": "text", **change}
    path = tmp_path / "a.zarr.zip"
    with pytest.raises(SpecError) as caught:
        ups_store.write(path, _odd_at(number, odd), identity={})
    assert (caught.value.array, caught.value.sample) == (array, number)
    assert str(caught.value).count("can't be stored") <= 1
    assert words in str(caught.value)
    good = {"u": np.zeros(4, np.float32), "n": number, "t": "text"}
    assert len(ups_store.write(path, _odd_at(number, good), identity={})) == 100, "what came before was kept"


@pytest.mark.parametrize("columns", [{}, {"t": ["a", "b", "c"]}])
def test_masked_columns_are_refused_and_unmasked_ones_are_not(
    tmp_path: Path, columns: dict[str, Any]
) -> None:
    masked = np.ma.array(np.zeros((3, 2)), mask=np.eye(3, 2))
    with pytest.raises(SpecError, match="a mask would be lost") as caught:
        ups_store.save(tmp_path / "a.zarr.zip", u=masked, **columns)
    assert (caught.value.kind, caught.value.array) == ("value", "u")
    ups_store.save(tmp_path / "a.zarr.zip", u=masked.filled(7), **columns)
    assert ups_store.load(tmp_path / "a.zarr.zip")["u"][0, 0] == 7


@pytest.mark.parametrize(
    ("sample", "options", "kind", "words"),
    [
        ({"a": {"b": 1}, "a.b": 2}, {}, "names", "two values have one name"),
        ({}, {}, "arrays", "a sample has no arrays"),
        ({"u": 1}, {"ragged": "u"}, "argument", "names in a list"),
        (1, {"names": "u"}, "argument", "names: expected names in a list, found 'u'"),
        ((1, 2), {"names": ["u", "u"]}, "names", "names: expected names that differ, found 'u' twice"),
        ({"u": 1}, {"on_error": "raise"}, "argument", "on_error: expected 'fail' or 'skip', found 'raise'"),
        ({"u": 1}, {"on_mismatch": "skip"}, "argument", "on_mismatch: expected 'raise' or 'restart'"),
        ({"u": 1}, {"dims": {"v": ("x",)}}, "names", "some of u"),
        ({"u": 1}, {"identity": "x"}, "argument", "a mapping by name"),
        ({"u": 1}, {"identity": [1]}, "argument", "a mapping by name"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_argument_that_would_be_ignored_or_lose_values_is_refused(
    tmp_path: Path, sample: dict[str, Any], options: dict[str, Any], kind: str, words: str, as_list: bool
) -> None:
    samples = [sample] * 3 if as_list else iter([sample] * 3)
    with pytest.raises(SpecError, match=words) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", samples, **{"identity": {}, **options})
    assert caught.value.kind == kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("samples", "options", "words"),
    [
        ([{"u": 1}], {"num_workers": 2}, "num_workers without effect: expected map and inputs"),
        (
            [{"u": 1}],
            {"num_workers": 0, "retries": 1},
            "leave out num_workers and retries, or give a function",
        ),
        ([{"u": 1}], {"names": ["u"]}, "found a dict, which has names; leave out `names`"),
        (iter([{"u": 1}]), {"names": ["v"]}, "sample 0: names without effect"),
        ({"u": np.zeros((3, 2))}, {"ragged": ["u"]}, "ragged without effect: expected samples"),
    ],
)
def test_argument_without_effect_is_refused(
    tmp_path: Path, samples: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", samples, **{"identity": {}, **options})
    assert caught.value.kind == "no_effect"
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_first_samples_of_other_shapes_are_shown_as_shapes(tmp_path: Path) -> None:
    for first, shown in ((np.float32(0), "()"), (np.zeros((4, 1)), "(*, 1)"), (np.zeros(3), "(*,)")):
        other = np.zeros((2, 2, 2), np.asarray(first).dtype)
        with pytest.raises(SpecError) as caught:
            ups_store.write(tmp_path / "a.zarr.zip", iter([{"u": first}, {"u": other}]), identity={})
        assert caught.value.expected == f"shape {shown}, as in sample 0"


@pytest.mark.filterwarnings("error:.*`finish` wasn.t called:RuntimeWarning")
def test_store_left_whole_is_closed_though_the_warning_is_an_error(tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.zarr.zip", {"x": ups_store.ArraySpec((1,), "int8")}
    with pytest.raises(RuntimeWarning), ups_store.create(path, arrays, identity={}) as writer:
        writer.commit(0, {"x": 1})
    assert writer.building.fd < 0
    with ups_store.create(path, arrays, identity={}) as again:  # the lock isn't kept
        again.finish()


def test_dims_constants_and_attributes_are_the_stores(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dims": {"u": ("x", "c"), "t": ("time",)}, "constants": {"t": np.arange(3)}}
    with ups_store.write(
        tmp_path / "a.zarr.zip", fixed(), identity={}, attrs={"by": "me"}, **options
    ) as store:
        assert (store.dims["u"], store.dims["t"]) == (("sample", "x", "c"), ("time",))
        assert store.attrs["by"] == "me"


def test_progress_is_shown_on_demand_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ups_store.write(tmp_path / "a.zarr.zip", mixed(), identity={}).close()
    assert capsys.readouterr().err == ""
    ups_store.write(tmp_path / "b.zarr.zip", mixed(), identity={}, progress=True).close()
    assert "b.zarr.zip: making the store" in capsys.readouterr().err


def test_names_choose_columns_and_name_the_one_array(tmp_path: Path) -> None:
    columns = {"a": np.arange(3.0), "b": np.arange(3.0) + 5}
    with ups_store.write(tmp_path / "b.zarr.zip", columns, names=["b"]) as store:
        assert list(store.arrays) == ["b"]
    with ups_store.write(tmp_path / "u.zarr.zip", np.arange(3.0), names=["u"]) as store:
        assert store["u"].tolist() == [0, 1, 2]
    for samples, names in ((columns, ["z"]), (np.arange(3.0), ["u", "v"])):
        with pytest.raises(SpecError) as caught:
            ups_store.write(tmp_path / "wrong.zarr.zip", samples, names=names)
        assert caught.value.kind == "names"


def test_map_without_inputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", map=str)
    assert caught.value.kind == "argument"
