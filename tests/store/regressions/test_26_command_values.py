"""Issue 32, 26: values that a verb can't take are named, with what it takes, and are no bug of ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ups_store
from ups_store.cli.app import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--samples", "0,2,5"), "expected FIRST:PAST_LAST for each OUT, such as 0:80,80:100, found '0,2,5'"),
        (("--samples", "0:1:2"), "found '0:1:2'"),
        (("--samples", "a:b"), "found 'a:b'"),
        (("--samples", ""), "found ''"),
        (("--fractions", "half"), "expected numbers such as 0.8,0.1,0.1, found 'half'"),
    ],
)
def test_split_says_what_it_expected(tmp_path: Path, options: tuple[str, str], message: str) -> None:
    source = tmp_path / "a.zarr.zip"
    ups_store.write(source, {"x": np.zeros((20, 3), np.float32)})
    outs = [str(tmp_path / name) for name in ("b.zarr.zip", "c.zarr.zip", "d.zarr.zip")]
    done = CliRunner().invoke(app, ["split", str(source), *outs, *options])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert [*tmp_path.iterdir()] == [source]


@pytest.mark.parametrize("pattern", ["", ".", "/tmp/*.pt", "a/" * 3000])
def test_import_pt_names_a_pattern_that_is_none(tmp_path: Path, pattern: str) -> None:
    words = ["import-pt", str(tmp_path), str(tmp_path / "x.zarr.zip"), "--pattern", pattern]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SystemExit | ups_store.SpecError)
    assert "pattern" in str(done.exception) + done.stderr
