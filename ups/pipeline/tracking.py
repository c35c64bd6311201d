"""What the processes of `ups run` know of each other: the launch, what stores took, the run at W&B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ups.data.stores import are_reused
from ups.pipeline.graph import Node
from ups.pipeline.nodes import FIELD_STORES, LATENT_STORES, Run
from ups.train.launched import (
    STARTUP_VARIABLE,
    hand_over,
    launched_at,
    of_stores,
    process_began,
    restored,
    with_stores,
)
from ups.train.tracking import context_path, forget_run, handing_on, numbers_within, open_wandb

_JOB = "pipeline"


class Tracking:
    """Hands over to a run's nodes when it was launched and what its stores took; see `tracking`."""

    def __init__(self, run: Run) -> None:
        self._run, self._stores = run, dict[str, float]()
        self._launched = launched_at(process_began())
        hand_over(self._launched, {})

    def valid(self, node: Node) -> None:
        """A node needs nothing."""
        self._take(node, of_stores(0.0, is_reused=True))

    def done(self, node: Node, seconds: float) -> None:
        """A node was executed."""
        is_reused = False
        with suppress(OSError, ValueError, KeyError):  # a build without a manifest has built
            is_reused = are_reused(self._run.manifest_path(node.name))
        self._take(node, of_stores(seconds, is_reused=is_reused))

    def _take(self, node: Node, stores: Mapping[str, float]) -> None:
        if node.name in (FIELD_STORES, LATENT_STORES):
            self._stores = with_stores(self._stores, stores)
            hand_over(self._launched, self._stores)


@contextmanager
def tracking(run: Run, *, restart: bool) -> Iterator[Tracking]:
    """Inside, nodes of a run learn of its launch, and find its run at Weights & Biases.

    Args:
        restart: Whether it begins from scratch, and so is another one at Weights & Biases.
    """
    folder = run.config.checkpoint.dir
    if restart:
        forget_run(folder)
    with handing_on(context_path(folder)), restored(STARTUP_VARIABLE):
        yield Tracking(run)


def send_metadata(run: Run, metadata: Mapping[str, Any]) -> None:
    """Send seconds of nodes, costs, results and gates to Weights & Biases, if that is switched on.

    Args:
        metadata: What `metadata.json` holds.
    """
    config = run.config
    run_config = config.model_dump(mode="json")
    sink = open_wandb(config.logging.wandb, config.checkpoint.dir, job=_JOB, run_config=run_config)
    if sink is None:
        return
    sent = {name: metadata[name] for name in ("seconds", "own_s", "cost", "results")}
    sent["nodes"] = {name: node["seconds"] for name, node in metadata["nodes"].items()}
    sink.log({f"{_JOB}/{name}": value for name, value in numbers_within(sent).items()})
    columns = ("gate", "what", "number", "limit", "passed", "says")
    rows = [
        (name, *(verdict.get(column) for column in columns))
        for name, verdicts in metadata["gates"].items()
        for verdict in verdicts or ()
    ]
    if rows:
        sink.log_table(f"{_JOB}/gates", columns=("after", *columns), rows=rows)
    sink.close(has_failed=False)
