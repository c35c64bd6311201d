"""Every verb that takes a store, on a packed one and on a pattern: the result, or what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command
from small_stores import IDENTITY, assert_same_bits, build, mixed_constants, mixed_values, names_in

import ups_store
from ups_store.packed.pack import pack_store
from ups_store.system.paths import partition_path, partition_range

N = 4
VALUES = mixed_values(N)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One split mapped, packed, and in two partitions."""
    folder = tmp_path_factory.mktemp("stores")
    path = build(folder / "whole.zarr.zip", VALUES, constants=mixed_constants())
    with ups_store.open(path) as store:
        pack_store(store, folder / "packed.zarr.zip")
    for number in range(2):
        samples = partition_range(N, number, 2)
        values = {name: value[samples.start : samples.stop] for name, value in VALUES.items()}
        build(
            partition_path(folder / "part.zarr.zip", number, 2),
            values,
            constants=mixed_constants(),
            partition=(number, 2),
        )
    return folder


class Verbs:
    """Runs verbs in the folder; what they print to stdout, and their exit codes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        code = run_command(self._monkeypatch, *words)
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def json(self, *words: object) -> list[Any]:
        _, out, _ = self(*words, "--json")
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def verbs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verbs:
    monkeypatch.chdir(folder)
    return Verbs(monkeypatch, capsys)


PATTERN = "part-*-of-00002.zarr.zip"


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
def test_info_describes(verbs: Verbs, path: str) -> None:
    whole, told = verbs.json("info", "whole.zarr.zip", path, "--stats")
    for key in ("num_samples", "config_hash", "identity", "identity_document", "attrs", "constants"):
        assert told[key] == whole[key], key
    assert told["identity"] == IDENTITY
    assert told["statistics"]["nu"] == whole["statistics"]["nu"]
    assert len(told["partitions"]) == (2 if path == PATTERN else 0)
    code, out, _ = verbs("info", path)
    assert code == 0
    assert ("2 partitions" if path == PATTERN else "packed by blosc") in out


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
def test_verify_checks_every_byte(verbs: Verbs, path: str) -> None:
    (told,) = verbs.json("verify", path)
    assert told["ok"]
    assert told["path"] == path
    assert [part["ok"] for part in told["partitions"]] == [True] * (2 if path == PATTERN else 0)


def test_doctor_examines_each_partition(verbs: Verbs) -> None:
    told = verbs.json("doctor", PATTERN)
    assert [(part["status"], part["num_samples"]) for part in told] == [("complete", 2)] * 2
    assert [part["status"] for part in verbs.json("doctor", "packed.zarr.zip")] == ["packed"]
    code, _, err = verbs("doctor", PATTERN, "--salvage", "out")
    assert (code, "one by one" in err) == (2, True)


@pytest.mark.parametrize(("path", "same"), [("packed.zarr.zip", True), (PATTERN, None)])
def test_diff_compares_with_the_mapped_form(verbs: Verbs, path: str, same: bool | None) -> None:
    (told,) = verbs.json("diff", "whole.zarr.zip", path)
    assert (told["same_identity"], told["same_content"]) == (True, same)


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
def test_preview_draws(verbs: Verbs, path: str, tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    code, said, _ = verbs("preview", path, "--sample", 3, "--array", "mask", "--out", out)
    assert (code, said) == (0, f"{out}\n")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
def test_concat_makes_one_mapped_file(verbs: Verbs, tmp_path: Path, path: str) -> None:
    out = tmp_path / "out.zarr.zip"
    assert verbs("concat", path, out)[0] == 0
    with ups_store.open(out) as store:
        assert_same_bits(store.gather(slice(None)), VALUES)


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
def test_split_cuts_across_files(verbs: Verbs, tmp_path: Path, path: str) -> None:
    outs = [tmp_path / "a.zarr.zip", tmp_path / "b.zarr.zip"]
    assert verbs("split", path, *outs, "--samples", "1:3,3:4")[0] == 0
    for out, samples in zip(outs, (slice(1, 3), slice(3, 4)), strict=True):
        with ups_store.open(out) as store:
            assert_same_bits(store.gather(slice(None)), {k: v[samples] for k, v in VALUES.items()})
    assert verbs("split", path, *outs, "--samples", "1:3,3:4")[0] == 0  # both are known to be made


@pytest.mark.parametrize("path", ["packed.zarr.zip", PATTERN])
@pytest.mark.parametrize("to", ["hdf5", "safetensors", "zarr"])
def test_export_writes_what_it_writes_of_the_mapped_form(
    verbs: Verbs, tmp_path: Path, path: str, to: str
) -> None:
    expected, found = tmp_path / "whole", tmp_path / "other"
    for source, out in (("whole.zarr.zip", expected), (path, found)):
        assert verbs("export", source, out, "--to", to)[0] == 0
    if path == PATTERN:  # its identity is its own
        assert (names_in(found) if found.is_dir() else []) == (names_in(expected) if found.is_dir() else [])
        return
    for file in [expected, *expected.rglob("*")]:
        if file.is_file():
            assert (found / file.relative_to(expected)).read_bytes() == file.read_bytes()


def test_pack_packs_each_partition(verbs: Verbs, tmp_path: Path) -> None:
    code, out, _ = verbs("pack", PATTERN, tmp_path / "small.zarr.zip")
    names = [f"small-0000{i}-of-00002.zarr.zip" for i in range(2)]
    assert (code, len(out.splitlines()), names_in(tmp_path)) == (0, 2, names)
    with ups_store.open(tmp_path / "small-*-of-00002.zarr.zip") as store, ups_store.open(PATTERN) as mapped:
        assert store.access == "decode"
        assert store.fingerprint == mapped.fingerprint
        assert_same_bits(store.gather(slice(None)), VALUES)


@pytest.mark.parametrize("verb", ["concat", "split", "export"])
def test_partition_is_no_target(verbs: Verbs, folder: Path, verb: str) -> None:
    part = folder / "part-00001-of-00002.zarr.zip"
    before = part.read_bytes()
    options = {"concat": (), "split": ("--samples", "0:2"), "export": ("--to", "hdf5")}[verb]
    code, _, err = verbs(verb, PATTERN, part, *options, "--force")
    assert (code, "replace its source" in err) == (2, True)
    assert part.read_bytes() == before


REFUSED = [
    ("unpack", "whole.zarr.zip", (), "open it with `ups_store.open`"),
    ("unpack", PATTERN, (), "ups-store concat"),
    ("unpack", "set.zarr.json", (), "ups-store concat"),
]


@pytest.mark.parametrize(("verb", "path", "options", "hint"), REFUSED)
def test_verb_that_needs_one_file_of_the_other_form_says_what_to_do(
    verbs: Verbs, tmp_path: Path, verb: str, path: str, options: tuple[str, ...], hint: str
) -> None:
    code, out, err = verbs(verb, path, tmp_path / "out", *options)
    assert code in (1, 2)
    assert (out, hint in err, "Traceback" in err) == ("", True, False)
    assert names_in(tmp_path) == []
