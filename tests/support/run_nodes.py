"""Nodes of a run that train, or build what is trained on, as `ups train` executes them."""

from __future__ import annotations

from pathlib import Path

from ups.config import RunConfig, load_config
from ups.pipeline.graph import Node
from ups.pipeline.nodes import TRAINING, Run, declare_graph
from ups.pipeline.training import TrainingHere


def training_nodes(config: RunConfig) -> list[Node]:
    return declare_graph(Run(config, config, config, Path())).of(TRAINING)


def build_stores(name: str, config_path: Path, *overrides: str) -> dict[str, float]:
    """Build "field-stores" or "latent-stores"; returns the metrics of the start."""
    config = load_config(config_path, overrides=overrides)
    words = ["--config", str(config_path), *overrides]
    executor = TrainingHere(Run(config, config, config, config.checkpoint.dir, words=words))
    (node,) = [node for node in declare_graph(executor.run) if node.name == name]
    executor.advance(node)
    return executor.startup
