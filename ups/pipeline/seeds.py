"""`ups run --seeds`: the same run with several training seeds, and one evaluation of all of them.

Every seed is a run of its own in `<checkpoint.dir>/seed-N`. What two seeds would do alike (checks of the
data, stores of fields, latents of a given encoder) is done by the first of them. In the end the run's own
folder gets a report in which the seeds are one row, and a record for the leaderboard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ups.config.seeds import seed_folder, seed_overrides
from ups.errors import GateMissedError
from ups.log import logger, prefixed, quiet
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.nodes import Run, evaluation_node
from ups.pipeline.run import Options, open_run, run_graph, run_pipeline


def open_seeds(
    run: Run, seeds: Sequence[int], *, config_path: Path | None, overrides: Sequence[str]
) -> dict[int, Run]:
    """The run of each seed.

    Args:
        run: What the file and the overrides say.

    Raises:
        ConfigError: As `open_run`.
    """
    with quiet():
        return {
            seed: open_run(
                config_path,
                [*overrides, *seed_overrides(run.config, seed), *_own_folders(run, seed)],
                phases=run.phases,
            )
            for seed in seeds
        }


def _own_folders(run: Run, seed: int) -> list[str]:
    """Where the records and reports of a seed go, if the configuration names a place for the run's."""
    named = {"dir": run.config.pipeline.dir, "report_dir": run.config.pipeline.report_dir}
    return [f"pipeline.{key}={seed_folder(path, seed)}" for key, path in named.items() if path is not None]


def run_seeds(run: Run, runs: Mapping[int, Run], options: Options) -> dict[str, Any]:
    """Execute what isn't valid of each seed's run, one after the other, and evaluate all together.

    A seed that misses a gate doesn't keep the others from their turn.

    Args:
        run: The run, whose own seed isn't used.
        runs: Of each seed.
        options: As `run_pipeline`; `first` and `only` are about each seed.

    Returns:
        What `metadata.json` of the run holds, under "by_seed" that of each seed; of a dry run {"plan": by
        "seed N", and "all seeds", what `run_pipeline` says}.

    Raises:
        GateMissedError: The first one, once all seeds had their turn.
        UpsError: As `run_pipeline`, at once.
    """
    missed, found = list[GateMissedError](), dict[int, dict[str, Any]]()
    graph = joint_graph(run, runs)
    joint = replace(options, first=None, only=None, skipped=_skipped_of_all(options))
    for seed, own in runs.items():
        logger.info(f"seed {seed}: {own.folder}")
        others = [other.folder for other in runs.values() if other is not own]
        try:
            with prefixed(f"seed {seed}: "):
                found[seed] = run_pipeline(own, options, siblings=others)
        except GateMissedError as error:
            missed.append(error)
            logger.warning(f"seed {seed}: {error}")
    if options.dry_run:
        plans = {f"seed {seed}": document["plan"] for seed, document in found.items()}
        return {"plan": {**plans, "all seeds": run_graph(run, graph, joint)["plan"]}}
    metadata = {}
    if options.only is None:
        metadata = run_graph(run, graph, joint, of_seeds=runs)
    if missed:
        raise missed[0]
    return {**metadata, "by_seed": found}


def _skipped_of_all(options: Options) -> list[str]:
    """Of the two evaluations of all seeds, only the last one that isn't skipped is made."""
    return [*options.skipped, *(() if "full-eval" in options.skipped else ("small-eval",))]


def joint_graph(run: Run, runs: Mapping[int, Run]) -> Graph:
    """The evaluations of all seeds together."""
    groups: tuple[Group, ...] = ("small-eval", "full-eval")
    return Graph(_evaluation_of_all(run, group, runs) for group in groups)


def _evaluation_of_all(run: Run, group: Group, runs: Mapping[int, Run]) -> Node:
    """One evaluation in which the seeds are one row, of all that each seed's own evaluation reads."""
    node = evaluation_node(run, group, ())
    own = {str(seed): evaluation_node(seed_run, group, ()) for seed, seed_run in runs.items()}
    flags = ["--seeds", ",".join(own)]

    def command(restart: bool) -> list[str]:
        assert node.command is not None
        return [*node.command(restart), *flags]

    inputs = lambda: {seed: one.inputs() for seed, one in own.items()}  # noqa: E731
    return replace(node, inputs=inputs, command=command)
