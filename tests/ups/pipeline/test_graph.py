"""`Graph` and the nodes that runs have: order, choice, registration of later stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ups.config import load_config
from ups.errors import ConfigError
from ups.pipeline import nodes
from ups.pipeline.graph import Graph, Node
from ups.pipeline.nodes import TRAINING, Run, declare_graph, shown

CHECKS = ["validate-config", "validate-data", "dry-run"]
ALL = ["small-evaluation", "small-gate", "full-evaluation", "full-gate", "promotion"]


def node(name: str, *after: str, group: Any = "training") -> Node:
    return Node(name, group, after, inputs=dict)


def declared(**overrides: Any) -> list[str]:
    return [one.name for one in declare_graph(run_of(**overrides))]


def run_of(**overrides: Any) -> Run:
    values: dict[str, Any] = {"data": {"tasks": "burgers1d", "root": "data"}, **overrides}
    config = load_config(values)
    return Run(config, config, config, Path("checkpoints/run"))


def test_nodes_come_after_what_they_name_and_else_as_declared() -> None:
    graph = Graph([node("c", "b"), node("d"), node("b", "a", "nowhere"), node("a")])
    assert [one.name for one in graph] == ["d", "a", "b", "c"]
    groups = Graph([node("e", "training", group="full-eval"), node("f"), node("g")])
    assert [one.name for one in groups] == ["f", "g", "e"]


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([node("a", "b"), node("b", "a"), node("c")], "in a circle: a, b"),
        ([node("a"), node("a")], "two nodes of a run are named a"),
    ],
)
def test_circles_and_equal_names_are_refused(nodes: list[Node], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Graph(nodes)
    assert caught.value.kind == "graph"


def test_nodes_are_chosen_by_from_only_and_groups() -> None:
    graph = Graph([node("a", group="dry-run"), node("b"), node("c", "b"), node("d", group="full-eval")])
    names = lambda **given: [one.name for one in graph.chosen(**given)]  # noqa: E731
    assert names() == ["a", "b", "c", "d"]
    assert names(skipped=["training"]) == ["a", "d"]
    assert names(first="c") == ["c", "d"]
    assert names(only="c") == ["c"]
    assert names(first="b", skipped=["full-eval"]) == ["b", "c"]
    with pytest.raises(ConfigError, match=r"--from: expected a, b, c, d, found 'dd'"):
        names(first="dd")
    with pytest.raises(ConfigError, match="--from and --only"):
        names(first="a", only="b")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ["autoencoder", "latent-stores", "operator"]),
        ({"training": {"cache_mode": "memory"}}, ["autoencoder", "operator"]),
        ({"operator": {"state": "fields"}}, ["field-stores", "operator"]),
        (
            {"training": {"field_source": "store", "latent_cache_dir": "latents"}},
            ["field-stores", "autoencoder", "latent-stores", "operator"],
        ),
        (
            {
                "stages": {"joint": {"epochs": 1}},
                "training": {"latent_cache_dir": "latents", "use_inverse_losses": True},
            },
            ["field-stores", "joint", "latent-stores", "operator"],
        ),
        ({"latent": {"checkpoint": "given.safetensors"}}, ["latent-stores", "operator"]),
        ({"stages": {"operator": {"epochs": 0}}}, ["autoencoder", "latent-stores"]),
        (
            {"evaluation": {"baseline_samples": 16}},
            ["autoencoder", "latent-stores", "operator", "baselines"],
        ),
    ],
)
def test_configuration_decides_which_nodes_a_run_has(overrides: dict[str, Any], expected: list[str]) -> None:
    assert declared(**overrides) == [*CHECKS, *expected, *ALL]
    assert [one.name for one in declare_graph(run_of(**overrides)).of(TRAINING)] == expected


def test_later_stage_is_one_registered_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_DECLARED", [*nodes._DECLARED])
    path = Path("checkpoints/corrector.safetensors")

    @nodes.register
    def corrector(run: Run) -> Node:
        after = ("operator",)
        return Node(
            "corrector", "training", after, dict, outputs=lambda: {str(path): "hash"}, stage="corrector"
        )

    names = declared()
    assert names.index("operator") < names.index("corrector") < names.index("small-evaluation")
    (evaluation,) = [one for one in declare_graph(run_of()) if one.name == "full-evaluation"]
    assert evaluation.inputs()[str(path)] == "hash"


def test_several_processes_are_started_by_torchrun() -> None:
    run = run_of(training={"num_gpus": 3})
    commands = {one.name: one.command for one in declare_graph(run)}
    operator, latents = commands["operator"], commands["latent-stores"]
    assert operator is not None
    assert latents is not None
    start = ["torchrun", "--standalone", "--nproc-per-node=3"]
    assert shown(operator(True))[:5] == [*start, "ups", "train"]
    assert shown(operator(True))[-1] == "--restart"
    assert shown(latents(False))[:5] == [*start, "ups-store", "build"]
