"""Number 67, case 15b: a full slot cache makes room by its own files alone, known by their content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hostile_server import give_range, serving

import ups_store


def test_full_cache_leaves_files_of_others(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    cache = tmp_path / "cache"
    cache.mkdir()
    contents = {}
    for number in (0, 1):
        path = tmp_path / f"{number}.zarr.zip"
        ups_store.save(path, u=np.random.default_rng(number).random((20, 1000)))
        contents[f"/{path.name}"] = path.read_bytes()
    foreign = [cache / "timetable.slots", cache / f"{'0' * 64}.slots", cache / "notes.txt"]
    for path in foreign:
        path.write_bytes(b"mine" * 50_000)
    with serving(lambda request: give_range(request, contents[request.path])) as url:
        for number in (0, 1):
            with ups_store.open(f"{url}/{number}.zarr.zip", cache_dir=cache, cache_bytes=400_000) as store:
                store.gather(range(20))
    assert [path.read_bytes() for path in foreign] == [b"mine" * 50_000] * 3
    ours = [path for path in cache.iterdir() if path not in foreign]
    assert len(ours) == 1  # that of the first store went for the second's
