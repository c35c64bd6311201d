"""Switches that make a training faster or smaller: what each needs, and which ones combine.

`check_switches` refuses what doesn't combine before anything is opened; the table of docs/guides/train.md is
`combinations_table`, and tests/ups/train/test_switches.py trains every pair that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from ups.config import RunConfig, StageConfig
from ups.errors import ConfigError

if TYPE_CHECKING:
    import torch

Combination = Literal["yes", "one of", "no"]


@dataclass(frozen=True)
class Switch:
    """A setting, and how a step with it compares with one without.

    Attributes:
        settings: What switches it on, `key=value`; keys of `optimizer` are below `stages.<stage>`.
        is_on: Whether it is, given the configuration and the stage's own settings.
        drift: How far it may move a step's change of the weights, over that change's norm; None of one that
            means another change.
        choice: Of switches with the same one only one can be on.
        needs_gpu: Why there has to be one; None where it isn't needed.
        least_ranks: Fewer processes than these don't notice it.
    """

    settings: tuple[str, ...]
    is_on: Callable[[RunConfig, StageConfig], bool]
    drift: float | None
    choice: str | None = None
    needs_gpu: str | None = None
    least_ranks: int = 1


_ROUNDING = 1e-4  # float32, sums in another order
_OFFLOAD = "training.cpu_offload_optimizer"


def _is_parallel(way: str, config: RunConfig, stage: StageConfig) -> bool:
    return config.training.parallel == way


def _parallel(way: str) -> Switch:
    return Switch(
        (f"training.parallel={way}",), partial(_is_parallel, way), _ROUNDING, "parallel", least_ranks=2
    )


SWITCHES: Mapping[str, Switch] = {
    "compile": Switch(
        ("training.compile=true",),
        lambda config, stage: bool(stage.compile) and config.training.compile_regions == "whole",
        _ROUNDING,
        "compile",
    ),
    "compile blocks": Switch(
        ("training.compile=true", "training.compile_regions=blocks"),
        lambda config, stage: bool(stage.compile) and config.training.compile_regions == "blocks",
        _ROUNDING,
        "compile",
    ),
    "amp bfloat16": Switch(
        ("training.amp=true",),
        lambda config, stage: bool(stage.amp) and stage.amp_dtype == "bfloat16",
        0.05,  # 8 bits
        "amp",
    ),
    "amp float16": Switch(
        ("training.amp=true", "training.amp_dtype=float16"),
        lambda config, stage: bool(stage.amp) and stage.amp_dtype == "float16",
        0.01,  # 11 bits
        "amp",
    ),
    "matmul_precision high": Switch(
        ("training.matmul_precision=high",),
        lambda config, stage: config.training.matmul_precision != "highest",
        0.01,  # TF32 has 11 bits
    ),
    "checkpointing selective": Switch(
        ("training.activation_checkpointing=selective",),
        lambda config, stage: config.training.activation_checkpointing == "selective",
        _ROUNDING,
        "checkpointing",
    ),
    "checkpointing full": Switch(
        ("training.activation_checkpointing=full",),
        lambda config, stage: config.training.activation_checkpointing == "full",
        _ROUNDING,
        "checkpointing",
    ),
    "attention flex": Switch(
        ("operator.attention=flex",),
        lambda config, stage: config.operator.attention == "flex",
        0.02,  # TF32 inside its kernel
    ),
    "muon_hybrid": Switch(
        ("optimizer.name=muon_hybrid",),
        lambda config, stage: stage.optimizer.name == "muon_hybrid",
        None,
        "optimizer",
    ),
    "adamw8bit": Switch(
        ("optimizer.name=adamw8bit",),
        lambda config, stage: stage.optimizer.name == "adamw8bit",
        None,
        "optimizer",
    ),
    "cpu_offload_optimizer": Switch(
        (f"{_OFFLOAD}=true",),
        lambda config, stage: bool(stage.optimizer.cpu_offload),
        _ROUNDING,
        needs_gpu="it moves states from a GPU to the CPU",
    ),
    "grad_clip": Switch(
        ("training.grad_clip=0.001",), lambda config, stage: stage.grad_clip is not None, None
    ),
    "accum_steps": Switch(
        ("training.accum_steps=2",), lambda config, stage: config.training.accum_steps > 1, None
    ),
    "ema_decay": Switch(("training.ema_decay=0.9",), lambda config, stage: stage.ema_decay is not None, None),
    "ddp": _parallel("ddp"),
    "fsdp2": _parallel("fsdp2"),
    "hsdp": _parallel("hsdp"),
}

_ONLY_ADAMW = "AdamW alone is moved to the CPU"
_ONE_GPU = "it knows one GPU and one process"
_NOT_SHARED = "torchao's states aren't shared out over ranks"
REFUSED: Mapping[frozenset[str], str] = {
    frozenset(("cpu_offload_optimizer", "muon_hybrid")): _ONLY_ADAMW,
    frozenset(("cpu_offload_optimizer", "adamw8bit")): _ONLY_ADAMW,
    frozenset(("cpu_offload_optimizer", "grad_clip")): (
        "gradients are on their way to the CPU before their norm is known"
    ),
    frozenset(("cpu_offload_optimizer", "amp float16")): (
        "gradients are on their way to the CPU before its scaler has divided them"
    ),
    **{frozenset(("cpu_offload_optimizer", way)): _ONE_GPU for way in ("ddp", "fsdp2", "hsdp")},
    **{frozenset(("adamw8bit", way)): _NOT_SHARED for way in ("fsdp2", "hsdp")},
}


def combination(first: str, second: str) -> Combination:
    """Whether two switches may be on together: "one of" where they are values of one choice."""
    if frozenset((first, second)) in REFUSED:
        return "no"
    choice = SWITCHES[first].choice
    return "one of" if choice is not None and choice == SWITCHES[second].choice else "yes"


def switches_on(config: RunConfig, stage: str, *, num_ranks: int) -> list[str]:
    """Names of the switches that are on for a stage of a run, trained by so many processes."""
    settings = config.stage(stage)
    return [
        name
        for name, switch in SWITCHES.items()
        if num_ranks >= switch.least_ranks and switch.is_on(config, settings)
    ]


def check_switches(config: RunConfig, stage: str, *, device: torch.device | str, num_ranks: int) -> None:
    """Refuse what doesn't combine, or isn't there for a switch, before the stage is made; needs no torch."""
    settings = config.stage(stage)
    on = switches_on(config, stage, num_ranks=num_ranks)
    for first, second in combinations(on, 2):
        if reason := REFUSED.get(frozenset((first, second))):
            problem = f"stage {stage}: {_shown(first)} with {_shown(second)}: {reason}"
            raise ConfigError(problem, kind="switches", hint=_way_out(first, second))
    for name in on:
        if (reason := SWITCHES[name].needs_gpu) and not str(device).startswith("cuda"):
            problem = f"{_shown(name)}: {reason}"
            raise ConfigError(problem, kind="needs_gpu", expected="a CUDA device", found=str(device))
    if settings.optimizer.cpu_offload and settings.optimizer.name != "adamw":
        raise ConfigError(
            f"stage {stage}: {_OFFLOAD}: {_ONLY_ADAMW}",
            kind="optimizer",
            expected="optimizer.name = adamw",
            found=settings.optimizer.name,
        )


def _shown(name: str) -> str:
    """Its settings, without a number that isn't the run's own."""
    key, *others = SWITCHES[name].settings
    return " ".join((key.removesuffix("=0.001"), *others))


def _way_out(first: str, second: str) -> str:
    """How to switch off one of the two; some are on by default and can't be left out."""
    if "grad_clip" in (first, second):
        return "say training.grad_clip=null"
    is_of_ranks = SWITCHES[second].least_ranks > 1
    return "leave it out, or train with one process" if is_of_ranks else "leave one of them out"


def combinations_table() -> str:
    """What combines, as Markdown: a row and a column for each switch, and the reasons below."""
    names, reasons = list(SWITCHES), list(dict.fromkeys(REFUSED.values()))
    marks = {"yes": "+", "one of": "·"}

    def mark(row: str, column: str) -> str:
        if row == column:
            return ""
        kind = combination(row, column)
        return f"no {reasons.index(REFUSED[frozenset((row, column))]) + 1}" if kind == "no" else marks[kind]

    head = ["", *(str(number) for number in range(1, len(names) + 1))]
    rows = [
        [f"{number} {_code(row)}", *(mark(row, column) for column in names[:number])]
        for number, row in enumerate(names, 1)
    ]
    lines = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{table}\n\n{notes}\n"


def _code(name: str) -> str:
    return " ".join(f"`{setting}`" for setting in SWITCHES[name].settings)
