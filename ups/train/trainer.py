"""`Trainer`: the loop of every stage. One step is `Trainer.train_step`; the rest is when to look and save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ups.config import RunConfig
from ups.errors import InterruptedTrainingError
from ups.optim.ema import AveragedWeights
from ups.optim.optimizer import make_optimizer
from ups.optim.schedule import LearningRate
from ups.train.compiling import compiled_or_eager
from ups.train.interrupt import StopRequest, stop_on_signals
from ups.train.log import RunLog
from ups.train.meter import LossMeter, Stopwatch, diverged
from ups.train.stage import Stage
from ups.train.state import load_state, save_state


class Trainer:
    """Trains a stage.

    Order of wrapping: the optimiser takes the plain model's parameters; compilation changes only how the
    model is called.

    Args:
        stage: What to train.
        config: Configuration of the run.
        device: Where.
        restart: Begin anew although there is a state to continue from.
    """

    def __init__(
        self, stage: Stage, config: RunConfig, *, device: torch.device, restart: bool = False
    ) -> None:
        self.stage, self.config, self.device = stage, config, device
        self.settings = config.stage(stage.name)
        self.steps_per_epoch = self.settings.steps_per_epoch or max(
            1, stage.batches_per_pass // config.training.accum_steps
        )
        self.total_steps = self.steps_per_epoch * self.settings.epochs
        assert self.settings.optimizer.lr is not None
        self.optimizer = make_optimizer(stage.model.named_parameters(), self.settings.optimizer)
        self.learning_rate = LearningRate(
            self.settings.scheduler,
            peak=self.settings.optimizer.lr,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.settings.epochs,
        )
        decay = self.settings.ema_decay
        self.averaged = AveragedWeights(stage.model, decay=decay) if decay else None
        uses_fp16 = config.training.amp and config.training.amp_dtype == "float16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=uses_fp16)
        self.meter, self.stopwatch = LossMeter(), Stopwatch()
        self.step, self.best, self.bad_epochs = 0, math.inf, 0
        self.forward: Callable[..., Any] = stage.model
        self.state_path = config.checkpoint.dir / f"{stage.name}.training.safetensors"
        if self.state_path.exists() and not restart:
            self._restore()

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self.step // self.steps_per_epoch

    def train_step(self) -> None:
        """One optimiser step: gradients of `accum_steps` batches, clipped, applied, averaged."""
        accum_steps = self.config.training.accum_steps
        self.stage.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate.at(self.step)
        for number in range(self.step * accum_steps, (self.step + 1) * accum_steps):
            with self.stopwatch.waiting():
                batch = self.stage.batch(number)
            with self._autocast():
                losses = self.stage.losses(self.forward, batch)
            total = torch.stack(list(losses.values())).sum() / accum_steps
            self.scaler.scale(total).backward()
            self.meter.add(losses, step=self.step + 1)
            self.stopwatch.count(len(batch))
        self.scaler.unscale_(self.optimizer)
        if self.settings.grad_clip is not None:
            nn.utils.clip_grad_norm_(self.stage.model.parameters(), self.settings.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.averaged is not None:
            self.averaged.update()
        self.step += 1

    def fit(self) -> dict[str, Any]:
        """Train to the end, from wherever the run is, and report on what was exported.

        Raises:
            InterruptedTrainingError: On SIGTERM or SIGINT, once the state is saved.
            DivergedError: If a loss or the validation error isn't finite; nothing is saved after it.
        """
        log_path = self.config.training.log_path or self.config.checkpoint.dir / f"{self.stage.name}.jsonl"
        log = RunLog(log_path, stage=self.stage.name, total_steps=self.total_steps)
        with log, stop_on_signals() as stop:
            log.record("start", step=self.step, config=self.config.model_dump(mode="json"))
            log.note(_sizes(self.stage.model, self.total_steps, resumed_at=self.step))
            if self.config.training.compile:
                mode = self.config.training.compile_mode
                self.forward = compiled_or_eager(self.stage.model, mode=mode, note=log.note)
            while self.step < self.total_steps and not self._is_patience_over():
                self._run_epoch(log, stop)
            report = self.stage.finish()
            log.record("end", step=self.step, report=report)
        if not self.config.checkpoint.keep_training_state:
            self.state_path.unlink(missing_ok=True)
        return report

    def save(self) -> None:
        """Write the state that `fit` continues from."""
        position = {"step": self.step, "best": self.best, "bad_epochs": self.bad_epochs}
        save_state(
            self.state_path,
            model=self.stage.model,
            optimizer=self.optimizer,
            averaged=self.averaged,
            scaler=self.scaler,
            config=self.config,
            position={**position, "learning_rate": self.learning_rate.state()},
        )

    def _run_epoch(self, log: RunLog, stop: StopRequest) -> None:
        """Steps to the end of the present epoch, then validation."""
        began, every = time.perf_counter(), self.config.training.log_every
        interval = self.config.checkpoint.interval
        end = (self.epoch + 1) * self.steps_per_epoch
        while self.step < end:
            self.train_step()
            log.advance(self.step)
            is_save_due = interval is not None and self.step % interval == 0
            if self.step % every == 0 or self.step == end or is_save_due or stop.signal_name:
                losses = self._log_losses(log)  # raises if one isn't finite, so nothing bad is saved
            if stop.signal_name and self.step < end:
                self._interrupted(log, stop.signal_name)
            if is_save_due and self.step < end:
                self.save()
        metrics = self._validate()
        seconds = time.perf_counter() - began
        self.save()
        log.record(
            "epoch", step=self.step, epoch=self.epoch, **metrics, **{"training/epoch_time_sec": seconds}
        )
        shown = {"loss": sum(losses.values()), "nrmse": metrics["score"], "best": self.best, "s": seconds}
        log.epoch(self.epoch, self.settings.epochs, shown)
        if stop.signal_name and self.step < self.total_steps:
            self._interrupted(log, stop.signal_name)

    def _validate(self) -> dict[str, float]:
        """Metrics with the averaged weights where there are any; the best so far are exported."""
        self.stage.model.eval()
        if self.averaged is None:
            metrics = self._score_and_export()
        else:
            with self.averaged.in_place():
                metrics = self._score_and_export()
        self.learning_rate.end_epoch(metrics["score"])
        return metrics

    def _score_and_export(self) -> dict[str, float]:
        metrics = self.stage.validate()
        if not math.isfinite(metrics["score"]):
            raise diverged("validation error", self.step)
        if metrics["score"] < self.best:
            self.best, self.bad_epochs = metrics["score"], 0
            self.stage.export(metrics)
        else:
            self.bad_epochs += 1
        return metrics

    def _log_losses(self, log: RunLog) -> dict[str, float]:
        losses = self.meter.read()
        rates, lr = self.stopwatch.read(), self.optimizer.param_groups[0]["lr"]
        log.record("step", step=self.step, lr=lr, **{f"loss/{k}": v for k, v in losses.items()}, **rates)
        return losses

    def _interrupted(self, log: RunLog, signal_name: str) -> None:
        self.save()
        log.record("interrupted", step=self.step, signal=signal_name)
        raise InterruptedTrainingError(
            f"stopped by {signal_name} after step {self.step} of {self.total_steps}",
            path=self.state_path,
            hint="the same command continues",
        )

    def _is_patience_over(self) -> bool:
        return self.settings.patience is not None and self.bad_epochs >= self.settings.patience

    def _autocast(self) -> torch.autocast:
        training = self.config.training
        return torch.autocast(self.device.type, getattr(torch, training.amp_dtype), enabled=training.amp)

    def _restore(self) -> None:
        position = load_state(
            self.state_path,
            model=self.stage.model,
            optimizer=self.optimizer,
            averaged=self.averaged,
            scaler=self.scaler,
            config=self.config,
            stage=self.stage.name,
        )
        self.step, self.best = position["step"], position["best"]
        self.bad_epochs = position["bad_epochs"]
        self.learning_rate.restore(position["learning_rate"])


def _sizes(model: nn.Module, total_steps: int, *, resumed_at: int) -> str:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    resumed = f", continuing after step {resumed_at}" if resumed_at else ""
    return f"{num_parameters / 1e6:.2f} M parameters, {total_steps} steps{resumed}"
