"""`ups validate optimizations`: do switches pay on this machine, and what do they cost in accuracy?

A baseline and its variants train beside each other in one process, in turns of a few steps: the same seed,
the same data, and whatever else the machine does meets all of them alike. Where batches differ, turns are of
as many samples. Compared are the median of the paired times of a sample, the loss after as many samples, the
time until the baseline's last loss is reached, the validation error at the end, and memory; gates decide.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ups.config.checks import check_optimizer
from ups.config.stage_keys import nested_keys
from ups.device import choose_device, describe_device
from ups.errors import ConfigError, needs
from ups.log import logger
from ups.output import progress_bar
from ups.train.budget import within_budget
from ups.train.contenders import (
    BASELINE,
    OPTIMIZED,
    Contender,
    Variant,
    as_overrides,
    make_variants,
    rows_of_step,
)
from ups.train.interrupt import StopRequest, stop_on_signals
from ups.train.schedules import Schedule
from ups.train.stage import make_stage
from ups.train.switches import check_switches

with needs("train"):
    import yaml

ROUND_STEPS = 5  # of a contender, before it is the next one's turn
_GB = 1e9


@dataclass(frozen=True)
class Gates:
    """What the optimised configuration has to keep; each is compared with the baseline.

    Attributes:
        min_speedup: Baseline's time of a sample over its own, at least.
        max_loss_difference: Difference of the losses at the end, at most.
        max_nrmse_increase: By what share its validation error may be larger; smaller is no fault.
        max_memory_gb: Memory at the fullest moment of a step, at most, in 10^9 bytes.
    """

    min_speedup: float = 3.0
    max_loss_difference: float = 1e-3
    max_nrmse_increase: float = 0.03
    max_memory_gb: float = 50.0


@dataclass(frozen=True)
class Verdict:
    """One gate: what was found, and the limit. It isn't passed where nothing could be measured."""

    gate: str
    limit: float
    found: float | None
    is_passed: bool


@dataclass(frozen=True)
class Row:
    """A variant beside the baseline.

    Attributes:
        name: Of the variant.
        switches: Keys and values that differ from the baseline.
        rows: Samples of an optimiser step.
        step_s: Median wall time of a step.
        processor_s: Median processor time of a step.
        speedup: Median over the rounds of the baseline's time of a sample over its own.
        loss_speedup: The baseline's time of all its timed steps over its own until its loss was as low; None
            where it never was, or losses aren't of one kind.
        quartiles: First and third, of the same.
        warm_up_s: Wall time of the first steps, compilation in it.
        first_step_s: Of the very first one.
        peak_gb: Memory at the fullest moment of a step, with weights and the optimiser's state.
        waiting_share: Share of the time that was spent waiting for batches.
        loss: At the end.
        loss_difference: From the baseline's.
        largest_loss_difference: Of all rounds.
        nrmse: Validation error at the end.
        nrmse_change: Its relative difference from the baseline's.
        failure: Why it was given up, such as a loss that isn't finite.
        gates: What each gate says.
    """

    name: str
    switches: Mapping[str, Any]
    rows: int
    step_s: float | None
    processor_s: float | None
    speedup: float | None
    loss_speedup: float | None
    quartiles: tuple[float, float] | None
    warm_up_s: float
    first_step_s: float
    peak_gb: float | None
    waiting_share: float | None
    loss: float | None
    loss_difference: float | None
    largest_loss_difference: float | None
    nrmse: float | None
    nrmse_change: float | None
    failure: str | None
    gates: Sequence[Verdict]

    @property
    def is_passed(self) -> bool:
        """Whether it passes every gate."""
        return all(verdict.is_passed for verdict in self.gates)

    @property
    def is_sound(self) -> bool:
        """Whether it passes all gates but that of speed."""
        return all(verdict.is_passed for verdict in self.gates if verdict.gate != "speedup")


@dataclass(frozen=True)
class Findings:
    """What a comparison found.

    Attributes:
        about: Date, machine, stage, steps.
        rows: The baseline first, the optimised configuration last.
        is_complete: Whether all steps were made; else someone stopped it.
        winner: The fastest variant that is sound and faster than the baseline, or "baseline".
    """

    about: Mapping[str, Any]
    rows: Sequence[Row]
    is_complete: bool
    winner: str

    @property
    def is_passed(self) -> bool:
        """Whether the optimised configuration passes every gate."""
        return self.is_complete and self.rows[-1].is_passed

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        rows = [asdict(row) | {"is_passed": row.is_passed} for row in self.rows]
        said = {"is_passed": self.is_passed, "is_complete": self.is_complete, "winner": self.winner}
        return {**self.about, **said, "variants": rows}


def validate_optimizations(
    baseline: Path | None,
    optimized: Path | None,
    *,
    stage: str,
    overrides: Sequence[str],
    only_optimized: Sequence[str],
    warm_up: int,
    gates: Gates,
) -> Findings:
    """Compare two configurations that differ in switches, and each switch by itself.

    Args:
        baseline: YAML file or name of a shipped configuration.
        optimized: The other one.
        stage: Whose steps are compared.
        overrides: `key=value` of both.
        only_optimized: `key=value` of the other one alone.
        warm_up: First steps, timed apart.
        gates: What the other one has to keep.

    Returns:
        What was found; on SIGINT or SIGTERM, what was found until then.

    Raises:
        ConfigError: As `make_variants`, `check_switches`, and of stages; kind "steps" if there are too few.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "several ranks", kind="ranks", expected="one process", hint="start it without torchrun"
        )
    variants = make_variants(
        baseline, optimized, overrides=overrides, only_optimized=only_optimized, stage=stage
    )
    first = variants[0].config
    check_optimizer(first.stage(stage).optimizer, stage=stage)
    device = choose_device(first.training.device)
    for variant in variants:
        check_switches(variant.config, stage, device=device, num_ranks=1)
    steps = _num_steps(variants[0], stage, device=device)
    if steps <= warm_up:
        raise ConfigError(
            "steps of the comparison", kind="steps", expected=f"more than {warm_up} of warm-up", found=steps
        )
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    about = {"date": date, "machine": describe_device(device), "stage": stage, "seed": first.seed}
    about |= {"steps": steps, "warm_up_steps": warm_up, "memory": _memory_of(device), "gates": asdict(gates)}
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        sizes = [rows_of_step(variant, stage) for variant in variants]
        lengths = [warm_up + round((steps - warm_up) * sizes[0] / own) for own in sizes]
        if least := [n for n in lengths if n <= warm_up]:
            found, expected = f"{least[0]} of the largest batch", f"more than {warm_up} of warm-up"
            raise ConfigError("steps of the comparison", kind="steps", expected=expected, found=found)
        contenders = [
            Contender(variant, stage=stage, steps=length, device=device)
            for variant, length in zip(variants, lengths, strict=True)
        ]
        is_complete = _train(contenders, stack, stop, steps=steps, warm_up=warm_up)
        for contender in contenders if is_complete else ():
            if contender.is_running:
                contender.validate()
    rows = [_row(contender, contenders[0], gates) for contender in contenders]
    return Findings(about, rows, is_complete, winner_of(rows))


def _train(
    contenders: Sequence[Contender], stack: ExitStack, stop: StopRequest, *, steps: int, warm_up: int
) -> bool:
    """All steps of all contenders, in turns; whether none of them was left out."""
    rounds = list(_rounds(contenders, steps=steps, warm_up=warm_up))
    with progress_bar("comparing", total=sum(len(turns) for turns in rounds)) as show:
        done = 0
        for turns in rounds:
            for contender, num in turns:
                if stop.number:
                    return False
                if turns is rounds[0]:
                    stack.enter_context(contender)
                    logger.info(f"warming up: {contender.variant.name}")
                    contender.warm_up(num)
                elif contender.is_running:
                    contender.round(num)
                show(done := done + 1)
    return not stop.number


def _rounds(
    contenders: Sequence[Contender], *, steps: int, warm_up: int
) -> Iterator[list[tuple[Contender, int]]]:
    """Turns of each round, and their steps, which take as many samples: at least a step of each.

    Another one begins each round, as whose batches are prepared meanwhile disturbs others.
    """
    yield [(contender, warm_up) for contender in contenders]
    ratios = [contenders[0].rows / contender.rows for contender in contenders]
    size, done = max(ROUND_STEPS, math.ceil(1 / min(ratios))), [warm_up] * len(contenders)
    for number, begin in enumerate(range(warm_up, steps, size)):
        # From the warm-up on, of which all make as many steps.
        ends = [round((min(begin + size, steps) - warm_up) * ratio) + warm_up for ratio in ratios]
        turns = [
            (each, end - made) for each, end, made in zip(contenders, ends, done, strict=True) if end > made
        ]
        first = number % len(turns)
        done = ends
        yield [*turns[first:], *turns[:first]]


def _num_steps(variant: Variant, stage: str, *, device: torch.device) -> int:
    """Optimiser steps of a stage, be they said, epochs of its data, or a budget."""
    config = within_budget(stage, variant.config, device=device, is_continued=False)
    settings = config.stage(stage)
    if settings.steps is not None:
        return settings.steps
    made = make_stage(stage, config, device=device)
    try:
        accum_steps = config.training.accum_steps
        return Schedule.of(settings, num_batches=len(made.loader), accum_steps=accum_steps).total_steps
    finally:
        made.close()


def _memory_of(device: torch.device) -> str:
    if device.type == "cuda":
        return "weights, optimiser, averages, and what CUDA's allocator gave out besides during a step"
    return "weights, optimiser, averages, and what PyTorch's CPU allocator gave out besides during a step"


def _row(contender: Contender, baseline: Contender, gates: Gates) -> Row:
    """What was measured, beside the baseline."""
    own, other = contender.measured, baseline.measured
    size = baseline.rows / contender.rows  # of a batch: times are of as many samples
    ratios = [b / (a * size) for a, b in zip(own.step_s, other.step_s, strict=False)]
    has_same_loss = contender.variant.has_same_loss
    losses = own.losses if has_same_loss else []
    away = [abs(a - b) for a, b in zip(losses, other.losses, strict=False)]
    as_low = [number for number, loss in enumerate(losses, 1) if loss <= (other.loss or -math.inf)]
    spent_s = sum(own.step_s[: as_low[0]]) * size if as_low else math.inf
    quartiles = tuple(np.percentile(ratios, (25, 75)).tolist()) if ratios else None
    values: dict[str, Any] = {
        "speedup": _median(ratios),
        "peak_gb": None if own.peak_nbytes is None else own.peak_nbytes / _GB,
        "loss_difference": _difference(own.loss, other.loss) if has_same_loss else None,
        "nrmse_change": _relative(own.nrmse, other.nrmse),
    }
    return Row(
        name=contender.variant.name,
        switches=contender.variant.switches,
        rows=contender.rows,
        loss_speedup=sum(other.step_s) / spent_s if as_low else None,
        step_s=_median(own.step_s),
        processor_s=_median(own.processor_s),
        quartiles=quartiles,
        warm_up_s=own.warm_up_s,
        first_step_s=own.first_step_s,
        waiting_share=_median(own.waiting_share),
        loss=own.loss,
        largest_loss_difference=max(away, default=None),
        nrmse=own.nrmse,
        failure=own.failure,
        gates=[
            verdict
            for verdict in _judge(gates, values, failure=own.failure)
            if contender is not baseline and (has_same_loss or verdict.gate != "loss_difference")
        ],
        **values,
    )


def _judge(gates: Gates, values: Mapping[str, Any], *, failure: str | None) -> Iterator[Verdict]:
    def verdict(gate: str, limit: float, keeps: Callable[[float, float], bool]) -> Verdict:
        found = values[gate]
        return Verdict(gate, limit, found, found is not None and keeps(found, limit))

    yield verdict("speedup", gates.min_speedup, lambda found, limit: found >= limit)
    yield verdict("loss_difference", gates.max_loss_difference, lambda found, limit: abs(found) <= limit)
    yield verdict("nrmse_change", gates.max_nrmse_increase, lambda found, limit: found <= limit)
    yield verdict("peak_gb", gates.max_memory_gb, lambda found, limit: found <= limit)
    yield Verdict("failures", 0, float(failure is not None), failure is None)


def winner_of(rows: Sequence[Row]) -> str:
    """The fastest sound variant that was faster than the baseline in three rounds of four, or "baseline"."""
    faster = [row for row in rows[1:] if row.is_sound and row.quartiles and row.quartiles[0] > 1]
    return max(faster, key=lambda row: row.speedup or 0.0).name if faster else BASELINE


def suggested_yaml(
    findings: Findings,
    baseline: Path | None,
    optimized: Path | None = None,
    *,
    overrides: Sequence[str],
    only_optimized: Sequence[str] = (),
    folder: Path,
) -> str:
    """The configuration that won, as a file that includes the baseline's, or the other one itself.

    Args:
        findings: Of the comparison.
        baseline: As it was given.
        optimized: As it was given.
        overrides: `key=value` of both configurations.
        only_optimized: `key=value` of the other one alone.
        folder: Where the file is to lie, which `include` is relative to.
    """
    row = next(row for row in findings.rows if row.name == findings.winner)
    why = f"{row.speedup:.3g} times as fast" if row.switches else "no switch made it faster"
    lines = [f"# {why}: `ups validate optimizations`, {findings.about['date']}, {findings.about['machine']}"]
    is_whole = row.name == OPTIMIZED
    own, included = (only_optimized, optimized) if is_whole else (as_overrides(row.switches), baseline)
    said = (override.partition("=") for override in (*overrides, *own))
    given = nested_keys({key: yaml.safe_load(value) for key, _, value in said})
    if included is not None:
        name = os.path.relpath(included, folder) if included.exists() else str(included)
        given = {"include": name, **given}
    return "\n".join([*lines, yaml.safe_dump(given, sort_keys=False)])


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _relative(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other - 1


_COLUMNS = (
    *("variant", "samples a step", "ms a step", "speed-up", "quartiles", "to equal loss"),
    *("warm-up", "memory", "loss", "nRMSE", "gates"),
)
_WORDS = {"speedup": "speed-up", "loss_difference": "loss", "nrmse_change": "nRMSE", "peak_gb": "memory"}


def show_findings(findings: Findings, console: Console) -> None:
    """Show a table, then a sentence that says whether the optimised configuration passes."""
    about = findings.about
    table = Table(*_COLUMNS, title=f"stage {about['stage']}, {about['steps']} steps, {about['date']}")
    for row in findings.rows:
        table.add_row(*map(Text, _cells(row)))
    console.print(table)
    console.print(f"{about['machine']}; memory: {about['memory']}", markup=False)
    last = findings.rows[-1]
    if findings.is_complete:
        missed = [_sentence(verdict) for verdict in last.gates if not verdict.is_passed]
        said = f"misses {', '.join(missed)}" if missed else "passes all gates"
        console.print(f"{last.name}: {said}", markup=False)
    console.print(f"fastest without harm: {findings.winner}", markup=False)


def _cells(row: Row) -> tuple[str, ...]:
    if row.failure is not None:
        return row.name, *[""] * (len(_COLUMNS) - 2), row.failure
    quartiles = "{:.2f} to {:.2f}".format(*row.quartiles) if row.quartiles else ""
    loss = _shown(row.loss, "{:.4g}") + _shown(row.loss_difference if row.gates else None, " ({:+.2g})")
    nrmse = _shown(row.nrmse, "{:.4g}") + _shown(row.nrmse_change if row.gates else None, " ({:+.2%})")
    missed = [_WORDS.get(verdict.gate, verdict.gate) for verdict in row.gates if not verdict.is_passed]
    return (
        row.name,
        str(row.rows),
        _shown(row.step_s and 1e3 * row.step_s, "{:.4g}"),
        _shown(row.speedup, "{:.3g}"),
        quartiles,
        _shown(row.loss_speedup if row.gates else None, "{:.3g}"),
        f"{row.warm_up_s:.3g} s",
        _shown(row.peak_gb, "{:.3g} GB"),
        loss,
        nrmse,
        f"misses {', '.join(missed)}" if missed else "passes" if row.gates else "",
    )


def _sentence(verdict: Verdict) -> str:
    found = "not measured" if verdict.found is None else f"{verdict.found:.3g}"
    return f"{_WORDS.get(verdict.gate, verdict.gate)} (limit {verdict.limit:g}, found {found})"


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
