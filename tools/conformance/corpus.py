"""All files of the corpus with their answers, as a folder and as they are checked in: list and archive."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

from tools.conformance import building, packed, ragged, valid
from tools.conformance.array_documents import ARRAYS, NAMES
from tools.conformance.case import Case
from tools.conformance.damage import DAMAGED, FLIPPED, TWICE
from tools.conformance.defect import Defect
from tools.conformance.newer import NEWER_MINOR, NEWER_REFUSED
from tools.conformance.records import DIRECTORY, END_RECORDS, ENTRIES, NOT_A_STORE, TRUNCATED
from tools.conformance.root_documents import IDENTITY, ROOT
from tools.conformance.sample_store import sample_store
from tools.conformance.texts import TEXTS
from tools.conformance.valid import digests

FOLDER = Path(__file__).parents[2] / "tests" / "store" / "data" / "conformance"
LIST, ARCHIVE = "corpus.json", "files.tar.xz"

_REFUSED = {
    "end": {**NOT_A_STORE, **END_RECORDS, **TRUNCATED},
    "directory": {**DIRECTORY, **ENTRIES},
    "text": TEXTS,
    "root": {**ROOT, **IDENTITY, **NEWER_REFUSED},
    "array": {**ARRAYS, **NAMES},
}


def cases() -> list[Case]:
    """Every file, sorted by name."""
    good, *values = sample_store()
    answers = digests(*values)
    newer = [
        Case(
            f"newer/{name}.zarr.zip",
            build(good),
            "A file of a newer minor version.",
            verify="refused",
            digests=answers,
        )
        for name, build in NEWER_MINOR.items()
    ]
    refused = [
        _refused(folder, name, defect, good)
        for folder, found in _REFUSED.items()
        for name, defect in found.items()
    ]
    damaged = [
        Case(f"damaged/{name}.zarr.zip", defect.build(good), defect.why, verify=[defect.clause])
        for name, defect in DAMAGED.items()
    ]
    damaged += [
        Case(f"damaged/{name}.zarr.zip", defect.build(good), defect.why, verify=[defect.clause], may=["3.2"])
        for name, defect in FLIPPED.items()
    ]
    damaged += [
        Case(f"damaged/{name}.zarr.zip", build(good), why, verify=clauses)
        for name, (build, why, clauses) in TWICE.items()
    ]
    found = [*valid.cases(), *newer, *refused, *damaged, *packed.cases(), *ragged.cases(), *building.cases()]
    return sorted(found, key=lambda case: case.file)


def _refused(folder: str, name: str, defect: Defect, good: bytes) -> Case:
    file = f"refused/{folder}/{name}.zarr.zip"
    return Case(file, defect.build(good), defect.why, opens=False, clause=defect.clause, verify="refused")


def list_text(found: list[Case]) -> str:
    """`corpus.json`: a line for each file."""
    lines = ",\n".join(json.dumps(case.to_json(), ensure_ascii=False) for case in found)
    return f'{{"format_version": "1.0", "files": [\n{lines}\n]}}\n'


def write_folder(folder: Path, found: list[Case]) -> None:
    """Write the files and the list of what is expected of them."""
    for case in found:
        path = folder / case.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case.raw)
    (folder / LIST).write_text(list_text(found))


def archive_bytes(found: list[Case]) -> bytes:
    """All files in one archive; most are alike, so it is small."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for case in found:
            member = tarfile.TarInfo(case.file)
            member.size = len(case.raw)
            archive.addfile(member, io.BytesIO(case.raw))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    return lzma.compress(buffer.getvalue(), filters=filters)
