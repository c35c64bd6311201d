"""Our reader and the second one over the conformance corpus, and the corpus against the script that makes it.

`corpus.json` says what each file is and what must be answered, docs/format/conformance.md how it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ups_store
from tests.support.spec_page import run_block, schema_problems
from tools.conformance import corpus
from ups_store.errors import FormatError, StoreError, VersionTooNewError
from ups_store.read.base import AnyStore
from ups_store.system import files

LISTED = json.loads((corpus.FOLDER / corpus.LIST).read_text())
FILES: list[dict[str, Any]] = LISTED["files"]
REFUSED = [case for case in FILES if case["open"] == "refused" and case["kind"] != "building"]
OPENED = [case for case in FILES if case["open"] == "ok" and case["kind"] != "building"]
BUILDING = [case for case in FILES if case["kind"] == "building"]
ROOT = Path(__file__).parents[3]
SECOND_READER = ROOT / "tools" / "second_reader" / "reader.mjs"
PAGE = ROOT / "docs" / "format" / "conformance.md"
MAX_SECONDS = 15.0  # of processor time; most of it for a document of 16 MiB
MAX_MEMORY_BYTES = 192 << 20  # a document of 16 MiB, decoded, its attributes and its text again

# The clause that a file breaks, and those that find it here: by comparing the directory or a document.
FOUND_ELSEWHERE = {
    "2.2": {"3.2", "3.5", "7.1"},
    "3.1": {"7.1"},
    "3.4": {"3.2", "3.5", "7.1"},
    "3.5": {"3.2"},
    "4.3": {"13.2"},
    "4.4": {"14.2"},
    "4.5": {"4.4", "14.2"},
    "4.6": {"3.5"},
    "4.7": {"4.4"},
    "5.1": {"4.4"},
    "5.6": {"3.5"},
    "7.1": {"3.5", "3.6"},
    "8.1": {"3.5", "4.3"},
    "8.3": {"4.3"},
    "9.1": {"3.5", "4.1", "4.4"},
    "10.1": {"4.3"},
    "10.3": {"3.5", "14.2", "14.3"},
    "13.2": {"4.3", "4.4"},
    "13.3": {"3.5", "7.1"},
    "13.4": {"4.4"},
    "14.1": {"14.2", "14.3", "3.5", "4.2", "4.4", "4.5", "8.1"},
    "14.2": {"4.4", "8.1", "14.1"},
    "14.3": {"14.2", "8.1", "3.5", "4.4"},
}
pytestmark = pytest.mark.timeout(180)  # a hang is a failure, too


def by_folder(cases: list[dict[str, Any]]) -> list[Any]:
    folders: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        folders.setdefault(case["file"].rpartition("/")[0], []).append(case)
    return [pytest.param(those, id=name) for name, those in folders.items()]


@contextmanager
def naming(case: dict[str, Any]) -> Iterator[None]:
    """Inside, what fails says of which file."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(case["file"])
        raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the archive beside the list."""
    path = tmp_path_factory.mktemp("corpus")
    with tarfile.open(corpus.FOLDER / corpus.ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    shutil.copy(corpus.FOLDER / corpus.LIST, path)
    yield path
    shutil.rmtree(path)


@contextmanager
def little_time_and_memory() -> Iterator[None]:
    """Of the process, as Linux counts it: `tracemalloc` would take four times as long."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before, begin = resident_nbytes("VmRSS"), time.process_time()  # other processes may have the processor
    yield
    assert time.process_time() - begin < MAX_SECONDS
    assert resident_nbytes("VmHWM") - before < MAX_MEMORY_BYTES


def resident_nbytes(name: str) -> int:
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[0]) << 10


# --- the corpus -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {case.file: case for case in corpus.cases()}


def test_checked_in_list_is_the_one_that_the_script_makes(made: dict[str, Any]) -> None:
    assert [case["file"] for case in FILES] == list(made)
    for case in FILES:
        assert case == made[case["file"]].to_json(), case["file"]


def test_archive_holds_the_files_of_the_list(folder: Path) -> None:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert found.keys() - {corpus.LIST} == {case["file"] for case in FILES}
    for case in FILES:
        assert hashlib.sha256(found[case["file"]].read_bytes()).hexdigest() == case["sha256"], case["file"]


def test_corpus_has_files_of_every_kind() -> None:
    assert len(REFUSED) + sum(isinstance(case["verify"], list) for case in OPENED) > 500
    assert (
        len({case["sha256"] for case in FILES}) > len(FILES) - 10
    )  # few stand there twice, with other answers
    assert {case["kind"] for case in FILES} == {"mapped", "packed", "building"}
    states = {"resumable", "resumable, lazy, of another boot", "finished", "headless", "foreign or damaged"}
    assert {case["state"] for case in BUILDING} == states
    clauses = {clause for case in OPENED if isinstance(case["verify"], list) for clause in case["verify"]}
    assert clauses == {
        "3.2",
        "3.3",
        "4.1",
        "4.7",
        "5.2",
        "5.3",
        "5.4",
        "8.1",
        "13.7",
        "14.5",
    }  # the table of 7.6


def test_page_counts_the_files() -> None:
    broken = len(REFUSED) + sum(isinstance(case["verify"], list) for case in OPENED)
    page = PAGE.read_text()
    assert f"They are {len(FILES)}:" in page
    assert f" {broken} broken ones" in page
    assert f"\n{len(FILES)} files, 0 disagreements\n" in page
    assert {key for case in FILES for key in case} <= set(re.findall(r"`(\w+)`", page))


def test_every_file_says_what_is_wrong_in_a_sentence() -> None:
    for case in FILES:
        assert case["why"].endswith("."), case["file"]
        assert ("clause" in case) == (case["open"] == "refused" and case.get("state") != "headless"), case[
            "file"
        ]


def documents_of(path: Path) -> dict[str, Any]:
    """Documents of the arrays of a file."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/zarr.json")]
        return {name: json.loads(archive.read(name)) for name in names}


def test_generator_of_the_page_gives_documents_of_valid_files_and_no_others(folder: Path) -> None:
    """Spec 4.4: generate and compare."""
    generate = run_block("generator")["document"]

    def is_generated(document: Any) -> bool:
        try:
            keys = ("attributes", "shape", "data_type", "dimension_names")
            expected = generate(*(document[key] for key in keys))
        except (KeyError, TypeError, AttributeError):
            return False
        return json.dumps(expected, sort_keys=True) == json.dumps(document, sort_keys=True)

    valid = [case for case in OPENED if (case["kind"], case["verify"]) == ("mapped", "ok")]
    wrong = [case for case in REFUSED if "refused/array/" in case["file"] and case["clause"] == "4.4"]
    assert (len(valid) > 40, len(wrong) > 60) == (True, True)
    for case in valid:
        for name, document in documents_of(folder / case["file"]).items():
            assert is_generated(document), (case["file"], name)
    for case in wrong:
        documents = documents_of(folder / case["file"]).values()
        of_others = "attributes" in case["file"] or "dims" in case["file"]  # no matter of the other keys
        assert of_others or not all(map(is_generated, documents)), case["file"]


# The schemas see a document by itself: not what a hash is of, nor what other documents and entries say.
ACCEPTED = {"digest_missing", "digest_of_no_constant", "hash_of_an_edited_identity", "hash_of_something_else"}
ACCEPTED |= {"identity_has_another_array", "identity_lacks_an_array", "partition_past_the_last"}
ACCEPTED |= {f"identity_with_{what}" for what in ("another_dtype", "another_shape", "other_dims")}
ACCEPTED |= {"identity_with_number_of_samples", "newer_minor_requiring_a_feature"}
ACCEPTED |= {f"newer_minor_with_{what}" for what in ("an_entry_between", "another_array_key", "data_missing")}


def test_schemas_refuse_root_documents_of_the_corpus(folder: Path) -> None:
    accepted = set()
    for case in REFUSED:
        if "refused/root/" in case["file"]:
            with zipfile.ZipFile(folder / case["file"]) as archive:
                document = json.loads(archive.read("zarr.json"))
            if not schema_problems("root", document):
                accepted.add(Path(case["file"]).name.removesuffix(".zarr.zip"))
    assert accepted == ACCEPTED


# --- our reader -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cases", by_folder(REFUSED))
def test_open_refuses_files_of_the_corpus(cases: list[dict[str, Any]], folder: Path) -> None:
    """Spec 7.1 and 11.1: a typed error that says where, which clause and what to do."""
    for case in cases:
        with naming(case):
            check_refusal(case, folder / case["file"])


def check_refusal(case: dict[str, Any], path: Path) -> None:
    with little_time_and_memory(), pytest.raises(StoreError) as caught:
        ups_store.open(path)
    error = caught.value
    assert isinstance(error, FormatError | VersionTooNewError)
    assert error.kind
    assert error.clause is not None
    assert error.clause == case["clause"] or error.clause in FOUND_ELSEWHERE.get(case["clause"], ())
    assert str(error).startswith(str(path))
    assert f"(spec {error.clause})" in str(error)
    assert error.hint is not None
    assert str(error).endswith(f"; {error.hint}"), "nothing says what to do"
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


@pytest.mark.parametrize("cases", by_folder(OPENED))
def test_open_and_verify_of_files_of_the_corpus(cases: list[dict[str, Any]], folder: Path) -> None:
    """Spec 7.6, 8.5 and 10.3."""
    for case in cases:
        with naming(case):
            with little_time_and_memory():
                opened = ups_store.open(folder / case["file"])
            with opened as store:
                assert verified(store, set(case.get("may", []))) == case["verify"]
                assert case.get("fingerprint") in (None, store.fingerprint)
                check_digests(store, case.get("digests", {}))


def verified(store: AnyStore, may: set[str]) -> str | list[str]:
    try:
        clauses = {problem.clause for problem in store.verify(num_threads=1).problems}
    except VersionTooNewError:
        return "refused"
    return sorted(clauses - may) or "ok"


def check_digests(store: AnyStore, digests: dict[str, Any]) -> None:
    is_whole = any(isinstance(digest, str) for digest in digests.values())
    values = {**(store.gather(np.arange(len(store))) if is_whole else {}), **store.constants}
    for name, digest in digests.items():
        if isinstance(digest, str):
            assert digest_of(values[name]) == digest, name
        else:
            assert [digest_of(store.sample(i)[name]) for i in range(len(store))] == digest["samples"], name


def digest_of(value: npt.NDArray[Any] | str | bytes) -> str:
    raw = value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else value.tobytes()
    return hashlib.sha256(raw).hexdigest()


def test_open_of_building_files_of_the_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec 6.5."""
    for case in BUILDING:
        with naming(case), monkeypatch.context() as patch:
            if "boot_id" in case:
                boot_id = bytes.fromhex(case["boot_id"])
                patch.setattr(files, "boot_id", lambda boot_id=boot_id: boot_id)
            check_building(case, folder / case["file"].removesuffix(".building"))


def check_building(case: dict[str, Any], path: Path) -> None:
    if case["open"] == "refused":
        with little_time_and_memory(), pytest.raises(StoreError) as caught:
            ups_store.open(path, partial=True)
        assert (caught.value.kind == "build_tail") == (case["state"] == "headless")
        assert str(caught.value).startswith(f"{path}.building")
        return
    with little_time_and_memory(), ups_store.open(path, partial=True) as store:
        ranges = np.flatnonzero(np.diff(store.committed.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        assert ranges.tolist() == case["committed"]


# --- the reader that was made from the specification alone ----------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run it")
def test_second_reader_agrees_on_every_file(folder: Path) -> None:
    command = ["node", str(SECOND_READER), "corpus", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{len(FILES)} files, 0 disagreements\n"), done.stderr
