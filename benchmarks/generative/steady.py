"""`python -m benchmarks.generative.steady`: the prior of steady solutions beside direct regression.

Darcy flow with the coefficient known everywhere, where there is one solution, and with the coefficient known
at few points, where there are many. Both models are the same network, trained for as many steps. Stop it
whenever you like: run again, it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer

import ups
from benchmarks.harness.commands import note, show_and_keep, show_progress
from ups.config import load_config
from ups.data.solvers import make_dataset
from ups.data.windows import open_trajectories
from ups.eval.ensembles import Climate, ensemble_numbers, roll_out_members
from ups.eval.forecasters import PriorForecaster
from ups.output import with_nulls, write_atomically
from ups.train.run import run_stage

_HERE = Path(__file__).resolve().parent
TASK, METHODS, SEEDS = "darcy2d", ("regression", "flow"), (0, 1, 2)
NUM_SAMPLES, OBSERVED = 800, 12  # OBSERVED: points where the coefficient is known
SPLIT, MEMBERS, SHOWN = "test", 16, ("mean_nrmse", "crps", "energy_score", "spread_skill")
SETTINGS = {
    "operator": {"state": "fields", "num_heads": 4},
    "diffusion": {"hidden_dim": 24, "depths": [2], "num_sampler_steps": 8},
    "training": {
        **{"batch_size": 32, "lr": 4e-3, "ema_decay": 0.98, "num_workers": 0, "device": "cpu"},
        # What decides the mean is learnt near the noise; uniform flow times learn it late.
        "tau_distribution": {"type": "beta", "alpha": 1.0, "beta": 3.0},
    },
    "evaluation": {"enabled": False},
}


def main(
    points: Annotated[int, typer.Option(help="along each axis")] = 32,
    steps: Annotated[int, typer.Option(help="optimiser steps of each training")] = 400,
    seeds: Annotated[str, typer.Option(help="training seeds")] = ",".join(map(str, SEEDS)),
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data and scores [default: benchmarks/generative/out-steady]"),
    ] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="write the table into docs/results/generative.md")
    ] = False,
) -> None:
    """Make the data, train what isn't trained yet, and print the table of what is."""
    show_progress()
    torch.set_num_threads(1)
    folder = out or _HERE / "out-steady"
    data = folder / "data"
    if not data.exists():
        make_dataset(TASK, data, num_samples=NUM_SAMPLES, points=points)
    runs = []
    for seed, observed, method in product(map(int, seeds.split(",")), (None, OBSERVED), METHODS):
        path = folder / f"{method}-{observed or 'all'}-{seed}" / "scores.json"
        if not path.exists():
            note(f"{path.parent.name}: training")
            scores = train_and_score(path.parent, data, method, observed, seed=seed, steps=steps)
            write_atomically(path, json.dumps(with_nulls(scores), indent=1).encode())
        run = {"method": method, "observed": observed, "seed": seed, **json.loads(path.read_text())}
        runs.append(run)
    sizes = {"points": points, "num_samples": NUM_SAMPLES, "observed": OBSERVED, "steps": steps}
    page, document = "generative" if docs else "", {"sizes": sizes, "runs": runs}
    show_and_keep(table(runs), folder / "steady.md", document, page=page, block="steady")


def train_and_score(
    folder: Path, data: Path, method: str, observed: int | None, *, seed: int, steps: int
) -> dict[str, Any]:
    """Train one model, and score it on the test split.

    Args:
        folder: Of its checkpoints.
        data: Of the samples.
        method: Of `METHODS`.
        observed: Points at which the coefficient is known; None for all.
        seed: Of the training.
        steps: Of the optimiser.
    """
    stage = {"epochs": 4, "steps": steps, "scheduler": {"name": "cosine", "warmup_steps": 40}}
    settings = {
        **SETTINGS,
        "data": {"task": TASK, "root": str(data)},
        "cache": {"dir": str(folder.parent / "cache")},
        "encoder": {"patch_size": 4},
        "prior": {"method": method, "observed_points": observed},
        "stages": {"prior": stage},
        "checkpoint": {"dir": str(folder)},
        "seed": seed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    config = load_config(path)
    report = run_stage("prior", config)
    model = ups.load(report["checkpoint"])
    trajectories = open_trajectories(config.build, TASK, SPLIT)
    climate, forecaster = Climate.of(trajectories), PriorForecaster(model, seed=0)  # type: ignore[arg-type]
    num = MEMBERS if method == "flow" else None
    rolled = roll_out_members(forecaster, trajectories, climate, members=num, seed=0)
    return {
        **ensemble_numbers(rolled.errors),
        "parameters": report["parameters"],
        "training_seconds": report["cpu_seconds"],
        "seconds_each": rolled.seconds / len(trajectories),
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds, with the standard deviation over them where there are several."""
    columns = "nRMSE of the mean | CRPS | energy score | spread/skill | training, s"
    lines = [f"| coefficient known at | model | {columns} |", "|---|---|---|---|---|---|---|"]
    for observed, method in product(dict.fromkeys(run["observed"] for run in runs), METHODS):
        rows = [run for run in runs if (run["observed"], run["method"]) == (observed, method)]
        cells = ["all points" if observed is None else f"{observed} points"]
        cells.append(f"prior, {MEMBERS} members" if method == "flow" else "regression")
        for key in SHOWN:
            values = [run[key] for run in rows if run.get(key) is not None]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread}" if values else "-")
        cells.append(f"{mean(run['training_seconds'] for run in rows):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
