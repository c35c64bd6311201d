"""An old configuration with inverse losses under its operator is refused with keys that every command has."""

from __future__ import annotations

import pytest

from ups.config import load_config
from ups.config.checks import check_no_inverse_losses
from ups.errors import ConfigError

OLD = ["data.tasks=burgers1d", "training.use_inverse_losses=true", "stages.operator.epochs=1"]


def test_hint_names_keys_that_make_it_train() -> None:
    with pytest.raises(ConfigError) as caught:
        check_no_inverse_losses(load_config(overrides=OLD))
    hint = caught.value.hint
    assert hint is not None
    assert "--stage" not in hint
    for change in ("stages.joint.epochs=1", "training.use_inverse_losses=false"):
        assert change.partition("=")[0] in hint
        check_no_inverse_losses(load_config(overrides=[*OLD, change]))
