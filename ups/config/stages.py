"""Stages: their names, and what an entry of `stages` says about optimiser, schedule, budget and length."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from ups.config.section import Count, CountOrZero, Fraction, NotNegative, Positive, Section
from ups.errors import needs
from ups_store.build import long_dtype

with needs("train"):
    from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

Limit = Literal["flops", "samples", "seconds"]

BUDGETS: tuple[Limit, ...] = ("flops", "samples", "seconds")

# Peak learning rates of baselines (docs/results/accuracy.md); `ups tune` searches for others.
BASELINE_LR = {"fno": 4e-3, "unet": 1e-3, "fno_neuraloperator": 4e-3}

BASELINES = tuple(BASELINE_LR)  # each a stage

# In the order of training.
STAGE_NAMES = (
    *("autoencoder", "joint", "operator", "diff_residual", "consistency_distill", "steady_prior"),
    *BASELINES,
)


def _known_stage(name: str) -> str:
    if name not in STAGE_NAMES:
        near = difflib.get_close_matches(name, STAGE_NAMES, n=1)
        hint = f"did you mean {near[0]}" if near else f"known: {', '.join(STAGE_NAMES)}"
        raise ValueError(f"stages.{name} is no stage; {hint}")
    return name


StageName = Annotated[str, AfterValidator(_known_stage)]

# Names of PyTorch's classes, as older configurations have them.
_SCHEDULER_NAMES = {
    "cosineannealinglr": "cosine",
    "steplr": "step",
    "reducelronplateau": "plateau",
    "constantlr": "constant",
    "none": "constant",
}


class OptimizerConfig(Section):
    """Optimiser of a stage."""

    name: Literal["adamw", "adam", "sgd", "muon_hybrid", "adamw8bit"] = Field("adamw", description="kind")
    lr: Positive | None = Field(
        None, description="peak learning rate; by default training.lr, of baselines one that was searched for"
    )
    weight_decay: NotNegative = Field(0.0, description="decay of matrices; vectors have none")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), description="Adam's moments")
    eps: Positive = Field(1e-8, description="Adam's epsilon")
    momentum: Fraction = Field(0.9, description="of SGD")
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = Field(
        "auto", description="how PyTorch loops over parameters; auto: fused where that can be"
    )
    cpu_offload: bool | None = Field(
        None, description="states and step on the CPU; by default training.cpu_offload_optimizer"
    )
    muon_momentum: Fraction = Field(0.95, description="of the matrices that muon_hybrid gives to Muon")
    muon_ns_steps: Annotated[Count, Field(lt=100)] = Field(
        5, description="Newton-Schulz iterations of Muon, fewer than 100"
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Muon's learning rate by a matrix's shape; match_rms_adamw: steps as large as AdamW's",
    )
    muon_backend: str = Field("auto", description="of earlier configurations; Muon is always PyTorch's")

    @field_validator("name", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


class SchedulerConfig(Section):
    """Learning rate over optimiser steps, as a share of the peak."""

    name: Literal["constant", "cosine", "step", "plateau"] = Field("cosine", description="kind")
    warmup_steps: CountOrZero = Field(0, description="optimiser steps of linear warm-up")
    t_max: Count | None = Field(None, description="cosine: epochs until eta_min; by default the stage's")
    eta_min: NotNegative = Field(0.0, description="cosine: learning rate at the end")
    step_size: Count = Field(10, description="step: epochs from one reduction to the next")
    gamma: Positive = Field(0.5, description="step: factor of a reduction")
    factor: Positive = Field(0.5, description="plateau: factor of a reduction")
    patience: CountOrZero = Field(3, description="plateau: epochs without improvement that are tolerated")
    min_lr: NotNegative = Field(0.0, description="plateau: least learning rate")
    mode: Literal["min"] = Field("min", description="plateau: errors are minimised")

    @field_validator("name", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return _SCHEDULER_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


class BudgetConfig(Section):
    """How much a stage may be trained, by one measure; it becomes a number of steps before they begin."""

    flops: Positive | None = Field(None, description="counted floating-point operations of its steps")
    samples: Count | None = Field(None, description="frames or windows that it is trained on")
    seconds: Positive | None = Field(None, description="processor time of its steps")
    step_ratio: Positive | None = Field(
        None, description="of seconds, as `ups compare` measured it: a step's time over the operator's"
    )

    @model_validator(mode="after")
    def _is_one(self) -> BudgetConfig:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"budget: give one of {', '.join(BUDGETS)}, not {' and '.join(given) or 'none'}")
        return self

    @property
    def limit(self) -> Limit:
        """What it counts."""
        return next(name for name in BUDGETS if getattr(self, name) is not None)

    @property
    def allowed(self) -> float:
        """How much of it."""
        return float(getattr(self, self.limit))

    def __str__(self) -> str:
        return f"budget of {shown_amount(self.limit, self.allowed)}"


def shown_amount(limit: str, amount: float) -> str:
    """So much of what a budget counts, for people: "1.23e+12 FLOP", "60 s", "5,000 samples"."""
    if limit == "flops":
        return f"{amount:.3g} FLOP"
    return f"{amount:,.4g} s" if limit == "seconds" else f"{amount:,.0f} {limit}"


AmpDtype = Annotated[Literal["bfloat16", "float16"], BeforeValidator(long_dtype)]

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

DistillMethod = Literal["reflow", "consistency"]


def check_one_batch_size(each: int | None, over_all: int | None) -> None:
    """Refuse a batch size of each rank together with one over all ranks.

    Raises:
        ValueError: If both are given.
    """
    if each is not None and over_all is not None:
        raise ValueError("batch_size (per rank) and global_batch_size (over all ranks): give one of them")


class StageConfig(Section):
    """One entry of `stages`."""

    epochs: CountOrZero = Field(10, description="passes over the training data; 0 leaves the stage out")
    steps_per_epoch: Count | None = Field(None, description="optimiser steps an epoch; by default all data")
    steps: Count | None = Field(
        None, description="optimiser steps in all, cut into epochs; by default epochs x steps_per_epoch"
    )
    budget: BudgetConfig | None = Field(
        None, description="says `steps`, by what they cost; ended by no patience"
    )
    batch_size: Count | None = Field(None, description="by default training.batch_size")
    global_batch_size: Count | None = Field(None, description="by default training.global_batch_size")
    grad_clip: Positive | None = Field(None, description="by default training.grad_clip")
    ema_decay: Fraction | None = Field(None, description="by default training.ema_decay")
    patience: Count | None = Field(None, description="by default training.patience")
    amp: bool | None = Field(None, description="by default training.amp")
    amp_dtype: AmpDtype | None = Field(None, description="by default training.amp_dtype")
    compile: bool | None = Field(None, description="by default training.compile")
    compile_mode: CompileMode | None = Field(None, description="by default training.compile_mode")
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    method: DistillMethod | None = Field(
        None,
        description="consistency_distill: rectified flow on pairs (reflow, the default), or consistency",
    )

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> StageConfig:
        check_one_batch_size(self.batch_size, self.global_batch_size)
        return self

    @field_validator("optimizer", "scheduler", mode="before")
    @classmethod
    def _absent_is_default(cls, value: Any) -> Any:
        return {} if value is None else value
