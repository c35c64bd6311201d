"""The cache of slots: a second epoch is local, the folder bounded, and nothing in it is ever trusted."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_server import ObjectServer, s3_environment
from remote_stores import KEY, URL, some_values, upload
from small_stores import assert_same_bits, samples_of

import ups_store
from ups_store.remote.slot_cache import SUFFIX, SlotCache
from ups_store.remote.store import RemoteStore
from ups_store.system import files

SLOT_BYTES = 8256  # of `some_values`


def opened(folder: Path, **options: Any) -> RemoteStore:
    store = ups_store.open(URL, cache_dir=folder / "slots", **options)
    assert isinstance(store, RemoteStore)
    return store


def used(folder: Path) -> int:
    return sum(files.allocated_bytes(path) for path in (folder / "slots").glob(f"*{SUFFIX}"))


def test_second_epoch_asks_for_nothing(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    with opened(tmp_path) as store:
        for epoch in range(2):
            server.forget()
            order = np.random.default_rng(epoch).permutation(40)
            for batch in order.reshape(-1, 8):
                assert_same_bits(store.gather(batch), samples_of(values, batch))
            assert bool(server.asked) is (epoch == 0)
        assert store.residency() > 0.9


def test_copy_at_another_url_shares_what_was_fetched(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    with opened(tmp_path) as store:
        store.gather([5])
    server.objects["bucket/b.zarr.zip"] = server.objects[KEY]
    with ups_store.open("s3://bucket/b.zarr.zip", cache_dir=tmp_path / "slots") as store:
        server.forget()
        assert_same_bits(store.gather([5]), samples_of(values, [5]))
        assert server.asked == []


def test_damage_in_the_cache_is_fetched_again(server: ObjectServer, tmp_path: Path) -> None:
    """As after a crash: flags reached the disk, the bytes did not."""
    values = some_values()
    upload(server, tmp_path, values)
    with opened(tmp_path) as store:
        store.gather(slice(None))
        (path,) = (tmp_path / "slots").iterdir()
        with path.open("r+b") as file:
            file.write(bytes(100_000))
    with opened(tmp_path) as store:
        assert_same_bits(store.gather(slice(None)), values)
        server.forget()
        assert_same_bits(store.gather(slice(None)), values)
        assert server.asked == []


def test_folder_stays_below_its_limit_and_keeps_most(server: ObjectServer, tmp_path: Path) -> None:
    values = {"u": some_values(120)["u"]}
    upload(server, tmp_path, values)
    limit = 500_000  # of 120 slots of 8 KiB, each on three pages
    num_asked = []
    with opened(tmp_path, cache_bytes=limit) as store:
        for epoch in range(4):
            server.forget()
            for sample in np.random.default_rng(epoch).permutation(120).tolist():
                assert_same_bits(store.gather([sample]), samples_of(values, [sample]))
                assert used(tmp_path) <= limit
            num_asked.append(len(server.asked))
    assert num_asked[0] == 120
    assert all(50 < num < 100 for num in num_asked[1:])


def test_chunks_that_are_read_in_the_end_take_the_place_of_others(
    server: ObjectServer, tmp_path: Path
) -> None:
    """As docs/guides/remote.md says; of two arrays, as each has a place of its own in the file."""
    whole = some_values(60)["u"]
    values = {"u": whole, "v": whole + 1}
    upload(server, tmp_path, values, dims={})
    with opened(tmp_path, cache_bytes=450_000) as store:
        store.gather(range(30))
        num_asked = []
        while len(num_asked) < 300 and min(num_asked, default=40) > 10:
            server.forget()
            for sample in range(50, 60):
                assert_same_bits(store.gather([sample]), samples_of(values, [sample]))
            num_asked.append(len(server.asked))
    assert num_asked[0] > 10 >= num_asked[-1]


def test_store_that_no_process_uses_goes_before_others(server: ObjectServer, tmp_path: Path) -> None:
    for seed in range(3):
        upload(server, tmp_path, some_values(seed=seed), key=f"bucket/{seed}.zarr.zip")
    folder, limit = tmp_path / "slots", 800_000  # of two stores
    stores = [
        ups_store.open(f"s3://bucket/{n}.zarr.zip", cache_dir=folder, cache_bytes=limit) for n in range(3)
    ]
    paths = [folder / f"{store.fingerprint}{SUFFIX}" for store in stores]
    stores[0].gather(slice(None))
    stores[1].gather(slice(None))
    stores[1].close()
    stores[2].gather(slice(None))
    assert [path.exists() for path in paths] == [True, False, True]
    assert used(tmp_path) <= limit


def test_disk_that_fails_ends_the_cache_not_the_reading(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = some_values()
    upload(server, tmp_path, values)

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as store:
        monkeypatch.setattr(files, "write_at", fail)
        with pytest.warns(UserWarning, match="No space left"):
            assert_same_bits(store.gather([3], ["u"]), samples_of({"u": values["u"]}, [3]))
        assert_same_bits(store.gather([3]), samples_of(values, [3]))


def test_folder_that_can_not_be_made_is_a_warning(server: ObjectServer, tmp_path: Path) -> None:
    values = some_values()
    upload(server, tmp_path, values)
    (tmp_path / "slots").write_text("a file")
    with pytest.warns(UserWarning, match="no chunk is kept"):
        store = opened(tmp_path, cache_bytes=1000)
    assert_same_bits(store.gather([3]), samples_of(values, [3]))


def test_environment_says_folder_and_limit(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_STORE_CACHE_DIR", str(tmp_path / "slots"))
    monkeypatch.setenv("UPS_STORE_CACHE_BYTES", "2e6")
    upload(server, tmp_path, some_values())
    with ups_store.open(URL) as store:
        assert isinstance(store, RemoteStore)
        assert isinstance(store.cache, SlotCache)
        assert store.cache.limit_bytes == 2_000_000


READER = """
import sys, numpy as np, ups_store
url, folder, seed = sys.argv[1:]
rng = np.random.default_rng(int(seed))
with ups_store.open(url, cache_dir=folder, cache_bytes=700_000) as store:
    for _ in range(2):
        for batch in rng.permutation(len(store)).reshape(-1, 5):
            found = store.gather(batch)
            assert (found["small"][:, 0] == batch).all()
            assert (found["u"] == batch[:, None, None]).all(), batch
"""


@pytest.mark.slow
@pytest.mark.multi_process
def test_eight_processes_share_a_folder(server: ObjectServer, tmp_path: Path) -> None:
    """Half of them are killed somewhere; the folder is too small, so slots are given back all the time."""
    number = np.arange(100)
    values = {
        "u": np.broadcast_to(number[:, None, None], (100, 8, 256)).astype(np.float32),
        "small": np.broadcast_to(number[:, None], (100, 3)).astype(np.float64),
    }
    upload(server, tmp_path, values)
    folder = tmp_path / "slots"
    environment = {**os.environ, **s3_environment(server.url)}
    command = [sys.executable, "-c", READER, URL, str(folder)]
    readers = [subprocess.Popen([*command, str(seed)], env=environment) for seed in range(8)]
    while len(server.asked) < 150 and any(reader.poll() is None for reader in readers):
        time.sleep(0.01)
    for reader in readers[::2]:
        reader.kill()
    assert [reader.wait() for reader in readers][1::2] == [0, 0, 0, 0]
    assert used(tmp_path) <= 700_000 + 8 * 5 * 3 * SLOT_BYTES
    with ups_store.open(URL, cache_dir=folder, cache_bytes=700_000) as store:
        assert_same_bits(store.gather(slice(None)), values)
