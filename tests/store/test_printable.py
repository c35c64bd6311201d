"""What files of others hold never moves a cursor, hides a line, or turns text around: not on any way out."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import run_ups_store
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from small_stores import MakeStore, flip

import ups_store
from ups.errors import UpsError
from ups_store.console import PrintableConsole
from ups_store.errors import BuildLockedError, StoreError
from ups_store.printable import json_text, one_line, printable

_TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\u202etxt.\u2066\x85"


def obeyed(text: str) -> list[str]:
    """Characters that a terminal would obey instead of showing."""
    return [
        c
        for c in text
        if (unicodedata.category(c) in ("Cc", "Zl", "Zp") and c != "\n")
        or unicodedata.bidirectional(c) in _TURNING
    ]


def test_every_character_that_a_terminal_obeys_is_escaped_and_no_other() -> None:
    everything = "".join(map(chr, range(0xD800))) + "".join(map(chr, range(0xE000, 0x10000)))
    shown = printable(everything)
    assert obeyed(shown) == []
    changed = {c for c in everything if printable(c) != c}
    marks = {"\u061c", "\u200e", "\u200f"}  # of direction, which show nothing either
    assert changed == set(obeyed(everything)) | marks


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\tb\r", r"a\tb\r"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("\u202eabc", r"\u202eabc"),
        ("two\nlines", "two\nlines"),
        ("übung 時間 😀 \\ [b]", "übung 時間 😀 \\ [b]"),
        ("\udcff", r"\udcff"),  # of a name that isn't UTF-8
    ],
)
def test_printable_text_shows_escapes_and_leaves_all_else(text: str, shown: str) -> None:
    assert printable(text) == printable(shown) == shown


def test_name_of_a_file_stays_on_its_line() -> None:
    assert one_line("a\nb: ok") == r"a\nb: ok"
    differing = {f"{EVIL}\nb: ok": (EVIL, 1), "c": (1, 2)}
    shown = ups_store.describe_differences(differing)
    assert obeyed(shown) == []
    assert shown.count("\n") == 1


def test_json_is_ascii_without_control_characters_and_reads_back() -> None:
    everything = "".join(map(chr, range(0x3000)))
    text = json_text({everything: [everything, EVIL]})
    assert all(" " <= c <= "~" for c in text)
    assert json.loads(text) == {everything: [everything, EVIL]}


@pytest.mark.parametrize("cls", [StoreError, BuildLockedError, UpsError])
def test_error_shows_escapes_and_keeps_what_it_knows(cls: Callable[..., StoreError]) -> None:
    error = cls(f"odd {EVIL}", path=f"{EVIL}\nnext: ok", found=f"pid 1 on {EVIL}", hint=f"remove {EVIL}")
    assert obeyed(str(error)) == []
    assert "\n" not in str(error)
    assert (error.path, error.found) == (f"{EVIL}\nnext: ok", f"pid 1 on {EVIL}")


@pytest.fixture
def evil_store(make_store: MakeStore, tmp_path: Path) -> Path:
    """A store whose name, attributes, dimensions and identity are all evil."""
    spec = ups_store.ArraySpec((2, 3), "float32", dims=("sample", "x\u202etxt.\u2066"), attrs={EVIL: EVIL})
    path = tmp_path / f"{EVIL}.zarr.zip"
    options = {"identity": {EVIL: {"made by": EVIL}, "task": EVIL}, "attrs": {f"note{EVIL}": EVIL}}
    with ups_store.create(path, {"fields": spec}, **options) as writer:
        writer.commit_many([0, 1], {"fields": np.ones((2, 3), "float32")})
        return writer.finish()


@pytest.fixture
def other_store(tmp_path: Path) -> Path:
    spec = ups_store.ArraySpec((1,), "float32")
    with ups_store.create(tmp_path / "other.zarr.zip", {"w": spec}, identity={f"{EVIL}\n": [EVIL]}) as writer:
        writer.commit(0, {"w": np.float32(1)})
        return writer.finish()


@pytest.mark.parametrize(
    "words",
    [
        ("info", "-v"),
        ("info", "--stats"),
        ("verify",),
        ("doctor",),
        ("diff", "other"),
        ("info", "other"),
        ("unpack", "missing.zarr.zip"),
        ("split", "--samples", "nonsense", "missing.zarr.zip"),
        ("-vv", "unpack", "missing.zarr.zip"),
        (f"--{EVIL}",),
    ],
    ids=" ".join,
)
def test_verb_prints_nothing_that_a_terminal_obeys(
    evil_store: Path, other_store: Path, words: tuple[str, ...]
) -> None:
    verb, *rest = words if words[0] != "-vv" else words[1:]
    rest = [str(other_store) if word == "other" else word for word in rest]
    before = ["-vv"] if words[0] == "-vv" else []
    done = run_ups_store(*before, verb, str(evil_store), *rest)
    assert done.output.strip()
    assert obeyed(done.output) == []


@pytest.mark.parametrize("verb", ["info", "verify", "doctor"])
def test_json_of_a_verb_is_ascii_and_has_the_name_as_it_is(evil_store: Path, verb: str) -> None:
    done = run_ups_store(verb, str(evil_store), "--json")
    assert all(" " <= c <= "~" for c in done.stdout.rstrip("\n"))
    assert json.loads(done.stdout)["path"] == str(evil_store)


def test_damaged_file_whose_name_has_a_line_break_says_nothing_about_another(
    make_store: MakeStore, tmp_path: Path
) -> None:
    path = make_store().rename(tmp_path / "a\nb.zarr.zip: ok\n.zarr.zip")
    flip(path, path.stat().st_size // 2)
    done = run_ups_store("verify", str(path))
    assert all(line.startswith((str(tmp_path), "error: ")) for line in done.output.splitlines())


def test_names_and_values_of_a_store_begin_no_line_of_their_own(
    make_store: MakeStore, tmp_path: Path
) -> None:
    forged = "\x07\nconfig hash FORGED"
    path = tmp_path / f"a{forged}.zarr.zip"
    with ups_store.create(path, {}, identity={forged: forged}, attrs={"note": forged}) as writer:
        writer.finish()
    for paths in ([str(path)], [str(path), str(make_store())]):
        lines = run_ups_store("info", "-v", *paths).output.splitlines()
        assert not any(line.strip().startswith("config hash FORGED") for line in lines)
        assert any(r"\x07\nconfig hash FORGED" in line for line in lines)


def test_terminal_gets_colours_of_ours_and_no_sequences_of_others() -> None:
    out = io.StringIO()
    console = PrintableConsole(file=out, force_terminal=True, color_system="standard", width=200)
    table = Table("name")
    table.add_row(EVIL)
    table.add_row(Text(EVIL))
    console.print(Text("red", style="red"), EVIL, table)
    with Progress(TextColumn("{task.description}"), console=console) as progress:
        progress.add_task(EVIL)
    assert "\x1b[31mred\x1b[0m" in out.getvalue()
    rest = re.sub(r"\x1b\[\??[0-9;]*[A-Za-z]|\r", "", out.getvalue())  # colours, and moves of the bar
    assert obeyed(rest) == []
    assert "owned" in rest
    assert "\x1b]" not in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
