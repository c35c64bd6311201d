"""Point 25: `verify` reports every clause that is violated (spec 7.6)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ups_store


def test_verify_of_a_damaged_constant_reports_chunk_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "c.zarr.zip"
    specs, constants = {"n": ups_store.ArraySpec((1,), "int8")}, {"c": np.zeros(2, bool)}
    with ups_store.create(path, specs, constants=constants, identity={}) as writer:
        writer.commit_many([0], {"n": np.ones(1, "i1")})
        writer.finish()
    raw = bytearray(path.read_bytes())
    raw[4096] = 2
    path.write_bytes(raw)
    with ups_store.open(path) as store:
        assert sorted(problem.clause for problem in store.verify().problems) == ["4.7", "5.2", "8.1"]
