"""`Stage`: what the trainer asks of one, the stages by name, and how a model is called in training.

And what stages of rollouts do with a batch: cut it to the curriculum's length, add noise, push it forward.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ups.config import OptimizerConfig, RunConfig
from ups.data.batches import Loader, WindowBatch
from ups.data.stores import Store
from ups.device import with_compiled, with_compiled_blocks
from ups.distributed.ranks import ALONE
from ups.distributed.sharding import ShardedPart, blocks_of, is_sharded, shard_part
from ups.errors import ConfigError, did_you_mean
from ups.log import logger
from ups.nn.activation_checkpointing import set_activation_checkpointing
from ups.nn.shifted_window import MIN_HEAD_CHANNELS, Attention, ShiftedWindowAttention, set_attention
from ups.optim import ParameterGroup, make_optimizer, muon_matrices, parameter_groups
from ups.stages import STAGES, StageFacts
from ups.trained.checkpoint import check_whole

if TYPE_CHECKING:
    from ups.train.physics_priors import PhysicsPriors

Losses = dict[str, Tensor]
GradientsOfBatch = Literal["all", "the same", "some"]

ALL = "all"  # autoencoder or joint, stores of latents, operator: `ups.pipeline.training`


@dataclass(frozen=True)
class Curriculum:
    """Rollouts that grow while training lasts.

    Attributes:
        horizon: Steps of the longest ones.
        share: Share of the training in which they grow from 1 step to `horizon`, 0 to 1.
        num_batches: Batches of the whole training.
    """

    horizon: int = 1
    share: float = 0.0
    num_batches: int = 1

    def steps_at(self, number: int) -> int:
        """Steps of the rollouts of a batch, by its number."""
        progress = number / max(1.0, self.share * self.num_batches)
        is_grown = self.share == 0
        return self.horizon if is_grown else min(self.horizon, 1 + int(self.horizon * progress))

    def cut(self, batch: WindowBatch, number: int) -> WindowBatch:
        """The batch of a number, its windows as long as they are to be."""
        num_frames = 1 + min(self.steps_at(number), batch.states.shape[1] - 1)
        return dataclasses.replace(batch, states=batch.states[:, :num_frames])


@dataclass(frozen=True)
class StageStart:
    """What listens while a stage is made.

    Attributes:
        latents: Stores in memory that `make_latents` gave; None where nobody has called it.
        check_data: Given the stage's `data_identity` as soon as it is known, and before anything is built or
            replaced; raises CheckpointError if the run was begun on other data.
        phase: Gives a context manager, inside which the time belongs to a phase of the start.
    """

    check_data: Callable[[Mapping[str, Any]], None] = lambda identity: None
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    latents: Mapping[str, Store] | None = None


QUIET_START = StageStart()


class Stage(ABC):
    """One thing to train: its model, data, losses and validation.

    Under `torchrun` every rank makes the same stage with the same weights. A batch is this rank's rows of
    it, an `ups.data.batches.TaskBatch`; what is drawn at random for it comes from its `draws`, which are the
    same whichever ranks share it. All ranks call its methods at the same point, but `export`; only the first
    one writes files. Parts of its making may be timed with `StageStart.phase`.

    Attributes:
        facts: What is known of it without making it; its name among them.
        model: What is trained, on its device; parameters that aren't to be trained don't require gradients.
        loader: Training batches, a pass at a time; each a function of the seed and its number alone.
        curriculum: How long the rollouts of its batches are.
        priors: Physics priors that some of its steps take, too.
        compiled: Methods of the model that `training.compile` is about. None of them depends on how long
            rollouts are.
        num_micro_batches: Parts of a batch, the same on every rank, whose gradients are computed one after
            the other, where memory doesn't suffice for all rows; a batch has `split` then.
        gradients: Which trained parameters a batch gives gradients to: "all", "the same" in every batch, as
            with one task, or "some". Ranks look in every step which ones have none, unless they know.
        ranks: The processes that train together; known once training begins.
        score_name: What `score` of `validate` is, on the terminal.
        compiled_model: The model as training calls it, perhaps with compiled methods; once training begins.
    """

    facts: StageFacts
    model: nn.Module
    loader: Loader
    curriculum = Curriculum()
    priors: PhysicsPriors | None = None
    compiled: tuple[str, ...] = ("forward",)
    num_micro_batches = 1
    gradients: GradientsOfBatch = "some"
    score_name = "nrmse"
    ranks = ALONE
    compiled_model: nn.Module | None = None

    @property
    def name(self) -> str:
        """As in the configuration."""
        return self.facts.name

    @property
    def called(self) -> Any:
        """The model as training calls it, or as it is before that."""
        return self.model if self.compiled_model is None else self.compiled_model

    @property
    def is_untrained(self) -> bool:
        """Whether no weight of the model is trained."""
        return not any(parameter.requires_grad for parameter in self.model.parameters())

    @abstractmethod
    def losses(self, forward: Callable[..., Any], batch: Any) -> Losses:
        """Named losses of some rows of a batch, scalars, whose sum is minimised.

        `forward` is the model, or the same with compiled methods.

        Each is a mean over the rows, of things that depend on one row each: then the mean over the ranks,
        weighted by their numbers of rows, is the loss of the whole batch.
        """

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics on the validation split, the same on every rank; `score` is what counts, less is better.

        Each rank looks at its share (`Ranks.share`) and calls the model as often as the others do, since a
        sharded one is called by all or none; then they join what they found (`Ranks.joined`). It runs under
        the precision of training, and calls the model as that does (`called`).
        """

    @abstractmethod
    def export(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """Write the model as others use it; on the first rank, whenever the score is the best so far.

        Args:
            metrics: Of `validate`.
            weights: The model's `state_dict`, whole.
        """

    def export_again(self, metrics: dict[str, float], weights: Mapping[str, Tensor]) -> Path:
        """As `export`, of weights that were exported before, where the file is lost."""
        return self.export(metrics, weights)

    def check_exported(self, score: float) -> None:
        """Fail unless what was exported last is there, whole; on the first rank.

        Raises:
            CheckpointError: About the file.
        """
        for path, kind in self.exports().items():
            check_whole(path, kind=kind)

    @abstractmethod
    def finish(self) -> dict[str, Any]:
        """Report on what was exported last, as JSON values, once training is over.

        Every rank loads the file and measures its share, in the precision that others use it in.

        Raises:
            GateMissedError: On every rank, if it isn't good enough to be used.
        """

    def parameter_groups(self, settings: OptimizerConfig) -> list[ParameterGroup]:
        """What is trained, in groups with a weight decay and a learning rate of their own.

        By default matrices decay and vectors don't, all at one rate.
        """
        return parameter_groups(self.model, weight_decay=settings.weight_decay)

    def configure_optimizer(self, settings: OptimizerConfig) -> torch.optim.Optimizer:
        """What takes the steps; of the model's parameters, after `shard`.

        Raises:
            ConfigError: As `make_optimizer`.
        """
        hidden = muon_matrices(self.model) if settings.name == "muon_hybrid" else {}
        return make_optimizer(self.parameter_groups(settings), settings, hidden=hidden)

    def after_step(self, step: int) -> None:  # noqa: B027
        """Called after every optimiser step, with their number; such as for a target that follows."""

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        """Share out the parameters over the ranks of a mesh, in place, before there is an optimiser.

        Args:
            mesh: Over which ranks.
            **options: As `torch.distributed.fsdp.fully_shard` has them.

        Raises:
            ConfigError: Kind "not_shardable", if the model can't be.
        """
        for part in self.sharded_parts():
            shard_part(part, mesh, **options)

    def sharded_parts(self) -> list[ShardedPart]:
        """What `shard` takes: by default the whole model, where it is called by its forward pass alone."""
        return [ShardedPart(self.model)]

    def exports(self) -> Mapping[Path, str]:
        """Files that `export` writes, with their kinds of checkpoint: a better one of before is kept."""
        return {}

    def published(self) -> Mapping[Path, str]:
        """Files that others use once the stage is over, with their kinds of checkpoint."""
        return self.exports()

    def data_identity(self) -> Mapping[str, Any]:
        """What data it is trained on, as JSON values: a run isn't continued on others."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """What continuing needs besides the model's weights: by name JSON values, and tensors.

        Tensors may be sharded. Their names and shapes are the same from the beginning.
        """
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:  # noqa: B027
        """Take what `state` gave; tensors are new, and sharded as those that are here."""

    def preparation_flops(self) -> float:
        """Floating-point operations that making its data took once, such as encoding all frames."""
        return 0.0

    def close(self) -> None:  # noqa: B027
        """End what works for its data in the background, and with it a batch that waits for that.

        Called on every rank when training ends, however it ends, and perhaps twice.
        """


def facts_of(name: str) -> StageFacts:
    """Give what is known of a stage."""
    if name not in STAGES:
        expected, hint = f"one of {', '.join((*STAGES, ALL))}", did_you_mean(name, STAGES)
        raise ConfigError(
            "no such stage", kind="unknown_stage", expected=expected, found=repr(name), hint=hint
        )
    return STAGES[name]


def make_stage(
    name: str, config: RunConfig, *, device: torch.device, start: StageStart = QUIET_START
) -> Stage:
    """Make a stage by its name."""
    maker = facts_of(name).maker
    if isinstance(maker, str):
        module, _, function = maker.partition(":")
        maker = getattr(import_module(module), function)
    stage: Stage = maker(config, device=device, start=start)
    return stage


def forward_of(stage: Stage, config: RunConfig) -> nn.Module:
    """How a stage's model is called, as the configuration says: compiled, with activation checkpointing.

    What nothing of is trained, such as a frozen encoder or a teacher, isn't compiled by blocks. A sharded
    model has blocks that are compiled already.
    """
    training, settings, model = config.training, config.stage(stage.name), stage.model
    set_activation_checkpointing(model, training.activation_checkpointing)
    device = next(model.parameters()).device
    set_attention(model, attention_of(model, config, device=device))
    if not settings.compile or is_sharded(model):
        return model
    options: dict[str, Any] = {"mode": settings.compile_mode}
    if training.compile_regions == "whole":
        return with_compiled(model, stage.compiled, **options)
    blocks = [block for block in blocks_of(model) if any(p.requires_grad for p in block.parameters())]
    if not blocks:
        logger.info(f"the model of stage {stage.name} has no blocks: its step is compiled as a whole")
        return with_compiled(model, stage.compiled, **options)
    return with_compiled_blocks(model, blocks, **options)


def attention_of(model: nn.Module, config: RunConfig, *, device: torch.device) -> Attention:
    """What computes the attention of a model: FlexAttention where it was asked for and can be trained."""
    layers = [module for module in model.modules() if isinstance(module, ShiftedWindowAttention)]
    if config.operator.attention == "sdpa" or not layers:
        return "sdpa"
    if device.type != "cuda":
        logger.info(
            "operator.attention = flex: FlexAttention has no backward pass on a CPU, so sdpa is taken"
        )
        return "sdpa"
    least = min(layer.out.in_features // layer.num_heads for layer in layers)
    if least < MIN_HEAD_CHANNELS:
        raise ConfigError(
            "operator.attention = flex",
            kind="flex_heads",
            expected=f"at least {MIN_HEAD_CHANNELS} channels of each head",
            found=least,
            hint="lower operator.num_heads, or say operator.attention=sdpa",
        )
    return "flex"


def pushed(batch: WindowBatch) -> WindowBatch:
    """The batch with as many steps before its trained one as are drawn for it, none among them."""
    num = torch.randint(batch.states.shape[1] - 1, (), generator=batch.draws.generator)
    return dataclasses.replace(batch, pushed=int(num))


def push_forward(
    step: Callable[..., Tensor], given: Tensor, truth: Tensor, *, num: int
) -> tuple[Tensor, Tensor]:
    """The model's own state after some steps without gradients, and what follows it.

    Source: Brandstetter et al. 2022, section 3.1 (arXiv:2202.03376): the state that a step is trained from
    has the errors of earlier steps, and no gradient teaches these to help the later ones.

    Args:
        step: The model; called with a state (B, ...) and `steps`, it returns (B, steps, ...).
        given: The first state, shape (B, ...).
        truth: Those that follow, shape (B, K, ...).
        num: How many steps, 0 to K - 1.

    Returns:
        Shapes (B, ...) and (B, 1, ...).
    """
    if num:
        with torch.no_grad():
            given = step(given, steps=num)[:, -1]
    return given, truth[:, num : num + 1]


def with_noise(batch: WindowBatch, *, level: float, std: Sequence[float]) -> WindowBatch:
    """Noise on the given states, so that rollouts learn to mend what earlier steps did wrong.

    Args:
        batch: Windows; their first state gets the noise.
        level: Standard deviation in normalised units; 0 for none.
        std: Standard deviation of each channel in the training data.
    """
    if not level:
        return batch
    given = batch.states[:, :1]
    drawn = batch.draws.normal(given.shape[1:]).to(given.device)
    noisy = given + level * given.new_tensor(std) * drawn
    return dataclasses.replace(batch, states=torch.cat([noisy, batch.states[:, 1:]], dim=1))
