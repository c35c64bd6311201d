"""The order of an epoch: what deciding on the next batch costs the thread that asks for it."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Literal

import numpy as np

from benchmarks.harness.inputs import check
from benchmarks.harness.measure import median_s, tracked
from benchmarks.harness.scale import SCALE
from ups_store.read.order import DataOrder

NUM_ITEMS = 1_000_000
BATCH = 64
NUM_STEPS = 2048  # of an epoch of 15,625: many blocks of positions


class Order:
    params = ("full", "block")
    param_names = ("shuffle",)

    def setup(self, shuffle: str) -> None:
        chosen: Literal["block", True] = "block" if shuffle == "block" else True
        self.order = DataOrder([NUM_ITEMS], global_batch_size=BATCH, shuffle=chosen, drop_last=True)
        items = np.concatenate([step.items for step in islice(self.order.steps(), NUM_STEPS)])
        check(np.diff(np.sort(items)) > 0, np.ones(len(items) - 1, bool))  # none twice

    def time_steps(self, shuffle: str) -> None:
        deque(islice(self.order.steps(), NUM_STEPS), maxlen=0)

    @tracked(f"order of a batch of {BATCH} of {NUM_ITEMS:,} samples", "µs", at_most=11.0)
    def track_step(self, shuffle: str) -> float:
        seconds = median_s(lambda i: self.time_steps(shuffle), repeats=SCALE.process_pairs)
        return 1e6 * seconds / NUM_STEPS
