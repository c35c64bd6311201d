"""Options, markers that skip by themselves, Hypothesis profiles, and a factory of stores."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_groups import GROUP_BYTES, memory_group
from forked_readers import forked
from hypothesis import settings
from small_stores import MakeStore, Values, build, mixed_constants, mixed_values
from tiny_disk import mounted

# The syncs of a busy disk take long, so no example has a deadline.
settings.register_profile("default", max_examples=25, stateful_step_count=25, deadline=None)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("slow", max_examples=100, stateful_step_count=25, deadline=None)  # of --run-slow
settings.register_profile("nightly", max_examples=1000, stateful_step_count=60, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Also for processes that tests start: of several, each with threads that spin, all wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes would compile the whole package each, and every run all of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A killed process loses nothing that it wrote, so tests needn't wait for the disk: what a power loss takes is
# tested on `lossy_disk.Disk`, above these.
os.fsync = os.fdatasync = lambda fd: None

# Shells start background jobs with Ctrl-C ignored, which the processes that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--run-slow") and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "slow": "" if config.getoption("--run-slow") else "slow: run with --run-slow",
        "interop": "" if "interop" in config.getoption("-m") else "interop: run by `make interop`",
        "gpu": _no_gpu_reason() if any(item.get_closest_marker("gpu") for item in items) else "",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Trace nothing in a test marked `no_cover`: in a worker pytest-cov 7 stops only one of two tracers."""
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported for the tests stays: collections needn't look through it


def _no_gpu_reason() -> str:
    import torch  # seconds, so only where a test asks for a GPU

    return "" if torch.cuda.is_available() else "gpu: no CUDA device"


@pytest.fixture(scope="session", autouse=True)
def _readers_are_forked() -> Iterator[None]:
    yield from forked()


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """List of members of a control group with `GROUP_BYTES` of memory; skips where none can be made."""
    yield from memory_group(GROUP_BYTES)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of `tiny_disk.DISK_BYTES`."""
    with mounted(tmp_path / "disk") as place:
        yield place


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """Factory of finished stores in `tmp_path`; of `mixed_values` unless given others.

    Options are those of `small_stores.begin`: constants, dims, identity, attrs, durability.
    """

    def make(values: Values | None = None, *, name: str = "burgers1d_train.zarr.zip", **options: Any) -> Path:
        if values is None:
            values = mixed_values()
            options = {"constants": mixed_constants(), **options}
        return build(tmp_path / name, values, **options)

    return make
