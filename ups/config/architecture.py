"""Sections of the models: latents, autoencoder, operator, baselines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ups.config.stages import LatentDtype
from ups.errors import CheckpointError, needs
from ups.models.operator_size import TOKEN_UNET, FnoConfig, Mixer, UnetConfig
from ups.section import Count, Fraction, NotNegative, Positive, Section, key
from ups.stages import (
    CORRECTOR,
    FNO,
    FNO_NEURALOPERATOR,
    FORECASTERS,
    NOTHING,
    OPERATORS,
    OWN_BASELINE,
    PRIOR,
    ROLLED_OUT,
    UNET,
)
from ups_store.build import EncodingConfig
from ups_store.sources import LocalPath

with needs("train"):
    from pydantic import (
        SerializationInfo,
        SerializerFunctionWrapHandler,
        ValidationInfo,
        field_validator,
        model_serializer,
        model_validator,
    )

with needs("train"):
    from pydantic import Field, field_validator


class RunLatentConfig(EncodingConfig):
    """Size of the latent state of one frame, `tokens` x `dim` numbers; and how the build encodes."""

    dim: Count = key(4, "channels D of a latent token")
    tokens: Count = key(32, "number of latent tokens L")
    checkpoint: LocalPath | None = key(
        None, "encoder's weights; by default <checkpoint.dir>/autoencoder.safetensors", affects=OPERATORS
    )


class EncoderConfig(Section):
    """Architecture of the encoder."""

    patch_size: Count = key(8, "points of a patch, on each axis")
    width: Count = key(64, "channels of its layers")
    depth: Count = key(3, "residual blocks before, and as many after, the pooling")
    num_heads: Count = key(4, "heads of the attention pooling; divides width")
    basis: Literal["pca", "none"] = key(
        "pca",
        "linear part of encoder and decoder: principal components of the patches, measured on the"
        " training split",
    )
    residual: bool = key(True, "train networks, on top of the basis; false leaves encoder and decoder linear")
    isometry: bool = key(
        True, "rescale the latents that were trained so that the decoder's singular values agree"
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

    width: Count = key(64, "channels of its layers")
    depth: Count = key(3, "residual blocks over the tokens")
    num_heads: Count = key(4, "heads of the cross-attention; divides width")
    radius: Count = key(1, "tokens to each side that a query attends to, on each axis")


class SpectralConfig(Section):
    """Blocks that mix tokens by their Fourier modes."""

    modes: Count | None = key(
        None,
        "modes kept along each axis, of either sign; by default all, at most 64, 16 or 8 of them "
        "on 1, 2 or 3 axes",
    )
    padding: NotNegative = key(0.125, "zeros behind an axis that isn't periodic, over its length")
    norm: Literal["none", "layer"] = key("none", "of the tokens before they are mixed, by convolutions too")


def _config_of(name: str, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """The values of an operator's own section with its defaults."""
    from ups.models.operators import read_config

    try:
        # Configurations in checkpoints are read without: they were checked when they were written.
        allow_code = None if (info.context or {}).get("is_own", True) else ()
        return read_config(name, values, allow_code=allow_code).model_dump(mode="json")
    except CheckpointError:
        return values


class OperatorConfig(Section):
    """The operator, and how it is trained."""

    name: str = key(
        TOKEN_UNET,
        "token_unet, the package's own, of which mixer, size and what follows it say the architecture; fno,"
        " unet or fno_neuraloperator; or module:class of your own (docs/guides/own-operator.md)",
    )
    config: dict[str, Any] = key(
        {},
        "keys of another operator than token_unet; `ups configs operator NAME` shows them",
        validate_default=True,
    )
    mixer: Mixer | tuple[Mixer, ...] = key(
        "spectral",
        "what mixes the tokens: spectral, convolution, attention, or hybrid (attention beside "
        "spectral); a list has one for each level. attention where num_heads or window_size is "
        "given, and no mixer",
        min_length=1,
    )
    spectral: SpectralConfig = SpectralConfig()
    architecture_type: Literal["pdet_unet", "pdet_stack"] = key(
        "pdet_unet", "U-shape, or pdet_stack: one level of depth blocks"
    )
    attention: Literal["sdpa", "flex"] = key(
        "sdpa",
        "what computes attention in training: PyTorch's scaled_dot_product_attention, or its "
        "FlexAttention, which on a CPU has no backward pass, so that sdpa is taken there",
        affects=NOTHING,
    )
    size: Literal["tiny", "small", "S", "B", "L"] = key("small", "says what the keys of layers leave open")
    width: Count | None = key(None, "channels of the finest level's layers")
    depths: tuple[Count, ...] | None = key(None, "blocks of each level", min_length=1)
    depth: Count | None = key(None, "blocks of a single level, instead of depths")
    num_heads: Count | None = key(None, "attention heads of the finest level")
    window_size: Count | None = key(None, "tokens of an attention window along an axis")
    mlp_ratio: Positive | None = key(
        None, "hidden over outer channels of the MLP, which blocks with attention have"
    )
    drop_path: Fraction | None = key(None, "share of residual branches dropped")
    dropout: Fraction | None = key(None, "share of the MLPs' activations dropped")
    state: Literal["latent", "fields"] = key(
        "latent", "what it advances: latents, or patches of the fields themselves"
    )
    noise: NotNegative = key(
        0.01,
        "standard deviation of noise on the first state, in normalised units; "
        "without it a rollout keeps what small scales have of error",
        affects=OPERATORS,
    )
    curriculum: Fraction = key(
        0.0, "share of the training in which rollouts grow from 1 step to horizon", affects=FORECASTERS
    )
    val_trajectories: Count = key(
        32, "trajectories per task that validation rolls out", affects=ROLLED_OUT, used_by=("validation",)
    )

    @field_validator("config")
    @classmethod
    def _config_of_its_class(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Checked by the operator's own section, with its defaults; of a file only if its code may be run."""
        name = info.data.get("name", TOKEN_UNET)
        if name == TOKEN_UNET and values:
            raise ValueError(
                "operator.config has no effect: token_unet's keys are operator.mixer, size, width, ..."
            )
        return values if name == TOKEN_UNET else _config_of(name, values, info)

    @model_serializer(mode="wrap")
    def _as_before_there_were_names(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Without name and config where they say nothing, so that identities are those of before."""
        values: dict[str, Any] = serialize(self)
        is_shown = info.context and info.context.get("secrets")  # such as by --print-config
        if self.name == TOKEN_UNET:
            del values["config"]
            if not is_shown:
                del values["name"]
        return values

    @model_validator(mode="after")
    def _has_one_depth(self) -> OperatorConfig:
        if self.depth is not None and self.depths is not None:
            raise ValueError("operator.depth and operator.depths: give one of them")
        return self


class OwnBaselineConfig(Section):
    """An operator of your own beside the run's, on patches of the fields of `encoder.patch_size` points."""

    name: str | None = key(None, "module:class, or a registered name; as of `ups compare --kind`")
    config: dict[str, Any] = key({}, "keys of its own, as operator.config", validate_default=True)

    @field_validator("config")
    @classmethod
    def _config_of_its_class(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name")
        if name is None and values:
            raise ValueError("baselines.own.config has no effect without baselines.own.name")
        return values if name is None else _config_of(name, values, info)


class BaselinesConfig(Section):
    """What stands beside the operator; each is a stage that is trained as the operator is."""

    fno: FnoConfig = key(FnoConfig(), "our FNO", affects=(FNO.name,))
    unet: UnetConfig = key(UnetConfig(), "our U-Net", affects=(UNET.name,))
    fno_neuraloperator: FnoConfig = key(
        FnoConfig(), "neuraloperator's FNO", affects=(FNO_NEURALOPERATOR.name,)
    )
    own: OwnBaselineConfig = key(OwnBaselineConfig(), "one of your own", affects=(OWN_BASELINE.name,))
    horizon: Count | None = key(None, "steps that a loss goes through; by default the operator's")
    curriculum: Fraction | None = key(None, "by default operator.curriculum")
    noise: NotNegative = key(0.0, "standard deviation of noise on the first frame, in normalised units")

    @model_serializer(mode="wrap")
    def _as_before_there_were_own(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Without `own` where it says nothing, so that identities are those of before."""
        values: dict[str, Any] = serialize(self)
        if self.own.name is None and not (info.context and info.context.get("secrets")):
            del values["own"]
        return values


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
