"""Point 27: messages that point the right way."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

import ups_store
from ups_store.cli import main
from ups_store.system import files


@pytest.mark.parametrize("other", [3, 5])
def test_diff_says_where_stores_have_other_numbers_of_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    paths = [tmp_path / "a.zarr.zip", tmp_path / "b.zarr.zip"]
    for path, num in zip(paths, (3, other), strict=True):
        ups_store.write(path, [{"a": np.float32(i)} for i in range(num)], identity={"v": 1})
    for as_json in (False, True):
        monkeypatch.setattr("sys.argv", ["ups-store", "diff", *map(str, paths), *["--json"] * as_json])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == (other != 3)
        said = capsys.readouterr().out
        if as_json:
            assert json.loads(said)["num_samples"] == [3, other]
        else:
            assert ("samples: 3 -> 5" if other != 3 else "samples: 3 in both") in said


def test_folder_without_permission_is_named_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(files, "create_new", refuse)
    with pytest.raises(ups_store.StoreError) as caught:
        ups_store.write(tmp_path / "a.zarr.zip", [{"a": np.float32(0)}])
    assert "last good commit" not in str(caught.value)
    assert "may not write there" in str(caught.value)
