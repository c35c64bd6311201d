"""Links within an HDF5 file that lead nowhere are named as such where their dataset is missed."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import pytest
from pdebench_files import Size, edited, write_scalar_1d

from ups_store.errors import SourceError
from ups_store.sources.source import open_source

LINKS = {
    "soft": (h5py.SoftLink("/nowhere"), "/nowhere"),
    "soft, below a dataset": (h5py.SoftLink("/x-coordinate/sub"), "/x-coordinate/sub"),
    "external, of this file": (h5py.ExternalLink("a.h5", "/nowhere"), "/nowhere of a.h5"),
    "external": (h5py.ExternalLink("other.h5", "/nowhere"), "/nowhere of other.h5"),
}


@pytest.mark.parametrize("kind", LINKS)
def test_link_to_nothing_is_named(tmp_path: Path, kind: str) -> None:
    link, shown = LINKS[kind]
    path = write_scalar_1d(tmp_path / "a.h5", Size(3))
    write_scalar_1d(tmp_path / "other.h5", Size(3))

    def replace(file: h5py.File) -> None:
        del file["tensor"]
        file["tensor"] = link

    with pytest.raises(SourceError) as caught:
        open_source(edited(path, replace), follow=tmp_path)
    assert f"tensor, a link to {shown}, which isn't there" in str(caught.value)


def test_pipe_in_place_of_a_source_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.h5")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "a.h5")
    assert (caught.value.kind, caught.value.exit_code) == ("not_a_file", 3)
