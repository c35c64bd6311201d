"""Training stack for neural PDE solvers, reading its data from `ups_store` files.

`ups.load("checkpoints/operator.safetensors").rollout(fields, steps)` predicts; `corrector.safetensors` gives
ensembles, with `members=64`. Torch comes with `load`.
`pip install 'ups-store[train]'` brings what all of it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.eval.metrics import register_metric as register_metric
    from ups.trained.loading import load as load
    from ups_store import __version__ as __version__

__all__ = ["load", "register_metric"]

_HOMES = {"load": "ups.trained.loading", "register_metric": "ups.eval.metrics", "__version__": "ups_store"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
