"""Write the corpus of malformed files into a folder, for those who test readers of the format.

    python tools/make_malformed.py FOLDER

The folder gets the good store `good.zarr.zip`, the folders `malformed` (a reader refuses them), `truncated`
(cut at every structural boundary; refused too), `damaged` (readable, some byte is wrong) and `newer_minor`
(a reader must read them), a file per defect and named after it, and `corpus.json`: what this package's reader
says of each. About 100 MB, most of them in three files that are long on purpose.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import ups_store
from ups_store.testing import DAMAGED, MALFORMED, NEWER_MINOR, truncations, write_sample_store


def write_corpus(folder: Path) -> dict[str, dict[str, object]]:
    """Write every file; returns what this package's reader says of each, by path within the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    good = write_sample_store(folder / "good.zarr.zip").read_bytes()
    groups: Mapping[str, Mapping[str, bytes]] = {
        "malformed": {name: build(good) for name, build in MALFORMED.items()},
        "truncated": truncations(good),
        "damaged": {name: build(good) for name, build in DAMAGED.items()},
        "newer_minor": {name: build(good) for name, build in NEWER_MINOR.items()},
    }
    said = {"good.zarr.zip": verdict(folder / "good.zarr.zip", folder)}
    for group, files in groups.items():
        (folder / group).mkdir(exist_ok=True)
        for name, raw in files.items():
            path = folder / group / f"{name}.zarr.zip"
            path.write_bytes(raw)
            said[path.relative_to(folder).as_posix()] = verdict(path, folder)
    return said


def verdict(path: Path, folder: Path) -> dict[str, object]:
    """What this package's reader says of a file."""
    try:
        with ups_store.open(path) as store:
            return {"opens": True, "problems": [str(problem) for problem in store.verify().problems]}
    except ups_store.FormatError as error:
        sentence = str(error).replace(f"{folder.absolute()}/", "")
        return {"opens": False, "kind": error.kind, "clause": error.clause, "sentence": sentence}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    said = write_corpus(folder)
    (folder / "corpus.json").write_text(json.dumps(said, indent=1) + "\n")
    print(f"{len(said)} files in {folder}")


if __name__ == "__main__":
    main()
