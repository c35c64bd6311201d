"""Training stack for neural PDE solvers, reading its data from `ups_store` files.

`ups.load("checkpoints/operator.safetensors").rollout(fields, steps)` predicts; torch comes with `load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.trained.simulator import load_simulator as load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from ups.trained.simulator import load_simulator

        return load_simulator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
