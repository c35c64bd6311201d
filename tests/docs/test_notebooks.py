"""The notebooks run, and show what their text says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tools import notebooks
from tools.notebooks import Cell, Output

NAMES = sorted(path.stem for path in notebooks.FOLDER.glob("*.py"))


@cache
def ran(name: str) -> list[Output]:
    return notebooks.run(notebooks.FOLDER / f"{name}.py")


def shown(name: str) -> str:
    return "".join(output.text for output in ran(name))


def test_store_notebook_continues_checks_and_finds_the_damage() -> None:
    text = shown("store_in_five_minutes")
    assert "wave_train.zarr.zip.building" in text
    assert "content.seed: 0 -> 1" in text
    assert "80 samples are missing, from number 120 on" in text
    assert "wave_train.zarr.zip: ok" in text
    assert "array 'u', sample 99" in text


@pytest.mark.slow  # a minute; `make docs` runs it, too, and the one above takes the same way
@pytest.mark.multi_process
@pytest.mark.timeout(300)
def test_rollout_notebook_ends_below_persistence_with_a_picture() -> None:
    outputs = ran("hdf5_to_rollout")
    assert [len(output.images) for output in outputs if output.images] == [1]
    words = shown("hdf5_to_rollout").rpartition("operator ")[2].replace(",", " ").split()
    assert float(words[0]) < 0.8 * float(words[2])
    assert words[1] == "persistence"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_offered_for_download(name: str) -> None:
    cells = notebooks.read_cells(notebooks.FOLDER / f"{name}.py")
    document = json.loads(notebooks.to_ipynb(notebooks.FOLDER / f"{name}.py"))
    assert len(document["cells"]) == len(cells) > 10
    typed = [cell["source"] for cell in document["cells"] if cell["source"].startswith("!")]
    assert len(typed) == len([cell for cell in cells if cell.kind == "shell"]) > 0


def test_cells_are_text_code_and_commands(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(
        '"""Intro."""\n\n# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\nx = 1\nx + 1\n\n# %%\n# !echo hello\n'
    )
    cells = notebooks.read_cells(path)
    assert cells == [
        Cell("markdown", "# Title\n\nText"),
        Cell("code", "x = 1\nx + 1"),
        Cell("shell", "echo hello"),
    ]
    outputs = notebooks.run(path)
    assert [output.text for output in outputs] == ["", "2\n", "hello\n"]
    page, images = notebooks.to_markdown(path, outputs)
    assert "```python\nx = 1\nx + 1\n```\n\n```text\n2\n```" in page
    assert images == {}


@pytest.mark.parametrize("cell", ["1 / 0", "# !exit 3"])
def test_failing_cell_fails_the_notebook(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"# %%\n{cell}\n")
    with pytest.raises(RuntimeError, match=r"bad\.py"):
        notebooks.run(path)
