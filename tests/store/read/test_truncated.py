"""A store file that another process cuts while it is open: an error, where that can be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_stores import MakeStore

import ups_store
from ups_store import TruncatedError
from ups_store.packed.pack import pack_store
from ups_store.read.store_file import StoreFile

# Runs apart from pytest, so that a SIGBUS would be seen; the file is cut by a third process.
READER = """
import subprocess, sys
import ups_store

path, access, new_length = sys.argv[1:]
store = ups_store.open(path, access=access)
uses = {
    "gather": lambda: store.gather([0, 3, 1]),
    "window": lambda: store.gather([3], ["fields"], start=1, length=2),
    "sample": lambda: store.sample(3),
    "array": lambda: store["fields"].sum(),
}
if store.access == "decode":
    del uses["array"]
for use in uses.values():
    use()
subprocess.run([sys.executable, "-c", f"import os; os.truncate({path!r}, {new_length})"], check=True)
for name, use in uses.items():
    try:
        use()
    except ups_store.TruncatedError as error:
        print(name, error.kind, error.clause)
"""


def check_reader(path: Path, access: str, *uses: str) -> None:
    command = [sys.executable, "-c", READER, str(path), access, "5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{use} truncated_while_open 6.11" for use in uses]


@pytest.mark.multi_process
@pytest.mark.parametrize("access", ["map", "pread"])
def test_file_cut_by_another_process_is_an_error_and_no_signal(make_store: MakeStore, access: str) -> None:
    check_reader(make_store(), access, "gather", "window", "sample", "array")


@pytest.mark.multi_process
def test_packed_file_cut_by_another_process_is_the_same_error(make_store: MakeStore, tmp_path: Path) -> None:
    path = tmp_path / "packed.zarr.zip"
    with ups_store.open(make_store()) as store:
        pack_store(store, path)
    check_reader(path, "auto", "gather", "window", "sample")


def test_packed_chunk_that_is_cut_while_it_is_read_is_no_damage(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the length was compared."""
    path = tmp_path / "packed.zarr.zip"
    with ups_store.open(make_store()) as store:
        pack_store(store, path)
    with ups_store.open(path) as packed:
        monkeypatch.setattr(StoreFile, "check_length", lambda file: None)
        os.truncate(path, 5000)
        with pytest.raises(TruncatedError) as caught:
            packed.gather([3])
        assert (caught.value.kind, caught.value.path) == ("truncated_while_open", str(path))


def test_file_cut_to_nothing_is_an_error(make_store: MakeStore) -> None:
    path = make_store()
    with ups_store.open(path) as store:
        path.open("w").close()
        with pytest.raises(TruncatedError, match="cut the file") as caught:
            store.gather([0])
    assert (caught.value.found, caught.value.path) == (0, str(path))


def test_longer_file_is_read_on(make_store: MakeStore) -> None:
    path = make_store()
    with ups_store.open(path) as store:
        expected = store["nu"].copy()
        with path.open("ab") as file:
            file.write(b"more")
        assert np.array_equal(store.gather([0, 1, 2, 3], ["nu"])["nu"], expected)
