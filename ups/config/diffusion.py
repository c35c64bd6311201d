"""Sections of the generative stages: the corrector, its flow times, and the prior of steady solutions."""

from __future__ import annotations

from typing import Annotated, Literal

from ups.config.stages import LatentDtype
from ups.errors import needs
from ups.section import Count, Positive, Section, key
from ups.stages import CORRECTOR, NOTHING, PRIOR
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import Field, field_validator


class TauConfig(Section):
    """From which distribution the flow times are drawn that a generative model is trained at."""

    type: Literal["uniform", "beta", "logit_normal"] = key(
        "uniform", "tau itself beta distributed, or its logit normal; 0 is noise, 1 data"
    )
    alpha: Positive = key(1.0, "beta: larger than beta means closer to the data")
    beta: Positive = key(1.0, "beta: second shape")
    mean: Annotated[float, Field(allow_inf_nan=False)] = key(0.0, "logit_normal: of the logit")
    std: Positive = key(1.0, "logit_normal: of the logit")

    @field_validator("type", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return value.lower().replace("-", "_") if isinstance(value, str) else value


class DiffusionConfig(Section):
    """The corrector: a generative model of the operator's residual (stage corrector)."""

    hidden_dim: Count | None = key(
        None,
        "channels of the finest level's layers; by default the operator's",
        affects=(CORRECTOR.name, PRIOR.name),
    )
    depths: tuple[Count, ...] | None = key(
        None,
        "blocks of each level; by default the operator's",
        min_length=1,
        affects=(CORRECTOR.name, PRIOR.name),
    )
    operator: LocalPath | None = key(
        None, "what is corrected; by default <checkpoint.dir>/operator.safetensors", affects=NOTHING
    )
    lead_times: Count = key(
        2, "steps of the operator's rollouts from true states; residuals are taken after each"
    )
    residual_share: Annotated[float, Field(gt=0, lt=1)] = key(
        0.5, "share of the validation trajectories whose residuals it is trained on"
    )
    num_pairs: Count = key(16384, "residuals of a task, at most, spread evenly")
    residual_dir: LocalPath | None = key(
        None, "folder of the stores of residuals; by default <checkpoint.dir>/residuals", affects=NOTHING
    )
    residual_dtype: LatentDtype = key("float32", "of the states in these stores")
    sampler: Literal["euler", "heun", "adaptive"] = key("euler", "from noise to a residual", affects=NOTHING)
    num_sampler_steps: Count = key(32, "of euler and heun", affects=NOTHING)
    tolerance: Positive = key(1e-2, "adaptive: largest error of a step", affects=NOTHING)
    max_evaluations: Annotated[Count, Field(ge=2)] = key(
        200, "adaptive: evaluations of the network for one residual, at most", affects=NOTHING
    )
    val_members: Annotated[Count, Field(ge=64)] = key(
        64, "members of the ensembles that a generative stage is judged by at its end", affects=NOTHING
    )
    export_anyway: bool = key(
        False, "export a model that missed its gates, too; its file says so", affects=NOTHING
    )


class PriorConfig(Section):
    """The prior of steady solutions (stage prior); network and sampler are those of `diffusion`."""

    method: Literal["flow", "regression"] = key(
        "flow", "a generative model; or the mean of solutions, by the same network"
    )
    observed_points: Count | None = key(
        None, "random points, others for each sample, at which alone the input is given; null: all"
    )
