"""Write the conformance corpus: the files of docs/format/conformance.md and what every reader must answer.

    python -m tools.make_conformance FOLDER     # every file, and corpus.json
    python -m tools.make_conformance            # what is checked in: corpus.json and one archive of the files

The same program writes the same files, which `tests/store/format/test_conformance.py` compares. Files of a
published version never change; a new version gets more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tools.conformance import corpus


def main(folder: Annotated[Path | None, typer.Argument(help="made if missing")] = None) -> None:
    """Write the conformance corpus."""
    found = corpus.cases()
    if folder is None:
        corpus.FOLDER.mkdir(parents=True, exist_ok=True)
        (corpus.FOLDER / corpus.LIST).write_text(corpus.list_text(found))
        (corpus.FOLDER / corpus.ARCHIVE).write_bytes(corpus.archive_bytes(found))
    else:
        corpus.write_folder(folder, found)
    print(f"{len(found)} files in {folder or corpus.FOLDER}")


if __name__ == "__main__":
    typer.run(main)
