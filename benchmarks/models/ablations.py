"""`python -m benchmarks.models.ablations`: what each choice of the operator's training is worth.

Each ablation changes one thing of a training of the models benchmark, on several tasks and seeds, and stands
beside what it changes by paired differences on the same trajectories. All are trained for as much processor
time as the base, whose budget is counted operations: steps of both are timed in turns. Stop it whenever you
like: run again, it goes on. docs/results/log.md has what came of it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from benchmarks.models.data import make_all_data, training_identity
from benchmarks.models.patched import full_resolution_lift, with_input_added
from benchmarks.models.questions import BURGERS, DARCY, SHOCKS, TEST, VORTICITY, Question
from benchmarks.models.table import WORDS, shown_interval, values_of
from benchmarks.models.timed import Timed, ratio_of_times
from benchmarks.models.train import known_scores, train_and_score
from ups.config import RunConfig, load_config
from ups.eval.intervals import Paired, Resamples, compare
from ups.output import write_atomically

_HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
BASE, MODEL, FNO, SHIFT = "base", "operator", "fno", "amplitude 1.5x"


# The base's loss, the benchmark's until 2026-11-23: relative l2, now the default, is an ablation.
_SQUARES = ("training.rollout_loss=mse", "training.lambda_relative=1")


def _short(question: Question, flops: float) -> Question:
    """A question with one shifted set, a smaller budget and the base's loss."""
    shifts = {name: changed for name, changed in question.shifts.items() if name == SHIFT}
    return replace(question, shifts=shifts, flops=flops, overrides=_SQUARES)


QUESTIONS = {
    question.name: question
    for question in (
        *(_short(line, 1e11) for line in (BURGERS, SHOCKS)),
        *(_short(square, 2e11) for square in (VORTICITY, DARCY)),
    )
}
USUAL = ("burgers", "shocks", "vorticity")
ONE_AXIS = ("burgers", "shocks")
LOSSY = ("shocks", "vorticity")  # where linear compression loses something


@dataclass(frozen=True)
class Ablation:
    """One change.

    Attributes:
        title: For people.
        overrides: `key=value` of the run, or what gives them for a question.
        against: Name of what it stands beside.
        questions: Names of the tasks.
        model: The stage that is scored.
        stages: What is trained, in this order, and the share of the processor time that each has.
        patched: Changes the model itself, where no key does.
    """

    title: str
    overrides: Callable[[Question], Sequence[str]] | Sequence[str] = ()
    against: str = BASE
    questions: Sequence[str] = USUAL
    model: str = MODEL
    stages: Mapping[str, float] = field(default_factory=lambda: {MODEL: 1.0})
    patched: Callable[[], AbstractContextManager[None]] = nullcontext

    def of(self, question: Question) -> Question:
        """The question with this change."""
        changed = self.overrides(question) if callable(self.overrides) else self.overrides
        return replace(question, overrides=(*question.overrides, *changed))


def latents(factor: int, *further: str) -> Callable[[Question], Sequence[str]]:
    """Principal components of patches instead of the patches, a share 1 / factor of the numbers."""

    def overrides(question: Question) -> Sequence[str]:
        ndim, patch = 1 if question.task.endswith("1d") else 2, question.patch
        if patch**ndim < factor:
            patch *= 2
        tokens = (question.settings["points"] // patch) ** ndim
        shape = (f"latent.tokens={tokens}", f"latent.dim={patch**ndim // factor}")
        linear = ("operator.state=latent", "encoder.residual=false", "training.cache_mode=memory")
        return (*linear, *shape, f"encoder.patch_size={patch}", *further)

    return overrides


def trained_latents(factor: int, *further: str, stage: str = "autoencoder") -> Callable[[Question], Any]:
    """As `latents`, with small networks on top of the components, trained by a stage."""

    def overrides(question: Question) -> Sequence[str]:
        networks = [f"{part}.{key}" for part in ("encoder", "decoder") for key in ("width=32", "depth=1")]
        sampled = ("encoder.residual=true", "training.query_sampling.num_queries=96")
        rates = (f"stages.{stage}.optimizer.lr=2e-3", f"stages.{stage}.scheduler.warmup_steps=40")
        validated = [f"stages.{name}.epochs=4" for name in (stage, MODEL)]  # which takes longer than training
        return (*latents(factor)(question), *networks, *sampled, *rates, *validated, *further)

    return overrides


LINEAR = {"autoencoder": 0.0, MODEL: 1.0}  # the first of which has nothing to train there
TRAINED = {"autoencoder": 0.5, MODEL: 0.5}
TOGETHER = {"joint": 1.0}
JOINT = "training.use_inverse_losses=true"
PRIOR = "training.physics_priors"

# In the order in which they are trained.
ABLATIONS: Mapping[str, Ablation] = {
    "base": Ablation("squares, relative and not", questions=(*USUAL, DARCY.name)),
    "relative-l2": Ablation(
        "relative l2, now the default",
        ("training.rollout_loss=relative_l2", "training.lambda_relative=0"),
        questions=(*USUAL, DARCY.name),
    ),
    "layer-norm": Ablation("LayerNorm in spectral blocks", ("operator.spectral.norm=layer",)),
    "linear-2x": Ablation("linear latents, 2x", latents(2), stages=LINEAR),
    "linear-4x": Ablation("linear latents, 4x", latents(4), stages=LINEAR),
    "linear-8x": Ablation("linear latents, 8x", latents(8), stages=LINEAR),
    "adds-input": Ablation(
        "the input is added to the solution", questions=(DARCY.name,), patched=with_input_added
    ),
    "fno": Ablation("FNO", questions=(DARCY.name,), model=FNO, stages={FNO: 1.0}),
    "pushforward": Ablation("pushforward, 2 steps", ("training.horizon=2", "training.pushforward=true")),
    "trained-4x": Ablation(
        "trained latents, 4x", trained_latents(4), "linear-4x", questions=LOSSY, stages=TRAINED
    ),
    "joint-4x": Ablation(
        "trained jointly, 4x",
        trained_latents(4, JOINT, stage="joint"),
        "trained-4x",
        questions=LOSSY,
        stages=TOGETHER,
    ),
    "joint-4x-aligned": Ablation(
        "trained jointly 4x, alignment without stop-gradient",
        trained_latents(4, JOINT, "training.lambda_alignment=1", stage="joint"),
        "joint-4x",
        questions=LOSSY,
        stages=TOGETHER,
    ),
    "trained-4x-l1": Ablation(
        "trained latents 4x, L1",
        trained_latents(4, "training.reconstruction_loss=l1"),
        "trained-4x",
        questions=LOSSY,
        stages=TRAINED,
    ),
    "residual": Ablation("prior: residual, weight 1", (f"{PRIOR}.residual=1",), questions=ONE_AXIS),
    "latent-noise-0": Ablation(
        "linear latents 2x, noise 0", latents(2, "operator.noise=0"), "linear-2x", stages=LINEAR
    ),
    "latent-noise-0.03": Ablation(
        "linear latents 2x, noise 0.03", latents(2, "operator.noise=0.03"), "linear-2x", stages=LINEAR
    ),
    "lift": Ablation("full-resolution lift", questions=(*USUAL, DARCY.name), patched=full_resolution_lift),
    "conservation": Ablation("prior: conservation, weight 1", (f"{PRIOR}.conservation=1",)),
}

Scores = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # by question and ablation, one a seed
console = Console(stderr=True)


def main(
    only: Annotated[list[str] | None, typer.Option(help="an ablation's name; may be repeated")] = None,
    tasks: Annotated[str, typer.Option(help="which of them")] = ",".join(QUESTIONS),
    seeds: Annotated[str, typer.Option(help="training seeds")] = ",".join(map(str, SEEDS)),
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data, scores and table [default: benchmarks/models/out-ablations]"),
    ] = None,
) -> None:
    """Train what isn't trained yet, and print the table of what is."""
    if unknown := [name for name in only or () if name not in ABLATIONS]:
        raise typer.BadParameter(f"{unknown[0]}: expected {', '.join(ABLATIONS)}", param_hint="--only")
    torch.set_num_threads(1)
    folder, numbers = out or _HERE / "out-ablations", [int(seed) for seed in seeds.split(",")]
    for name in with_compared(only or list(ABLATIONS)):
        for question in (task for task in ABLATIONS[name].questions if task in tasks.split(",")):
            for seed in numbers:
                _train(name, QUESTIONS[question], seed, folder)
    text = markdown(known(folder, numbers))
    write_atomically(folder / "ablations.md", text.encode())
    Console().print(text, markup=False, soft_wrap=True)


def with_compared(names: Sequence[str]) -> list[str]:
    """The names, with what they stand beside, in the order of `ABLATIONS`."""
    wanted = set(names)
    while missing := {ABLATIONS[name].against for name in wanted} - wanted:
        wanted |= missing
    return [name for name in ABLATIONS if name in wanted]


def known(folder: Path, seeds: Sequence[int]) -> Scores:
    """The scores of all ablations that are trained with all seeds."""
    found: dict[str, dict[str, Sequence[Mapping[str, Any]]]] = {}
    for name, ablation in ABLATIONS.items():
        for question in ablation.questions:
            changed = ablation.of(QUESTIONS[question])
            scores = [known_scores(changed, ablation.model, seed, folder, variant=name) for seed in seeds]
            if all(scores):
                found.setdefault(question, {})[name] = [one for one in scores if one]
    return found


def _train(name: str, question: Question, seed: int, folder: Path) -> None:
    """One training of an ablation, unless it is known."""
    ablation = ABLATIONS[name]
    changed = ablation.of(question)
    if known_scores(changed, ablation.model, seed, folder, variant=name):
        return
    _note(f"{question.name}: {name}, seed {seed}")
    path = make_all_data(question, folder / question.name, note=_note)
    train_and_score(
        changed,
        ablation.model,
        seed,
        config_path=path,
        folder=folder,
        note=lambda text: None,
        variant=name,
        stages=tuple(ablation.stages),
        steps=None if name == BASE else functools.partial(_steps, name, question, folder),
        patched=ablation.patched,
    )


def _steps(name: str, question: Question, folder: Path, stage: str, config: RunConfig) -> int:
    """Steps of a stage that take its share of the base's processor time."""
    ablation, base = ABLATIONS[name], ABLATIONS[BASE].of(question)
    if not (share := ablation.stages[stage]):
        return 1
    trained = known_scores(base, MODEL, config.seed, folder, variant=BASE)
    assert trained is not None, "the base is trained first"
    path = folder / question.name / "run.yaml"
    unit = Timed(MODEL, load_config(path, overrides=[*base.overrides, f"seed={config.seed}"]))
    identity = training_identity(ablation.of(question))
    ratio = ratio_of_times(
        Timed(stage, config, ablation.patched),
        unit,
        folder / "ratios" / f"{question.name}-{name}-{stage}-{identity}.json",
    )
    return max(1, round(share * trained["steps"] / ratio))


def markdown(scores: Scores) -> str:
    """A table of ratios on the test sets of the training's distribution, one on larger amplitudes."""
    parts = []
    for name in (TEST, SHIFT):
        own = {question: by for question, by in scores.items() if name in next(iter(by.values()))[0]["sets"]}
        title = "As trained" if name == TEST else name
        parts += [f"### {title}", "", *_table(own, name), ""]
    return "\n".join(parts)


def _table(scores: Scores, set_name: str) -> Iterator[str]:
    yield f"| | beside | {' | '.join(scores)} |"
    yield "|---|---|" + "---|" * len(scores)
    for name, ablation in ABLATIONS.items():
        cells = [_cell(by, name, set_name) for by in scores.values()]
        if any(cells):
            beside = "" if name == ablation.against else ABLATIONS[ablation.against].title
            yield f"| {ablation.title} | {beside} | {' | '.join(cells)} |"


def _cell(by_name: Mapping[str, Sequence[Mapping[str, Any]]], name: str, set_name: str) -> str:
    """nRMSE, ratio with its interval, verdict, steps and processor time; empty where it isn't known."""
    if name not in by_name:
        return ""
    seeds, against = by_name[name], ABLATIONS[name].against
    nrmse, first = (np.mean([_finite(one["sets"][set_name][key]) for one in seeds]) for key in
                    ("nrmse", "first_step"))  # fmt: skip
    trained = f"{seeds[0]['steps']:,} steps, {np.mean([one['cpu_seconds'] for one in seeds]):.0f} s"
    shown = f"{nrmse:.3g}, first step {first:.3g}"
    if name != against and against in by_name:
        pair = paired(seeds, by_name[against], set_name)
        shown += f"; {shown_interval(pair.ratio)} {WORDS[pair.verdict]}"
    return f"{shown}; {trained}"


def paired(seeds: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], set_name: str) -> Paired:
    """A change beside what it changes, on the same trajectories."""
    own, theirs = (values_of(dict(enumerate(each)), set_name) for each in (seeds, others))
    resamples = Resamples(len(own[0]))
    return compare(resamples.of(own, row="changed"), resamples.of(theirs, row="against"))


def _finite(values: Sequence[float | None]) -> list[float]:
    return [float("inf") if value is None else value for value in values]


def _note(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
