"""Stage `all`: autoencoder (or joint), stores of latents, operator, baselines, evaluation, in one command.

Whatever is finished and still valid is kept: a stage's training state says with which configuration and on
which data it was trained, a store's identity what it was made from. Stores are built by the same command that
you would type.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ups.config import RunConfig, load_config
from ups.config.seeds import seed_overrides
from ups.data.fields import describe_fields
from ups.data.stores import latent_folder, own_manifest
from ups.device import choose_device
from ups.errors import ConfigError, ConfigWarning, InterruptedTrainingError, UpsError
from ups.eval.baseline_files import find_baselines
from ups.eval.comparison import TrainedRun
from ups.eval.evaluate import daily_split, evaluate
from ups.eval.report_page import write_report
from ups.eval.split_uses import count_test_uses
from ups.eval.training_logs import read_stage_logs
from ups.grid import cut_grid
from ups.optim import check_optimizer
from ups.output import Note, check_writable, discard, each_once, terminal
from ups.train.distributed import joined_ranks
from ups.train.interrupt import SAME_COMMAND
from ups.train.joint import check_joint
from ups.train.operator import check_no_inverse_losses
from ups.train.operator_spec import operator_size
from ups.train.run import train_unless_valid, unused_in_all_stages
from ups.train.stage import ALL
from ups.train.train_baselines import train_configured_baselines
from ups.trained.checkpoint import read_document
from ups.trained.simulator import load_simulator
from ups.trained.specs import AUTOENCODER_FILE, OPERATOR, OPERATOR_FILE, parse_simulator_spec
from ups_store.launch import rank_of

# Modes of `training.cache_mode` in which the operator's stage encodes for itself and nothing is stored.
_WITHOUT_STORES = ("memory", "none")
BUILD = ("-m", "ups_store.build")


def run_all(
    config: RunConfig,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    note: Note,
    restart: bool = False,
    began: float | None = None,
    evaluates: bool = True,
) -> dict[str, Any]:
    """Train everything that an operator needs, and the operator.

    Args:
        config: Configuration of the run.
        config_path: The file that it was read from, for the build of stores.
        overrides: `key=value` on top of that.
        note: Told what people should know; what several stages find alike, once.
        restart: Train every stage from scratch.
        began: When the process was started, seconds since 1970.
        evaluates: Whether the run ends evaluated where `evaluation.enabled` says so.

    Returns:
        {"stage": "all", "stages": reports by stage, "cache": metrics of the build, "evaluation": paths of the
        report's files}.

    Raises:
        ConfigError: If field stores and latent stores would lie in the same place, and those of the stages;
            before anything is built or trained, as far as the configuration alone shows.
        OutputError: If the report could not be written.
        UpsError: Of the stages; of kind "build" with the exit code of a build that failed.
    """
    note = each_once(note)
    first = first_stage(config)
    folder = _report_folder(config_path)
    _check_nothing_refused_later(config, first, report_folder=folder)
    train = partial(train_unless_valid, config=config, note=note, restart=restart)
    stages: dict[str, Any] = {}
    training, cache, startup = config.training, dict[str, float](), dict[str, float]()
    with joined_ranks(training.device, timeout_s=training.rank_timeout_s, note=note) as (ranks, _):
        for text in unused_in_all_stages(config) if ranks.is_first else ():
            note(f"warning: {text}")
        said: dict[str, Any] = {"config_path": config_path, "overrides": overrides}
        said |= {"is_first": ranks.is_first, "note": note}
        if _has_given_encoder(config) and ranks.is_first:
            note(f"no autoencoder is trained: latent.checkpoint = {config.latent.checkpoint}")
        check_sizes(config, first)
        if first == "joint" or config.operator.state == "fields" or training.field_source == "store":
            startup = build_fields(**said)
        if first is not None:
            stages[first] = train(first, began=began, startup=startup)
            began, startup = None, {}  # the start of the process is the first stage's
        if config.operator.state == "latent" and training.cache_mode not in _WITHOUT_STORES:
            cache = build_latents(config, **said)
        if config.stage("operator").epochs:
            stages["operator"] = train("operator", began=began, startup=startup | cache)
        if config.evaluation.enabled and _predicts_fields(config):
            train_configured_baselines(config, restart=restart, note=note)
    evaluation = {}
    if config.evaluation.enabled and evaluates and ranks.is_first:
        seconds = {name: report["seconds"] for name, report in stages.items()}
        evaluation = _evaluate([config], config.checkpoint.dir, seconds, folder=folder, note=note)
    return {"stage": ALL, "stages": stages, "cache": cache, "evaluation": evaluation}


def run_all_seeds(
    config: RunConfig,
    seeds: Sequence[int],
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    note: Note,
    restart: bool = False,
    began: float | None = None,
) -> dict[str, Any]:
    """Train everything with one seed after the other, each in its own folders, and evaluate all together.

    Args:
        config: Configuration of the run; its own seed isn't used.
        seeds: Training seeds.
        config_path: As `run_all`.
        overrides: As `run_all`.
        note: As `run_all`.
        restart: As `run_all`.
        began: As `run_all`.

    Returns:
        {"stage": "all", "seeds": what `run_all` returns by seed, "evaluation": paths of the report's files}.

    Raises:
        UpsError: As `run_all`.
    """
    note = each_once(note)
    configs, reports = [], {}
    for seed in seeds:
        given = [*overrides, *seed_overrides(config, seed)]
        configs.append(own := load_config(config_path, overrides=given, note=discard))
        note(f"seed {seed}: {own.checkpoint.dir}")
        options: dict[str, Any] = {"restart": restart, "began": began, "evaluates": False}
        reports[seed] = run_all(own, config_path=config_path, overrides=given, note=note, **options)
        began = None
    evaluation = {}
    if config.evaluation.enabled and rank_of() == 0:
        folder = _report_folder(config_path)
        evaluation = _evaluate(configs, config.checkpoint.dir, {}, folder=folder, note=note)
    return {"stage": ALL, "seeds": reports, "evaluation": evaluation}


def check_sizes(config: RunConfig, first: str | None) -> None:
    """Refuse patches and tokens that don't fit the grids of the tasks, before stores are built.

    Args:
        config: Configuration of the run.
        first: What `first_stage` says.

    Raises:
        ConfigError: As `cut_grid`, and as `describe_fields`.
        ups_store.SourceError: If the sources are missing or can't be read.
    """
    if first is None and config.operator.state == "latent":
        return  # the encoder that is given has its sizes
    num_tokens = config.latent.tokens if config.operator.state == "latent" else None
    for task in config.data.tasks:
        grid = describe_fields(config.build, task).grid
        cut_grid(grid, patch_size=config.encoder.patch_size, num_tokens=num_tokens)


def _report_folder(config_path: Path | None) -> Path:
    return Path("reports") / (config_path.stem if config_path else ALL)


def first_stage(config: RunConfig) -> str | None:
    """The stage that makes the encoder: "joint" where it has epochs; None where none is needed or wanted.

    Raises:
        ConfigError: Kind "same_folder", if stage joint's field stores and the latent stores had one path;
            "given_encoder", if stage joint would train another one than `latent.checkpoint`; and those of
            stage joint.
    """
    if config.trains_jointly:
        check_joint(config)
        _check_no_given_encoder(config)
        _check_own_folders(config, "stage joint")
        return "joint"
    if config.operator.state == "fields" or _has_given_encoder(config):
        return None
    return "autoencoder" if config.stage("autoencoder").epochs else None


def _check_nothing_refused_later(config: RunConfig, first: str | None, *, report_folder: Path) -> None:
    """Refuse before hours of training what a stage, or the evaluation, would refuse after them."""
    if config.evaluation.enabled:
        daily_split(None, config.evaluation.split, note=discard)
        check_writable(report_folder)
    if config.training.field_source == "store" and config.operator.state == "latent":
        _check_own_folders(config, "training.field_source=store")
    has_operator = config.stage("operator").epochs > 0
    if has_operator:
        check_no_inverse_losses(config)
    if has_operator or first == "joint":
        with warnings.catch_warnings():  # said when the operator is made
            warnings.simplefilter("ignore", ConfigWarning)
            operator_size(config.operator)
    for name in filter(None, (first, "operator" if has_operator else None)):
        check_optimizer(config.stage(name).optimizer, stage=name)


def _check_own_folders(config: RunConfig, reader: str) -> None:
    if latent_folder(config) == config.cache.dir:
        raise ConfigError(
            f"{reader} reads stores of fields, which stores of latents would replace",
            kind="same_folder",
            expected="another training.latent_cache_dir than cache.dir",
            found=str(config.cache.dir),
        )


def _has_given_encoder(config: RunConfig) -> bool:
    """Whether latents are those of another autoencoder than the one that this run would train."""
    own = config.checkpoint.dir / AUTOENCODER_FILE
    is_wanted = config.operator.state == "latent"
    return is_wanted and config.autoencoder_path.absolute() != own.absolute()


def _check_no_given_encoder(config: RunConfig) -> None:
    if _has_given_encoder(config):
        raise ConfigError(
            "stage joint trains an autoencoder, but latents are to be those of another one",
            kind="given_encoder",
            expected="stages.joint.epochs=0, or no latent.checkpoint",
            found=f"latent.checkpoint = {config.latent.checkpoint}",
        )


def _predicts_fields(config: RunConfig) -> bool:
    """Whether the operator's errors are of fields, as a baseline's are, and not of latents."""
    path = config.checkpoint.dir / OPERATOR_FILE
    return parse_simulator_spec(read_document(path, kind=OPERATOR), path).is_encoder_known


def _evaluate(
    configs: Sequence[RunConfig],
    checkpoints: Path,
    phases: dict[str, float],
    *,
    folder: Path,
    note: Note,
) -> dict[str, str]:
    """Write the report of `ups evaluate` to a folder."""
    first, runs = configs[0], []
    for config in configs:
        device = choose_device(config.training.device, note=note)
        simulator = load_simulator(config.checkpoint.dir / OPERATOR_FILE, device=str(device))
        baselines = find_baselines(config, simulator, note=note)
        runs.append(TrainedRun(simulator, config.seed, baselines, read_stage_logs(config, note=note)))
    report = evaluate(
        first,
        runs[0].simulator,
        split=daily_split(None, first.evaluation.split, note=note),
        baselines=runs[0].baselines,
        logs=runs[0].logs,
        other_seeds=runs[1:],
        phases=phases,
        note=note,
    )
    report = replace(report, test_uses=count_test_uses(checkpoints))
    return {kind: str(path) for kind, path in write_report(folder, report).items()}


def build_latents(
    config: RunConfig,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    is_first: bool,
    note: Note,
) -> dict[str, float]:
    """Build the stores of latents that the autoencoder in use makes; valid ones are kept.

    Args:
        config: Configuration of the run.
        config_path: The file that it was read from.
        overrides: `key=value` on top of that.
        is_first: Whether this is the first rank, which shows the command and writes the manifest.
        note: Told the command.

    Returns:
        `startup/cache_sec`, and `startup/cache_reused`, 1 if all stores were valid, else 0.

    Raises:
        UpsError: Kind "build", with the exit code of the build; its own message went to stderr.
        InterruptedTrainingError: On SIGTERM or SIGINT; what is committed stays.
    """
    manifest = config.checkpoint.dir / "latents.manifest.json"
    flags = ["--checkpoint", str(config.autoencoder_path)]
    flags += ["--cache-dir", str(latent_folder(config)), "--cache-dtype", config.training.latent_cache_dtype]
    flags += ["--manifest", str(manifest)] if is_first else []
    began = time.perf_counter()
    _run([*_command(config_path, overrides), *flags], note=note if is_first else discard)
    metrics = {"startup/cache_sec": time.perf_counter() - began}
    if is_first:
        stores = json.loads(own_manifest(manifest).read_text(encoding="utf-8"))["stores"]
        metrics["startup/cache_reused"] = float(all(store["reused"] for store in stores))
    return metrics


def build_fields(
    *, config_path: Path | None, overrides: Sequence[str], is_first: bool, note: Note
) -> dict[str, float]:
    """Build stores of the fields themselves; see `build_latents`. Returns `startup/field_cache_sec`."""
    began = time.perf_counter()
    command = _command(config_path, [*overrides, "latent.encoder=none"])
    _run(command, note=note if is_first else discard)
    return {"startup/field_cache_sec": time.perf_counter() - began}


def _command(config_path: Path | None, overrides: Sequence[str]) -> list[str]:
    config = [] if config_path is None else ["--config", str(config_path)]
    quiet = ["-q"] if terminal().quiet else []
    return [sys.executable, *BUILD, *quiet, *config, *overrides]


def _run(command: list[str], *, note: Note) -> None:
    """Run a command with its output on stderr, -q without its results; signals to stop go to it."""
    note(f"$ {shlex.join(['ups-store', 'build', *command[len(BUILD) + 1 :]])}")
    running: list[subprocess.Popen[bytes]] = []
    stopped_by: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        for process in running:
            process.send_signal(number)

    # Before the process is there: a signal between its start and ours would leave it behind.
    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # In a session of its own a Ctrl-C on the terminal reaches it once, through us.
        stdout = subprocess.DEVNULL if terminal().quiet else sys.stderr.fileno()  # only a step of the run
        running.append(subprocess.Popen(command, stdout=stdout, start_new_session=True))
        for number in stopped_by[:1]:
            running[0].send_signal(number)
        code = running[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != 0 and stopped_by:
        problem = f"stopped by {signal.Signals(stopped_by[0]).name} during a build of stores"
        raise InterruptedTrainingError(problem, kind="build_interrupted", continued_by=SAME_COMMAND)
    if code != 0:
        error = UpsError(
            f"the build of stores ended with exit code {code}",
            kind="build",
            hint="its own message stands above",
            continued_by=SAME_COMMAND,
        )
        error.exit_code = code if code > 0 else UpsError.exit_code
        raise error
