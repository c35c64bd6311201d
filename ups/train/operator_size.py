"""The operator's architecture: a size by name, and what `operator.pdet` changes about it."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from ups.config.run import OperatorConfig
from ups.errors import ConfigError, ConfigWarning
from ups.models.latent_operator import SIZES, OperatorSize

_FIELDS = {
    "hidden_dim": "width",
    "depths": "depths",
    "num_heads": "num_heads",
    "window_size": "window",
    "mlp_ratio": "mlp_ratio",
    "drop_path": "drop_path",
    "dropout": "dropout",
}


def operator_size(config: OperatorConfig) -> OperatorSize:
    """Architecture of the operator.

    Raises:
        ConfigError: If heads don't divide the channels, or a stack has several levels.
    """
    pdet = config.pdet
    changed: dict[str, Any] = {
        field: getattr(pdet, key) for key, field in _FIELDS.items() if getattr(pdet, key) is not None
    }
    if pdet.depth is not None:
        changed["depths"] = (pdet.depth,)
    size = dataclasses.replace(SIZES[config.size], **changed)
    if config.architecture_type == "pdet_stack" and len(size.depths) != 1:
        raise ConfigError(
            "operator.architecture_type = pdet_stack",
            kind="architecture",
            expected="one level: operator.pdet.depth",
            found=f"depths {list(size.depths)}",
        )
    if size.width % size.num_heads:
        raise ConfigError(
            f"operator.pdet.hidden_dim = {size.width}",
            kind="num_heads",
            expected=f"a multiple of operator.pdet.num_heads = {size.num_heads}",
        )
    _warn_of_no_effect(config)
    return size


def _warn_of_no_effect(config: OperatorConfig) -> None:
    if config.pdet.group_size is not None:
        reason = "layers are normalised over all channels"
        warnings.warn(f"operator.pdet.group_size has no effect: {reason}", ConfigWarning, stacklevel=3)
    if not config.pdet.qk_norm:
        reason = "queries and keys are always normalised"
        warnings.warn(f"operator.pdet.qk_norm has no effect: {reason}", ConfigWarning, stacklevel=3)
