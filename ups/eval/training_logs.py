"""What the logs of a run hold: seconds of each stage and what they went to, curves, samples seen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.legacy import present_stage, stage_file
from ups.log import logger
from ups.stages import STAGES

_WAIT, _RATE = "training/data_wait_share", "training/samples_per_sec"
_STARTUP = "startup/total_startup_time_min"  # from the launch of the command
_EARLIER = "startup/earlier_sec"  # until it was the stage's turn
_FLOPS, _PROCESSOR = "training/flops", "training/processor_s"
_SHOWN = 60  # characters of a line that can't be read

Curve = tuple[Sequence[int], Sequence[float]]  # optimiser steps and values


@dataclass(frozen=True)
class StageLog:
    """One stage of a run, its continuations taken together.

    Attributes:
        stage: Its name.
        seconds: Wall time, from the start of the process to the stage's report.
        startup_s: Of these, until the first optimiser step was over.
        train_s: Of these, in optimiser steps, waiting included; the rest is validation and saving.
        data_wait_s: Of these, waiting for data.
        steps: Optimiser steps.
        samples: Training items seen: frames of an autoencoder, windows of an operator.
        loss: Sum of the losses.
        score: What validation counts.
        trained_at: When the last epoch was over, seconds since 1970; 0 if none was.
        flops: Counted floating-point operations of these steps.
        preparation_flops: Those of making their data once, such as latents of all frames.
        processor_s: Processor time of these steps, of all ranks.
        gpu_share: Mean utilisation of the GPU, 0 to 1; None without one.
    """

    stage: str
    seconds: float
    startup_s: float
    train_s: float
    data_wait_s: float
    steps: int
    samples: int
    loss: Curve = field(default=((), ()), repr=False)
    score: Curve = field(default=((), ()), repr=False)
    gpu_share: float | None = None
    trained_at: float = 0.0
    flops: float = 0.0
    preparation_flops: float = 0.0
    processor_s: float = 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of the optimiser steps' time that went to waiting for data."""
        return self.data_wait_s / self.train_s if self.train_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Numbers as JSON values; without the curves."""
        return {
            "seconds": round(self.seconds, 2),
            "startup_s": round(self.startup_s, 2),
            "train_s": round(self.train_s, 2),
            "data_wait_s": round(self.data_wait_s, 3),
            "data_wait_share": round(self.data_wait_share, 5),
            "steps": self.steps,
            "samples": self.samples,
            "flops": self.flops,
            "preparation_flops": self.preparation_flops,
            "processor_s": round(self.processor_s, 2),
            "gpu_share": self.gpu_share,
        }


def read_stage_logs(config: RunConfig) -> list[StageLog]:
    """The stages of a run that left a log, in the order of training."""
    found = []
    for stage in STAGES:  # in the order in which they are trained
        path = log_path(config, stage)
        if (log := read_stage_log(path, stage)) is not None:
            found.append(log)
    return found


def log_path(config: RunConfig, stage: str) -> Path:
    """Where a stage writes its log."""
    return config.training.log_path or stage_file(config.checkpoint.dir / f"{stage}.jsonl")


def read_stage_log(path: Path, stage: str) -> StageLog | None:
    """What a file says of one stage; None if it isn't there, or says nothing."""
    records = _last_training(path, stage) if path.exists() else []
    return _summarise(stage, records) if records else None


def data_wait_share(logs: Sequence[StageLog]) -> float | None:
    """Share of all stages' training time that went to waiting for data; None without logs."""
    seconds = sum(log.train_s for log in logs)
    return sum(log.data_wait_s for log in logs) / seconds if seconds > 0 else None


def _last_training(path: Path, stage: str) -> list[dict[str, Any]]:
    """Records of a stage since it last began from scratch; a line that was cut off is left out."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError):
            logger.warning(f"{path}: line {number} isn't a whole record and is left out: {_shortened(line)}")
            continue
        if present_stage(record.get("stage")) != stage:
            continue
        if record.get("event") == "start" and record.get("step", 0) == 0:
            records.clear()
        records.append(record)
    return records


def _shortened(line: str) -> str:
    return repr(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}...")


def _summarise(stage: str, records: Sequence[Mapping[str, Any]]) -> StageLog:
    batch_size = _samples_per_step(records)
    steps = [record for record in records if record.get("event") == "step"]
    epochs = [record for record in records if record.get("event") == "epoch" and "score" in record]
    runs = [run for run in _runs(records) if any(map(_is_of_training, run))]
    parts = [_step_seconds(run, batch_size) for run in runs]
    train_s, wait_s = sum(train for train, _ in parts), sum(wait for _, wait in parts)
    losses = [sum(_number(v) for k, v in record.items() if k.startswith("loss/")) for record in steps]
    last = max((int(record.get("step", 0)) for record in records), default=0)
    gpu = [record[key] for record in steps for key in ("training/gpu_utilization_pct",) if record.get(key)]
    return StageLog(
        stage=stage,
        seconds=sum(_run_seconds(run) for run in runs),
        startup_s=sum(_startup_s(record) for record in records if _STARTUP in record),
        train_s=train_s,
        data_wait_s=wait_s,
        steps=last,
        samples=int(last * batch_size),
        loss=([int(record["step"]) for record in steps], losses),
        score=([int(record["step"]) for record in epochs], [_number(record["score"]) for record in epochs]),
        gpu_share=sum(gpu) / len(gpu) / 100 if gpu else None,
        flops=_last_total(records, _FLOPS),
        preparation_flops=_preparation_flops(records),
        processor_s=_last_total(records, _PROCESSOR),
        trained_at=max((float(record["time"]) for record in epochs), default=0.0),
    )


def _last_total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """A total that records of steps carry; 0 in logs of earlier versions."""
    return float(next((record[name] for record in reversed(records) if name in record), 0.0))


def _preparation_flops(records: Sequence[Mapping[str, Any]]) -> float:
    """Of the beginning: a continuation finds the data made."""
    return float(next((record.get("preparation_flops") or 0.0 for record in records), 0.0))


def _number(value: float | None) -> float:
    """NaN for null, which a log has for what is no number."""
    return math.nan if value is None else float(value)


def _runs(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The records of every process that worked on the stage."""
    runs: list[list[Mapping[str, Any]]] = []
    for record in records:
        if record.get("event") == "start" or not runs:
            runs.append([])
        runs[-1].append(record)
    return runs


def _is_of_training(record: Mapping[str, Any]) -> bool:
    """Whether a record is of an optimiser step: a finished stage that is run again makes none."""
    return record.get("event") in ("step", "epoch") or _STARTUP in record


def _step_seconds(run: Sequence[Mapping[str, Any]], batch_size: int) -> tuple[float, float]:
    """Seconds in optimiser steps and, of these, waiting for data; a run after a crash repeats some steps."""
    train_s = wait_s = 0.0
    before = int(run[0].get("step", 0)) if run[0].get("event") == "start" else 0
    for record in run:
        if record.get("event") != "step":
            continue
        rate = float(record.get(_RATE) or 0.0)
        seconds = (int(record["step"]) - before) * batch_size / rate if rate > 0 else 0.0
        before = int(record["step"])
        train_s += seconds
        wait_s += seconds * float(record.get(_WAIT, 0.0))
    return train_s, wait_s


def _run_seconds(run: Sequence[Mapping[str, Any]]) -> float:
    """From the process's start, which the startup's record knows, to the last record."""
    began, ended = float(run[0]["time"]), float(run[-1]["time"])
    startup = next((record for record in run if _STARTUP in record), None)
    if startup is not None:
        began = min(began, float(startup["time"]) - _startup_s(startup))
    return ended - began


def _startup_s(record: Mapping[str, Any]) -> float:
    """Seconds of a stage's own start."""
    return 60 * float(record[_STARTUP]) - float(record.get(_EARLIER, 0.0))


def _samples_per_step(records: Sequence[Mapping[str, Any]]) -> int:
    start = next((record for record in records if "config" in record), None)
    if start is None:
        return 1
    accum_steps = int(start["config"].get("training", {}).get("accum_steps", 1))
    return int(start.get("global_batch_size", 1)) * accum_steps
