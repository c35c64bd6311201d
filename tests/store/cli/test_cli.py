"""`ups-store VERB`: output, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_command
from small_stores import MakeStore, begin, flip, mixed_values, samples_of

import ups_store
from ups_store.system import files

VALUES = mixed_values()


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run the command line in this process."""

    def run(*args: object) -> Result:
        return Result(run_command(monkeypatch, *args), *capsys.readouterr())

    return run


def rows_of(result: Result) -> list[str]:
    """Lines of the output, with one space between words."""
    return [" ".join(line.split()) for line in result.out.splitlines()]


def offset_of(path: Path, array: str) -> int:
    """First byte of an array's first sample in the file."""
    with ups_store.open(path) as store:
        needle = store[array][0].tobytes()
    return path.read_bytes().index(needle)


# info


def test_info_tells_arrays_identity_and_age(make_store: MakeStore, invoke: Invoke) -> None:
    path = make_store(attrs={"channels": ["u", "p", "v", "w"], "[bold]": ":smile:"})
    result = invoke("info", path)
    assert (result.code, result.err) == (0, "")
    assert "4 samples" in result.out
    assert "written just now" in result.out
    assert "fields (4, 5, 64, 4) float32 sample time x channel 5.1 kB 5.2 kB" in rows_of(result)
    assert "t (5,) float32 time constant, 20 B -" in rows_of(result)
    assert 'channels: ["u", "p", "v", "w"]' in result.out
    assert "[bold]: :smile:" in result.out
    assert 'latent: {"dim": 2, "len": 3}' in result.out
    assert ups_store.open(path).config_hash in result.out


def test_info_stats_shows_range_and_counts(make_store: MakeStore, invoke: Invoke) -> None:
    values = {"nu": np.array([1.0, np.nan, 4.0]), "k": np.arange(3)}
    result = invoke("info", "--stats", make_store(values))
    assert "nu 1 4 2.5 1 0" in rows_of(result)
    document = invoke("info", "--stats", "--json", make_store(values, name="b.zarr.zip")).json[0]
    assert document["statistics"] == {
        "nu": {"minimum": 1.0, "maximum": 4.0, "mean": 2.5, "num_nan": 1, "num_inf": 0}
    }


def test_info_of_several_stores_is_a_table(make_store: MakeStore, invoke: Invoke) -> None:
    a, b = make_store(name="a.zarr.zip"), make_store({"nu": np.ones(3)}, name="b.zarr.zip")
    result = invoke("info", a, b)
    assert (result.code, result.err) == (0, "")
    heading, first, second = result.out.splitlines()
    assert heading.split()[:3] == ["store", "samples", "size"]
    assert first.split()[:2] == [str(a), "4"]
    assert "nu scalar" in second


@pytest.mark.parametrize("suffix", ["", ".building"])
def test_info_of_unfinished_store_tells_progress(tmp_path: Path, invoke: Invoke, suffix: str) -> None:
    path = tmp_path / "s.zarr.zip"
    with begin(path, VALUES) as writer:
        writer.commit_many([0, 3], samples_of(VALUES, [0, 3]))
        running = invoke("info", f"{path}{suffix}").out
        assert invoke("info", f"{path}{suffix}", path, "--json").json[0]["build"]["num_committed"] == 2
    ended = invoke("info", f"{path}{suffix}").out
    owner = f"pid {os.getpid()} on {os.uname().nodename}"
    assert f"unfinished: 2 of 4 samples committed, durable · being built by {owner}" in running
    assert f"unfinished: 2 of 4 samples committed, durable · no process builds it (last {owner})" in ended


# verify


def test_verify_names_every_damaged_place(make_store: MakeStore, invoke: Invoke) -> None:
    path = make_store()
    offset = offset_of(path, "fields")
    flip(path, offset + 5184 + 7)
    result = invoke("verify", path)
    assert result.code == 1
    place = f"array 'fields', sample 1, bytes {offset + 5184}..{offset + 5184 + 5120 + 4}: chunk_crc"
    assert f"{path}: {place}" in result.out
    assert "(spec 5.2)" in result.out
    assert f"{path}: 1 damaged sample in array 'fields'" in result.out
    assert f"{path}: DAMAGED, 1 problem " in result.out


def test_verify_json_tells_place_and_verdict(make_store: MakeStore, invoke: Invoke) -> None:
    path = make_store()
    flip(path, offset_of(path, "fields"))
    result = invoke("verify", path, "--json")
    (document,) = result.json
    assert result.code == 1
    assert (document["path"], document["ok"], document["nbytes"]) == (str(path), False, path.stat().st_size)
    problem = document["problems"][0]
    assert (problem["array"], problem["sample"], problem["clause"]) == ("fields", 0, "5.2")


def test_verify_shows_fifty_problems_and_counts_all(make_store: MakeStore, invoke: Invoke) -> None:
    fields = np.arange(60 * 1200, dtype=np.float32).reshape(60, 1200)
    path = make_store({"fields": fields}, dims={})
    offset = offset_of(path, "fields")
    for sample in range(60):
        flip(path, offset + sample * 4864)
    lines = invoke("verify", path).out.splitlines()
    assert sum("chunk_crc" in line for line in lines) == 50
    assert f"{path}: and 10 more problems; -v shows all" in lines
    assert lines[-1].startswith(f"{path}: DAMAGED, 60 problems")
    assert invoke("verify", "-v", path).out.count("chunk_crc") == 60
    assert len(invoke("verify", path, "--json").json[0]["problems"]) == 60


def test_verify_reports_what_cannot_be_opened_and_goes_on(
    make_store: MakeStore, invoke: Invoke, tmp_path: Path
) -> None:
    good, bad = make_store(name="good.zarr.zip"), make_store(name="bad.zarr.zip")
    flip(bad, bad.stat().st_size - 1)
    result = invoke("verify", bad, tmp_path / "missing", tmp_path, good, "--json")
    assert result.code == 1
    assert [document["ok"] for document in result.json] == [False, False, False, True]
    assert [document["error"]["kind"] for document in result.json[1:3]] == ["not_found", "not_a_file"]
    assert f"error: {bad}: " in result.err


# preview and diff


def test_preview_names_the_file_after_the_store(
    make_store: MakeStore, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = make_store()
    names = [
        invoke("preview", path).out,
        invoke("preview", path, "--sample", 2, "--array", "mask").out,
    ]
    assert names == ["burgers1d_train.png\n", "burgers1d_train_mask_sample2.png\n"]
    assert sorted(entry.name for entry in Path().iterdir()) == [name.strip() for name in names]


def test_preview_never_writes_over_a_store(make_store: MakeStore, invoke: Invoke) -> None:
    path = make_store()
    before = path.read_bytes()
    result = invoke("preview", path, "--out", path)
    assert result.code == 2
    assert ".png" in result.err
    assert path.read_bytes() == before


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Text with what moves a cursor, and bytes, in samples of their own lengths."""
    samples = [{"caption": f"sample {i}\n\x1b[2Jover\tthere", "raw": b"x" * i} for i in range(3)]
    path = tmp_path / "texts.zarr.zip"
    ups_store.write(path, samples, identity={}).close()
    return path


def test_preview_prints_text_line_by_line_escaped(texts: Path, invoke: Invoke) -> None:
    result = invoke("preview", texts)
    assert (result.code, result.out) == (0, "sample 0\n\\x1b[2Jover\\tthere\n")
    result = invoke("preview", texts, "--array", "caption", "--sample", 2)
    assert result.out.startswith("sample 2\n")


def test_preview_of_text_refuses_a_file_and_of_bytes_says_so(
    texts: Path, invoke: Invoke, tmp_path: Path
) -> None:
    result = invoke("preview", texts, "--out", tmp_path / "a.png")
    assert (result.code, "text is printed" in result.err) == (2, True)
    result = invoke("preview", texts, "--array", "raw")
    assert (result.code, "it is bytes" in result.err) == (2, True)
    assert invoke("preview", texts, "--sample", 3).code == 1


def test_diff_of_same_identity_is_0(make_store: MakeStore, invoke: Invoke) -> None:
    a, b = make_store(name="a.zarr.zip"), make_store(name="b.zarr.zip")
    assert invoke("diff", a, b).code == 0
    assert invoke("diff", a, b).out == (
        "identity: the same\nattributes, which are no part of it: the same\n"
        "checksums recorded in the files: the same (`verify` reads the bytes)\n"
    )
    other = make_store(mixed_values(seed=1), name="c.zarr.zip", constants={})
    assert (
        "checksums recorded in the files: different (`verify` reads the bytes)"
        in invoke("diff", a, other).out
    )


def test_diff_shows_both_values_and_returns_1(make_store: MakeStore, invoke: Invoke) -> None:
    a = make_store(name="a.zarr.zip", identity={"task": "x", "n": 1}, attrs={"split": "train"})
    b = make_store(name="b.zarr.zip", identity={"task": "x", "n": [2]})
    result = invoke("diff", a, b)
    assert result.code == 1
    assert result.out == (
        "identity: 1 difference\n  content.n: 1 -> [2]\n"
        'attributes, which are no part of it: 1 difference\n  split: "train" -> null\n'
        "checksums recorded in the files: different (`verify` reads the bytes)\n"
    )
    (document,) = invoke("diff", a, b, "--json").json
    assert document["differences"] == {"content.n": [1, [2]]}
    assert (document["same_identity"], document["same_content"]) == (False, False)


def test_diff_of_unfinished_store_compares_identities_only(
    make_store: MakeStore, tmp_path: Path, invoke: Invoke
) -> None:
    path = make_store(VALUES)
    with begin(tmp_path / "other.zarr.zip", VALUES):
        result = invoke("diff", path, tmp_path / "other.zarr.zip")
    assert result.code == 0
    assert (
        "checksums recorded in the files: not compared, for one is unfinished (`verify` reads the bytes)"
        in result.out
    )


# exit codes and messages


@pytest.mark.parametrize(
    "args", [["bogus"], ["info"], ["verify", "--num-threads", "0", "x"], ["preview", "x", "--sample", "-1"]]
)
def test_bad_usage_is_2(invoke: Invoke, args: list[str]) -> None:
    result = invoke(*args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: ups-store" in result.err


def test_version_tells_program_and_format(invoke: Invoke) -> None:
    result = invoke("--version")
    assert result.code == 0
    assert result.out.startswith("ups-store ")
    assert ", format 1.0, batches copied by " in result.out


@pytest.mark.parametrize("verb", [["info"], ["verify"], ["preview"], ["diff", "other"]])
def test_missing_store_is_one_line_and_1(invoke: Invoke, tmp_path: Path, verb: list[str]) -> None:
    result = invoke(*verb, tmp_path / "missing.zarr.zip")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["info", "verify"])
def test_no_descriptor_left_is_one_line_that_says_what_to_raise(
    make_store: MakeStore, invoke: Invoke, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    path = make_store()
    monkeypatch.setattr(files, "open_existing", refuse)
    result = invoke(verb, path)
    message = f"error: {path}: too many open files; raise the limit with `ulimit -n`\n"
    assert (result.code, result.out, result.err) == (1, "", message)


def test_closed_pipe_ends_quietly(make_store: MakeStore) -> None:
    command = [sys.executable, "-m", "ups_store", "info", str(make_store())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['ups-store', '--help']\n"
        "from ups_store.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'h5py', 'matplotlib', 'zarr', 'scipy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"
