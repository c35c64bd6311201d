"""A copy of a run in a folder that is removed again: few samples, an untrained encoder, steps that are timed.

Stages are the real ones. Everything that they write goes there, so a run's own folders stay as they are.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from ups.config import RunConfig, load_config
from ups.data.batches import batch_size_of
from ups.data.held_out import divided
from ups.data.stores import latent_build, latent_folder
from ups.device import free_memory, matmul_precision
from ups.errors import needs
from ups.log import quiet
from ups.pipeline.planned import ALONE, PlannedRanks, rollouts_of
from ups.pipeline.sources import TaskSources
from ups.stages import ENCODER_MODEL, STAGES, Model
from ups.train.budget import seconds_of_step, within_budget
from ups.train.stage import Stage, StageStart, make_stage
from ups.train.trainer import Trainer
from ups_store.build import Watcher, build_all

with needs("train"):
    import torch
    from torch import Tensor

_IN_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # in memory, else the folder lies on the disk
_WARM_UP = 2  # steps before those that are timed; the first one compiles
_LEAST_SAMPLES = 4  # half of a validation split is of the development split
_WITH_RESIDUALS = [stage for stage in STAGES.values() if stage.learns == "residuals"]
_ON_DATA = [stage for stage in STAGES.values() if stage.learns in ("codes", "steps")]


@dataclass(frozen=True)
class Measured:
    """What steps of a stage took.

    Attributes:
        first_step_s: Of the first one, with compilation.
        step_s: Mean of the others.
        memory_bytes: Peak of the device, or of this process where a CPU trains; of one rank of several.
        saved_bytes: Of its exported model and its training state.
        steps: Optimiser steps of its budget; None where it has none.
    """

    first_step_s: float
    step_s: float
    memory_bytes: int
    saved_bytes: int
    steps: int | None = None


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder, in memory where there is room, which is removed at the end of the block."""
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM
    with tempfile.TemporaryDirectory(prefix="ups-dry-run-", dir=_IN_MEMORY if has_room else None) as name:
        yield Path(name)


class Scratch:
    """A run's stages in a folder of their own.

    Args:
        config_path: The file that it was read from.
        tasks: Its sources.
        folder: Where everything goes.
        trained: Names of the stages that would be trained. Others' models are taken as they are.
        ranks: That will train together; one of them is measured.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        config_path: Path | None,
        overrides: Sequence[str],
        tasks: Mapping[str, TaskSources],
        folder: Path,
        trained: Collection[str],
        ranks: PlannedRanks = ALONE,
    ) -> None:
        self._ranks, self._own, self._folder = ranks, config, folder
        self._has_sources = all({"train", "val"} <= task.builds.keys() for task in tasks.values())
        made = {model for name in trained if name in STAGES for model in STAGES[name].makes}
        there = {model for model in _needed_models() if config.is_given(model) or model not in made}
        # An encoder that isn't there is made for it; what is to be corrected is there, or checked.
        there -= set() if config.autoencoder_path.exists() else {ENCODER_MODEL}
        models = {model: config.path_of(model).absolute() for model in there}
        diffusion, training = config.diffusion, config.training
        rows = max(batch_size_of(config.stage(stage.name)) for stage in _WITH_RESIDUALS)
        values: dict[str, Any] = {
            "checkpoint.dir": str(folder / "checkpoints"),
            "training.log_path": str(folder / "log.jsonl"),
            "logging.wandb.enabled": False,
            "logging.tensorboard.enabled": False,
            "evaluation.enabled": False,
            "data.split": ["train", "val"],
            "data.limit": samples_needed(config, tasks),
            "data.source_digest": "sampled",
            "cache.codec": "none",
            "cache.remote": None,
            **{model.key: None for model in _needed_models() if model.key is not None},
            **{model.key: str(path) for model, path in models.items() if model.key is not None},
            # Enough residuals and pairs for whole batches, drawn by the fewest steps.
            "diffusion.residual_dir": None,
            "diffusion.num_pairs": min(diffusion.num_pairs, rows + diffusion.lead_times),
            "diffusion.sampler": "euler",
            "diffusion.num_sampler_steps": 1,
            "training.distill_pair_dir": None,
            "training.distill_num_pairs": min(training.distill_num_pairs, rows),
            "training.latent_cache_dir": str(latent_folder(config)),  # what is there is read
        }
        if self._has_sources:
            values |= {"cache.dir": str(folder / "fields"), "training.field_source": "store"}
            values |= {"training.latent_cache_dir": str(folder / "latents")}
        if not self._has_sources or training.cache_mode in ("auto", "memory"):
            values["training.cache_mode"] = "store"  # as when all latents are there
        if ranks.num > 1:  # one rank's rows of batches that are given over all of them
            sizes = {"training": training.global_batch_size}
            sizes |= {f"stages.{name}": stage.global_batch_size for name, stage in config.stages.items()}
            for section, size in sizes.items():
                if size is not None:
                    values[f"{section}.global_batch_size"] = max(1, size // ranks.num)
        words = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
        with quiet():
            self.config = load_config(config_path, overrides=words)
        for model, path in models.items():  # no key says where these are
            if model.key is None and path.exists():
                link = self.config.path_of(model)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)

    def with_own_paths(self, text: str) -> str:
        """What is said of a file of this folder, as of the one of the run that it stands for."""
        own = {"checkpoints": self._own.checkpoint.dir, "fields": self._own.cache.dir}
        own["latents"] = latent_folder(self._own)
        for name, path in own.items():
            text = text.replace(str(self._folder / name), str(path))
        return text

    def build_fields(self) -> None:
        """Build stores of the few samples, where there are sources."""
        if self._has_sources:
            build_all(self.config.build, watcher=Watcher())

    def build_latents(self, device: torch.device) -> None:
        """Encode them, where stores are what the operator reads."""
        if self._has_sources and self.config.training.cache_mode == "store":
            config = latent_build(
                self.config, autoencoder_path=self.config.autoencoder_path, device=str(device)
            )
            build_all(config, watcher=Watcher())

    def measure(self, name: str, config: RunConfig, *, device: torch.device, num_steps: int) -> Measured:
        """Make a stage, take some steps, and leave its model, as untrained as that is, to the next ones.

        Args:
            config: The scratch's own, or what is made of it.
            num_steps: How many are timed.
        """
        free_memory(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with quiet(), matmul_precision(self.config.training.matmul_precision):
            config = within_budget(name, config, device=device, is_continued=False)
            stage = make_stage(name, config, device=device, start=StageStart())
            try:
                measured = _measured(stage, config, self._ranks, device=device, num_steps=num_steps)
                if _needed_models() & {*STAGES[name].makes}:
                    left = stage.export({"score": math.inf}, stage.model.state_dict())
                    # A generative model has another name until it has passed its gates.
                    left.rename(left.with_name(left.name.replace(".candidate.", ".")))
            finally:
                stage.close()
                stage.loader.close()
        steps = config.stage(name).steps
        if config.stage(name).budget is None or steps is None:
            return measured
        return replace(measured, steps=self._ranks.steps_of(steps))


def _needed_models() -> set[Model]:
    """Models that later stages need, also those of your own."""
    return {model for stage in STAGES.values() for model in stage.needs}


def _measured(
    stage: Stage, config: RunConfig, ranks: PlannedRanks, *, device: torch.device, num_steps: int
) -> Measured:
    weights = _nbytes(stage.model.state_dict())
    if stage.is_untrained:
        return Measured(0.0, 0.0, _peak(device), weights)
    trainer = Trainer(stage, config, device=device, restart=True)
    grows = bool(stage.curriculum.share)  # rollouts do, over the training: then steps are spread over it
    seconds = [
        seconds_of_step(
            trainer,
            share=(max(0, number) + 0.5) / num_steps if grows else None,
            clock=time.perf_counter,
        )
        for number in range(-_WARM_UP, num_steps)
    ]
    trained = {name: weight for name, weight in stage.model.named_parameters() if weight.requires_grad}
    averages = _nbytes(trained) if trainer.averaged is not None else 0
    moments = sum(map(_nbytes, trainer.optimizer.state.values()))
    saved = 2 * weights + averages + moments  # exported, and in the training state
    shared = 2 * _nbytes(trained) + averages + moments  # gradients are as large as what is trained
    memory = ranks.memory_of_rank(_peak(device), states=shared)
    return Measured(seconds[0], mean(seconds[_WARM_UP:]), memory, saved)


def samples_needed(config: RunConfig, tasks: Mapping[str, TaskSources]) -> int:
    """Count samples of a split that give whole batches to every stage."""
    batch = max(batch_size_of(config.stage(stage.name)) for stage in _ON_DATA)
    span, most = config.training.horizon * config.training.stride, _LEAST_SAMPLES
    named = [stage.name for stage in _WITH_RESIDUALS if stage.name in config.stages]
    rows = max((batch_size_of(config.stage(name)) for name in named), default=0)
    for task in tasks.values():
        windows = max(1, task.num_times - span) if task.info is not None and not task.info.steady else 1
        most = max(most, math.ceil(batch / windows))
        if not rows:
            continue
        # Of a validation split, half of it "dev", as many as give a corrector its rows, and one to check it.
        starts, lead_times = rollouts_of(config, task)
        wanted = max(2, math.ceil(rows / max(1, starts * lead_times)))
        num, there = wanted + 1, (task.num_samples("val") + 1) // 2
        while num < there:
            parts = divided(num, config.diffusion.residual_share)
            if len(parts["fit"]) >= wanted and len(parts["check"]) >= 1:
                break
            num += 1
        most = max(most, 2 * num)
    return most


def _nbytes(tensors: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in tensors.values() if isinstance(value, Tensor))


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
