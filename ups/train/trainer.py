"""`Trainer`: the loop of every stage. One step is `Trainer.train_step`; the rest is when to look and save."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ups.config import RunConfig
from ups.data.batches import endless
from ups.distributed.ranks import ALONE, Ranks
from ups.errors import GateMissedError, InterruptedTrainingError
from ups.optim import AveragedWeights, LearningRate, set_learning_rate
from ups.train.best import BestWeights
from ups.train.distributed import Agreement, ParallelLosses, share_out
from ups.train.flops import peak_flops, precision_of
from ups.train.interrupt import SAME_COMMAND, StallWatch, StopRequest, stop_on_signals
from ups.train.log import RunLog
from ups.train.meter import LossMeter, PeakMemory, StartupClock, StepClock, Work, diverged, memory_of
from ups.train.profile import StepProfile
from ups.train.saved_state import SavedState, check_batch, check_same, state_path
from ups.train.schedules import Schedule
from ups.train.stage import Stage, forward_of
from ups.train.state import (
    StateFiles,
    StateTensors,
    check_shared,
    load_state,
    remove_state,
    save_state,
)
from ups.train.tracking import EPOCH_SECONDS, GpuWatch, open_sinks

_SAVE_FAILED = 1 << 16  # what a rank brings along instead of a signal's number
GRADIENT_NORM = "training/gradient_norm"  # of the step that a line ends with, before it is clipped


class WaitEndedError(Exception):
    """Training waited for a batch, and was asked to stop."""


class Trainer:
    """Trains a stage.

    Order of wrapping: compilation changes only how the model is called; DDP wraps the stage's losses, or the
    parameters are sharded first (`share_out`); the optimiser and the averages take the plain model's
    parameters.

    Args:
        stage: What to train; on every rank the same, with the same weights.
        restart: Begin from scratch although there is a state to continue from.
        startup: Clock of the phases before the first step.
    """

    def __init__(
        self,
        stage: Stage,
        config: RunConfig,
        *,
        device: torch.device,
        restart: bool = False,
        ranks: Ranks = ALONE,
        startup: StartupClock | None = None,
    ) -> None:
        self.stage, self.config, self.device, self.ranks = stage, config, device, ranks
        self.settings = config.stage(stage.name)
        self.schedule = Schedule.of(
            self.settings, num_batches=len(stage.loader), accum_steps=config.training.accum_steps
        )
        self.steps_per_epoch, self.total_steps = self.schedule.steps_per_epoch, self.schedule.total_steps
        assert self.settings.optimizer.lr is not None
        stage.ranks = ranks
        self.log = RunLog(stage=stage.name, total_steps=self.total_steps, is_quiet=not ranks.is_first)
        shapes = share_out(
            stage,
            config.training,
            ranks=ranks,
            device=device,
            amp_dtype=getattr(torch, self.settings.amp_dtype or "") if self.settings.amp else None,
            compile_mode=self.settings.compile_mode if self.settings.compile else None,
        )
        self._parameters = list(stage.model.train().parameters())
        self.optimizer = stage.configure_optimizer(self.settings.optimizer)
        self.learning_rate = LearningRate(
            self.settings.scheduler,
            peak=self.settings.optimizer.lr,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )
        decay = self.settings.ema_decay
        self.averaged = AveragedWeights(stage.model, decay=decay) if decay else None
        uses_fp16 = self.settings.amp and self.settings.amp_dtype == "float16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=bool(uses_fp16))
        self.meter, self.stopwatch, self.gpu = LossMeter(ranks), StepClock(), GpuWatch(device)
        self.peak = PeakMemory(device)
        self._autocast = autocast_of(config, stage.name, device)
        precision = precision_of(self.settings, matmul_precision=config.training.matmul_precision)
        peak = partial(peak_flops, device, precision)
        self.work = Work(stage, autocast=self._autocast, peak=peak, ranks=ranks, shapes=shapes)
        self.startup, self.startup_metrics = startup or StartupClock(), dict[str, float]()
        self.step, self.gradient_norm = 0, torch.zeros(())
        self.wandb_id: str | None = None
        self.state_path = state_path(config, stage.name)
        self.profile = StepProfile(
            config.checkpoint.dir, stage=stage.name, device=device, log=self.log, is_first=ranks.is_first
        )
        self.watch = StallWatch(
            config.training.stall_timeout_s,
            path=config.checkpoint.dir / f"{stage.name}.stalled{f'.{ranks.rank}' if ranks.rank else ''}.txt",
            stage=stage.name,
            device=device,
            record=lambda text: self.log.record("stalled", step=self.step, error=text),
        )
        self.files = StateFiles(self.state_path, ranks=ranks, is_async=config.training.async_checkpoint)
        is_continuing = self.state_path.exists() and not restart
        self.best_weights = BestWeights(
            stage,
            config,
            validate=self._metrics,
            ranks=ranks,
            is_first_epoch_over=is_continuing and SavedState.read(self.state_path).is_first_epoch_over,
        )
        stage.compiled_model = forward = forward_of(stage, config)
        self._num_parts = stage.num_micro_batches
        accum_steps = config.training.accum_steps * self._num_parts
        self.losses = ParallelLosses(stage, forward, ranks=ranks, accum_steps=accum_steps)
        self._batches: Iterator[Any] | None = None
        if ranks.rank:
            torch.manual_seed(torch.initial_seed() + ranks.rank)  # dropout differs from rank to rank
        if is_continuing:
            self._restore()
        check_shared(self.state_path, step=self.step, ranks=ranks)

    @property
    def epoch(self) -> int:
        """Epochs that are over, the last one perhaps shorter."""
        is_over = self.step == self.total_steps
        return self.schedule.epochs if is_over else self.step // self.steps_per_epoch

    def train_step(self, *, is_stopping: Callable[[], bool] | None = None) -> None:
        """One optimiser step: gradients of `accum_steps` batches, clipped, applied, averaged.

        Args:
            is_stopping: Whether to give up waiting for the step's first batch; nothing has changed then.

        Raises:
            WaitEndedError: If it was given up.
        """
        with self.work.of_step():
            self._train_step(is_stopping)

    def _train_step(self, is_stopping: Callable[[], bool] | None) -> None:
        accum_steps = self.config.training.accum_steps
        if not self.stage.model.training:  # going through all modules takes a hundredth of a small step
            self.stage.model.train()
        set_learning_rate(self.optimizer, self.learning_rate.at(self.step))
        begin, end = self.step * accum_steps, (self.step + 1) * accum_steps
        for number in range(begin, end):
            with self.stopwatch.waiting(), self.profile.waiting():
                batch = self._batch(number, is_stopping=is_stopping if number == begin else None)
            parts = batch.split(self._num_parts) if self._num_parts > 1 else [batch]
            for place, part in enumerate(parts, 1):
                with self.losses.accumulating(is_last=number == end - 1 and place == len(parts)):
                    with self._autocast():
                        losses, share = self.losses(part)
                    # Ranks take the mean of their gradients; shares add up to 1.
                    weight = share * self.ranks.world_size / accum_steps
                    self.scaler.scale(reduce(add, losses.values()) * weight).backward()
                self.meter.add(losses, step=self.step + 1, share=share, is_rest=place > 1)
                self.work.add(part)
            self.stopwatch.count(batch.num_rows)
        self.scaler.unscale_(self.optimizer)
        self.gradient_norm = clipped(self._parameters, self.settings.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.averaged is not None:
            self.averaged.update()
        self.step += 1
        self.stage.after_step(self.step)

    def seek(self, step: int) -> None:
        """Go to a step without training up to it, as a measurement does."""
        self.step, self._batches = step, None

    def measure(self) -> dict[str, float]:
        """Metrics of the averaged weights where there are any; nothing is exported. A collective."""
        self.stage.model.eval()
        with self.averaged.in_place() if self.averaged is not None else nullcontext():
            return self._metrics()

    def fit(self) -> dict[str, Any]:
        """Train to the end, from wherever the run is, and report on what was exported.

        Raises:
            InterruptedTrainingError: On SIGTERM or SIGINT to any rank, once the state is saved.
            DivergedError: If a loss or the validation error isn't finite; nothing is saved after it.
            GateMissedError: As the stage's `finish`; numbers and limits are in the log.
        """
        log = self.log
        if self.ranks.is_first:
            log.sinks += open_sinks(self.config, self.stage.name, run_id=self.wandb_id)
            self.wandb_id = next((sink.run_id for sink in log.sinks if sink.run_id), None)
        with log, self.gpu, self.watch, self.profile, closing(self.stage.loader), stop_on_signals() as stop:
            log.record(
                "start",
                step=self.step,
                total_steps=self.total_steps,
                config=self.config.model_dump(mode="json"),
                global_batch_size=self.stage.loader.order.global_batch_size,
                effective_batch_size=self._rows_of_step,
                preparation_flops=self.stage.preparation_flops() if self.ranks.is_first else 0.0,
            )
            log.note(self._sizes())
            try:
                self._restore_export()
                report = self._train(stop)
                self.files.wait()
            except GateMissedError as error:
                said = {"verdicts": list(error.verdicts), "report": dict(error.report)}
                log.record("gate_missed", step=self.step, **said)
                raise
            finally:
                self.files.close()
                self.stage.close()  # first, or closing the loader waits for a batch that may never come
            exports = {str(path): kind for path, kind in self.stage.published().items() if path.exists()}
            early = {"ended_by": "patience"} if self.step < self.total_steps else {}
            log.record("end", step=self.step, report=report, exports=exports, **early, **self.peak.read())
        if not self.config.checkpoint.keep_training_state and self.ranks.is_first:
            remove_state(self.state_path)
        return dict(report)

    def save(self) -> None:
        """Write the state that `fit` continues from, or let it be written; a collective."""
        own, own_tensors = _parted(self.stage.state())
        save_state(
            self.files,
            self._tensors(own_tensors),
            scaler=self.scaler,
            config=self.config,
            data_identity=self.stage.data_identity(),
            position={
                "step": self.step,
                "global_batch_size": self.stage.loader.order.global_batch_size,
                **self.best_weights.state(),
                "learning_rate": self.learning_rate.state(),
                "wandb_id": self.wandb_id,
                "stage": own,
                "work": self.work.read(),
            },
            is_over=self._is_over(),
            ema_updates=self.averaged.num_updates if self.averaged is not None else 0,
            ranks=self.ranks,
        )

    def _batch(self, number: int, *, is_stopping: Callable[[], bool] | None) -> Any:
        """The batch of a number; numbers are asked for one after another."""
        if self._batches is None:
            self._batches = endless(self.stage.loader, number)

        def give_up() -> None:
            if is_stopping is not None and is_stopping():
                raise WaitEndedError

        self.stage.loader.on_wait = give_up
        return next(self._batches)

    def _train(self, stop: StopRequest) -> Any:
        """The remaining epochs, and the stage's report."""
        agreement = Agreement(self.ranks)
        while not self._is_over():
            self._run_epoch(stop, agreement)
        agreement.end()
        self.watch.rest()
        if self.step < self.total_steps:
            why = f"no epoch was better than {self.settings.patience} before"
            self.log.note(f"ended by patience after step {self.step} of {self.total_steps}: {why}")
        return self.stage.finish()

    def _run_epoch(self, stop: StopRequest, agreement: Agreement) -> None:
        """Steps to the end of the present epoch, then validation."""
        began, every = time.perf_counter(), self.config.training.log_every
        interval = self.config.checkpoint.interval
        end, logged = min((self.epoch + 1) * self.steps_per_epoch, self.total_steps), self.step
        # Ranks have to stop after the same step: one alone can't give up.
        is_stopping = (lambda: stop.number > 0) if self.ranks.world_size == 1 else None
        while self.step < end:
            self.watch.expect("step", after=self.step)
            try:
                self.train_step(is_stopping=is_stopping)
            except WaitEndedError:
                if self.step > logged:
                    self._log_losses()
                self._interrupted(stop.number)
            if not self.startup_metrics:
                self._started(seconds=time.perf_counter() - began)
            if self.profile.is_on:
                self.watch.rest()  # writing a trace takes as long as it takes
                self.profile.after_step(self.step, is_last_of_epoch=self.step == end)
            self.log.advance(self.step)
            is_save_due = interval is not None and self.step % interval == 0
            number = self._agreed(agreement, stop)
            if self.step % every == 0 or self.step == end or is_save_due or number:
                losses = self._log_losses()  # raises if one isn't finite, so nothing bad is saved
                logged = self.step
            if number and self.step < end:
                self._interrupted(number)
            if is_save_due and self.step < end:
                self.watch.expect("saving", after=self.step)
                self.save()
        self.watch.expect("validation", after=self.step)
        metrics = self._validate()
        seconds = time.perf_counter() - began
        self.watch.expect("saving", after=self.step)
        self.save()
        work = self.work.read()
        self.log.record(
            "epoch",
            step=self.step,
            epoch=self.epoch,
            **metrics,
            **work,
            **{EPOCH_SECONDS: seconds},
            **self.gpu.end_epoch(),
            **self.peak.read(),
        )
        shown = {"loss": sum(losses.values()), self.stage.score_name: metrics["score"]}
        shown |= {"best": self.best_weights.score, "s": seconds}
        self.log.epoch(self.epoch, self.schedule.epochs, shown)
        self.stopwatch.skip()
        number = self._agreed(agreement, stop)
        if number and self.step < self.total_steps:
            self._interrupted(number)

    def _agreed(self, agreement: Agreement, stop: StopRequest) -> int:
        """Number of a signal that some rank got before; raises on every rank if a state can't be written."""
        number = agreement(_SAVE_FAILED if self.files.has_failed else stop.number)
        if number == _SAVE_FAILED:
            self.files.wait()
        return number

    def _validate(self) -> dict[str, float]:
        """Metrics of the averaged weights where there are any; the best so far are exported."""
        self.stage.model.eval()
        with self.averaged.in_place() if self.averaged is not None else nullcontext():
            metrics = self._metrics()
            if not math.isfinite(metrics["score"]):
                raise diverged("validation error", self.step)
            self.best_weights.take(metrics, step=self.step)
        self.learning_rate.end_epoch(metrics["score"])
        return metrics

    def _metrics(self) -> dict[str, float]:
        """Of the present weights. Autocast keeps what it cast while it is on, so it is on for these alone."""
        with self._autocast():
            return self.stage.validate()

    def _log_losses(self) -> dict[str, float]:
        losses, work = self.meter.read(), self.work.read()
        rates, lr = self.stopwatch.read(), self.learning_rate.at(self.step - 1)
        rates |= self.work.utilization(self.stopwatch.seconds)
        rates[GRADIENT_NORM] = self.gradient_norm.item()
        self.log.losses(
            losses,
            step=self.step,
            lr=lr,
            rates={**rates, **work, **self.gpu.read(), **memory_of(self.device)},
        )
        return losses

    def _started(self, *, seconds: float) -> None:
        """The first step is over: log what the time until then went to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.startup.take({"startup/first_step_sec": seconds})
        self.startup_metrics = self.startup.end()
        self.log.record("startup", step=self.step, **self.startup_metrics)

    def _interrupted(self, number: int) -> None:
        self.watch.expect("saving", after=self.step)
        self.save()
        self.files.wait()
        name = signal.Signals(number).name
        self.log.record("interrupted", step=self.step, signal=name)
        where = f"stopped by {name} after step {self.step} of {self.total_steps}"
        raise InterruptedTrainingError(
            f"stage {self.stage.name} was {where}, and is saved in {self.state_path}",
            continued_by=SAME_COMMAND,
        )

    def _restore_export(self) -> None:
        """Export again what is lost of what was exported before, as far as the state has it."""
        if self.best_weights.step is None:
            return
        self.stage.model.eval()
        with self.averaged.in_place() if self.averaged is not None else nullcontext():
            self.best_weights.export_lost(self.step, is_over=self._is_over(), state_path=self.state_path)

    def _is_over(self) -> bool:
        return self.step >= self.total_steps or self._is_patience_over()

    def _is_patience_over(self) -> bool:
        return self.settings.patience is not None and self.best_weights.bad_epochs >= self.settings.patience

    def _restore(self) -> None:
        own_tensors = _parted(self.stage.state())[1]
        position, own_tensors = load_state(
            self.state_path,
            self._tensors(own_tensors),
            scaler=self.scaler,
            config=self.config,
            data_identity=self.stage.data_identity(),
            stage=self.stage.name,
            ranks=self.ranks,
        )
        rows = self.stage.loader.order.global_batch_size
        check_batch(self.state_path, position, rows=rows, num_ranks=self.ranks.world_size)
        self.step, self.wandb_id = position["step"], position["wandb_id"]
        if self.step > self.total_steps:
            length = f"{self.step} steps were made, and it would end after {self.total_steps}"
            check_same(self.state_path, "configuration", [f"stages.{self.stage.name} is shorter: {length}"])
        self.best_weights.restore(position)
        self.learning_rate.restore(position["learning_rate"])
        self.work.restore(position["work"])
        self.stage.restore(position["stage"] | own_tensors)

    def state_nbytes(self) -> int:
        """Bytes of weights, buffers, averages and the optimiser's state, as they lie on this rank."""
        tensors = [*self.stage.model.parameters(), *self.stage.model.buffers()]
        tensors += self._tensors(_parted(self.stage.state())[1]).now().values()
        return sum({part.data_ptr(): part.nbytes() for part in map(_storage, tensors)}.values())

    @property
    def _rows_of_step(self) -> int:
        """Rows of an optimiser step, over all batches and ranks; fewer where a pass ends."""
        return self.stage.loader.order.global_batch_size * self.config.training.accum_steps

    def _sizes(self) -> str:
        trained = (parameter for parameter in self.stage.model.parameters() if parameter.requires_grad)
        num_parameters = sum(parameter.numel() for parameter in trained)
        ranks, accum_steps = self.ranks.world_size, self.config.training.accum_steps
        rows = f"{self._rows_of_step} rows"
        if ranks * accum_steps > 1:
            rows += (
                f" ({self._rows_of_step / (ranks * accum_steps):g} x {ranks} ranks x {accum_steps} batches)"
            )
        how = f", {self.config.training.parallel}" if ranks > 1 else ""
        resumed = f", continuing after step {self.step}" if self.step else ""
        resumed = ", trained already" if self.step >= self.total_steps else resumed
        steps = f"{self.total_steps} steps of {rows}"
        return f"{num_parameters / 1e6:.2f} M parameters, {steps}{how}{resumed}"

    def _tensors(self, own: Mapping[str, Tensor]) -> StateTensors:
        return StateTensors(
            model=self.stage.model, optimizer=self.optimizer, averaged=self.averaged, stage=own
        )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage()


def clipped(parameters: Sequence[Tensor], most: float | None) -> Tensor:
    """The norm of the gradients, which are then at most that long; of all ranks alike, on the device."""
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if most is not None:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def autocast_of(config: RunConfig, stage: str, device: torch.device) -> Callable[[], torch.autocast]:
    """What a stage's forward passes are made in, with the precision of its `amp`."""
    settings = config.stage(stage)
    assert settings.amp_dtype is not None
    dtype = getattr(torch, settings.amp_dtype)
    # A second pass looks for the operations of the first, of which a cache of weights leaves some out.
    cache_enabled = False if config.training.activation_checkpointing == "selective" else None
    return partial(
        torch.autocast, device.type, dtype, enabled=bool(settings.amp), cache_enabled=cache_enabled
    )


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON values, and tensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value for name, value in state.items() if name not in tensors}, tensors
