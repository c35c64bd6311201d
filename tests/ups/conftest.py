"""Tests of the training stack: one thread, since the test processes share the cores, and a fixed seed."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _repeatable_and_alone() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
