"""A report of an evaluation, sent to Weights & Biases: its numbers, table, figures and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ups.config.run import WandbConfig
from ups.eval.report import Report
from ups.log import logger
from ups.train.wandb_sink import WandbSink, open_wandb

_COLUMNS = ("task", "row", "metric", "mean", "low", "high", "verdict", "note")


def send_report(report: Report, files: Mapping[str, Path], *, name: str, joins: bool = False) -> None:
    """Send a report to the run that its configuration and context say; what goes wrong is a warning.

    Args:
        files: It, as it was written, by suffix.
        name: What the evaluation is called there, such as "small-eval".
        joins: Whether it is only sent where the trained run is there already.
    """
    try:
        settings = WandbConfig.model_validate(report.config["logging"]["wandb"])
        folder = Path(report.config["checkpoint"]["dir"])
        sink = open_wandb(settings, folder, job=name, run_config=report.config, joins=joins)
        if sink is not None:
            with TemporaryDirectory(prefix="ups-figures-") as pictures:
                _send(
                    sink,
                    report,
                    files,
                    name=name,
                    pictures=Path(pictures),
                    sends_files=settings.log_checkpoints,
                )
                sink.close(has_failed=False)
    except Exception as error:
        logger.warning(f"the report isn't at Weights & Biases: {error}")


def _send(
    sink: WandbSink,
    report: Report,
    files: Mapping[str, Path],
    *,
    name: str,
    pictures: Path,
    sends_files: bool,
) -> None:
    sink.log(dict(_numbers(report, name)))
    sink.log_table(f"{name}/errors", columns=_COLUMNS, rows=_rows(report))
    images = {}
    for drawing in report.drawings:
        path = pictures / f"{drawing.name}.png"
        path.write_bytes(drawing.images("png")["png"])
        images[f"{name}/{drawing.name}"] = (path, drawing.caption)
    if images:
        sink.log_images(images)
    if sends_files:
        about = {"split": report.split, "test_uses": report.test_uses}
        paths = list(files.values())
        sink.log_files(name, kind="evaluation", files=paths, about=about, made_from=report.made_from)


def _numbers(report: Report, name: str) -> Iterator[tuple[str, float]]:
    """Means of all metrics."""
    for task in report.tasks:
        for row in task.rows:
            for metric, value in row.scores.metrics.items():
                yield f"{name}/{task.task}/{row.name}/{metric}", value.mean


def _rows(report: Report) -> Iterator[tuple[Any, ...]]:
    """The table: a line for each metric of each row of each task."""
    for task in report.tasks:
        for row in task.rows:
            for metric, value in row.scores.metrics.items():
                pair = row.paired.get(metric)
                verdict = pair.verdict if pair else ""
                yield task.task, row.name, metric, value.mean, value.low, value.high, verdict, row.note
