"""A training goes on where compiling is switched on or off, as where activation checkpointing is."""

from __future__ import annotations

import json

import pytest
import torch
from field_runs import field_run, prepared_fields, stopping_after, train

__all__ = ["field_run", "prepared_fields"]


@pytest.mark.usefixtures("field_run")
@pytest.mark.parametrize("key", ["training.compile", "stages.operator.compile"])
def test_training_goes_on_uncompiled_with_a_note(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    with stopping_after(1):
        assert train(f"{key}=true").exit_code == 5
    done = train(f"{key}=false", "--json")
    assert done.exit_code == 0, done.output
    assert f"{key} was True and is False: training goes on" in done.stderr
    assert json.loads(done.stdout)["resumed_at"] == 1
