"""Number 40: the name that a server gives a source can't be that of a record, or lead elsewhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from command_line import run_build
from hostile_server import give_range, serving

SECRET = b"top secret"


@pytest.mark.parametrize(
    "name", ["staged.json", "part.json", "a.part", "..", ".bashrc", "a/b.h5", "a\tb.h5", "a" * 300]
)
def test_name_from_a_server_is_refused(name: str, tmp_path: Path) -> None:
    victim, records = tmp_path / "victim.h5", []
    victim.write_bytes(SECRET)
    status = victim.stat()

    with serving(lambda request: give_range(request, records[0], **disposition)) as url:
        place = f"{url}/download"
        record = {"key": f"url {hashlib.sha256(place.encode()).hexdigest()}", "location": "x", "size": 10}
        record |= {"name": "../../../victim.h5", "tag": "", "sha256": "0" * 64, "md5": ""}
        records.append(json.dumps(record | {"state": [status.st_size, status.st_mtime_ns]}).encode())
        disposition = {"Content_Disposition": f'attachment; filename="{name}"'}
        words = [
            "--tasks",
            "burgers1d",
            "--split",
            "train",
            "--cache-dir",
            tmp_path / "cache",
            "--stage-only",
        ]
        done = run_build(*words, f"data.files=['{place}']", "reading.retries=0", "data.root=x")
    assert done.exit_code == 3
    assert "no name that a copy can have" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != victim]
