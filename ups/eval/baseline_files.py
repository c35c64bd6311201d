"""Where baselines of a run lie, and which of them belong into its table.

Each is in a folder of its own, `<checkpoint.dir>/baselines/<task>_<kind>_<budget>`, with its training state
and log.
"""

from __future__ import annotations

from pathlib import Path

from ups.config import RunConfig
from ups.config.stages import BASELINES
from ups.errors import ConfigError, MissingExtraError
from ups.eval.baseline_model import Baseline, load_baseline
from ups.log import logger
from ups.trained.simulator import Simulator

_FOLDER = "baselines"  # in the folder of the checkpoints


def baseline_folder(config: RunConfig, kind: str, task: str, limit: str) -> Path:
    """Where a baseline with a budget of "flops", "samples", "seconds" or "steps" is trained."""
    return config.checkpoint.dir / _FOLDER / f"{task}_{kind}_{limit}"


def baseline_path(config: RunConfig, kind: str, task: str, limit: str) -> Path:
    """Its file."""
    return baseline_folder(config, kind, task, limit) / f"{kind}.safetensors"


def find_baselines(config: RunConfig, simulator: Simulator) -> list[Baseline]:
    """The baselines of a run that predict what the simulator does; others are named.

    Raises:
        CheckpointError: If one can't be read.
    """
    folder, found = config.checkpoint.dir / _FOLDER, []
    for path in sorted(folder.glob("*.safetensors")):
        logger.info(f"{path} is left out: an earlier version made it; train it again")
    for path in sorted(path for kind in BASELINES for path in folder.glob(f"*/{kind}.safetensors")):
        try:
            model = load_baseline(path, device=str(simulator.device))
        except (ConfigError, MissingExtraError) as error:  # another machine may have had the package
            error.path = None
            logger.info(f"{path} is left out: {error}")
            continue
        if problem := _mismatch(model, config, simulator):
            logger.info(f"{path} is left out: {problem}")
        else:
            found.append(model)
    return found


def _mismatch(model: Baseline, config: RunConfig, simulator: Simulator) -> str | None:
    """Why a baseline doesn't belong into the table, or None."""
    spec = model.spec
    if spec.task not in config.data.tasks or spec.task not in simulator.spec.tasks:
        return f"it is of another task, {spec.task}"
    if spec.grid != simulator.spec.tasks[spec.task].grid:
        return f"it is for another grid, {spec.grid.name}"
    is_steady = simulator.spec.tasks[spec.task].steady
    if is_steady and spec.size.get("predicts_change", True):
        return "it predicts a change of its input, which is no solution; train it again"
    if spec.stride != simulator.spec.stride and not is_steady:
        return f"it takes another time stride, {spec.stride}"
    if model.effort is None:
        return "its training isn't over; the same command continues it"
    return None
