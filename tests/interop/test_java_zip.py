"""java.util.zip finds every entry, by the central directory and by streaming."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from reference_store import build_reference

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).parent / "ReadZip.java"


def run_java(*arguments: str) -> str:
    return subprocess.run(
        ["java", *arguments], check=True, timeout=120, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def java() -> None:
    if shutil.which("java") is None:
        pytest.skip("no java")
    if "jdk.compiler" not in run_java("--list-modules"):
        pytest.skip("this java can't run source files: it has no jdk.compiler")


@pytest.mark.usefixtures("java")
def test_java_reads_every_entry_by_directory_and_by_stream(tmp_path: Path) -> None:
    store = build_reference(tmp_path / "reference.zarr.zip")
    with zipfile.ZipFile(store) as archive:
        expected = [f"comment {archive.comment.decode()}"]
        for how in ("directory", "stream"):
            for name in archive.namelist():
                payload = archive.read(name)
                expected.append(f"{how} {name} {len(payload)} {hashlib.sha256(payload).hexdigest()}")
    assert run_java(str(PROGRAM), str(store)).splitlines() == expected
