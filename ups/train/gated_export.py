"""Files of generative stages get their names when they have passed their gates; till then, candidates'.

Training exports the best weights so far to `<name>.candidate.safetensors`. When it is over, their ensembles
are measured and judged. A missed gate ends the stage with exit code 10: candidate and training state are
kept, and whatever had the name before still has it. `diffusion.export_anyway` gives the name all the same;
then the file says which gates it missed, and `ups.load` warns of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.distributed.ranks import Ranks
from ups.errors import CheckpointError, GateMissedError
from ups.eval.gate_verdicts import GateVerdict, check_gates
from ups.log import logger
from ups.output import with_nulls
from ups.train.best import set_aside
from ups.trained.card import card_path
from ups.trained.checkpoint import check_whole, load_checkpoint, read_document, save_checkpoint
from ups.trained.corrected_files import candidate_of
from ups.trained.specs import GATES


class GatedFile:
    """A checkpoint, and the candidate for its name.

    Args:
        path: Name of the checkpoint.
        kind: Kind of checkpoint.
    """

    def __init__(
        self,
        path: Path,
        *,
        kind: str,
    ) -> None:
        self.path, self.kind = path, kind
        self.candidate = candidate_of(path)

    @property
    def latest(self) -> Path:
        """What is measured: the candidate, or what was one and has its name already."""
        return self.candidate if self.candidate.exists() else self.path

    def check(self, score: float) -> None:
        """Fail unless `latest` is whole, and has the weights of a validation error.

        Raises:
            CheckpointError: As `check_whole`; kind "other_weights", if the candidate is gone, and an earlier
                training has the name.
        """
        check_whole(self.latest, kind=self.kind)
        found = read_document(self.latest, kind=self.kind)["report"]["score"]
        if found != score and math.isfinite(score):
            problem, facts = "of an earlier training", {"expected": f"validation error {score:.6g}"}
            raise CheckpointError(problem, kind="other_weights", path=self.latest, found=found, **facts)

    def publish(
        self,
        report: Mapping[str, Any],
        verdicts: Sequence[GateVerdict],
        *,
        stage: str,
        config: RunConfig,
        ranks: Ranks,
    ) -> dict[str, Any]:
        """Give the candidate its name if it has passed all gates; a collective.

        Args:
            report: On the stage, JSON values.
            verdicts: On all gates.
            ranks: All of them; the first one writes.

        Returns:
            The report with `checkpoint`, `gates` and `gates_missed`.

        Raises:
            GateMissedError: On every rank, with the report.
        """
        try:
            gates = check_gates(verdicts, where=f"stage {stage}", hint=self._hint())
        except GateMissedError as error:
            gates = list(error.verdicts)
            error.report = {**report, "checkpoint": None, **_said(gates)}
            if not config.diffusion.export_anyway:
                raise
            logger.warning(f"{error.problem}; {self.path} is exported all the same, marked")
        ranks.first_does(lambda: self._name(gates, config))
        return {**report, "checkpoint": str(self.path), **_said(gates)}

    def _hint(self) -> str:
        kept = f"nothing is exported; {self.candidate} and the training state are kept"
        return f"{kept}: train longer, or export it marked with diffusion.export_anyway=true"

    def _name(self, gates: list[dict[str, Any]], config: RunConfig) -> None:
        tensors, document = load_checkpoint(self.latest, kind=self.kind)
        is_new = self.candidate.exists()
        if not is_new and _as_text(document.get(GATES)) == _as_text(gates):
            return  # measured once more, with the same result
        if is_new:
            set_aside(self.path, kind=self.kind, metrics=document["report"], config=config)
        save_checkpoint(self.path, tensors, kind=self.kind, document={**document, GATES: gates})
        for path in (self.candidate, card_path(self.candidate)):
            path.unlink(missing_ok=True)


def _as_text(gates: object) -> str:
    """As a file has them: without tuples, and with null for what isn't finite."""
    return json.dumps(with_nulls(gates))


def _said(gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    missed = [gate["says"] for gate in gates if not gate["passed"]]
    return {"gates": list(gates), "gates_missed": missed}
