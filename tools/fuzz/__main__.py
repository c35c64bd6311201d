"""`python -m tools.fuzz`."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.fuzz.run import STORE, fuzz_in_processes, input_maker


def main(
    inputs: Annotated[int, typer.Option(help="how many inputs to try")] = 1_000_000,
    *,
    kind: Annotated[str, typer.Option(help="store, hdf5, yaml, pt, safetensors or model")] = STORE,
    seed: Annotated[int, typer.Option(help="another seed, other inputs")] = 0,
    processes: Annotated[int, typer.Option(help="processes")] = 2,
    max_seconds: Annotated[float, typer.Option(help="stop after so long, whatever was tried")] = math.inf,
    keep: Annotated[Path | None, typer.Option(help="folder for inputs that failed")] = None,
) -> None:
    """Fuzz a reader; exits with 1 if anything but a typed error or a right result came of an input."""
    outcome = fuzz_in_processes(
        inputs, seed=seed, num_processes=processes, max_seconds=max_seconds, kind=kind
    )
    if keep is not None and outcome.failures:
        keep.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            make = input_maker(kind, Path(folder))
            for number in outcome.failures:
                (keep / f"{kind}-{seed}-{number}").write_bytes(make(seed, number)[0])
    print(json.dumps(vars(outcome), indent=2))
    raise typer.Exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    typer.run(main)
