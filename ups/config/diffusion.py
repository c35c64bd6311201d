"""Sections of the generative stages: the corrector, its flow times, and the prior of steady solutions."""

from __future__ import annotations

from typing import Annotated, Literal

from ups.config.section import Count, LatentDtype, Positive, Section
from ups.errors import needs
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import Field, field_validator


class TauConfig(Section):
    """From which distribution the flow times are drawn that a generative model is trained at."""

    type: Literal["uniform", "beta", "logit_normal"] = Field(
        "uniform", description="tau itself beta distributed, or its logit normal; 0 is noise, 1 data"
    )
    alpha: Positive = Field(1.0, description="beta: larger than beta means closer to the data")
    beta: Positive = Field(1.0, description="beta: second shape")
    mean: Annotated[float, Field(allow_inf_nan=False)] = Field(0.0, description="logit_normal: of the logit")
    std: Positive = Field(1.0, description="logit_normal: of the logit")

    @field_validator("type", mode="before")
    @classmethod
    def _own_name(cls, value: object) -> object:
        return value.lower().replace("-", "_") if isinstance(value, str) else value


class DiffusionConfig(Section):
    """The corrector: a generative model of the operator's residual (stage diff_residual)."""

    latent_dim: Count | None = Field(None, description="must be latent.dim")
    hidden_dim: Count | None = Field(
        None, description="channels of the finest level's layers; by default the operator's"
    )
    depths: tuple[Count, ...] | None = Field(
        None, min_length=1, description="blocks of each level; by default the operator's"
    )
    operator: LocalPath | None = Field(
        None, description="what is corrected; by default <checkpoint.dir>/operator.safetensors"
    )
    lead_times: Count = Field(
        2,
        description="steps of the operator's rollouts from true states; residuals are taken after each",
    )
    residual_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5,
        description="share of the validation trajectories whose residuals it is trained on",
    )
    num_pairs: Count = Field(16384, description="residuals of a task, at most, spread evenly")
    residual_dir: LocalPath | None = Field(
        None, description="folder of the stores of residuals; by default <checkpoint.dir>/residuals"
    )
    residual_dtype: LatentDtype = Field("float32", description="of the states in these stores")
    sampler: Literal["euler", "heun", "adaptive"] = Field("euler", description="from noise to a residual")
    num_sampler_steps: Count = Field(32, description="of euler and heun")
    tolerance: Positive = Field(1e-2, description="adaptive: largest error of a step")
    max_evaluations: Annotated[Count, Field(ge=2)] = Field(
        200, description="adaptive: evaluations of the network for one residual, at most"
    )
    val_members: Annotated[Count, Field(ge=64)] = Field(
        64, description="members of the ensembles that a generative stage is judged by at its end"
    )
    export_anyway: bool = Field(
        False, description="export a model that missed its gates, too; its file says so"
    )


class SteadyPriorConfig(Section):
    """The prior of steady solutions (stage steady_prior); network and sampler are those of `diffusion`."""

    method: Literal["flow", "regression"] = Field(
        "flow", description="a generative model; or the mean of solutions, by the same network"
    )
    observed_points: Count | None = Field(
        None,
        description="random points, others for each sample, at which alone the input is given; null: all",
    )
