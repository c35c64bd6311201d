"""`ups tune`: a stage's learning rate and size, searched for on the validation split at one budget.

Trials are trainings of the stage in folders of their own. The first has what the configuration says itself;
Optuna (Akiba et al. 2019, arXiv:1907.10902) proposes the others by its tree-structured Parzen estimator. All
are recorded in `trials.jsonl`, the study in `study.log`, and the best so far in `best.yaml`, which a
configuration takes by `include`. The test split is never read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config import RunConfig, load_config
from ups.config.stage_keys import nested_keys
from ups.config.stages import BudgetConfig
from ups.data.batches import seed_of
from ups.data.splits import open_fields
from ups.errors import ConfigError, DivergedError, needs
from ups.eval.baseline_model import check_kinds, network_size, own_kind
from ups.eval.equal_budgets import parse_budgets
from ups.grid import GridSpec
from ups.locks import locked
from ups.log import logger, once_each, quiet
from ups.models.operator_size import TOKEN_UNET
from ups.models.operators import config_section
from ups.output import check_writable, write_atomically
from ups.section import Section, fact
from ups.stages import BASELINES, OPERATOR, OWN_BASELINE
from ups.train.run import run_stage
from ups.train.saved_state import differing_keys
from ups.train.train_baselines import train_stage_of_baselines
from ups_store.launch import ONLY_ONCE, check_shared, log_origin
from ups_store.printable import json_text

with needs("train"):
    import yaml

if TYPE_CHECKING:
    import optuna

_LEAST_LR, _LARGEST_LR = 5e-4, 2e-2
_OPERATOR_WIDTHS, _PATCHES = (16, 24, 32, 48, 64, 96, 128), (2, 4, 8, 16)

Values = Mapping[str, float | int]  # by key of the configuration


@dataclass(frozen=True)
class Space:
    """What is searched: a learning rate, uniformly in its logarithm, and sizes.

    Attributes:
        lr: Key of the learning rate.
        sizes: By key, what it may be.
    """

    lr: str
    sizes: Mapping[str, Sequence[int]]

    def distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """As Optuna takes it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        rate = FloatDistribution(_LEAST_LR, _LARGEST_LR, log=True)
        return {self.lr: rate} | {key: CategoricalDistribution(some) for key, some in self.sizes.items()}

    def own(self, config: RunConfig, stage: str) -> dict[str, float | int]:
        """What a configuration says itself, as far as it lies in the space."""
        lr = config.stage(stage).optimizer.lr
        values: Any = config.model_dump()
        own: dict[str, float | int] = {self.lr: lr} if lr and _LEAST_LR <= lr <= _LARGEST_LR else {}
        for key, sizes in self.sizes.items():
            if (value := reduce(lambda inner, name: inner[name], key.split("."), values)) in sizes:
                own[key] = value
        return own


def space_of(stage: str, config: RunConfig) -> Space:
    """What is searched for a stage, as far as the grids of its tasks have room for it."""
    searched = (OPERATOR.name, *BASELINES)
    if stage not in searched:
        expected = " or ".join(searched)
        raise ConfigError("--stage", kind="unknown_stage", expected=expected, found=repr(stage))
    source = config.training.field_source
    grids = [open_fields(config.build, task, "val", source=source).info.grid for task in config.data.tasks]
    return Space(f"stages.{stage}.optimizer.lr", _sizes(stage, config, grids))


def _sizes(stage: str, config: RunConfig, grids: Sequence[GridSpec]) -> dict[str, Sequence[int]]:
    if stage == OPERATOR.name:
        widths = [width for width in _OPERATOR_WIDTHS if width % (config.operator.num_heads or 4) == 0]
        points = [length for grid in grids for length in grid.points]
        patches = [size for size in _PATCHES if all(length % size == 0 for length in points)]
        own = {"encoder.patch_size": patches} if config.operator.state == "fields" and patches else {}
        if config.operator.name != TOKEN_UNET:
            tried = _tried(config_section(config.operator.name))
            return {f"operator.config.{name}": sizes for name, sizes in tried.items()} | own
        return {"operator.width": widths, **own}
    if stage == OWN_BASELINE.name:
        tried = _tried(config_section(own_kind(config)))
        return {f"baselines.own.config.{name}": sizes for name, sizes in tried.items()}
    fitting = {
        name: [size for size in sizes if _has_room(config, stage, {name: size}, grids)]
        for name, sizes in _tried(type(getattr(config.baselines, stage))).items()
    }
    return {f"baselines.{stage}.{name}": sizes for name, sizes in fitting.items() if sizes}


def _tried(section: type[Section]) -> dict[str, Sequence[int]]:
    """Sizes to try of each key of a section that says some, `key(tune=)`."""
    return {name: sizes for name, field in section.model_fields.items() if (sizes := fact(field, "tune"))}


def _has_room(config: RunConfig, kind: str, size: Mapping[str, int], grids: Sequence[GridSpec]) -> bool:
    own = getattr(config.baselines, kind).model_copy(update=dict(size))
    (checked,) = check_kinds([kind])
    try:
        for grid in grids:
            network_size(checked, grid, config.baselines.model_copy(update={kind: own}))
    except ConfigError as error:
        if error.kind != "size":
            raise
        return False
    return True


def import_optuna() -> Any:
    """Import the module, or say which extra brings it."""
    with needs("tune"):
        return import_module("optuna")


@once_each()
def tune(
    stage: str,
    config_path: Path | None,
    *,
    overrides: Sequence[str],
    num_trials: int,
    amounts: Mapping[str, float | None],
    restart: bool = False,
) -> dict[str, Any]:
    """Search until there are so many trials; run it again to continue, or with more of them.

    Args:
        stage: "operator" or a baseline.
        config_path: YAML file of the run.
        num_trials: Trials in all, those of before counted.
        amounts: Budget of each trial, one of "flops", "samples" and "seconds".
        restart: Forget earlier trials.

    Returns:
        {"stage", "best": values by key, "score", "trials": records, "file": path of `best.yaml`}.

    Raises:
        MissingExtraError: Without Optuna.
        ConfigError: If stage, budget or configuration is wrong; kind "other_search", if earlier trials were
            of another one; kind "no_trial", if none could be trained to the end.
        InterruptedTrainingError: On SIGTERM or SIGINT; the trial continues where it was left.
        UpsError: Kind "run_locked", if another process searches there.
    """
    check_shared(hint=ONLY_ONCE)
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # notes say it
    budgets = parse_budgets(**amounts)
    if len(budgets) != 1:
        expected = "one of --budget-flops, --budget-samples and --budget-seconds"
        raise ConfigError(
            "budget of a trial", kind="budget", expected=expected, found=f"{len(budgets)} of them"
        )
    config = load_config(config_path, overrides=overrides)
    search = _Search(stage, config, config_path, overrides, budgets[0])
    with locked(search.folder.with_name(f".{stage}.lock")):
        return search.run(num_trials, restart=restart)


class _Search:
    """One study; see `tune`."""

    def __init__(
        self,
        stage: str,
        config: RunConfig,
        config_path: Path | None,
        overrides: Sequence[str],
        budget: BudgetConfig,
    ) -> None:
        self._stage, self._config, self._budget = stage, config, budget
        self._config_path, self._overrides = config_path, overrides
        self._space = space_of(stage, config)
        self.folder = config.checkpoint.dir / "tune" / stage

    def run(self, num_trials: int, *, restart: bool) -> dict[str, Any]:
        if restart:
            shutil.rmtree(self.folder, ignore_errors=True)
        check_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        study = self._open_study()
        for number in range(num_trials):
            self._try(study, number, num_trials)
        records = [self._record(trial) for trial in study.trials]
        best = _best(study)
        if best is None:
            problem = f"none of {len(records)} trials of stage {self._stage} could be trained to the end"
            raise ConfigError(problem, kind="no_trial", path=self.folder / "trials.jsonl")
        return {
            "stage": self._stage,
            "best": dict(best.params),
            "score": best.value,
            "trials": records,
            "file": str(self.folder / "best.yaml"),
        }

    def _open_study(self) -> optuna.Study:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        storage = JournalStorage(JournalFileBackend(str(self.folder / "study.log")))
        study = optuna.create_study(storage=storage, study_name=self._stage, load_if_exists=True)
        asked = {
            "config": self._config.model_dump(mode="json"),
            "budget": self._budget.model_dump(mode="json"),
        }
        before = study.user_attrs.get("asked")
        if before is None:
            study.set_user_attr("asked", asked)
        else:
            self._check_same(before)
        return study

    def _check_same(self, before: Mapping[str, Any]) -> None:
        """Trials of another configuration, or at another budget, don't compare."""
        differing = differing_keys(before["config"], self._config, stage=self._stage)
        if before["budget"] != self._budget.model_dump(mode="json"):
            was = BudgetConfig.model_validate(before["budget"])
            differing.append(f"a {was} is now a {self._budget}")
        if differing:
            raise ConfigError(
                f"the trials that are there are of another search: {'; '.join(differing)}",
                kind="other_search",
                path=self.folder,
                hint="go back to it, use another checkpoint.dir, or --restart",
            )

    def _try(self, study: optuna.Study, number: int, num_trials: int) -> None:
        """Train a trial, or go on with one that was interrupted; nothing, if it is over."""
        import optuna

        if number == len(study.trials):
            # A sampler of its own for each: its proposal depends on the trials before, on no interruption.
            study.sampler = optuna.samplers.TPESampler(seed=seed_of(self._config.seed, number) % 2**32)
            if number == 0:
                study.enqueue_trial(self._space.own(self._config, self._stage))
            study.ask(self._space.distributions())
        trial = study.trials[number]
        if trial.state.is_finished():
            return
        shown = ", ".join(f"{key} {value:.3g}" for key, value in trial.params.items())
        logger.info(f"trial {number + 1} of {num_trials}: {shown}")
        began = time.perf_counter()
        try:
            report = self._train(number, trial.params)
            study.tell(number, report["score"])
        except (ConfigError, DivergedError) as error:
            report = {"error": str(error)}
            logger.info(f"trial {number + 1} failed: {error}")
            study.tell(number, state=optuna.trial.TrialState.FAIL)
        self._keep(study, number, report | {"seconds": time.perf_counter() - began})

    def _train(self, number: int, values: Values) -> dict[str, Any]:
        """Score on the validation split, and what the training took."""
        stage, limit = self._stage, self._budget.limit
        own = [
            f"checkpoint.dir={self.folder / f'trial_{number:03}'}",
            "checkpoint.keep_training_state=false",
            "training.log_path=null",
            f"latent.checkpoint={self._config.autoencoder_path}",
            f"stages.{stage}.steps=null",
            f"stages.{stage}.steps_per_epoch=null",
            f"stages.{stage}.budget={{{limit}: {getattr(self._budget, limit)}}}",
            *(f"{key}={value}" for key, value in values.items()),
        ]
        with quiet():
            config = load_config(self._config_path, overrides=[*self._overrides, *own])
        if stage in BASELINES:
            reports = train_stage_of_baselines(stage, config)["stages"]
        else:
            reports = {stage: run_stage(stage, config)}
        scores = [report["score"] for report in reports.values()]
        steps = {name: report["steps"] for name, report in reports.items()}
        return {"score": sum(scores) / len(scores), "steps": steps}

    def _keep(self, study: optuna.Study, number: int, report: Mapping[str, Any]) -> None:
        """A line for the trial, and the best so far."""
        study.set_user_attr(f"trial_{number}", dict(report))
        record = self._record(study.trials[number]) | dict(report) | log_origin()
        with (self.folder / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json_text(record) + "\n")
        best = _best(study)
        if best is None:
            return
        score = f"{report['score']:.4g}" if "score" in report else "not known"
        logger.info(f"validation error {score}, best {best.value:.4g} of trial {best.number + 1}")
        text = f"# Best of {len(study.trials)} trials of `ups tune --stage {self._stage}`, each with a"
        text += f" {self._budget}:\n# nRMSE on validation {best.value:.4g}.\n"
        text += yaml.safe_dump(nested_keys(best.params), sort_keys=False)
        write_atomically(self.folder / "best.yaml", text.encode())

    def _record(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "values": dict(trial.params),
            "score": trial.value,
            "budget": self._budget.model_dump(mode="json", exclude_none=True),
        }


def _best(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    """The trial of the least validation error."""
    finished = [trial for trial in study.trials if trial.value is not None]
    return min(finished, key=lambda trial: (trial.value, trial.number), default=None)
