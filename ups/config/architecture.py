"""Sections of the models: latents, autoencoder, operator, baselines."""

from __future__ import annotations

from typing import Any, Literal

from ups.config.section import Count, Fraction, NotNegative, Positive, Section
from ups.errors import needs
from ups_store.build import EncodingConfig
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import Field, model_validator


class RunLatentConfig(EncodingConfig):
    """Size of the latent state of one frame, `tokens` x `dim` numbers; and how the build encodes."""

    dim: Count = Field(4, description="channels D of a latent token")
    tokens: Count = Field(32, description="number of latent tokens L")
    checkpoint: LocalPath | None = Field(
        None, description="encoder's weights; by default <checkpoint.dir>/autoencoder.safetensors"
    )


class EncoderConfig(Section):
    """Architecture of the encoder."""

    patch_size: Count = Field(8, description="points of a patch, on each axis")
    width: Count = Field(64, description="channels of its layers")
    depth: Count = Field(3, description="residual blocks before, and as many after, the pooling")
    num_heads: Count = Field(4, description="heads of the attention pooling; divides width")
    basis: Literal["pca", "none"] = Field(
        "pca",
        description="linear part of encoder and decoder: principal components of the patches, measured on the"
        " training split",
    )
    residual: bool = Field(
        True, description="train networks, on top of the basis; false leaves encoder and decoder linear"
    )
    isometry: bool = Field(
        True, description="rescale the latents that were trained so that the decoder's singular values agree"
    )

    @model_validator(mode="after")
    def _encodes_something(self) -> EncoderConfig:
        if self.basis == "none" and not self.residual:
            raise ValueError(
                "encoder.basis = none and encoder.residual = false: nothing is left that encodes"
            )
        return self


class DecoderConfig(Section):
    """Architecture of the decoder."""

    width: Count = Field(64, description="channels of its layers")
    depth: Count = Field(3, description="residual blocks over the tokens")
    num_heads: Count = Field(4, description="heads of the cross-attention; divides width")
    radius: Count = Field(1, description="tokens to each side that a query attends to, on each axis")


Mixer = Literal["spectral", "convolution", "attention", "hybrid"]

# Naming one of these, and no mixer, means the PDE-Transformer that the operator once always was.
_ATTENTION_KEYS = ("num_heads", "window_size", "attention_type", "qk_norm")


class PdetConfig(Section):
    """Architecture of the operator; what is left open comes from `operator.size`."""

    input_dim: Count | None = Field(None, description="must be latent.dim")
    hidden_dim: Count | None = Field(None, description="channels of the finest level's layers")
    depths: tuple[Count, ...] | None = Field(None, min_length=1, description="blocks of each level")
    depth: Count | None = Field(None, description="blocks of a single level, instead of depths")
    num_heads: Count | None = Field(None, description="attention heads of the finest level")
    group_size: Count | None = Field(None, description="has no effect: there are no groups to normalise")
    window_size: Count | None = Field(None, description="tokens of an attention window along an axis")
    mlp_ratio: Positive | None = Field(
        None, description="hidden over outer channels of the MLP, which blocks with attention have"
    )
    qk_norm: bool = Field(True, description="queries and keys are always normalised")
    attention_type: Literal["standard"] = Field("standard", description="in shifted windows")
    drop_path: Fraction | None = Field(None, description="share of residual branches dropped")
    dropout: Fraction | None = Field(None, description="share of the MLPs' activations dropped")
    use_activation_checkpoint: bool = Field(
        False, description="true means training.activation_checkpointing=full"
    )
    use_flex: bool = Field(False, description="true means operator.attention=flex")

    @model_validator(mode="after")
    def _has_one_depth(self) -> PdetConfig:
        if self.depth is not None and self.depths is not None:
            raise ValueError("operator.pdet.depth and operator.pdet.depths: give one of them")
        return self


class SpectralConfig(Section):
    """Blocks that mix tokens by their Fourier modes."""

    modes: Count | None = Field(
        None,
        description="modes kept along each axis, of either sign; by default all, at most 64, 16 or 8 of them "
        "on 1, 2 or 3 axes",
    )
    padding: NotNegative = Field(
        0.125, description="zeros behind an axis that isn't periodic, over its length"
    )
    norm: Literal["none", "layer"] = Field(
        "none", description="of the tokens before they are mixed, by convolutions too"
    )


class OperatorConfig(Section):
    """The operator, and how it is trained."""

    mixer: Mixer | tuple[Mixer, ...] = Field(
        "spectral",
        min_length=1,
        description="what mixes the tokens: spectral, convolution, attention, or hybrid (attention beside "
        "spectral); a list has one for each level. attention where pdet.num_heads, window_size, "
        "attention_type or qk_norm is given, and no mixer",
    )
    spectral: SpectralConfig = SpectralConfig()
    architecture_type: Literal["pdet_unet", "pdet_stack"] = Field(
        "pdet_unet", description="U-shape, or pdet_stack: one level of pdet.depth blocks"
    )
    attention: Literal["sdpa", "flex"] = Field(
        "sdpa",
        description="what computes attention in training: PyTorch's scaled_dot_product_attention, or its "
        "FlexAttention, which on a CPU has no backward pass, so that sdpa is taken there",
    )
    size: Literal["tiny", "small", "S", "B", "L"] = Field("small", description="what pdet leaves open")
    pdet: PdetConfig = PdetConfig()
    state: Literal["latent", "fields"] = Field(
        "latent", description="what it advances: latents, or patches of the fields themselves"
    )
    noise: NotNegative = Field(
        0.01,
        description="standard deviation of noise on the first state, in normalised units; "
        "without it a rollout keeps what small scales have of error",
    )
    curriculum: Fraction = Field(
        0.0, description="share of the training in which rollouts grow from 1 step to horizon"
    )
    val_trajectories: Count = Field(32, description="trajectories per task that validation rolls out")

    @model_validator(mode="before")
    @classmethod
    def _attention_of_its_keys(cls, values: Any) -> Any:
        pdet = values.get("pdet") if isinstance(values, dict) else None
        if isinstance(pdet, dict) and values.get("mixer") is None:
            named = any(pdet.get(key) is not None for key in _ATTENTION_KEYS)
            return {**values, "mixer": "attention" if named else "spectral"}
        return values


class FnoConfig(Section):
    """Size of an FNO."""

    width: Count = Field(32, description="channels of its layers")
    modes: Count | None = Field(
        None, description="Fourier modes along each axis; by default 16 in 1D, 12 in 2D, or what the grid has"
    )
    depth: Count = Field(4, description="layers")


class UnetConfig(Section):
    """Size of the U-Net."""

    width: Count = Field(24, description="channels of the finest level; a multiple of 4")
    levels: Count | None = Field(
        None, description="resolutions; by default 4, or as often as the grid can be halved"
    )


class BaselinesConfig(Section):
    """What stands beside the operator; each is a stage that is trained as the operator is."""

    fno: FnoConfig = FnoConfig()
    unet: UnetConfig = UnetConfig()
    fno_neuraloperator: FnoConfig = FnoConfig()
    horizon: Count | None = Field(
        None, description="steps that a loss goes through; by default the operator's"
    )
    curriculum: Fraction | None = Field(None, description="by default operator.curriculum")
    noise: NotNegative = Field(
        0.0, description="standard deviation of noise on the first frame, in normalised units"
    )
