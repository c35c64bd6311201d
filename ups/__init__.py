"""Training stack for neural PDE solvers, reading its data from `ups_store` files.

`ups.load("checkpoints/operator.safetensors").rollout(fields, steps)` predicts; `corrector.safetensors` gives
ensembles, with `members=64`. Torch comes with `load`.
`@ups.operator("name")` makes an operator of a class of your own (docs/guides/own-operator.md).
`pip install 'ups-store[train]'` brings what all of it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.eval.metrics import register_metric as register_metric
    from ups.losses import register_loss as register_loss
    from ups.models.operators import States as States
    from ups.models.operators import Step as Step
    from ups.models.operators import operator as operator
    from ups.models.operators import register_operator as register_operator
    from ups.section import Section as Section
    from ups.section import key as key
    from ups.trained.loading import load as load
    from ups_store import __version__ as __version__

# Module of each name; imported when it is first asked for.
_HOMES = {
    "load": "ups.trained.loading",
    "register_loss": "ups.losses",
    "register_metric": "ups.eval.metrics",
    "operator": "ups.models.operators",
    "register_operator": "ups.models.operators",
    "States": "ups.models.operators",
    "Step": "ups.models.operators",
    "Section": "ups.section",
    "key": "ups.section",
    "__version__": "ups_store",
}
__all__ = [
    *("Section", "States", "Step", "key", "load", "operator"),
    *("register_loss", "register_metric", "register_operator"),
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
