"""Less memory than the store has: `ulimit`, control groups and locked memory, in processes of their own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from control_groups import memory_group
from preload_processes import (
    MIB,
    digest,
    join_group,
    limit_address_space,
    limit_data,
    under_limit,
)
from small_stores import build

import ups_store

pytestmark = pytest.mark.multi_process
STORE_MIB = 48


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """A store that every user can open."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        values = {"fields": np.ones((STORE_MIB, MIB), np.uint8)}
        yield build(Path(folder) / "a.zarr.zip", values, dims={})


@pytest.fixture
def group() -> Iterator[Path]:
    """List of members of a new control group with memory for half of the store."""
    yield from memory_group(STORE_MIB * MIB // 2)


def outcomes(path: Path, limit: Callable[[], None], *requests: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What requests to preload come to in a process that has taken on a limit, and outlives it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=under_limit, args=(path, limit, list(requests), there))
    process.start()
    there.close()
    found: list[tuple[Any, ...]] = here.recv()
    process.join()
    assert process.exitcode == 0
    return found


def digest_of(path: Path) -> str:
    with ups_store.open(path) as store:
        return digest(store)


@pytest.mark.parametrize("limit", [limit_address_space, limit_data])
def test_copy_beyond_an_ulimit_is_an_error_and_auto_shares_the_page_cache(path: Path, limit: Any) -> None:
    copy, auto = outcomes(path, partial(limit, 30 * MIB), {"mode": "copy"}, {"mode": "auto"})
    assert copy[:3] == ("MemoryLimitError", "memory", path.stat().st_size)
    assert "available" in copy[3]
    assert (auto[0], auto[2]) == ("page-cache", digest_of(path))


def test_store_larger_than_its_control_group_is_refused_and_stays_readable(path: Path, group: Path) -> None:
    requests = [{"mode": "page-cache"}, {"mode": "copy"}, {"mode": "copy", "shared": True}, {"mode": "auto"}]
    *refused, auto = outcomes(path, partial(join_group, group, path), *requests)
    for found in refused:
        assert found[:3] == ("MemoryLimitError", "memory", path.stat().st_size)
        assert "raise the limit" in found[3]
    assert (auto[0], auto[2]) == ("mapped", digest_of(path))
    assert "page-cache refused" in auto[1]
