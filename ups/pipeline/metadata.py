"""`metadata.json` of a run: with what it was made, what it took, what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ups.config import RunConfig, dump_config
from ups.data.identities import hash_of, source_identity
from ups.output import json_document, with_nulls, write_atomically
from ups.pipeline.gates import gates_of_file, read_report
from ups.pipeline.graph import Graph
from ups.pipeline.machine import code_identity, machine
from ups.pipeline.nodes import EVALUATIONS, Run
from ups.pipeline.records import RunFolder
from ups.train.tracking import numbers_within, open_wandb

FILE = "metadata.json"
KIND = "ups_run"
_GATES = ("small-gate", "full-gate")
_JOB = "pipeline"


def write_metadata(
    run: Run,
    graph: Graph,
    folder: RunFolder,
    *,
    own_s: float,
    missed: Mapping[str, Any],
    of_seeds: Mapping[int, Run],
    price_per_hour: float | None,
) -> dict[str, Any]:
    """Write what is known of a run.

    Args:
        folder: Its records.
        own_s: Seconds of this process besides those of nodes.
        missed: Verdicts of gates that were missed just now, by node.
        of_seeds: Runs with single seeds, if this one is about all of them: their time and gates count.
        price_per_hour: Of the machine.

    Returns:
        What was written, JSON values.
    """
    records, of_stages = dict[str, dict[str, Any]](), dict[str, Any]()
    for node in graph:
        record = folder.valid_record(node, node.key())
        if record is None:
            continue
        records[node.name] = record
        for path in record["outputs"] if node.stage is not None else ():
            verdicts = gates_of_file(Path(path))  # of what was exported, be it in spite of them
            of_stages |= {} if verdicts is None else {node.name: verdicts}
    seconds = folder.seconds()
    by_seed = {seed: json_document(own.folder / FILE) for seed, own in of_seeds.items()}
    total = sum(seconds.values()) + sum(document.get("seconds", 0.0) for document in by_seed.values())
    price = price_per_hour
    if price is None:  # an earlier call may have been given it
        price = json_document(run.folder / FILE).get("price_per_hour")
    values: dict[str, Any] = {
        "kind": KIND,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": str(run.config.checkpoint.dir),
        "config_sha256": hash_of(dump_config(run.config)),
        "seeds": list(of_seeds) or [run.config.seed],
        "code": code_identity(),
        "machine": machine(),
        "sources": source_identity(run.config),
        "identities": {
            path: identity
            for record in records.values()
            for path, identity in record.get("outputs", {}).items()
        },
        "nodes": {
            node.name: {"is_valid": node.name in records, "seconds": seconds.get(node.name, 0.0)}
            for node in graph
        },
        "seconds": round(total, 3),
        "own_s": round(own_s, 3),
        "price_per_hour": price,
        "results": {name: _results(run, name) for name, node in EVALUATIONS.items() if node in records},
        "gates": {
            **{**of_stages, **missed},
            **{name: missed.get(name, records.get(name, {}).get("gates")) for name in _GATES},
            **{
                f"seed {seed}, {name}": verdicts
                for seed, document in by_seed.items()
                for name, verdicts in document.get("gates", {}).items()
            },
        },
        "promotion": {key: records.get("promotion", {}).get(key) for key in ("promoted", "best")},
    }
    values["cost"] = None if price is None else round(total / 3600 * price, 4)
    written: dict[str, Any] = with_nulls(values)
    write_atomically(run.folder / FILE, json.dumps(written, indent=2).encode() + b"\n")
    return written


def _results(run: Run, name: str) -> dict[str, Any]:
    """The operator's metrics of an evaluation by task."""
    report = read_report(run.report_folder(name) / "report.json")
    tasks: dict[str, Any] = {}
    for task, found in report["tasks"].items():
        metrics = found["rows"].get("operator", {})
        tasks[task] = {
            metric: value
            for metric, value in metrics.items()
            if isinstance(value, Mapping) and {*value} == {"mean", "low", "high"}
        }
    return {"split": report.get("split"), "tasks": tasks}


def send_metadata(config: RunConfig, metadata: Mapping[str, Any]) -> None:
    """Send seconds of nodes, costs, results and gates to Weights & Biases, if that is switched on.

    Args:
        metadata: What `metadata.json` holds.
    """
    run_config = config.model_dump(mode="json")
    sink = open_wandb(config.logging.wandb, config.checkpoint.dir, job=_JOB, run_config=run_config)
    if sink is None:
        return
    sent = {name: metadata[name] for name in ("seconds", "own_s", "cost", "results")}
    sent["nodes"] = {name: node["seconds"] for name, node in metadata["nodes"].items()}
    sink.log({f"{_JOB}/{name}": value for name, value in numbers_within(sent).items()})
    columns = ("gate", "what", "number", "limit", "passed", "says")
    rows = [
        (name, *(verdict.get(column) for column in columns))
        for name, verdicts in metadata["gates"].items()
        for verdict in verdicts or ()
    ]
    if rows:
        sink.log_table(f"{_JOB}/gates", columns=("after", *columns), rows=rows)
    sink.close(has_failed=False)
