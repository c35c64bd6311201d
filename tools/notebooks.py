"""Notebooks as Python files: read, run, and render as Markdown or as `.ipynb`.

The cells of `docs/notebooks/*.py` are in the percent format, which
Jupyter (by jupytext), VS Code and PyCharm open:
`# %%` begins a cell of code, `# %% [markdown]` one of text, and a cell of `# !` lines types commands. So a
review sees Python, and no output is committed: the site and the tests run them.

python -m tools.notebooks docs/notebooks/store_in_five_minutes.py    # runs it, and prints the page
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "docs" / "notebooks"
_TIME_LIMIT_S = 300
_MARK = re.compile(r"^# %%(?: \[(markdown)\])?\n", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """One cell; `kind` is markdown, code, or shell, whose text is the lines to type."""

    kind: str
    text: str


@dataclass
class Output:
    """What a cell of code showed."""

    text: str = ""  # what was printed, and the repr of the last expression
    html: str = ""  # the last expression's own, where it has one
    images: list[str] = field(default_factory=list)  # figures as base64 of PNG


def read_cells(path: Path) -> list[Cell]:
    """The cells of a notebook; what stands before the first mark is for developers."""
    _, *parts = _MARK.split(path.read_text(encoding="utf-8"))
    return [_cell(kind, text.strip("\n")) for kind, text in zip(parts[::2], parts[1::2], strict=True)]


def _cell(kind: str | None, text: str) -> Cell:
    lines = text.splitlines()
    if kind == "markdown":
        return Cell("markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
    if lines and all(line.startswith("# !") for line in lines):
        return Cell("shell", "\n".join(line.removeprefix("# !") for line in lines))
    return Cell("code", text)


# --- run ---


def run(path: Path) -> list[Output]:
    """Run a notebook in a process and an empty folder of its own; outputs, one per cell.

    Raises:
        RuntimeError: With the child's traceback, if a cell or one of its commands fails.
    """
    bin_folder = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "MPLBACKEND": "Agg",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",  # threads that wait for each other make small models slow
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tools.notebooks", "--child", str(path.resolve())],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{path.name}: {done.stderr}")
        shown = done.stdout.replace(f"{Path(folder).resolve()}/", "")  # paths as the reader would see them
    return [Output(**output) for output in json.loads(shown)]


def _run_here(cells: list[Cell]) -> list[Output]:
    variables: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in cells:
        if cell.kind == "markdown":
            outputs.append(Output())
        elif cell.kind == "shell":
            outputs.append(Output(text="".join(map(_type, cell.text.splitlines()))))
        else:
            outputs.append(_execute(cell.text, variables))
    return outputs


def _type(line: str) -> str:
    done = subprocess.run(
        line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"`{line}` ended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def _execute(code: str, variables: dict[str, Any]) -> Output:
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, output = io.StringIO(), Output()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), variables)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), variables) if last else None
    output.images = _figures()
    if hasattr(value, "_repr_html_"):
        output.html = value._repr_html_()
    elif value is not None and not output.images:
        print(repr(value), file=printed)
    output.text = printed.getvalue()
    return output


def _figures() -> list[str]:
    """Open figures of matplotlib, which are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    images = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, dpi=100, bbox_inches="tight")
        images.append(b64encode(buffer.getvalue()).decode())
    pyplot.close("all")
    return images


# --- render ---


def to_markdown(path: Path, outputs: list[Output]) -> tuple[str, dict[str, bytes]]:
    """A page with code and outputs, and its images by file name."""
    parts, images = [], {}
    for number, (cell, output) in enumerate(zip(read_cells(path), outputs, strict=True)):
        language = {"code": "python", "shell": "sh"}.get(cell.kind)
        parts.append(f"```{language}\n{cell.text}\n```" if language else cell.text)
        if output.text.strip():
            parts.append(f"```text\n{output.text.rstrip()}\n```")
        if output.html:
            parts.append(re.sub(r"\n\s*\n", "\n", f"<div>{output.html}</div>"))
        for position, image in enumerate(output.images):
            name = f"{path.stem}-{number}-{position}.png"
            images[name] = b64decode(image)
            parts.append(f"![Figure of the cell above]({name})")
    parts.append(f"[Download this page as a notebook]({path.stem}.ipynb)")
    return "\n\n".join(parts) + "\n", images


def to_ipynb(path: Path) -> str:
    """The notebook as Jupyter keeps it (nbformat 4.5), without outputs."""
    cells = []
    for number, cell in enumerate(read_cells(path)):
        text = re.sub("^", "!", cell.text, flags=re.MULTILINE) if cell.kind == "shell" else cell.text
        kind = "markdown" if cell.kind == "markdown" else "code"
        extra = {} if kind == "markdown" else {"execution_count": None, "outputs": []}
        cells.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text, **extra})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1
    )


def main(arguments: list[str]) -> None:
    """Run notebooks and print them; with `--child` one, here, as JSON for `run`."""
    if arguments[0] == "--child":
        print(json.dumps([asdict(output) for output in _run_here(read_cells(Path(arguments[1])))]))
        return
    for name in arguments:
        print(to_markdown(Path(name), run(Path(name)))[0])


if __name__ == "__main__":
    main(sys.argv[1:])
