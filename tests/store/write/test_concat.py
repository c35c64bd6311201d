"""`concat` and `split`: the same samples in other files; what doesn't fit is refused with the difference."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import ragged_stores
from command_line import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import (
    MakeStore,
    StopAt,
    all_arrays,
    assert_same_bits,
    build,
    damage,
    mixed_constants,
    mixed_values,
    names_in,
    samples_of,
)

import ups_store
from ups_store.errors import CorruptChunkError, IdentityMismatchError, SpecError
from ups_store.format.metadata import DTYPE_NAMES, dtype_of
from ups_store.writing import concat
from ups_store.writing.concat import concat_stores, ranges_of_fractions, split_store


def joined(*values: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([v[name] for v in values]) for name in values[0]}


def test_concat_holds_all_samples_in_order(make_store: MakeStore, tmp_path: Path) -> None:
    first, second = mixed_values(3, seed=1), mixed_values(5, seed=2)
    paths = [
        make_store(values, name=name, constants=mixed_constants(), identity={"n": name})
        for name, values in (("a", first), ("b", second))
    ]
    with ups_store.open(paths[0]) as a, ups_store.open(paths[1]) as b:
        target = concat_stores([a, b], tmp_path / "out")
        parents = [
            {"config_hash": s.config_hash, "fingerprint": s.fingerprint, "samples": [0, n]}
            for s, n in ((a, 3), (b, 5))
        ]
    assert_same_bits(all_arrays(target), joined(first, second))
    with ups_store.open(target) as store:
        assert_same_bits(store.constants, mixed_constants())
        assert store.identity == {"kind": "concat", "parents": parents}
        assert store.dims["fields"] == ("sample", "time", "x", "channel")


def test_concat_keeps_the_attributes_that_agree(make_store: MakeStore, tmp_path: Path) -> None:
    a = make_store(name="a", attrs={"task": "burgers", "split": "train", "only": 1})
    b = make_store(name="b", attrs={"task": "burgers", "split": "val"})
    with ups_store.open(a) as left, ups_store.open(b) as right:
        target = concat_stores([left, right], tmp_path / "out")
    assert ups_store.open(target).attrs == {"task": "burgers"}


@settings(max_examples=8)
@given(
    dtype=st.sampled_from(DTYPE_NAMES),
    shape=st.sampled_from([(), (3,), (0,), (1400,)]),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_split_of_concat_is_the_same_bits(
    dtype: str, shape: tuple[int, ...], sizes: list[int], seed: int, data: st.DataObject
) -> None:
    rng, kind = np.random.default_rng(seed), dtype_of(dtype)
    parts = [
        {"u": _bits(rng, (num, *shape), kind, 2 if dtype == "bool" else 256), "nu": rng.random(num)}
        for num in sizes
    ]
    whole = joined(*parts)
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        paths = [build(where / f"part{i}", part, dims={}) for i, part in enumerate(parts)]
        target = concat_stores([ups_store.open(path) for path in paths], where / "whole")
        assert_same_bits(all_arrays(target), whole)
        total = sum(sizes)
        if not total:
            return
        cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
        ranges = list(zip([0, *cuts], [*cuts, total], strict=True))
        outs = [where / f"out{i}" for i in range(len(ranges))]
        for out, (first, end) in zip(
            split_store(ups_store.open(target), outs, samples=ranges), ranges, strict=True
        ):
            assert_same_bits(all_arrays(out), samples_of(whole, range(first, end)))


def _bits(rng: np.random.Generator, shape: tuple[int, ...], kind: Any, high: int) -> npt.NDArray[Any]:
    return rng.integers(0, high, int(np.prod(shape)) * kind.itemsize, np.uint8).view(kind).reshape(shape)


BASE = {"u": np.zeros((2, 3), np.float32), "nu": np.zeros(2)}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({**BASE, "u": np.zeros((2, 3))}, {}, "float64"),
    "shape": ({**BASE, "u": np.zeros((2, 4), np.float32)}, {}, "(4,)"),
    "missing": ({"u": BASE["u"]}, {}, "absent"),
    "unknown": ({**BASE, "v": np.zeros(2)}, {}, "'v'"),
    "dims": (BASE, {"dims": {"u": ("sample", "y")}}, "'y'"),
    "constant_values": (BASE, {"constants": {"x": np.arange(3.0) + 1}}, "other values of the constant"),
    "constant_dtype": (BASE, {"constants": {"x": np.arange(3, dtype=np.float32)}}, "float32"),
    "no_constant": (BASE, {"constants": {}}, "absent"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_concat_names_what_differs(tmp_path: Path, case: str) -> None:
    values, options, reason = OTHERS[case]
    defaults: dict[str, Any] = {"dims": {"u": ("sample", "x_u")}, "constants": {"x": np.arange(3.0)}}
    a = build(tmp_path / "a", BASE, **defaults)
    b = build(tmp_path / "b", values, **{**defaults, **options})
    with pytest.raises(SpecError) as caught:
        concat_stores([ups_store.open(a), ups_store.open(b)], tmp_path / "out")
    assert caught.value.kind == "concat_mismatch"
    assert reason in str(caught.value)
    assert str(b) in str(caught.value)
    assert names_in(tmp_path) == ["a", "b"]


def test_concat_of_a_damaged_store_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    path = make_store()
    damage(path, "fields", 1)
    with ups_store.open(path) as store:
        for call in (
            lambda: concat_stores([store], tmp_path / "out"),
            lambda: split_store(store, [tmp_path / "out"], samples=[(0, 1)]),
        ):
            with pytest.raises(CorruptChunkError):
                call()
    assert names_in(tmp_path) == [path.name]


def test_interrupted_concat_continues(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ups_store.open(make_store())
    expected = concat_stores([store, store], tmp_path / "whole").read_bytes()
    monkeypatch.setattr(concat, "COPY_BYTES", 1)
    stop = StopAt(5)
    with pytest.raises(KeyboardInterrupt):
        concat_stores([store, store], tmp_path / "out", progress=stop)
    assert concat_stores([store, store], tmp_path / "out", progress=stop).read_bytes() == expected
    assert stop.num_calls == 8


def test_concat_never_mixes_contents_of_one_identity(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuilt parent with other bytes doesn't continue an unfinished concatenation of the old one."""
    old = ups_store.open(make_store(name="old"))
    new = ups_store.open(make_store(mixed_values(seed=9), name="new", constants=mixed_constants()))
    assert old.config_hash == new.config_hash
    monkeypatch.setattr(concat, "COPY_BYTES", 1)

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        concat_stores([old], tmp_path / "out", progress=stop)
    with pytest.raises(IdentityMismatchError):
        concat_stores([new], tmp_path / "out")


def test_concat_with_a_forgotten_target_keeps_the_last_store(make_store: MakeStore) -> None:
    a, b = make_store(name="a"), make_store(mixed_values(2), name="b")
    before = b.read_bytes()
    with ups_store.open(a) as store:
        with pytest.raises(SpecError) as caught:
            concat_stores([store], b)
        assert (caught.value.kind, b.read_bytes() == before) == ("exists", True)
        assert len(ups_store.open(concat_stores([store], b, force=True))) == 4


@pytest.mark.parametrize("force", [False, True])
def test_source_is_no_target_by_any_name(make_store: MakeStore, tmp_path: Path, force: bool) -> None:
    path = make_store()
    before, alias = path.read_bytes(), tmp_path / "alias"
    alias.hardlink_to(path)
    with ups_store.open(path) as store:
        for target in (path, alias):
            calls = (
                lambda target=target: concat_stores([store], target, force=force),
                lambda target=target: split_store(store, [target], samples=[(0, 1)], force=force),
            )
            for call in calls:
                with pytest.raises(SpecError) as caught:
                    call()
                assert caught.value.kind == "same_file"
    assert path.read_bytes() == before


def test_split_keeps_an_existing_target_unless_forced(make_store: MakeStore, tmp_path: Path) -> None:
    path, other = make_store(name="a"), make_store(mixed_values(3), name="b")
    before = other.read_bytes()
    with ups_store.open(path) as store:
        with pytest.raises(SpecError) as caught:
            split_store(store, [tmp_path / "out", other], samples=[(0, 2), (2, 4)])
        assert (caught.value.kind, other.read_bytes() == before) == ("exists", True)
        assert names_in(tmp_path) == ["a", "b"]
        split_store(store, [tmp_path / "out", other], samples=[(0, 2), (2, 4)], force=True)
    assert len(ups_store.open(other)) == 2


def test_interrupted_split_continues_after_the_targets_it_finished(
    make_store: MakeStore, tmp_path: Path
) -> None:
    store = ups_store.open(make_store())
    outs, samples = [tmp_path / "out0", tmp_path / "out1"], [(0, 2), (2, 4)]
    with pytest.raises(KeyboardInterrupt):
        split_store(store, outs, samples=samples, progress=StopAt(2))
    first = outs[0].stat()
    split_store(store, outs, samples=samples)
    assert outs[0].stat().st_ino == first.st_ino
    assert_same_bits(all_arrays(outs[1]), samples_of(mixed_values(), [2, 3]))


def test_progress_of_text_is_in_bytes(tmp_path: Path) -> None:
    texts = [{"t": "Grüße"}, {"t": ""}, {"t": "naïve"}]
    done: list[int] = []
    with ups_store.write(tmp_path / "a.zarr.zip", texts) as store:
        concat_stores([store], tmp_path / "b.zarr.zip", progress=done.append)
    assert sum(done) == sum(len(text["t"].encode()) for text in texts)


def test_concat_into_memory_writes_no_file(make_store: MakeStore, tmp_path: Path) -> None:
    path = make_store()
    with ups_store.open(path) as store:
        target = concat_stores([store, store], ":memory:")
    assert_same_bits(all_arrays(target), joined(mixed_values(), mixed_values()))
    assert names_in(tmp_path) == [path.name]
    assert not Path(":memory:").exists()


@pytest.mark.parametrize("samples", [(2, 1), (-1, 2), (0, 5)])
def test_split_refuses_ranges_outside(
    make_store: MakeStore, tmp_path: Path, samples: tuple[int, int]
) -> None:
    with ups_store.open(make_store()) as store, pytest.raises(SpecError):
        split_store(store, [tmp_path / "out"], samples=[samples])


@given(num=st.integers(3, 10_000), weights=st.lists(st.integers(1, 100), min_size=1, max_size=3))
def test_fractions_cover_every_sample_once(num: int, weights: list[int]) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    try:
        ranges = ranges_of_fractions(num, fractions)
    except SpecError:
        assert min(fractions) * num < 1
        return
    assert [first for first, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == num
    assert all(abs(end - first - f * num) <= 1 for (first, end), f in zip(ranges, fractions, strict=True))


@pytest.mark.parametrize("fractions", [[], [0.5, 0.6], [1.5, -0.5], [0.98, 0.01, 0.01], [float("nan"), 1.0]])
def test_fractions_that_are_none_are_refused(fractions: list[float]) -> None:
    with pytest.raises(SpecError):
        ranges_of_fractions(3, fractions)


def test_commands_split_and_concat(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, a, b, out = make_store(), tmp_path / "a", tmp_path / "b", tmp_path / "out"
    assert run_command(monkeypatch, "split", path, a, b, "--fractions", "0.75,0.25") == 0
    told = capsys.readouterr()
    assert told.out.split() == [str(a), str(b)]
    written = [line.split(": wrote ")[1].split(",")[0] for line in told.err.splitlines()]
    assert written == ["3 samples", "1 sample"]
    assert run_command(monkeypatch, "concat", a, b, out) == 0
    assert capsys.readouterr().err.startswith(f"{out}: wrote 4 samples, ")
    assert run_command(monkeypatch, "concat", a, out) == 2, "the target was forgotten"
    assert run_command(monkeypatch, "concat", a, b, out, "--force") == 0
    assert_same_bits(all_arrays(out), mixed_values())
    assert run_command(monkeypatch, "split", path, tmp_path / "c", "--samples", "1:3") == 0
    assert_same_bits(all_arrays(tmp_path / "c"), samples_of(mixed_values(), [1, 2]))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--fractions", "1", "--samples", "0:1"],
        ["--fractions", "a"],
        ["--samples", "0:x"],
    ],
)
def test_split_command_with_wrong_options_is_a_usage_error(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    assert run_command(monkeypatch, "split", make_store(), tmp_path / "out", *options) == 2


def test_concat_and_split_keep_ragged_samples(tmp_path: Path) -> None:
    """Their lengths are those of the sources; a set is a source like any store."""
    first, second = ragged_stores.ragged_values((3, 0, 7)), ragged_stores.ragged_values((2, 5), seed=1)
    paths = [
        ragged_stores.build_ragged(tmp_path / f"{i}.zarr.zip", values)
        for i, values in enumerate((first, second))
    ]
    together = {name: [*first[name], *second[name]] for name in first}
    together |= {name: np.array(together[name]) for name in ("fields", "label")}
    stores = [ups_store.open(path) for path in paths]
    whole = concat_stores(stores, tmp_path / "all.zarr.zip")
    with ups_store.open(whole) as store:
        ragged_stores.check_same(store.gather(range(5)), together, range(5))
        assert store["text"][1] == first["text"][1]
        (part,) = split_store(store, [tmp_path / "part.zarr.zip"], samples=[(1, 4)])
    with ups_store.open(part) as store:
        ragged_stores.check_same(store.gather(range(3)), together, [1, 2, 3])
        assert store.verify().ok
