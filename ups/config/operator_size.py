"""The size of the operator as its configuration says it: by name, with numbers that its other keys change.

No torch: what doesn't fit is refused before anything is built.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from ups.config.architecture import OperatorConfig, SpectralConfig
from ups.config.run import RunConfig
from ups.errors import ConfigError, ConfigWarning
from ups.models.operator_size import NORMALISED, SIZES, OperatorSize

_FIELDS = {
    **{name: name for name in ("width", "depths", "num_heads", "mlp_ratio", "drop_path", "dropout")},
    "window_size": "window",
}


def operator_size(config: OperatorConfig) -> OperatorSize:
    """Architecture of the operator."""
    changed: dict[str, Any] = {
        field: getattr(config, key) for key, field in _FIELDS.items() if getattr(config, key) is not None
    }
    if config.depth is not None:
        changed["depths"] = (config.depth,)
    changed |= {
        "mixers": (config.mixer,) if isinstance(config.mixer, str) else config.mixer,
        "modes": config.spectral.modes,
        "padding": config.spectral.padding,
        "has_norm": config.spectral.norm == "layer",
    }
    size = dataclasses.replace(SIZES[config.size], **changed)
    _check_levels(config, size)
    check_size(size)
    _warn_of_no_effect(config, size)
    return size


def _check_levels(config: OperatorConfig, size: OperatorSize) -> None:
    if config.architecture_type == "pdet_stack" and len(size.depths) != 1:
        raise ConfigError(
            "operator.architecture_type = pdet_stack",
            kind="architecture",
            expected="one level: operator.depth",
            found=f"depths {list(size.depths)}",
        )


def check_size(size: OperatorSize, *, keys: tuple[str, str] = ("operator.width", "operator.depths")) -> None:
    """Refuse an architecture whose parts don't go together.

    Args:
        size: Of an operator, or of a model of its kind.
        keys: That say its channels and its depths.
    """
    width_key, depths_key = keys
    if len(size.mixers) not in (1, len(size.depths)):
        raise ConfigError(
            f"operator.mixer = {list(size.mixers)}",
            kind="mixers",
            expected=f"one for each of {len(size.depths)} levels, depths {list(size.depths)}",
            found=len(size.mixers),
            hint=f"name one mixer for all levels, or change {depths_key}",
        )
    if _has_attention(size) and size.width % size.num_heads:
        raise ConfigError(
            f"{width_key} = {size.width}",
            kind="num_heads",
            expected=f"a multiple of operator.num_heads = {size.num_heads}",
        )


def _has_attention(size: OperatorSize) -> bool:
    return any(mixer in NORMALISED for mixer in size.mixers)


def _warn_of_no_effect(config: OperatorConfig, size: OperatorSize) -> None:
    reasons = {}
    if not _has_attention(size):
        for key in ("num_heads", "window_size", "mlp_ratio", "dropout"):
            if getattr(config, key) is not None:
                reasons[key] = f"operator.mixer = {config.mixer} has no attention"
    if not _has_attention(size) and config.attention == "flex":
        reasons["attention"] = f"operator.mixer = {config.mixer} has none"
    if set(size.mixers) == {"attention"} and config.spectral != SpectralConfig():
        reasons["spectral"] = "operator.mixer = attention has no Fourier modes"
    for key, reason in reasons.items():
        warnings.warn(f"operator.{key} has no effect: {reason}", ConfigWarning, stacklevel=3)


def corrector_size(config: RunConfig) -> OperatorSize:
    """Architecture of the corrector."""
    with warnings.catch_warnings():  # said when the operator is made
        warnings.simplefilter("ignore", ConfigWarning)
        size = operator_size(config.operator)
    changed = {"width": config.diffusion.hidden_dim, "depths": config.diffusion.depths}
    return _with(size, changed, keys=("diffusion.hidden_dim", "diffusion.depths"))


def student_size(config: RunConfig, teacher: OperatorSize) -> OperatorSize:
    """Architecture of a student."""
    changed = {"width": config.training.distill_hidden_dim, "depths": config.training.distill_depths}
    return _with(teacher, changed, keys=("training.distill_hidden_dim", "training.distill_depths"))


def _with(size: OperatorSize, changed: Mapping[str, Any], *, keys: tuple[str, str]) -> OperatorSize:
    said = {name: value for name, value in changed.items() if value is not None}
    size = dataclasses.replace(size, **said)
    check_size(size, keys=keys)
    return size
