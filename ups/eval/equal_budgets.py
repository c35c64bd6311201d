"""Equal budgets: what the training of an operator took, as a budget of each baseline.

Counted operations are those of all stages that made the operator, its autoencoder's and the encoding of the
data included. Nothing here depends on a clock but the budget of seconds, which `ups.train.compare` turns into
steps by measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ups.config.stages import BUDGETS, BudgetConfig, Limit
from ups.errors import ConfigError
from ups.eval.training_logs import StageLog
from ups.stages import AUTOENCODER, ENCODER_MODEL, OPERATOR, STAGES

# Stages that leave an autoencoder, of which the last one's is used.
_ENCODERS = [name for name, stage in STAGES.items() if ENCODER_MODEL in stage.makes]


def parse_budgets(**amounts: float | None) -> list[BudgetConfig]:
    """A budget of each amount that is given."""
    found = []
    for limit, amount in amounts.items():
        if amount is None:
            continue
        if not amount > 0:
            raise ConfigError(f"budget of {limit}", kind="budget", expected="a number > 0", found=amount)
        found.append(BudgetConfig.model_validate({limit: int(amount) if limit == "samples" else amount}))
    return found


def equal_budgets(
    logs: Sequence[StageLog],
    *,
    num_tasks: int,
    by: Sequence[Limit] = BUDGETS,
    given: Mapping[Limit, float] | None = None,
) -> list[BudgetConfig]:
    """What the operator's training took, as budgets of each baseline of each task.

    Operations and processor time are those of all stages that made the operator; samples are the windows that
    it was trained on, in stage operator or, without one, in stage joint. A run on several tasks had that much
    for all of them, so a baseline of one task gets its share.
    """
    given = given or {}
    spent = {limit: amount for limit, amount in _spent(logs).items() if amount}
    if missing := [limit for limit in by if limit not in given and limit not in spent]:
        raise ConfigError(
            f"no training log says what the operator's training took in {missing[0]}",
            kind="no_log",
            expected="operator.jsonl or joint.jsonl in checkpoint.dir",
            hint=f"say {' and '.join(f'--budget-{limit}' for limit in missing)}, or train the operator again",
        )
    amounts = {limit: given[limit] if limit in given else spent[limit] / num_tasks for limit in by}
    if "samples" in amounts:
        amounts["samples"] = max(1, int(amounts["samples"]))
    return parse_budgets(**amounts)


def _spent(logs: Sequence[StageLog]) -> dict[Limit, float]:
    """Of the stages that made the operator; 0 where that isn't known of one of them."""
    used = used_stages(logs)
    operator = next((log for log in reversed(used) if log.stage != AUTOENCODER.name), None)
    if operator is None:
        return {}
    totals: dict[Limit, float] = {"samples": operator.samples}
    if all(log.flops for log in used):
        totals["flops"] = sum(log.flops + log.preparation_flops for log in used)
    if all(log.processor_s for log in used):
        totals["seconds"] = round(sum(log.processor_s for log in used) + encoding_seconds(used), 1)
    return totals


def encoding_seconds(logs: Sequence[StageLog]) -> float:
    """Processor time of encoding the data once, in proportion to its operations and the autoencoder's."""
    encoder = next((log for log in logs if log.stage in _ENCODERS and log.flops), None)
    if encoder is None:
        return 0.0
    return encoder.processor_s * sum(log.preparation_flops for log in logs) / encoder.flops


def used_stages(logs: Sequence[StageLog]) -> list[StageLog]:
    """Logs of what made the operator: its own, and that of one autoencoder, the one that it uses."""
    encoders = [log for log in logs if log.stage in _ENCODERS]
    last = max(encoders, key=lambda log: log.trained_at, default=None)
    return [log for log in logs if log is last or log.stage == OPERATOR.name]
