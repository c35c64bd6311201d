"""`_runs.c` under the sanitizers of gcc: no byte is touched that isn't its own, and nothing is undefined."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitized import SOURCE, compile_runs, find_runtime, run

pytestmark = [pytest.mark.slow, pytest.mark.multi_process, pytest.mark.timeout(900)]

CHECK = "is_right && are_below(firsts.buf, num, memory.len - nbytes + 1)"
TESTS = """
import pytest

files = ["read/test_runs.py", "read/test_touch.py", "write/test_encode_pieces.py"]
files = ["tests/store/" + file for file in files]
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", *files]))
"""
REACH_OUT = """
import numpy as np
from ups_store.system import runs

memory, out = np.zeros(1000, np.uint8), np.zeros(100, np.uint8)
runs.compiled.copy(memory, np.array([950], np.int64), 100, out)
"""


@pytest.fixture(scope="module")
def runtime() -> Path:
    found = find_runtime()
    if found is None:
        pytest.skip("no gcc with an address sanitizer")
    return found


def compiled(folder: Path, source: str) -> Path:
    module = compile_runs(folder, source)
    if module is None:
        pytest.skip("gcc can't compile _runs.c with sanitizers")
    return module


def test_compiled_copies_touch_no_byte_beyond_theirs_under_sanitizers(tmp_path: Path, runtime: Path) -> None:
    done = run(compiled(tmp_path, SOURCE.read_text()), TESTS, runtime=runtime)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_copy_that_does_not_check_where_runs_lie_is_found_by_the_sanitizer(
    tmp_path: Path, runtime: Path
) -> None:
    source = SOURCE.read_text()
    assert CHECK in source
    done = run(compiled(tmp_path, source.replace(CHECK, "is_right")), REACH_OUT, runtime=runtime)
    assert done.returncode == 99
    assert "heap-buffer-overflow" in done.stderr
