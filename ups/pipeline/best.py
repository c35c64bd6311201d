"""The best operator so far: what a run is compared with, and how it takes its place.

best/operator.safetensors    with its card
best/provenance.json         where it is from: hashes, commit, results; and the hash of what it replaced
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ups.data.identities import checkpoint_identity
from ups.errors import CheckpointError, OutputError, UpsError
from ups.output import appears_whole, json_document
from ups.pipeline.gates import metric_of, read_report
from ups.pipeline.machine import code_identity
from ups.registry import check_allowed
from ups.trained.card import card_path
from ups.trained.checkpoint import read_document, stored_digest
from ups.trained.specs import OPERATOR, OPERATOR_FILE, parse_simulator_spec

METRIC = "nrmse"  # by which the better one stays


def best_path(folder: Path) -> Path:
    """The operator in the folder of the best."""
    return folder / OPERATOR_FILE


def rival_of(folder: Path, own: str | None) -> str | None:
    """Hash of the best operator; where that is a run's own already, of the one that it replaced.

    So an evaluation beside the best one stays valid when its operator is promoted.
    """
    best = checkpoint_identity(best_path(folder), kind=OPERATOR)
    if best is None or best != own:
        return best
    provenance = json_document(folder / "provenance.json")
    # A promotion that was killed before its last rename left the provenance of what it replaced.
    was = provenance.get("replaced" if provenance.get("operator") == own else "operator")
    return None if was is None else str(was)


def is_rival_there(folder: Path, rival: str | None) -> bool:
    """Whether the best operator is another one, and its predictions are fields, which can be compared."""
    path = best_path(folder)
    if rival is None or checkpoint_identity(path, kind=OPERATOR) != rival:
        return False
    try:
        return parse_simulator_spec(read_document(path, kind=OPERATOR), path).is_encoder_known
    except CheckpointError:
        return False


def check_loadable(folder: Path, own: str) -> None:
    """Refuse a best operator of code that isn't allowed, before hours of training that it is compared after.

    Args:
        own: `operator.name` of the run, whose module its evaluation imports anyway.
    """
    try:
        operator = read_document(best_path(folder), kind=OPERATOR)["spec"]["operator"]
    except (CheckpointError, KeyError):  # there is none, or none that can be compared
        return
    name = str(operator.get("name", ""))
    if ":" in name:
        try:
            check_allowed(name, noun="operator", allow_code=own.partition(":")[0])
        except CheckpointError as error:
            error.path = str(best_path(folder))
            raise


def promote(operator: Path, folder: Path, *, report: Path, folder_of_run: Path) -> dict[str, Any]:
    """Copy an operator to the place of the best, unless that one's error is as small, and say which.

    Args:
        operator: The run's, which passed all gates.
        folder: Of the best operator.
        report: Of the full evaluation, with a row of the best if there was one.
        folder_of_run: For the provenance.

    Returns:
        {"promoted": whether it was copied or lies there already, "best": the folder}.
    """
    own, found = checkpoint_identity(operator, kind=OPERATOR), read_report(report)
    if own is None:
        raise UpsError("no operator to promote", kind="not_evaluated", path=operator)
    tasks = found["tasks"]
    mine, best = ([metric_of(found, task, METRIC, row=row) for task in tasks] for row in ("operator", "best"))
    # The better one has the smaller mean over tasks, where the best one was evaluated.
    if None in mine or (None not in best and sum(filter(None, mine)) >= sum(filter(None, best))):
        return {"promoted": False, "best": str(folder)}
    provenance = {
        "operator": own,
        "replaced": rival_of(folder, own),
        "tensors_sha256": stored_digest(operator, kind=OPERATOR),
        "from": str(operator),
        "run": str(folder_of_run),
        "promoted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_identity(),
        "report": str(report),
        METRIC: dict(zip(tasks, mine, strict=True)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as whole:  # what is entered last gets its name first: the operator
            partial = whole.enter_context(appears_whole(folder / "provenance.json"))
            partial.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
            for path in (card_path(operator), operator):
                if path.exists():
                    shutil.copyfile(path, whole.enter_context(appears_whole(folder / path.name)))
    except OSError as error:
        raise OutputError.of(error, folder) from error
    return {"promoted": True, "best": str(folder)}
