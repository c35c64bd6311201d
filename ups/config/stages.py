"""What an entry of `stages` says about optimiser, schedule, budget and length."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from ups.errors import needs
from ups.section import Count, CountOrZero, Fraction, NotNegative, Positive, Section, key
from ups.stages import NOTHING, STAGES, STUDENT
from ups_store.build import long_dtype

with needs("train"):
    from pydantic import (
        AfterValidator,
        BeforeValidator,
        Field,
        ValidationInfo,
        field_validator,
        model_validator,
    )


Limit = Literal["flops", "samples", "seconds"]
LatentDtype = Annotated[Literal["float16", "bfloat16", "float32"], BeforeValidator(long_dtype)]

BUDGETS: tuple[Limit, ...] = ("flops", "samples", "seconds")


def _known_stage(name: str, info: ValidationInfo) -> str:
    if name not in STAGES and (info.context or {}).get("knows_stages", True):
        near = difflib.get_close_matches(name, STAGES, n=1)
        hint = f"did you mean {near[0]}" if near else f"known: {', '.join(STAGES)}"
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

    name: Literal["adamw", "adam", "sgd", "muon_hybrid", "adamw8bit"] = key("adamw", "kind")
    lr: Positive | None = key(
        None, "peak learning rate; by default training.lr, of baselines one that was searched for"
    )
    weight_decay: NotNegative = key(0.0, "decay of matrices; vectors have none")
    betas: tuple[Fraction, Fraction] = key(
        (0.9, 0.99), "Adam's moments", read_by=("adamw", "adam", "muon_hybrid", "adamw8bit")
    )
    eps: Positive = key(1e-8, "Adam's epsilon", read_by=("adamw", "adam", "muon_hybrid", "adamw8bit"))
    momentum: Fraction = key(0.9, "of SGD", read_by=("sgd",))
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = key(
        "auto",
        "how PyTorch loops over parameters; auto: fused where that can be",
        affects=NOTHING,
        read_by=("adamw", "adam", "sgd", "muon_hybrid"),
    )
    cpu_offload: bool | None = key(
        None, "states and step on the CPU; by default training.cpu_offload_optimizer", affects=NOTHING
    )
    muon_momentum: Fraction = key(
        0.95, "of the matrices that muon_hybrid gives to Muon", read_by=("muon_hybrid",)
    )
    muon_ns_steps: Annotated[Count, Field(lt=100)] = key(
        5, "Newton-Schulz iterations of Muon, fewer than 100", read_by=("muon_hybrid",)
    )
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "Muon's learning rate by a matrix's shape; match_rms_adamw: steps as large as AdamW's",
        read_by=("muon_hybrid",),
    )

    @field_validator("name", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value


class SchedulerConfig(Section):
    """Learning rate over optimiser steps, as a share of the peak."""

    name: Literal["constant", "cosine", "step", "plateau"] = key("cosine", "kind")
    warmup_steps: CountOrZero = key(0, "optimiser steps of linear warm-up")
    t_max: Count | None = key(
        None, "cosine: epochs until eta_min; by default the stage's", read_by=("cosine",)
    )
    eta_min: NotNegative = key(0.0, "cosine: learning rate at the end", read_by=("cosine",))
    step_size: Count = key(10, "step: epochs from one reduction to the next", read_by=("step",))
    gamma: Positive = key(0.5, "step: factor of a reduction", read_by=("step",))
    factor: Positive = key(0.5, "plateau: factor of a reduction", read_by=("plateau",))
    patience: CountOrZero = key(
        3, "plateau: epochs without improvement that are tolerated", read_by=("plateau",)
    )
    min_lr: NotNegative = key(0.0, "plateau: least learning rate", read_by=("plateau",))

    @field_validator("name", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return _SCHEDULER_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


class BudgetConfig(Section):
    """How much a stage may be trained, by one measure; it becomes a number of steps before they begin."""

    flops: Positive | None = key(None, "counted floating-point operations of its steps")
    samples: Count | None = key(None, "frames or windows that it is trained on")
    seconds: Positive | None = key(None, "processor time of its steps")
    step_ratio: Positive | None = key(
        None, "of seconds, as `ups compare` measured it: a step's time over the operator's"
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
    """Refuse a batch size of each rank together with one over all ranks."""
    if each is not None and over_all is not None:
        raise ValueError("batch_size (per rank) and global_batch_size (over all ranks): give one of them")


class StageConfig(Section):
    """One entry of `stages`."""

    epochs: CountOrZero = key(10, "passes over the training data; 0 leaves the stage out")
    steps_per_epoch: Count | None = key(None, "optimiser steps an epoch; by default all data")
    steps: Count | None = key(
        None, "optimiser steps in all, cut into epochs; by default epochs x steps_per_epoch"
    )
    budget: BudgetConfig | None = key(None, "says `steps`, by what they cost; ended by no patience")
    batch_size: Count | None = key(None, "by default training.batch_size", affects=NOTHING)
    global_batch_size: Count | None = key(None, "by default training.global_batch_size", affects=NOTHING)
    grad_clip: Positive | None = key(None, "by default training.grad_clip")
    ema_decay: Fraction | None = key(None, "by default training.ema_decay")
    patience: Count | None = key(None, "by default training.patience", affects=NOTHING)
    amp: bool | None = key(None, "by default training.amp", used_by=("validation",))
    amp_dtype: AmpDtype | None = key(
        None, "by default training.amp_dtype", needs="amp", used_by=("validation",)
    )
    compile: bool | None = key(None, "by default training.compile", affects=NOTHING)
    compile_mode: CompileMode | None = key(
        None, "by default training.compile_mode", affects=NOTHING, needs="compile"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    method: DistillMethod | None = key(
        None, f"{STUDENT.name}: rectified flow on pairs (reflow, the default), or consistency"
    )

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> StageConfig:
        check_one_batch_size(self.batch_size, self.global_batch_size)
        return self

    @field_validator("optimizer", "scheduler", mode="before")
    @classmethod
    def _absent_is_default(cls, value: Any) -> Any:
        return {} if value is None else value

    def rows_over(self, num_ranks: int) -> int:
        """Count the rows of a whole batch over all ranks, from either of the two batch sizes."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size is not None  # one of both is taken from `training`
        return self.batch_size * num_ranks
