"""The file of a generative model, which gets its name when its gates are passed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.errors import CheckpointError, GateMissedError
from ups.eval.gate_verdicts import GateVerdict, check_gates
from ups.log import logger
from ups.output import with_nulls
from ups.train.best import set_aside
from ups.train.stage import Stage
from ups.trained.card import card_path
from ups.trained.checkpoint import check_whole, load_checkpoint, read_document, save_checkpoint
from ups.trained.corrected import candidate_of
from ups.trained.specs import GATES


class GatedFile:
    """A checkpoint that gets its name when it has passed its gates; till then it is `<name>.candidate`.

    A missed gate ends the stage with exit code 10: candidate and training state are kept, and whatever had
    the name before still has it. `diffusion.export_anyway` gives the name all the same; then the file says
    which gates it missed, and `ups.load` warns of it.
    """

    def __init__(self, path: Path, *, kind: str) -> None:
        self.path, self.kind, self.candidate = path, kind, candidate_of(path)

    @property
    def latest(self) -> Path:
        """What is measured: the candidate, or what was one and has its name already."""
        return self.candidate if self.candidate.exists() else self.path

    def check(self, score: float) -> None:
        """Fail unless `latest` is whole, and has the weights of a validation error."""
        check_whole(self.latest, kind=self.kind)
        saved = read_document(self.latest, kind=self.kind)["report"]["score"]
        if saved != score and math.isfinite(score):
            problem, facts = "of an earlier training", {"expected": f"validation error {score:.6g}"}
            raise CheckpointError(problem, kind="other_weights", path=self.latest, found=saved, **facts)

    def export_if_gates_passed(
        self, report: Mapping[str, Any], verdicts: Sequence[GateVerdict], *, stage: Stage, config: RunConfig
    ) -> dict[str, Any]:
        """Give the candidate its name if it has passed all gates, and report `checkpoint` and `gates`."""

        def said(gates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            missed = [gate["says"] for gate in gates if not gate["passed"]]
            return {"gates": list(gates), "gates_missed": missed}

        kept = f"nothing is exported; {self.candidate} and the training state are kept"
        hint = f"{kept}: train longer, or export it marked with diffusion.export_anyway=true"
        try:
            gates = check_gates(verdicts, where=f"stage {stage.name}", hint=hint)
        except GateMissedError as error:
            gates = list(error.verdicts)
            error.report = {**report, "checkpoint": None, **said(gates)}
            if not config.diffusion.export_anyway:
                raise
            logger.warning(f"{error.problem}; {self.path} is exported all the same, marked")
        stage.ranks.first_does(lambda: self._name(gates, config))
        return {**report, "checkpoint": str(self.path), **said(gates)}

    def _name(self, gates: list[dict[str, Any]], config: RunConfig) -> None:
        tensors, document = load_checkpoint(self.latest, kind=self.kind)
        is_new = self.candidate.exists()
        # As a file has them: without tuples, and with null for what isn't finite.
        before, now = (json.dumps(with_nulls(each)) for each in (document.get(GATES), gates))
        if not is_new and before == now:
            return  # measured once more, with the same result
        if is_new:
            set_aside(self.path, kind=self.kind, metrics=document["report"], config=config)
        save_checkpoint(self.path, tensors, kind=self.kind, document={**document, GATES: gates})
        for path in (self.candidate, card_path(self.candidate)):
            path.unlink(missing_ok=True)
