"""Ragged arrays, read: views, padded batches, text; damage in any of the three arrays is found and named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ragged_stores
import zarr
from ragged_stores import LENGTHS, TEXTS, build_ragged, check_same, ragged_values

import ups_store
from ups_store import ArraySpec
from ups_store.format.checksum import crc32c
from ups_store.read.catalog import read_finished
from ups_store.system import files

N = len(LENGTHS)
VALUES = ragged_values()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_ragged(tmp_path_factory.mktemp("ragged") / "a.zarr.zip", VALUES)


@pytest.fixture(params=["map", "pread"])
def access(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("verify", [None, "touch"])
@pytest.mark.parametrize("indices", [[4, 2, -4, 2, 0], []])
def test_gather_of_ragged_arrays_gives_the_samples_in_order(
    path: Path, access: Any, verify: Any, indices: list[int]
) -> None:
    with ups_store.open(path, access=access, verify=verify) as store:
        check_same(store.gather(indices), VALUES, indices)


def test_padded_batch_has_zeros_behind_each_sample(path: Path, access: Any) -> None:
    with ups_store.open(path, access=access) as store:
        batch = store.gather([4, 1, 0], ["points", "text", "label"], ragged="padded")
        assert list(batch) == ["points", "points.lengths", "text", "text.lengths", "label"]
        assert batch["points"].shape == (3, 40, 3)
        assert batch["points.lengths"].tolist() == [40, 0, 3]
        np.testing.assert_array_equal(batch["points"][2, :3], VALUES["points"][0])
        assert not batch["points"][2, 3:].any()
        assert not batch["points"][1].any()
        assert bytes(batch["text"][0]) == TEXTS[4].encode()


def test_padded_batch_goes_to_given_memory_of_any_length(path: Path) -> None:
    out = {"points": np.ones((2, 50, 3), np.float64), "points.lengths": np.ones(2, np.int64)}
    with ups_store.open(path) as store:
        batch = store.gather([0, 3], ["points"], ragged="padded", out=out)
    assert batch["points"] is out["points"]
    assert batch["points.lengths"] is out["points.lengths"]
    np.testing.assert_array_equal(out["points"][0, :3], VALUES["points"][0])
    assert out["points.lengths"].tolist() == [3, 1]
    assert not out["points"][:, 3:].any()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"ragged": "nested"}, "argument"),
        ({"out": {"points": np.empty((1, 3, 3), np.float32)}}, "out"),
        ({"out": {"points": np.empty((1, 2, 3), np.float32)}, "ragged": "padded"}, "out"),
        ({"out": {"points": np.empty((1, 3, 3), np.int8)}, "ragged": "padded"}, "out"),
        ({"out": {"other": np.empty(1)}, "ragged": "padded"}, "out"),
        ({"length": 2}, "window"),
    ],
)
def test_gather_refuses_arguments_without_meaning_for_ragged_arrays(
    path: Path, options: dict[str, Any], kind: str
) -> None:
    with ups_store.open(path) as store, pytest.raises(ups_store.SpecError) as error:
        store.gather([0], ["points"], **options)
    assert error.value.kind == kind


def test_window_over_ragged_time_is_refused(tmp_path: Path) -> None:
    spec = ArraySpec((1, None), "int8", dims=("sample", "time"), lengths=[3])
    with ups_store.create(tmp_path / "a.zarr.zip", {"u": spec}, identity={}) as writer:
        writer.commit(0, {"u": [1, 2, 3]})
        written = writer.finish()
    with ups_store.open(written) as store, pytest.raises(ups_store.SpecError) as error:
        store.gather([0], length=2)
    assert error.value.kind == "unsupported"


def test_whole_ragged_array_is_a_sequence_of_its_samples(path: Path, access: Any) -> None:
    with ups_store.open(path, access=access) as store:
        points = store["points"]
        assert (len(points), points.lengths.tolist()) == (N, list(LENGTHS))
        assert points.offsets.tolist() == [0, *np.cumsum(LENGTHS)]
        np.testing.assert_array_equal(points.rows, np.concatenate(VALUES["points"]))
        np.testing.assert_array_equal(points[-1], VALUES["points"][-1])
        assert list(store["text"]) == list(TEXTS)
        assert store["text"][1:3] == list(TEXTS[1:3])
        assert "5 samples" in repr(points)
        assert "point: 6,044 in all" in repr(store)
        with pytest.raises(IndexError):
            points[N]


def test_store_describes_a_ragged_array_so_that_create_takes_it(path: Path, tmp_path: Path) -> None:
    with ups_store.open(path) as store:
        spec = store.arrays["points"]
        assert (spec.shape, spec.dims) == ((N, None, 3), ("sample", "point", "xyz"))
        assert set(store.metas) == {"points", "text", "fields", "label"}
        assert store.constants == {}
        assert store.dims["text"] == ("sample", "text_dim_1")
        assert store.lengths("points").tolist() == list(LENGTHS)
        with pytest.raises(ups_store.SpecError) as error:
            store.lengths("label")
        assert error.value.kind == "ragged"


def test_zarr_reads_all_three_arrays_equal(path: Path) -> None:
    group = zarr.open_group(zarr.storage.ZipStore(path, mode="r"), mode="r")
    np.testing.assert_array_equal(group["points"][:], np.concatenate(VALUES["points"]))
    assert group["points.offsets"][:].tolist() == [0, *np.cumsum(LENGTHS)]
    expected = [crc32c(points.tobytes()) for points in VALUES["points"]]
    assert group["points.crc32c"][:].tolist() == expected
    start, end = np.cumsum(LENGTHS)[1:3]
    np.testing.assert_array_equal(group["points"][start:end], VALUES["points"][2])
    assert bytes(group["text"][:]).decode() == "".join(TEXTS)
    assert dict(group["points"].attrs)["units"] == "m"


def test_ragged_array_without_rows_or_samples_is_read_by_everything(tmp_path: Path) -> None:
    for lengths in ([], [0, 0]):
        spec = ArraySpec((len(lengths), None, 2), "int32", lengths=lengths)
        with ups_store.create(tmp_path / f"{len(lengths)}.zarr.zip", {"u": spec}, identity={}) as writer:
            writer.commit_many(range(len(lengths)), {"u": [np.empty((0, 2), np.int32)] * len(lengths)})
            written = writer.finish()
        with ups_store.open(written, verify="touch") as store:
            assert [u.shape for u in store.gather(range(len(lengths)))["u"]] == [(0, 2)] * len(lengths)
            assert store.gather(slice(None), ragged="padded")["u"].shape == (len(lengths), 0, 2)
            assert store.verify().ok
        group = zarr.open_group(zarr.storage.ZipStore(written, mode="r"), mode="r")
        assert group["u"].shape == (0, 2)
        assert group["u.offsets"][:].tolist() == [0] * (len(lengths) + 1)


def _entry(path: Path, name: str) -> tuple[int, int]:
    """First byte and number of bytes of an array's data."""
    with files.opened(path) as fd:
        array = read_finished(fd, path).layout.arrays[name]
    return array.offset, array.meta.nbytes


def _damaged(path: Path, tmp_path: Path, at: int, raw: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    copy = tmp_path / "damaged.zarr.zip"
    copy.write_bytes(data)
    return copy


def test_flipped_bit_of_a_sample_is_found_by_verify_and_on_touch(
    path: Path, tmp_path: Path, access: Any
) -> None:
    first, _ = _entry(path, "points")
    at = first + 12 * (3 + 100)  # row 100 of sample 2
    copy = _damaged(path, tmp_path, at, bytes([path.read_bytes()[at] ^ 1]))
    with ups_store.open(copy, verify="touch", access=access) as store:
        assert store.verify().damaged == {"points": [2]}
        store.gather([0, 1, 3, 4])
        with pytest.raises(ups_store.CorruptChunkError) as error:
            store.gather([0, 2], ["points"])
        assert (error.value.array, error.value.sample) == ("points", 2)
        with pytest.raises(ups_store.CorruptChunkError):
            store.sample(2)


def _far(values: np.ndarray[Any, Any]) -> None:
    values[3] = 1 << 40


def _falling(values: np.ndarray[Any, Any]) -> None:
    values[3] = 1


def _negative(values: np.ndarray[Any, Any]) -> None:
    values[3] = -1


@pytest.mark.parametrize("damage", [_far, _falling, _negative])
def test_wrong_offsets_are_refused_before_they_are_used(
    path: Path, tmp_path: Path, access: Any, damage: Callable[[Any], None]
) -> None:
    """Spec 14.5: also where their own checksum was made again, so that only their values are wrong."""
    first, nbytes = _entry(path, "points.offsets")
    offsets = np.frombuffer(path.read_bytes()[first : first + nbytes], "<i8").copy()
    damage(offsets)
    raw = offsets.tobytes()
    copy = _damaged(path, tmp_path, first, raw + struct.pack("<I", crc32c(raw)))
    with ups_store.open(copy, access=access) as store:
        store.gather([0, 1, 4], ["points"])
        with pytest.raises(ups_store.CorruptChunkError) as error:
            store.gather([0, 2, 3], ["points"])
        assert (error.value.kind, error.value.array, error.value.sample) == ("offsets", "points", 2)
        with pytest.raises(ups_store.CorruptChunkError):
            store.lengths("points")
        kinds = {problem.kind for problem in store.verify().problems}
        assert "offsets" in kinds


@pytest.mark.parametrize("name", ["points.offsets", "points.crc32c"])
def test_damaged_companion_is_found_by_verify_and_on_touch(path: Path, tmp_path: Path, name: str) -> None:
    first, nbytes = _entry(path, name)
    at = first + nbytes - 1
    copy = _damaged(path, tmp_path, at, bytes([path.read_bytes()[at] ^ 1]))
    with ups_store.open(copy, verify="touch") as store:
        assert any(problem.array == name for problem in store.verify().problems)
        with pytest.raises(ups_store.CorruptChunkError) as error:
            store.gather([0], ["points"])
        assert error.value.array == name


def test_bytes_behind_the_rows_are_verified(path: Path, tmp_path: Path) -> None:
    first, nbytes = _entry(path, "text")
    for at, kind in ((first + nbytes + 3, "fill"), (first + 65536 + 2, "shard_index")):
        copy = _damaged(path, tmp_path, at, b"\x07")
        with ups_store.open(copy) as store:
            assert {problem.kind for problem in store.verify().problems} == {kind}


def test_text_that_is_not_utf8_is_named_although_its_checksum_fits(path: Path, tmp_path: Path) -> None:
    first, _ = _entry(path, "text")
    checks, _ = _entry(path, "text.crc32c")
    data = bytearray(path.read_bytes())
    data[first : first + 1] = b"\xff"
    data[checks : checks + 4] = struct.pack("<I", crc32c(b"\xff"))
    copy = tmp_path / "text.zarr.zip"
    copy.write_bytes(data)
    with ups_store.open(copy) as store:
        found = [(p.kind, p.array, p.sample) for p in store.verify().problems]
        assert ("text", "text", 0) in found
        with pytest.raises(ups_store.CorruptChunkError) as error:
            store.sample(0)
        assert (error.value.kind, error.value.sample) == ("text", 0)
        assert store.gather([0], ["text"], ragged="padded")["text"].tolist() == [[255]]


def test_unfinished_store_gives_committed_ragged_samples(tmp_path: Path, access: Any) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_stores.ragged_specs(VALUES)
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY) as writer:
        writer.commit_many([2, 0], ragged_stores.rows_of(VALUES, [2, 0]))
        with ups_store.open(target, partial=True, access=access, verify="touch") as store:
            check_same(store.gather([0, 2]), VALUES, [0, 2])
            with pytest.raises(ups_store.NotCommittedError):
                store.gather([0, 1])
