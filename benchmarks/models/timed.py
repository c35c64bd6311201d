"""How many steps of one stage take as long as one of another, by steps that are timed in turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ups.config import RunConfig
from ups.output import write_atomically
from ups.train.budget import ratio_of, step_seconds, without_preparing
from ups.train.stage import StageStart, make_stage


@dataclass(frozen=True)
class Timed:
    """A stage whose steps are timed.

    Attributes:
        name: Of the stage.
        config: Of its run.
        patched: Changes its model, where no key does.
    """

    name: str
    config: RunConfig
    patched: Callable[[], AbstractContextManager[None]] = nullcontext


def ratio_of_times(one: Timed, unit: Timed, kept: Path) -> float:
    """How much longer a step takes than the unit's: the median over steps that are timed in turns.

    It is kept in a file, so that a benchmark that goes on has the steps that it began with.
    """
    if not kept.exists():
        device = torch.device("cpu")
        with ExitStack() as stack:
            stages = []
            for each in (one, unit):
                config = without_preparing(each.config)
                with each.patched():
                    stage = make_stage(each.name, config, device=device, start=StageStart())
                stack.callback(stage.close)
                stages.append((stage, config))
            ratio = ratio_of(*step_seconds(stages, device=device))
        write_atomically(kept, json.dumps(ratio).encode())
    found: float = json.loads(kept.read_text())
    return found
