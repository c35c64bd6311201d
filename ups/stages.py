"""The facts of each stage, from which all that lists stages is derived; nothing is imported that trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar


@dataclass(frozen=True)
class Model:
    """A checkpoint that stages make, and that others are trained on.

    Attributes:
        kind: Of the checkpoint.
        file: Its name in `checkpoint.dir`.
        key: Dotted key of the configuration that names one from elsewhere; None where no stage needs one.
    """

    kind: str
    file: str
    key: str | None = None


ENCODER_MODEL = Model("autoencoder", "autoencoder.safetensors", "latent.checkpoint")
OPERATOR_MODEL = Model("operator", "operator.safetensors", "diffusion.operator")
CORRECTOR_MODEL = Model("corrector", "corrector.safetensors", "training.distill_teacher")
STUDENT_MODEL = Model("student", "student.safetensors")
PRIOR_MODEL = Model("prior", "prior.safetensors")

Maker = TypeVar("Maker", bound=Callable[..., Any])
Learned = Literal["codes", "steps", "residuals", "solutions"]
Items = Literal["frames", "windows", "residuals", "pairs"]


@dataclass(frozen=True)
class StageFacts:
    """What is to be known of a stage before anything is imported that trains it.

    Attributes:
        name: In the configuration, on the command line, of its log and its training state.
        maker: What makes it from (config, device, start), or its `module:function`.
        makes: Models that it leaves; the first is what later nodes of a run look at.
        needs: Models that it is trained on; the encoder's only where states are latents.
        row: Of reports, that its model has.
        learns: "codes" of frames, "steps" from state to state, "residuals" of an operator's steps, or
            "solutions" of steady tasks. Keys of the configuration affect stages by it.
        items: What a pass over its data counts.
        reads_states: Whether it reads the states of `operator.state`, so stores of latents where there are
            any; else the fields.
        is_default: Whether a run has it unless its epochs are 0; else where `stages` names it.
        is_baseline: Whether it stands beside the operator, whose stage says what it leaves open.
        baseline_lr: Its peak learning rate (docs/results/accuracy.md) instead of the operator's; `ups tune`
            searches for others.
        like: Another stage, the keys of which affect this one, too, if it is one of your own; by default all
            keys do that affect any stage.
    """

    name: str
    maker: str | Callable[..., Any]
    makes: tuple[Model, ...] = ()
    needs: tuple[Model, ...] = ()
    row: str | None = None
    learns: Learned = "steps"
    items: Items = "windows"
    reads_states: bool = False
    is_default: bool = False
    is_baseline: bool = False
    baseline_lr: float | None = None
    like: str | None = None


def _baseline(name: str, lr: float | None) -> StageFacts:
    maker = f"ups.train.baseline:make_{name}_stage"
    return StageFacts(name, maker, row=name, is_baseline=True, baseline_lr=lr)


AUTOENCODER = StageFacts(
    "autoencoder",
    "ups.train.autoencoder:make_autoencoder_stage",
    makes=(ENCODER_MODEL,),
    learns="codes",
    items="frames",
    is_default=True,
)
JOINT = StageFacts("joint", "ups.train.joint:make_joint_stage", makes=(ENCODER_MODEL, OPERATOR_MODEL))
OPERATOR = StageFacts(
    "operator",
    "ups.train.operator:make_operator_stage",
    makes=(OPERATOR_MODEL,),
    needs=(ENCODER_MODEL,),
    row="operator",
    reads_states=True,
    is_default=True,
)
CORRECTOR = StageFacts(
    "corrector",
    "ups.train.flow:make_corrector_stage",
    makes=(CORRECTOR_MODEL,),
    needs=(OPERATOR_MODEL,),
    row="corrected",
    learns="residuals",
    items="residuals",
)
STUDENT = StageFacts(
    "student",
    "ups.train.student:make_student_stage",
    makes=(STUDENT_MODEL,),
    needs=(CORRECTOR_MODEL,),
    row="student",
    learns="residuals",
    items="pairs",
)
PRIOR = StageFacts(
    "prior",
    "ups.train.prior:make_prior_stage",
    makes=(PRIOR_MODEL,),
    needs=(ENCODER_MODEL,),
    row="prior",
    learns="solutions",
)
FNO = _baseline("fno", 4e-3)
UNET = _baseline("unet", 1e-3)
FNO_NEURALOPERATOR = _baseline("fno_neuraloperator", 4e-3)
OWN_BASELINE = _baseline("own_baseline", None)  # an operator of one's own, as `baselines.own` names it

# By name, in the order of training; stages of your own come last.
STAGES: dict[str, StageFacts] = {
    facts.name: facts
    for facts in (
        *(AUTOENCODER, JOINT, OPERATOR, CORRECTOR, STUDENT, PRIOR),
        *(FNO, UNET, FNO_NEURALOPERATOR, OWN_BASELINE),
    )
}


def stage(name: str, **facts: Any) -> Callable[[Maker], Maker]:
    """Register a stage of your own: a `Stage`, or a function that makes one from (config, device, start).

    `code: [mylab.stages]` in the configuration imports its module, `stages.NAME.epochs` puts it into a run,
    and `--stage NAME` trains it.

    Args:
        name: Of the stage.
        **facts: See `StageFacts`; by default it reads fields and makes `NAME.safetensors`, of kind NAME.
    """

    def register(maker: Maker) -> Maker:
        known = StageFacts(name, maker, **{"makes": (Model(name, f"{name}.safetensors"),), **facts})
        if isinstance(maker, type):
            maker.facts = known  # type: ignore[attr-defined]
        STAGES[name] = known
        return maker

    return register


def _names(*learned: Learned, with_baselines: bool = True) -> tuple[str, ...]:
    return tuple(
        name
        for name, facts in STAGES.items()
        if facts.learns in learned and (with_baselines or not facts.is_baseline)
    )


# Groups of the package's own stages, for what keys affect.
NOTHING = ()
STAGE_NAMES = tuple(STAGES)
BASELINES = tuple(name for name, facts in STAGES.items() if facts.is_baseline)
OPERATORS = _names("steps", with_baselines=False)
GENERATIVE = _names("residuals", "solutions")
NETWORKS = (*OPERATORS, *GENERATIVE)  # whose networks are of the operator's kind
FORECASTERS = _names("steps")  # learn the next time step
ROLLED_OUT = _names("steps", "residuals")  # or learn from rollouts
AUGMENTED = _names("codes", "solutions", "steps")
