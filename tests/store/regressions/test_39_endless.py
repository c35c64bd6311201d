"""Number 39: what never ends, or takes for ever, has a limit."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hostile_server import give_range, serving

import ups_store
from ups_store.build import load_config
from ups_store.errors import ConfigError

CONFIG = "data: {tasks: burgers1d, root: x}\n"


@pytest.mark.timeout(60)
def test_included_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    path = tmp_path / "run.yaml"
    path.write_text(f"include: pipe.yaml\n{CONFIG}")
    with pytest.raises(ConfigError, match="it is no file"):
        load_config(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", ["1" + ":1" * 400_000, "9" * 1_000_000])
def test_number_that_takes_quadratic_time_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{CONFIG}x: {number}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.kind == "too_long"
    with pytest.raises(ConfigError):
        load_config(overrides=["data.tasks=burgers1d", f"data.limit={number}"])


def test_slot_cache_that_a_stopped_process_has_locked_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr("ups_store.remote.slot_cache._LOCK_WAIT_S", 0.1, raising=False)
    path, cache = tmp_path / "a.zarr.zip", tmp_path / "slots"
    ups_store.save(path, u=np.arange(20000.0))
    content = path.read_bytes()
    with serving(lambda request: give_range(request, content)) as url:
        ups_store.open(f"{url}/a.zarr.zip", cache_dir=cache).close()
        (slots,) = cache.iterdir()
        with slots.open("r+b") as held:  # as by a process that is stopped while it removes the file
            exclusive = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            fcntl.fcntl(held, fcntl.F_OFD_SETLK, exclusive)
            with pytest.warns(UserWarning, match="another process has held a lock"):
                store = ups_store.open(f"{url}/a.zarr.zip", cache_dir=cache, deadline_s=3)
        assert store.gather([7])["u"][0] == 7.0
        store.close()
