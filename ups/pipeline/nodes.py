"""The nodes of a run, declared: stores, stages, evaluations, gates, promotion.

`ups run` executes them in processes of their own; `ups train --stage all` executes those of the group
"training" itself, on joined ranks (`ups.pipeline.training`). A later stage is one more function here, or
elsewhere, under `register`: what comes after all training names the group, so nothing else changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.config import RunConfig
from ups.config.after_training import GatesConfig
from ups.config.seeds import without_seed
from ups.config.stage_keys import NOT_OF_STORES, flat_keys, stage_keys
from ups.data.identities import checkpoint_identity, file_identity, source_identity, store_identities
from ups.data.stores import latent_folder
from ups.output import terminal
from ups.pipeline.best import best_path, is_rival_there, promote, rival_of
from ups.pipeline.gates import judge, read_report
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.records import RunFolder
from ups.train.checks import builds_fields, builds_latents, first_stage
from ups.trained.specs import (
    AUTOENCODER,
    AUTOENCODER_FILE,
    CORRECTOR,
    CORRECTOR_FILE,
    OPERATOR,
    OPERATOR_FILE,
    PRIOR,
    PRIOR_FILE,
    STUDENT,
    STUDENT_FILE,
)

FIELD_STORES, LATENT_STORES, BASELINES = "field-stores", "latent-stores", "baselines"
TRAINING: Group = "training"
# Nodes of the groups that evaluate.
EVALUATIONS = {"small-eval": "small-evaluation", "full-eval": "full-evaluation"}
_GATES = {"small-eval": "small-gate", "full-eval": "full-gate"}

_UPS, _BUILD = ("-m", "ups"), ("-m", "ups_store.build")
_REPORT = ("json", "csv", "html")
# What of a configuration decides an evaluation, besides the files that it reads.
_OF_EVALUATION = (
    *("data.", "tasks.", "laws.", "ttc.", "evaluation.horizon", "evaluation.max_trajectories"),
    *("evaluation.members", "evaluation.metrics", "evaluation.split", "training.field_source"),
    *("training.latent_cache_dtype", "seed"),
)


@dataclass(frozen=True)
class Run:
    """What the nodes of a run are declared from.

    Attributes:
        config: Of the training.
        small: Of the small evaluation.
        full: Of the full one.
        folder: Where the run keeps its records, and the three configurations as files.
        phases: Seconds of what happened before it, by name, for the reports.
    """

    config: RunConfig
    small: RunConfig
    full: RunConfig
    folder: Path
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def operator_path(self) -> Path:
        """The operator that it trains."""
        return self.config.checkpoint.dir / OPERATOR_FILE

    @property
    def best_dir(self) -> Path:
        """Where the best operator so far lies."""
        return self.config.pipeline.best_dir or self.config.checkpoint.dir / "best"

    def config_path(self, name: str = "train") -> Path:
        """The file of one of the configurations: "train", "small-eval" or "full-eval"."""
        return self.folder / f"{name}.yaml"

    def manifest_path(self, name: str) -> Path:
        """What a build of stores, "field-stores" or "latent-stores", says of them."""
        return self.folder / f"{name}.manifest.json"

    def report_folder(self, name: str) -> Path:
        """Where the report of "small-eval" or "full-eval" goes."""
        of_full = self.config.pipeline.report_dir if name == "full-eval" else None
        return of_full or self.folder / name

    def operator_identity(self) -> str | None:
        """Hash of the operator as it is now; None if there is none."""
        return checkpoint_identity(self.operator_path, kind=OPERATOR)


Declaration = Callable[[Run], Node | None]
_DECLARED: list[Declaration] = []


def register(declare: Declaration) -> Declaration:
    """Add a node to all runs: a function that declares it, or gives None where a run doesn't have it."""
    _DECLARED.append(declare)
    return declare


def declare_graph(run: Run) -> Graph:
    """All nodes of a run.

    Raises:
        ConfigError: As `first_stage`; kind "graph".
    """
    first_stage(run.config)  # refuses what can't be
    return Graph(filter(None, (declare(run) for declare in _DECLARED)))


def training_nodes(config: RunConfig) -> list[Node]:
    """Those that train, and build what is trained on, in order."""
    return declare_graph(Run(config, config, config, Path())).of(TRAINING)


# --- commands -----------------------------------------------------------------------------------------------


def build_command(config: RunConfig, config_path: Path | None, *words: str, holds_latents: bool) -> list[str]:
    """The build of a run's stores, of fields or of latents.

    Args:
        config_path: The file that it was read from.
        words: `key=value` on top of that, and flags.
        holds_latents: Which of the two.
    """
    given = [] if config_path is None else ["--config", str(config_path)]
    command = [sys.executable, *_BUILD, *_quiet(), *given, *words]
    if not holds_latents:
        return [*command, "latent.encoder=none"]
    # Said last, and as overrides, which win over flags: words may be about the stores of fields.
    values = {"cache.dir": str(latent_folder(config)), "cache.dtype": config.training.latent_cache_dtype}
    latents = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return [*command, "--checkpoint", str(config.autoencoder_path), *latents]


def _manifest(run: Run, name: str) -> list[str]:
    return ["--manifest", str(run.manifest_path(name))]


def shown(command: Sequence[str]) -> list[str]:
    """A command as a user would type it."""
    words = list(command[1:])
    at = next((i for i in range(len(words) - 1) if words[i] == "-m" and words[i + 1].startswith("ups")), 0)
    name = {"ups": ["ups"], "ups_store.build": ["ups-store", "build"]}.get(words[at + 1], words[at : at + 2])
    launcher = ["torchrun", *words[2:at]] if at else []
    return [*launcher, *name, *words[at + 2 :]]


def _ups(run: Run, *words: object, config: str = "train", is_parallel: bool = False) -> list[str]:
    program = [*_launcher(run.config if is_parallel else None), *_UPS]
    verb, *rest = map(str, words)
    return [sys.executable, *program, verb, *_quiet(), "--config", str(run.config_path(config)), *rest]


def _launcher(config: RunConfig | None) -> list[str]:
    num = 1 if config is None else config.pipeline.num_processes or config.training.num_gpus or 1
    return [] if num == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]


def _quiet() -> list[str]:
    return ["-q"] if terminal().quiet else []


# --- what nodes depend on -----------------------------------------------------------------------------------


def _fields(config: RunConfig) -> dict[str, Any]:
    """Identities of the fields that are read: of stores where they are, else of their sources."""
    if config.operator.state == "latent" and latent_folder(config) == config.cache.dir:
        return {"sources": source_identity(config)}  # there are latents
    stores = store_identities(config, config.cache.dir)
    return stores if all(stores.values()) else {"sources": source_identity(config)}


def _keys(config: RunConfig, beginnings: tuple[str, ...]) -> dict[str, Any]:
    values = flat_keys(config.model_dump(mode="json"))
    read = (key for key in values if key.startswith(beginnings) and key not in NOT_OF_STORES)
    return {key: values[key] for key in read}


def _autoencoder(config: RunConfig) -> dict[str, str | None]:
    path = config.autoencoder_path
    return {str(path): checkpoint_identity(path, kind=AUTOENCODER)}


def _baseline_files(config: RunConfig) -> dict[str, str | None]:
    """Trained baselines, without the states of their training."""
    files = sorted(config.checkpoint.dir.glob("baselines/*/*.safetensors"))
    return {str(path): file_identity(path) for path in files if ".training." not in path.name}


# --- checks before anything is done -------------------------------------------------------------------------

_CHECKS: dict[str, tuple[Group, tuple[str, ...]]] = {
    "validate-config": ("validation", ("validate", "config")),
    "validate-data": ("data-check", ("validate", "data")),
    "dry-run": ("dry-run", ("dry-run",)),
}


def _declare_check(name: str) -> Declaration:
    group, verb = _CHECKS[name]

    def declare(run: Run) -> Node:
        def inputs() -> Mapping[str, Any]:
            given = run.config.model_dump(mode="json")
            # The data and what a run takes are the same whatever its seed, so they are looked at once.
            config = given if name == "validate-config" else without_seed(given)
            return {"config": config, "sources": source_identity(run.config)}

        command = [sys.executable, *_UPS, *verb, *_quiet(), str(run.config_path())]
        return Node(name, group, (), inputs, command=lambda restart: command)

    return declare


for _name in _CHECKS:
    register(_declare_check(_name))


# --- training -----------------------------------------------------------------------------------------------

_CHECKED = ("validation", "data-check", "dry-run")


@register
def _field_stores(run: Run) -> Node | None:
    config = run.config
    if not builds_fields(config):
        return None
    return Node(
        FIELD_STORES,
        TRAINING,
        _CHECKED,
        inputs=lambda: {**_keys(config, ("data.", "tasks.", "cache.")), "sources": source_identity(config)},
        outputs=lambda: store_identities(config, config.cache.dir),
        command=lambda restart: build_command(
            config, run.config_path(), *_manifest(run, FIELD_STORES), holds_latents=False
        ),
    )


def _stage(run: Run, stage: str, after: tuple[str, ...], file: str, kind: str, inputs: Any) -> Node:
    config, path = run.config, run.config.checkpoint.dir / file
    return Node(
        stage,
        TRAINING,
        (*_CHECKED, *after),
        inputs=lambda: {"keys": stage_keys(config, stage), **inputs()},
        outputs=lambda: {str(path): checkpoint_identity(path, kind=kind)},
        command=lambda restart: _ups(
            run, "train", "--stage", stage, "--restart" if restart else "--unless-valid", is_parallel=True
        ),
        stage=stage,
    )


@register
def _encoder(run: Run) -> Node | None:
    config, stage = run.config, first_stage(run.config)
    if stage is None:
        return None
    return _stage(run, stage, (FIELD_STORES,), AUTOENCODER_FILE, AUTOENCODER, lambda: _fields(config))


@register
def _latent_stores(run: Run) -> Node | None:
    config = run.config
    if not builds_latents(config):
        return None
    keys = ("data.", "tasks.", "cache.", "latent.", "training.latent_cache_dtype")
    return Node(
        LATENT_STORES,
        TRAINING,
        (*_CHECKED, FIELD_STORES, "autoencoder", "joint"),
        inputs=lambda: {
            **_keys(config, keys),
            **_autoencoder(config),
            "sources": source_identity(config),
        },
        outputs=lambda: store_identities(config, latent_folder(config)),
        command=lambda restart: [
            sys.executable,
            *_launcher(config),
            *build_command(config, run.config_path(), *_manifest(run, LATENT_STORES), holds_latents=True)[1:],
        ],
    )


@register
def _operator(run: Run) -> Node | None:
    config = run.config
    if not config.stage("operator").epochs:
        return None

    def inputs() -> dict[str, Any]:
        if config.operator.state == "fields":
            return _fields(config)
        latents = store_identities(config, latent_folder(config)) if builds_latents(config) else None
        return {**_autoencoder(config), **(_fields(config) if latents is None else latents)}

    after = (FIELD_STORES, "autoencoder", "joint", LATENT_STORES)
    return _stage(run, "operator", after, OPERATOR_FILE, OPERATOR, inputs)


@register
def _corrector(run: Run) -> Node | None:
    config = run.config
    if not config.trains_corrector:
        return None

    def inputs() -> dict[str, Any]:
        path = config.corrected_operator_path
        return {str(path): checkpoint_identity(path, kind=OPERATOR), **_fields(config)}

    return _stage(run, "diff_residual", ("operator",), CORRECTOR_FILE, CORRECTOR, inputs)


@register
def _student(run: Run) -> Node | None:
    config, path = run.config, run.config.teacher_path
    if not config.trains_student:
        return None

    def inputs() -> dict[str, Any]:
        return {str(path): checkpoint_identity(path, kind=CORRECTOR), **_fields(config)}

    return _stage(run, "consistency_distill", ("diff_residual",), STUDENT_FILE, STUDENT, inputs)


@register
def _prior(run: Run) -> Node | None:
    config = run.config
    if not config.trains_prior:
        return None

    def inputs() -> dict[str, Any]:
        encoder = _autoencoder(config) if config.operator.state == "latent" else {}
        return {**encoder, **_fields(config)}

    return _stage(run, "steady_prior", (FIELD_STORES, "autoencoder", "joint"), PRIOR_FILE, PRIOR, inputs)


@register
def _baselines(run: Run) -> Node | None:
    config, evaluation = run.config, run.config.evaluation
    budgets = (evaluation.baseline_flops, evaluation.baseline_samples, evaluation.baseline_seconds)
    if not any(budgets):
        return None
    return Node(
        BASELINES,
        TRAINING,
        (*_CHECKED, "operator"),
        inputs=lambda: {
            "budgets": budgets,
            "keys": [stage_keys(config, kind) for kind in ("fno", "unet")],
            **_fields(config),
        },
        outputs=lambda: _baseline_files(config),
        command=lambda restart: _ups(
            run, "train-baselines", "--configured", *(["--restart"] if restart else []), is_parallel=True
        ),
    )


# --- evaluations, gates, promotion --------------------------------------------------------------------------


def _checkpoints(run: Run) -> dict[str, str | None]:
    """What all stages of the run leave, those of baselines too."""
    nodes = [node for node in declare_graph(run).of(TRAINING) if node.stage or node.name == BASELINES]
    return {path: identity for node in nodes for path, identity in node.outputs().items()}


def _rival(run: Run) -> str | None:
    return rival_of(run.best_dir, run.operator_identity())


def evaluation_node(run: Run, group: Group, after: tuple[str, ...]) -> Node:
    """The evaluation of "small-eval" or "full-eval"."""
    folder, config = run.report_folder(group), run.small if group == "small-eval" else run.full

    def inputs() -> dict[str, Any]:
        own = {"operator": run.operator_identity(), "best": _rival(run), "fields": _fields(config)}
        return {**_keys(config, _OF_EVALUATION), **_checkpoints(run), **_baseline_files(config), **own}

    def command(restart: bool) -> list[str]:
        best = ["--best", best_path(run.best_dir)] if is_rival_there(run.best_dir, _rival(run)) else []
        return _ups(run, "evaluate", "--out", folder, *best, *_phases(run), config=group)

    return Node(
        EVALUATIONS[group],
        group,
        after,
        inputs,
        outputs=lambda: {
            str(path): file_identity(path) for path in (folder / f"report.{end}" for end in _REPORT)
        },
        command=command,
    )


def _phases(run: Run) -> Iterator[str]:
    """What took time and has no log of its own: before the run, and builds of stores."""
    builds = {name: s for name, s in RunFolder(run.folder).seconds().items() if name.endswith("-stores")}
    for name, seconds in {**run.phases, **builds}.items():
        yield from ("--phase", f"{name}={seconds:.1f}")


def _gate(run: Run, group: Group, config: RunConfig, gates: GatesConfig) -> Node:
    report = run.report_folder(group) / "report.json"
    return Node(
        _GATES[group],
        group,
        (EVALUATIONS[group],),
        inputs=lambda: {"gates": gates.model_dump(mode="json"), "report": file_identity(report)},
        work=lambda: {"gates": judge(gates, read_report(report), run.config, what=group)},
    )


@register
def _small_evaluation(run: Run) -> Node:
    return evaluation_node(run, "small-eval", (TRAINING,))


@register
def _small_gate(run: Run) -> Node:
    return _gate(run, "small-eval", run.small, run.config.pipeline.small.gates)


@register
def _full_evaluation(run: Run) -> Node:
    return evaluation_node(run, "full-eval", (TRAINING, "small-eval"))


@register
def _full_gate(run: Run) -> Node:
    return _gate(run, "full-eval", run.full, run.config.pipeline.full.gates)


@register
def _promotion(run: Run) -> Node:
    report = run.report_folder("full-eval") / "report.json"
    best = best_path(run.best_dir)
    return Node(
        "promotion",
        "promotion",
        ("full-eval",),
        inputs=lambda: {"operator": run.operator_identity(), "report": file_identity(report)},
        outputs=lambda: {str(best): checkpoint_identity(best, kind=OPERATOR)},
        work=lambda: promote(run.operator_path, run.best_dir, report=report, folder_of_run=run.folder),
    )
