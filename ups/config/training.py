"""Configuration of the training loop; nothing here changes what a store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ups.config.section import Count, CountOrZero, Fraction, NotNegative, Positive, Section
from ups.data.config import long_dtype

AmpDtype = Annotated[Literal["bfloat16", "float16"], BeforeValidator(long_dtype)]
LatentDtype = Annotated[Literal["float16", "bfloat16", "float32"], BeforeValidator(long_dtype)]


class QuerySamplingConfig(Section):
    """At how many points of a field the decoder is asked during training."""

    num_queries: Count | None = Field(None, description="random points a batch; by default the whole grid")


class TrainingConfig(Section):
    """Loop, precision, losses; a stage's own values win."""

    batch_size: Count = Field(32, description="frames or windows a batch")
    lr: Positive = Field(1e-3, description="peak learning rate")
    accum_steps: Count = Field(1, description="batches an optimiser step")
    grad_clip: Positive | None = Field(1.0, description="largest norm of the gradient")
    ema_decay: Fraction | None = Field(
        None, description="of the averaged weights that are validated and kept"
    )
    amp: bool = Field(False, description="autocast to amp_dtype")
    amp_dtype: AmpDtype = Field("bfloat16", description="dtype of autocast")
    compile: bool = Field(False, description="torch.compile the model")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of torch.compile"
    )
    patience: Count | None = Field(None, description="epochs after the best one until training stops")
    log_path: Path | None = Field(None, description="JSON lines; by default <checkpoint.dir>/<stage>.jsonl")
    log_every: Count = Field(50, description="optimiser steps from one log line to the next")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; under torchrun each rank its own GPU")
    rank_timeout_s: Positive = Field(
        1800.0, description="seconds that a rank waits for the others, also while the first one validates"
    )

    field_source: Literal["auto", "store", "hdf5"] = Field("auto", description="where fields are read from")
    augment: bool = Field(True, description="random shifts along periodic axes, reflections where allowed")
    query_sampling: QuerySamplingConfig = QuerySamplingConfig()
    max_val_frames: Count = Field(1024, description="frames per task that validation looks at, spread evenly")

    num_workers: CountOrZero | Literal["auto"] = Field("auto", description="reader processes of a build")
    use_parallel_encoding: bool = Field(True, description="read and encode at the same time in a build")
    latent_cache_dir: Path | None = Field(None, description="folder of the latent stores")
    latent_cache_dtype: LatentDtype = Field("float16", description="of latents")
    cache_mode: Literal["auto", "store", "memory", "none"] = Field(
        "auto", description="latents from finished stores, made on demand, in memory, or in every pass"
    )
    pin_memory: bool = Field(True, description="page-locked batches where there is a GPU")
    prefetch_factor: CountOrZero = Field(2, description="batches that are prepared ahead, by a thread")
    preload: Literal["auto", "off", "page-cache", "copy", "pinned", "device"] = Field(
        "auto", description="how a store is brought into memory before training"
    )
    time_stride: Count = Field(1, description="stored time steps from one step of the operator to the next")
    rollout_horizon: Count = Field(1, description="operator steps that a loss goes through")
    lambda_spectral: NotNegative = Field(0.0, description="weight of the spectral loss of the operator")
    lambda_relative: NotNegative = Field(0.0, description="weight of the relative loss")
    use_inverse_losses: bool = Field(False, description="encoder and decoder as inverses, in stage joint")
    allow_unknown_encoder: bool = Field(
        False, description="train on latents of which nothing says which weights made them"
    )
    inverse_loss_frequency: Count = Field(1, description="optimiser steps from one inverse loss to the next")
