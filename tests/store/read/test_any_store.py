"""What every kind of store does alike: one face, one result, one error for one mistake."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import ObjectServer
from remote_stores import object_server
from small_stores import IDENTITY, MakeStore, assert_same_bits, build, mixed_constants, mixed_values

import ups_store
from ups_store import AnyStore, ArrayNotFoundError, SampleIndexError, SpecError, StoreClosedError
from ups_store.packed.pack import pack_store
from ups_store.read import base
from ups_store.system.paths import partition_path, partition_range

N = 7
VALUES = mixed_values(N)
CONSTANTS = mixed_constants()
NUMPY_KINDS = ["mapped", "pread", "touch", "partitions", "packed", "packed partitions"]
REMOTE_KINDS = ["remote", "remote partitions"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with pytest.MonkeyPatch.context() as monkeypatch, object_server(monkeypatch) as state:
        yield state


def made(kind: str, folder: Path, server: ObjectServer | None = None) -> AnyStore:
    """A store of one kind with `VALUES`."""
    path = folder / "a_train.zarr.zip"
    if kind in REMOTE_KINDS:
        assert server is not None
        local = kind.replace("remote", "").strip() or "mapped"
        with made(local, folder) as store:
            server.objects |= {f"b/{found.name}": found.read_bytes() for found in folder.iterdir()}
            return ups_store.open(f"s3://b/{store.path.name}")
    if kind == "device":
        pytest.importorskip("torch")
        with made("mapped", folder) as store:
            there: AnyStore = store.preload("device", device="cpu").on_device
            return there
    if "partitions" not in kind:
        build(path, VALUES, constants=CONSTANTS, attrs={"encoder": "grid"})
        if kind == "packed":
            path = packed_at(path)
        options: dict[str, Any] = {"pread": {"access": "pread"}, "touch": {"verify": "touch"}}.get(kind, {})
        return ups_store.open(path, **options)
    for number in range(3):
        samples = partition_range(N, number, 3)
        values = {name: value[samples.start : samples.stop] for name, value in VALUES.items()}
        part = partition_path(path, number, 3)
        build(part, values, constants=CONSTANTS, partition=(number, 3), attrs={"encoder": "grid"})
        if kind.startswith("packed"):
            packed_at(part)
            part.unlink()
    suffix = ".packed.zarr.zip" if kind.startswith("packed") else ".zarr.zip"
    return ups_store.open(folder / f"a_train-*-of-00003{suffix}")


def packed_at(path: Path) -> Path:
    with ups_store.open(path) as store:
        return pack_store(store, path.with_name(path.name.replace(".zarr", ".packed.zarr"))).path


@pytest.fixture(scope="module", params=[*NUMPY_KINDS, *REMOTE_KINDS, "device"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: ObjectServer
) -> Iterator[AnyStore]:
    with made(request.param, tmp_path_factory.mktemp("stores"), server) as store:
        yield store


def as_numpy(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """A batch with tensors as arrays; bfloat16 ones by their bits."""
    if all(isinstance(values, np.ndarray) for values in batch.values()):
        return batch
    from ups_store.torch.batch import as_array

    return {name: as_array(values) for name, values in batch.items()}


class TestEveryStore:
    def test_has_every_member(self, store: AnyStore) -> None:
        members = [name for name in vars(base.AnyStore) if not name.startswith("_")]
        members += [*base.AnyStore.__annotations__]
        assert len(members) > 20
        assert [name for name in members if not hasattr(store, name)] == []

    def test_tells_what_it_holds(self, store: AnyStore) -> None:
        assert len(store) == N
        assert "fields" in store
        assert "x" in store
        assert "beta" not in store
        assert 3 not in store
        shapes = {name: tuple(spec.shape) for name, spec in store.arrays.items()}
        assert shapes == {name: value.shape for name, value in VALUES.items()}
        assert_same_bits(store.constants, CONSTANTS)
        assert store.dims["fields"] == ("sample", "time", "x", "channel")
        assert (store.attrs, store.is_partial) == ({"encoder": "grid"}, False)
        assert store.identity == store.identity_document["content"] == IDENTITY
        assert store.config_hash == ups_store.format.root.config_hash(store.identity_document)
        assert store.committed.tolist() == [True] * N
        assert store.nbytes > 0
        assert store.residency() >= 0
        assert isinstance(store.fingerprint, str)
        with pytest.raises(TypeError):
            iter(store)

    def test_numbers_and_slices_mean_what_they_do_in_numpy(self, store: AnyStore) -> None:
        indices: Any
        for indices in ([5, 0, 5], [-1, 0, -N], np.array([6, 1], np.uint8), []):
            expected = {name: value[np.asarray(indices, np.int64)] for name, value in VALUES.items()}
            assert_same_bits(as_numpy(store.gather(indices)), expected)
        for samples in (slice(-3, None), slice(None, None, -2)):
            expected = {name: value[samples] for name, value in VALUES.items()}
            assert_same_bits(as_numpy(store.gather(samples)), expected)
            assert_same_bits(as_numpy(store[samples]), expected)
        for index in (-N, np.int32(3)):
            expected = {name: value[index, ...] for name, value in VALUES.items()}
            assert_same_bits(as_numpy(store.sample(index)), expected)
            assert_same_bits(as_numpy(store[index]), expected)

    def test_name_gives_a_constant_and_refuses_arrays_in_one_way(self, store: AnyStore) -> None:
        assert_same_bits({"x": store["x"]}, {"x": CONSTANTS["x"]})
        if store.access in ("map", "pread") and not hasattr(store, "partitions"):
            assert_same_bits({"nu": store["nu"]}, {"nu": VALUES["nu"]})
            return
        with pytest.raises(SpecError) as caught:
            store["nu"]
        assert (caught.value.kind, caught.value.array) == ("unsupported", "nu")

    def test_windows_are_slices_over_time(self, store: AnyStore) -> None:
        batch = as_numpy(store.gather([3, -1], ["fields", "nu"], start=[0, 2], length=2, stride=2))
        expected = np.stack([VALUES["fields"][3, 0:3:2], VALUES["fields"][-1, 2:5:2]])
        assert_same_bits(batch, {"fields": expected, "nu": VALUES["nu"][[3, -1]]})

    def test_sample_outside_is_one_error(self, store: AnyStore) -> None:
        for indices in ([0, -N - 1], [2**63]):
            with pytest.raises(SampleIndexError) as caught:
                store.gather(indices)
            assert (caught.value.kind, caught.value.found) == ("index", int(indices[-1]))
            for call in (store.sample, store.__getitem__):
                with pytest.raises(SampleIndexError):
                    call(int(indices[-1]))

    def test_what_is_no_sample_number_and_no_key_is_one_error(self, store: AnyStore) -> None:
        calls = [(store.gather, indices) for indices in (np.ones(N, bool), [0.0], [[0]], 3)]
        calls += [(store.__getitem__, key) for key in (True, [0, 1], slice("a", None))]
        for call, argument in calls:
            with pytest.raises(SpecError) as caught:
                call(argument)  # type: ignore[arg-type]
            assert caught.value.kind == "index", argument

    def test_unknown_name_is_one_error(self, store: AnyStore) -> None:
        for call in (lambda: store["beta"], lambda: store.gather([0], ["beta"])):
            with pytest.raises(ArrayNotFoundError):
                call()
        with pytest.raises(SpecError, match="no sample axis"):
            store.gather([0], ["x"])
        with pytest.raises(SpecError) as caught:
            store.gather([0], "nu")
        assert caught.value.kind == "names"

    def test_shows_arrays_and_identity(self, store: AnyStore) -> None:
        lines = repr(store).splitlines()
        assert lines[0].startswith(f"<ups_store.{type(store).__name__} {store.path.name}: {N} samples, ")
        assert len(lines) == 2 + len(VALUES) + len(CONSTANTS)
        assert "fields" in lines[1]
        assert "task='burgers1d'" in lines[-1]
        html = store._repr_html_()  # type: ignore[attr-defined]
        assert html.count("<tr>") == 1 + len(VALUES) + len(CONSTANTS)

    def test_verifies_with_a_report_on_each_file(self, store: AnyStore) -> None:
        if store.access == "device":
            with pytest.raises(SpecError) as caught:
                store.verify()
            assert caught.value.kind == "unsupported"
            return
        steps: list[int] = []
        report = store.verify(num_threads=2, progress=steps.append)
        assert report.ok
        assert (report.path, report.nbytes) == (store.path, store.nbytes)
        assert sum(part.nbytes for part in report.parts) == store.nbytes
        assert sum(steps) > 0
        assert (report.parts == (report,)) == (not hasattr(store, "partitions"))


@pytest.mark.parametrize("kind", [*NUMPY_KINDS, *REMOTE_KINDS])
def test_pickled_store_reads_the_same(tmp_path: Path, kind: str, server: ObjectServer) -> None:
    with made(kind, tmp_path, server) as store, pickle.loads(pickle.dumps(store)) as copy:
        assert (type(copy), copy.path, len(copy)) == (type(store), store.path, N)
        assert_same_bits(copy.gather([-1]), store.gather([N - 1]))


@pytest.mark.parametrize("kind", NUMPY_KINDS)
def test_preload_brings_it_into_the_page_cache_with_one_report(tmp_path: Path, kind: str) -> None:
    with made(kind, tmp_path) as store:
        report = store.preload("page-cache")
        assert (report.mode, report.nbytes, report.path) == ("page-cache", store.nbytes, store.path)
        assert [part.mode for part in report.parts] == ["page-cache"] * len(report.parts)
        assert store.residency() == 1.0
        assert_same_bits(store.gather(slice(None)), VALUES)


@pytest.mark.parametrize("kind", [*NUMPY_KINDS, *REMOTE_KINDS, "device"])
def test_closed_store_is_one_error(tmp_path: Path, kind: str, server: ObjectServer) -> None:
    store = made(kind, tmp_path, server)
    store.close()
    store.close()
    assert f"{N} samples" in repr(store)
    for call in (
        lambda: store.gather([0]),
        lambda: store.gather([]),
        lambda: store.sample(0),
        lambda: store[-1],
        lambda: store["x"],
        store.residency,
        store.check_open,
        lambda: store.preload("auto"),
    ):
        with pytest.raises(StoreClosedError):
            call()


@pytest.mark.parametrize(
    "options",
    [{"mode": "device"}, {"shared": True}],
)
def test_packed_store_refuses_what_has_no_effect_on_it(tmp_path: Path, options: dict[str, Any]) -> None:
    with made("packed", tmp_path) as store, pytest.raises(SpecError) as caught:
        store.preload(**options)
    assert caught.value.kind == "unsupported"


def test_partitions_report_damage_by_file_and_by_number_in_the_whole(tmp_path: Path) -> None:
    made("partitions", tmp_path).close()
    partition = partition_path(tmp_path / "a_train.zarr.zip", 1, 3)
    raw = bytearray(partition.read_bytes())
    raw[raw.index(VALUES["fields"][3].tobytes())] ^= 1
    partition.write_bytes(raw)
    with ups_store.open(tmp_path / "a_train-*-of-00003.zarr.zip") as store:
        report = store.verify()
    assert [file.ok for file in report.partitions] == [True, False, True]
    assert report.partitions[1].damaged == {"fields": [1]}
    assert report.damaged == {"fields": [3]}
    assert report.problems[0].path == partition


def test_identity_equals_what_was_given_in_json_values(tmp_path: Path) -> None:
    """The sentence of the README: comparing tells whether a store is made from the same."""
    given = {"task": "a", "n": 3, "nu": 0.5, "names": ["u", "v"], "none": None, "ok": True, "in": {"k": [1]}}
    path = build(tmp_path / "a.zarr.zip", VALUES, identity=given)
    with ups_store.open(path) as store:
        assert store.identity == given
        assert store.identity != {**given, "nu": 0.25}
    given = {"shape": (1, 2), "n": np.int64(3), "nu": np.float64(0.5)}
    path = build(tmp_path / "b.zarr.zip", VALUES, identity=given)
    with ups_store.open(path) as store:
        assert store.identity == {"shape": [1, 2], "n": 3, "nu": 0.5}


def test_repr_shows_nothing_that_a_file_could_run(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    hostile = f"{script}\x1b[2J"  # which the name of a dimension can't be (spec 4.5)
    values = {"u": np.zeros((1, 2), np.float32)}
    dims = {"u": ("sample", script)}
    path = build(tmp_path / "<b>.zarr.zip", values, dims=dims, identity={"task": hostile, hostile: 1})
    with ups_store.open(path) as store:
        html, text = store._repr_html_(), repr(store)  # type: ignore[attr-defined]
    assert "<script" not in html
    assert "<b>.zarr" not in html
    assert "\x1b" not in html + text
    assert "&lt;script&gt;" in html


def test_open_of_a_mapped_store_loads_no_codec(make_store: MakeStore) -> None:
    program = "import sys, ups_store; ups_store.open(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-c", program, str(make_store())]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert "ups_store.read.open" in loaded
    assert [name for name in loaded if name.startswith(("numcodecs", "ups_store.packed", "html"))] == []
