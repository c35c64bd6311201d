"""What an A/B comparison compares: variants of a configuration, and each in training beside the others.

A variant is a configuration, or it with switches of another, one by one and all. A switch changes how a step
is computed, not what is learnt; those that mean something together only, such as `training.amp` and its
dtype, are one. Whatever else differs, such as batches or losses, is in the last variant, the other
configuration itself; data and validation have to be the same. Contenders train a few steps at a time in one
process, each with its own model, optimiser, averages, batches and random numbers, all from the same seed: so
the others change nothing of what it computes. Time, memory and losses are measured by round.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ups.config import RunConfig, load_config
from ups.config.stage_keys import flat_keys
from ups.data.batches import batch_size_of
from ups.device import matmul_precision
from ups.errors import ConfigError, DivergedError
from ups.log import quiet
from ups.train.budget import with_steps
from ups.train.meter import is_out_of_memory
from ups.train.stage import make_stage
from ups.train.trainer import Trainer

_LAST = 0.1  # of the rounds: their mean loss is the loss at the end


@dataclass
class Measured:
    """What was measured of a contender.

    Attributes:
        step_s: Wall time of a step, by round.
        processor_s: Processor time of a step, by round; threads that prepare batches are in it.
        losses: Mean total loss, by round.
        warm_up_s: Wall time of the first steps, with what they compile.
        first_step_s: Of the very first one.
        peak_nbytes: Memory at the fullest moment of a step; None if it couldn't be measured.
        waiting_share: Share of the steps' time that was spent waiting for batches, by round.
        nrmse: Validation error after the last step; None until then.
        failure: Why it was given up; None if it wasn't.
    """

    step_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warm_up_s: float = 0.0
    first_step_s: float = 0.0
    peak_nbytes: int | None = None
    waiting_share: list[float] = field(default_factory=list)
    nrmse: float | None = None
    failure: str | None = None

    @property
    def loss(self) -> float | None:
        """Mean over the last tenth of the rounds; None before the first."""
        last = self.losses[-max(1, round(_LAST * len(self.losses))) :]
        return sum(last) / len(last) if last else None


class Contender:
    """A variant in training; a context manager that ends what it opened.

    Args:
        steps: Optimiser steps in all.

    Attributes:
        measured: So far.
        rows: Samples of an optimiser step.
    """

    def __init__(self, variant: Variant, *, stage: str, steps: int, device: torch.device) -> None:
        self.variant, self.measured = variant, Measured()
        self.rows = rows_of_step(variant, stage)
        self._config = with_steps(variant.config, stage, steps)
        self._device, self._stage_name = device, stage
        self._gpus = [device] if device.type == "cuda" else []
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        self._stack = ExitStack()
        self._trainer: Trainer | None = None

    def __enter__(self) -> Contender:
        with self._alone():
            with quiet():  # all say the same of their data
                stage = make_stage(self._stage_name, self._config, device=self._device)
            self._stack.callback(stage.close)
            self._stack.enter_context(closing(stage.loader))
            self._trainer = Trainer(stage, self._config, device=self._device, restart=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer = None
        self._stack.close()

    @property
    def is_running(self) -> bool:
        """Whether it hasn't failed."""
        return self.measured.failure is None

    def warm_up(self, num_steps: int) -> None:
        """The first steps, whose time counts apart; memory is measured at the last of them."""
        assert num_steps > 1

        def work(trainer: Trainer) -> None:
            began = time.perf_counter()
            self._steps(trainer, 1)
            self.measured.first_step_s = time.perf_counter() - began
            self._steps(trainer, num_steps - 2)
            self.measured.warm_up_s = time.perf_counter() - began
            resident = trainer.state_nbytes()
            self.measured.peak_nbytes = resident + peak_nbytes(lambda: self._steps(trainer, 1), self._device)
            trainer.meter.read()

        self._try(work)

    def round(self, num_steps: int) -> None:
        """Some steps, timed."""

        def work(trainer: Trainer) -> None:
            trainer.stopwatch.skip()
            wall, processor = time.perf_counter(), time.process_time()
            self._steps(trainer, num_steps)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            waiting = trainer.stopwatch.read()["training/data_wait_share"]
            losses = trainer.meter.read()
            self.measured.step_s.append(wall / num_steps)
            self.measured.processor_s.append(processor / num_steps)
            self.measured.waiting_share.append(waiting)
            self.measured.losses.append(sum(losses.values()))

        self._try(work)

    def validate(self) -> None:
        """Measure the validation error of the present weights."""

        def work(trainer: Trainer) -> None:
            self.measured.nrmse = trainer.measure()["score"]

        self._try(work)

    def _steps(self, trainer: Trainer, num: int) -> None:
        for _ in range(num):
            trainer.train_step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _try(self, work: Callable[[Trainer], None]) -> None:
        """What ends this contender ends none of the others."""
        assert self._trainer is not None
        try:
            with self._alone():
                work(self._trainer)
        except DivergedError as error:
            self._give_up(str(error.problem))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._give_up("out of memory: " + str(error).partition("\n")[0])

    def _give_up(self, why: str) -> None:
        self.measured.failure = why
        self.__exit__()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, random numbers and the precision of products are its own."""
        precision = self._config.training.matmul_precision
        with ExitStack() as stack:
            with quiet():
                stack.enter_context(matmul_precision(precision))
            stack.enter_context(torch.random.fork_rng(devices=self._gpus))
            torch.set_rng_state(self._random[0])
            for gpu, state in zip(self._gpus, self._random[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield
            self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]


def rows_of_step(variant: Variant, stage: str) -> int:
    """Samples of an optimiser step."""
    return batch_size_of(variant.config.stage(stage)) * variant.config.training.accum_steps


def peak_nbytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that PyTorch's allocator gave out during some work, beyond those of its beginning.

    On a GPU it is what the allocator counts; on the CPU its calls, as PyTorch's profiler records them.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else the profiler's library writes to stderr
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    now = most = 0
    for _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most


BASELINE, TOGETHER, OPTIMIZED = "baseline", "together", "optimized"
_MOST_SHOWN = 8  # refused keys in one message

# Keys that an A/B comparison switches, and the first of those that go together with each; "*" is any stage.
SWITCHED_TOGETHER = {
    "training.amp": "training.amp",
    "training.amp_dtype": "training.amp",
    "training.matmul_precision": "training.matmul_precision",
    "training.compile": "training.compile",
    "training.compile_mode": "training.compile",
    "training.compile_regions": "training.compile",
    "stages.*.compile": "training.compile",
    "stages.*.compile_mode": "training.compile",
    "stages.*.amp": "training.amp",
    "stages.*.amp_dtype": "training.amp",
    "operator.attention": "operator.attention",
    "training.cpu_offload_optimizer": "training.cpu_offload_optimizer",
    "stages.*.optimizer.cpu_offload": "training.cpu_offload_optimizer",
    "training.activation_checkpointing": "training.activation_checkpointing",
    "training.pin_memory": "training.pin_memory",
    "training.prefetch_factor": "training.prefetch_factor",
    "training.preload": "training.preload",
    "training.inverse_loss_frequency": "training.inverse_loss_frequency",
    "training.query_sampling.num_queries": "training.query_sampling",
    "training.query_sampling.curriculum.enabled": "training.query_sampling",
    "training.query_sampling.curriculum.start_queries": "training.query_sampling",
    "training.query_sampling.curriculum.share": "training.query_sampling",
    "stages.*.optimizer.implementation": "optimizer.implementation",
}
# What no step depends on: the baseline's holds for all.
_IRRELEVANT = (
    *("checkpoint.", "logging.", "evaluation.", "ttc.", "baselines.", "reading.", "seed"),
    *("training.log_", "training.patience", "training.num_workers", "training.use_parallel_encoding"),
    *("training.rank_timeout_s", "training.stall_timeout_s", "training.latent_cache_dir", "cache."),
    *("training.compile_cache", "training.async_checkpoint"),
)
# What all are trained and validated on.
_SAME = ("data.", "training.stride", "training.max_val_frames", "operator.val_trajectories")
# What the loss is of: it isn't compared where one of these differs.
_OF_LOSS = (
    *("training.losses", "training.rollout_loss", "training.reconstruction_loss", "training.lambda_"),
    *("training.physics_priors", "training.use_inverse_losses", "training.inverse_loss"),
    *("training.horizon", "training.pushforward", "operator.state", "encoder.", "latent."),
)
# Of a stage: how long it is trained, which the comparison says itself.
_LENGTH = ("epochs", "steps_per_epoch", "steps", "budget", "patience")
# Switches that a stage takes from `training` where it says nothing itself.
_OF_TRAINING = ("amp", "amp_dtype", "compile", "compile_mode", "optimizer.cpu_offload")


@dataclass(frozen=True)
class Variant:
    """One configuration of a comparison.

    Attributes:
        name: "baseline", "together", "optimized", or what is switched.
        switches: Keys with values that differ from the baseline's.
        config: The run's configuration.
    """

    name: str
    switches: Mapping[str, Any]
    config: RunConfig

    @property
    def has_same_loss(self) -> bool:
        """Whether its loss is a number of the same kind as the baseline's."""
        return not any(key.startswith(_OF_LOSS) and _unit(key) is None for key in self.switches)


def make_variants(
    baseline: Path | None,
    optimized: Path | None,
    *,
    overrides: Sequence[str],
    only_optimized: Sequence[str],
    stage: str,
) -> list[Variant]:
    """The baseline, it with every switch of the other configuration by itself, and it with all of them.

    Args:
        baseline: YAML file or name of a shipped configuration.
        optimized: The other one.
        overrides: `key=value` of both.
        only_optimized: `key=value` of the other one alone.
        stage: Whose steps are compared.
    """
    first = load_config(baseline, overrides=overrides)
    second = load_config(optimized, overrides=[*overrides, *only_optimized])
    units, others = differences(first, second, stage=stage)
    together = {key: value for unit in units.values() for key, value in unit.items()}
    variants = {BASELINE: dict[str, Any]()}
    if len(units) > 1 or others:
        variants |= {name_of(unit): unit for unit in units.values()}
    if not others:
        variants[TOGETHER if len(units) > 1 else name_of(together)] = together
    made = [
        Variant(name, switches, _load(baseline, [*overrides, *as_overrides(switches)]))
        for name, switches in variants.items()
    ]
    if others:
        folders = {"cache.dir": str(first.cache.dir), "checkpoint.dir": str(first.checkpoint.dir)}
        latents = first.training.latent_cache_dir
        own = {**folders, "training.latent_cache_dir": latents and str(latents), "seed": first.seed}
        config = _load(optimized, [*overrides, *only_optimized, *as_overrides(own)])
        made.append(Variant(OPTIMIZED, together | others, config))
    return made


def differences(
    first: RunConfig, second: RunConfig, *, stage: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What the second configuration has otherwise: keys and values of switches by unit, and of the rest.

    Raises:
        ConfigError: As `make_variants`.
    """
    before, now = (dict(_relevant(config, stage)) for config in (first, second))
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [key for key in differing if key.startswith(_SAME)]
    if refused:
        shown = "; ".join(f"{key} is {before.get(key)} and {now.get(key)}" for key in refused[:_MOST_SHOWN])
        more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        raise ConfigError(
            f"the configurations differ in data or validation: {shown}{more}",
            kind="not_comparable",
            hint="make these equal, on the command line for both",
        )
    units: dict[str, dict[str, Any]] = {}
    others = {key: now.get(key) for key in differing if _unit(key) is None}
    for key in differing:
        if (unit := _unit(key)) is not None:
            units.setdefault(unit, {})[key] = now[key]
    if not differing:
        raise ConfigError(
            f"the configurations don't differ in what stage {stage} does",
            kind="no_difference",
            hint="give another --optimized, or --set such as training.compile=true",
        )
    return units, others


def name_of(switches: Mapping[str, Any]) -> str:
    """Switches as people would type them, such as "training.compile=true"."""
    return " ".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in switches.items())


def as_overrides(switches: Mapping[str, Any]) -> list[str]:
    """`key=value`, which a command takes; JSON is YAML, and its "off" isn't false."""
    return [f"{key}={json.dumps(value)}" for key, value in switches.items()]


def _load(source: Path | None, overrides: Sequence[str]) -> RunConfig:
    with quiet():  # what is to be said was said before
        return load_config(source, overrides=overrides)


def _relevant(config: RunConfig, stage: str) -> Iterator[tuple[str, Any]]:
    """Keys that a step of the stage may depend on."""
    own = f"stages.{stage}."
    for key, value in flat_keys(config.model_dump(mode="json")).items():
        if not key.startswith(("stages.", *_IRRELEVANT)):
            yield key, value
    # As it is in effect, be it said of the stage, of `training`, or nowhere.
    for key, value in flat_keys(config.stage(stage).model_dump(mode="json"), own).items():
        name = key.removeprefix(own)
        if not (name.startswith(_LENGTH) or (name in _OF_TRAINING and not _says(config, stage, name))):
            yield key, value


def _says(config: RunConfig, stage: str, name: str) -> bool:
    """Whether the configuration says a switch of the stage itself; else it is that of `training`."""
    said = config.stages.get(stage)
    return said is not None and flat_keys(said.model_dump(mode="json")).get(name) is not None


def _unit(key: str) -> str | None:
    """The switch that a key belongs to; None of other keys."""
    parts = key.split(".")
    return SWITCHED_TOGETHER.get(".".join(["stages", "*", *parts[2:]]) if parts[0] == "stages" else key)
