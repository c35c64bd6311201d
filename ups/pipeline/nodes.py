"""The nodes of a run, declared: stores, stages, evaluations, gates, promotion.

`ups run` executes them in processes of their own, `ups train` those of the group "training" in its own.
Stages have their nodes by their facts (`ups.stages`); another step is one more function under `register`:
what comes after all training names the group, so nothing else changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ups import stages
from ups.config import RunConfig
from ups.config.after_training import CheckConfig, GatesConfig
from ups.config.legacy import as_hashed
from ups.config.seeds import without_seed
from ups.config.stage_keys import NOT_OF_STORES, flat_keys, stage_keys, users_of
from ups.data.identities import checkpoint_identity, file_identity, source_identity, store_identities
from ups.data.stores import latent_folder
from ups.output import terminal
from ups.pipeline.best import best_path, is_rival_there, promote, rival_of
from ups.pipeline.gates import judge, read_report
from ups.pipeline.graph import Graph, Group, Node
from ups.pipeline.records import RunFolder
from ups.stages import ENCODER_MODEL, FNO, OPERATOR_MODEL, STAGES, UNET, Model, StageFacts
from ups.train.checks import builds_fields, builds_latents, check_encoder
from ups.trained.specs import AUTOENCODER, OPERATOR

FIELD_STORES, LATENT_STORES, BASELINES = "field-stores", "latent-stores", "baselines"
TRAINING: Group = "training"
# Nodes of the groups that evaluate.
EVALUATIONS = {"small-eval": "small-evaluation", "full-eval": "full-evaluation"}
_GATES = {"small-eval": "small-gate", "full-eval": "full-gate"}
STORES = {FIELD_STORES: "fields.manifest.json", LATENT_STORES: "latents.manifest.json"}

_REPORT = ("json", "csv", "html")


@dataclass(frozen=True)
class Run:
    """What the nodes of a run are declared from.

    Attributes:
        config: Of the training.
        small: Of the small evaluation.
        full: Of the full one.
        folder: Where the run keeps its records, and the three configurations as files.
        phases: Seconds of what happened before it, by name, for the reports.
        words: What gives commands the configuration of the training; None for the file in the folder.
        is_first: Whether manifests of builds are written, by one of several ranks.
    """

    config: RunConfig
    small: RunConfig
    full: RunConfig
    folder: Path
    phases: Mapping[str, float] = field(default_factory=dict)
    words: Sequence[str] | None = None
    is_first: bool = True

    @property
    def operator_path(self) -> Path:
        """The operator that it trains."""
        return self.config.checkpoint.dir / OPERATOR_MODEL.file

    @property
    def best_dir(self) -> Path:
        """Where the best operator so far lies."""
        return self.config.pipeline.best_dir or self.config.checkpoint.dir / "best"

    def config_path(self, name: str = "train") -> Path:
        """The file of one of the configurations: "train", "small-eval" or "full-eval"."""
        return self.folder / f"{name}.yaml"

    def manifest_path(self, name: str) -> Path:
        """What a build of stores, "field-stores" or "latent-stores", says of them."""
        return self.folder / STORES[name]

    def report_folder(self, name: str) -> Path:
        """Where the report of "small-eval" or "full-eval" goes."""
        of_full = self.config.pipeline.report_dir if name == "full-eval" else None
        return of_full or self.folder / name

    def operator_identity(self) -> str | None:
        """Hash of the operator as it is now; None if there is none."""
        return checkpoint_identity(self.operator_path, kind=OPERATOR)


Declaration = Callable[[Run], Node | Iterable[Node] | None]
_DECLARED: list[Declaration] = []


def register(declare: Declaration) -> Declaration:
    """Add nodes to all runs: a function that declares one or several, or gives None where a run has none."""
    _DECLARED.append(declare)
    return declare


def declare_graph(run: Run) -> Graph:
    """All nodes of a run."""
    check_encoder(run.config)
    declared = (declare(run) or () for declare in _DECLARED)
    return Graph(node for nodes in declared for node in ([nodes] if isinstance(nodes, Node) else nodes))


# --- commands -----------------------------------------------------------------------------------------------


def _command(run: Run, module: str, *words: object, is_parallel: bool = False) -> list[str]:
    """A command line of this Python, by torchrun where `ups run` shares it out among ranks."""
    num = run.config.pipeline.num_processes or run.config.training.num_gpus or 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
    start = launcher if is_parallel and num > 1 and run.words is None else []
    return [sys.executable, *start, "-m", module, *map(str, words), *(["-q"] if terminal().quiet else [])]


def _build(run: Run, node: str) -> list[str]:
    """The build of a run's stores, of fields or of latents."""
    config = run.config
    words = ["--config", run.config_path()] if run.words is None else run.words
    manifest = ["--manifest", run.manifest_path(node)] if run.is_first else []
    command = partial(_command, run, "ups_store.build", *words, *manifest)
    if node == FIELD_STORES:
        return command("latent.encoder=none")
    # Said last, and as overrides, which win over flags: words may be about the stores of fields.
    values = {"cache.dir": str(latent_folder(config)), "cache.dtype": config.training.latent_cache_dtype}
    latents = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return command("--checkpoint", config.autoencoder_path, *latents, is_parallel=True)


def shown(command: Sequence[str]) -> list[str]:
    """A command as a user would type it."""
    words = list(command[1:])
    at = next((i for i in range(len(words) - 1) if words[i] == "-m" and words[i + 1].startswith("ups")), 0)
    name = {"ups": ["ups"], "ups_store.build": ["ups-store", "build"]}.get(words[at + 1], words[at : at + 2])
    launcher = ["torchrun", *words[2:at]] if at else []
    return [*launcher, *name, *words[at + 2 :]]


# --- what nodes depend on -----------------------------------------------------------------------------------


def _fields(config: RunConfig) -> dict[str, Any]:
    """Identities of the fields that are read: of stores where they are, else of their sources."""
    if config.uses_encoder and latent_folder(config) == config.cache.dir:
        return {"sources": source_identity(config)}  # there are latents
    stores = store_identities(config, config.cache.dir)
    return stores if all(stores.values()) else {"sources": source_identity(config)}


def _keys(config: RunConfig, beginnings: tuple[str, ...]) -> dict[str, Any]:
    values = flat_keys(config.model_dump(mode="json"))
    read = (key for key in values if key.startswith(beginnings) and key not in NOT_OF_STORES)
    return {key: values[key] for key in read}


def _baseline_files(config: RunConfig) -> dict[str, str | None]:
    """Trained baselines, without the states of their training."""
    files = sorted(config.checkpoint.dir.glob("baselines/*/*.safetensors"))
    return {str(path): file_identity(path) for path in files if ".training." not in path.name}


# --- checks before anything is done -------------------------------------------------------------------------


@register
def _checks(run: Run) -> Iterator[Node]:
    checks: dict[str, tuple[Group, tuple[str, ...]]] = {
        "validate-config": ("validation", ("validate", "config")),
        "validate-data": ("data-check", ("validate", "data")),
        "dry-run": ("dry-run", ("dry-run",)),
    }
    for name, (group, verb) in checks.items():
        command = _command(run, "ups", *verb, run.config_path())
        inputs = partial(_inputs_of_check, run, name)
        yield Node(name, group, (), inputs, command=lambda restart, words=command: words)  # type: ignore[misc]


def _inputs_of_check(run: Run, name: str) -> Mapping[str, Any]:
    given = run.config.model_dump(mode="json")
    # The data and what a run takes are the same whatever its seed, so they are looked at once.
    config = given if name == "validate-config" else without_seed(given)
    return {"config": as_hashed(config), "sources": source_identity(run.config)}


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
        command=lambda restart: _build(run, FIELD_STORES),
    )


@register
def _stages(run: Run) -> Iterator[Node]:
    return (stage_node(run, STAGES[name]) for name in run.config.trained_stages)


def _makers(*models: Model, but: str = "") -> tuple[str, ...]:
    """The stages that make models, but for one that makes a better one of what it needs."""
    return tuple(name for name, stage in STAGES.items() if {*stage.makes} & {*models} and name != but)


def stage_node(run: Run, stage: StageFacts) -> Node:
    """The node that trains a stage."""
    config, model = run.config, stage.makes[0]
    path, reads_latents = config.checkpoint.dir / model.file, stage.reads_states and builds_latents(config)

    def inputs() -> dict[str, Any]:
        latents = store_identities(config, latent_folder(config)) if reads_latents else None
        return {
            "keys": as_hashed(stage_keys(config, stage.name)),
            **{
                str(path): checkpoint_identity(path, kind=needed.kind)
                for needed in config.models_for(stage)
                for path in (config.path_of(needed),)
            },
            **(_fields(config) if latents is None else latents),
        }

    return Node(
        stage.name,
        TRAINING,
        (
            *_CHECKED,
            FIELD_STORES,
            *((LATENT_STORES,) if reads_latents else ()),
            *_makers(*stage.needs, but=stage.name),
        ),
        inputs=inputs,
        outputs=lambda: {str(path): checkpoint_identity(path, kind=model.kind)},
        command=lambda restart: _command(
            run,
            "ups",
            *("train", "--config", run.config_path(), "--stage", stage.name),
            "--restart" if restart else "--unless-valid",
            is_parallel=True,
        ),
        stage=stage.name,
    )


@register
def _latent_stores(run: Run) -> Node | None:
    config = run.config
    if not builds_latents(config):
        return None
    keys = ("data.", "tasks.", "cache.", "latent.", "training.latent_cache_dtype")
    return Node(
        LATENT_STORES,
        TRAINING,
        (*_CHECKED, FIELD_STORES, *_makers(ENCODER_MODEL)),
        inputs=lambda: {
            **_keys(config, keys),
            str(config.autoencoder_path): checkpoint_identity(config.autoencoder_path, kind=AUTOENCODER),
            "sources": source_identity(config),
        },
        outputs=lambda: store_identities(config, latent_folder(config)),
        command=lambda restart: _build(run, LATENT_STORES),
    )


@register
def _baselines(run: Run) -> Node | None:
    config, evaluation = run.config, run.config.evaluation
    budgets = (evaluation.baseline_flops, evaluation.baseline_samples, evaluation.baseline_seconds)
    if not any(budgets):
        return None
    return Node(
        BASELINES,
        TRAINING,
        (*_CHECKED, stages.OPERATOR.name),
        inputs=lambda: {
            "budgets": budgets,
            "keys": [as_hashed(stage_keys(config, kind.name)) for kind in (FNO, UNET)],
            **_fields(config),
        },
        outputs=lambda: _baseline_files(config),
        command=lambda restart: _command(
            run,
            "ups",
            *("train-baselines", "--config", run.config_path(), "--configured"),
            *(["--restart"] if restart else []),
            is_parallel=True,
        ),
    )


# --- evaluations, gates, promotion --------------------------------------------------------------------------


def evaluation_node(run: Run, group: Group, after: tuple[str, ...]) -> Node:
    """Declare the evaluation of "small-eval" or "full-eval"."""
    folder, config = run.report_folder(group), run.small if group == "small-eval" else run.full

    def inputs() -> dict[str, Any]:
        operator = run.operator_identity()
        own = {"operator": operator, "best": rival_of(run.best_dir, operator), "fields": _fields(config)}
        values = flat_keys(config.model_dump(mode="json"))
        keys = {key: value for key, value in values.items() if "evaluation" in users_of(key)}
        if not config.evaluation.metrics:  # identities of evaluations are those of before there were any
            del keys["evaluation.metrics"]
        trained = [node for node in declare_graph(run).of(TRAINING) if node.stage or node.name == BASELINES]
        models = {path: identity for node in trained for path, identity in node.outputs().items()}
        return {**keys, **models, **_baseline_files(config), **own}

    def command(restart: bool) -> list[str]:
        rival = rival_of(run.best_dir, run.operator_identity())
        words: list[object] = ["evaluate", "--config", run.config_path(group), "--out", folder]
        words += ["--best", best_path(run.best_dir)] if is_rival_there(run.best_dir, rival) else []
        # What took time and has no log of its own: before the run, and builds of stores.
        builds = {name: s for name, s in RunFolder(run.folder).seconds().items() if name in STORES}
        for name, seconds in {**run.phases, **builds}.items():
            words += ["--phase", f"{name}={seconds:.1f}"]
        return _command(run, "ups", *words)

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


@register
def _after_training(run: Run) -> Iterator[Node]:
    checks: dict[Group, CheckConfig] = {
        "small-eval": run.config.pipeline.small,
        "full-eval": run.config.pipeline.full,
    }
    before: tuple[str, ...] = (TRAINING,)
    for group, check in checks.items():
        yield evaluation_node(run, group, before)
        yield _gate(run, group, check.gates)
        before = (*before, group)
    report, best = run.report_folder("full-eval") / "report.json", best_path(run.best_dir)
    yield Node(
        "promotion",
        "promotion",
        ("full-eval",),
        inputs=lambda: {"operator": run.operator_identity(), "report": file_identity(report)},
        outputs=lambda: {str(best): checkpoint_identity(best, kind=OPERATOR)},
        work=lambda: promote(run.operator_path, run.best_dir, report=report, folder_of_run=run.folder),
    )


def _gate(run: Run, group: Group, gates: GatesConfig) -> Node:
    report = run.report_folder(group) / "report.json"
    return Node(
        _GATES[group],
        group,
        (EVALUATIONS[group],),
        inputs=lambda: {"gates": gates.model_dump(mode="json"), "report": file_identity(report)},
        work=lambda: {"gates": judge(gates, read_report(report), run.config, what=group)},
    )
