"""Training stack for neural PDE solvers, reading its data from `ups_store` files.

`ups.load("checkpoints/operator.safetensors").rollout(fields, steps)` predicts; `corrector.safetensors` gives
ensembles, with `members=64`. Torch comes with `load`.
`pip install 'ups-store[train]'` brings what all of it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.losses import register_loss as register_loss
    from ups.trained.loading import load as load
    from ups_store import __version__ as __version__

__all__ = ["load", "register_loss"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from ups.trained.loading import load

        return load
    if name == "register_loss":
        from ups.losses import register_loss

        return register_loss
    if name == "__version__":
        from ups_store import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
