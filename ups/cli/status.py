"""The verb `status`: what a run does now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.common import AsJson, columns
from ups.errors import ConfigError
from ups_store.console import format_duration, importing, print_json, print_lines, results

if TYPE_CHECKING:
    from ups.pipeline.status import NodeStatus, StageStatus, Status

_REFRESH_S = 2.0


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of checkpoints, or of `ups run`")],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="refresh until nothing runs there any more")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a run does now: step, rates, time left, memory, the last warning.

    Reads logs and records, so it also works where the run's folder is mounted, or over ssh.
    """
    if watch and as_json:
        raise ConfigError("--watch and --json", expected="one of them", found="both")
    with importing():
        from dataclasses import asdict

        from ups.output import with_nulls
        from ups.pipeline.status import read_status
    found = read_status(folder)
    if as_json:
        print_json(with_nulls(asdict(found)))
    elif watch:
        _watch(folder, found)
    else:
        print_lines(*_lines(found))


def _watch(folder: Path, found: Status) -> None:
    from rich.live import Live
    from rich.text import Text

    from ups.pipeline.status import read_status

    with Live(Text("\n".join(_lines(found))), console=results(), auto_refresh=False) as live:
        while found.is_running:
            time.sleep(_REFRESH_S)
            found = read_status(folder)
            live.update(Text("\n".join(_lines(found))), refresh=True)


def _lines(found: Status) -> Iterator[str]:
    if found.folder is not None:
        yield f"run {found.folder}: " + (
            f"running ({found.holder})" if found.holder is not None else "nothing runs"
        )
        width = columns(node.node for node in found.nodes)
        for node in found.nodes:
            yield _node_line(node, width)
    folders = {Path(stage.log).parent for stage in found.stages}
    for stage in found.stages:  # of several seeds or baselines with where each is
        name = stage.stage if len(folders) == 1 else stage.log.removesuffix(".jsonl")
        yield from _stage_lines(name, stage)


def _node_line(node: NodeStatus, width: int) -> str:
    code = f" (exit code {node.exit_code})" if node.state == "failed" else ""
    seconds = f"  {format_duration(node.seconds)}" if node.seconds is not None else ""
    return f"  {node.node:<{width}}{_words(node.state)}{code}{seconds}"


def _words(state: str) -> str:
    """Such as "gate missed"."""
    return state.replace("_", " ")


def _stage_lines(name: str, stage: StageStatus) -> Iterator[str]:
    steps = f"step {stage.step}"
    if stage.total_steps is not None:
        steps += f" of {stage.total_steps} ({stage.step / max(stage.total_steps, 1):.0%})"
    left = f", {format_duration(stage.seconds_left)} left" if stage.seconds_left is not None else ""
    by = f" by {stage.ended_by}" if stage.ended_by is not None else ""
    yield f"{name}: {_words(stage.state)}{by}, {steps}{left}"
    for parts in (_rates(stage), _memory(stage), _errors(stage), _ages(stage)):
        if shown := ", ".join(parts):
            yield f"  {shown}"
    if stage.warning is not None:
        yield f"  warning: {stage.warning}"
    if stage.error is not None:
        yield f"  error: {stage.error}"


def _rates(stage: StageStatus) -> Iterator[str]:
    if stage.samples_per_s is not None:
        yield f"{stage.samples_per_s:,.0f} samples/s"
    if stage.data_wait_share is not None:
        yield f"{stage.data_wait_share:.0%} waiting for data"
    if stage.mfu is not None:
        yield f"MFU {stage.mfu:.1%}"


def _memory(stage: StageStatus) -> Iterator[str]:
    if stage.memory_gib is not None:
        yield f"memory {stage.memory_gib:.2f} GiB"
    if stage.gpu_memory_gib is not None:
        yield f"at most {stage.gpu_memory_gib:.2f} GiB of the GPU's"


def _errors(stage: StageStatus) -> Iterator[str]:
    if stage.loss is not None:
        yield f"loss {stage.loss:.4g}"
    if stage.score is not None:
        yield f"validation error {stage.score:.4g}"


def _ages(stage: StageStatus) -> Iterator[str]:
    if stage.saved_s is not None:
        yield f"saved {format_duration(stage.saved_s)} ago"
    yield f"last line {format_duration(stage.silent_s)} ago by {stage.process}"
