"""Which validation trajectories a corrector is trained on, and which are kept for measuring; no torch."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from ups.errors import ConfigError

HeldOutPart = Literal["fit", "check"]
PARTS: tuple[HeldOutPart, ...] = ("fit", "check")
_USES = {"fit": "train on", "check": "measure on"}
_LEAST = {"fit": 2, "check": 1}  # trajectories

Items = npt.NDArray[np.int64]


def divided(num: int, share: float) -> dict[HeldOutPart, Items]:
    """Numbers of the trajectories for training, spread evenly, and of the others."""
    num_fit = min(num, round(share * num))
    fit = ((np.arange(num_fit) + 0.5) * num / max(1, num_fit)).astype(np.int64)
    return {"fit": fit, "check": np.setdiff1d(np.arange(num), fit)}


def check_enough(num: int, share: float, *, task: str, origin: object = None) -> None:
    """Refuse validation trajectories that are too few to train on some and measure on others.

    Args:
        num: Trajectories of validation, without those of "dev".
        share: Of them, for training.
        origin: Where they are from, for the error.
    """
    numbers = {part: len(items) for part, items in divided(num, share).items()}
    if all(numbers[part] >= _LEAST[part] for part in PARTS):
        return
    raise ConfigError(
        f"too few held-out trajectories of {task} for a corrector",
        kind="too_few_trajectories",
        path=origin,
        expected=" and ".join(f"at least {_LEAST[part]} to {_USES[part]}" for part in PARTS),
        found=" and ".join(f"{numbers[part]} to {_USES[part]}" for part in PARTS) + f", of {num}",
        hint="give validation more samples with data.split_fractions, or change diffusion.residual_share",
    )


def check_lead_times(lead_times: int, *, horizon: int, task: str, origin: object = None) -> None:
    """Refuse rollouts that are longer than trajectories."""
    if lead_times > horizon:
        expected = f"at most {horizon}, the steps of the trajectories of {task}"
        problem = f"diffusion.lead_times = {lead_times}"
        raise ConfigError(problem, kind="lead_times", path=origin, expected=expected)
