"""`python -m benchmarks.models.ablations`: what each choice of the operator's training is worth.

Each ablation changes one thing of a training of the models benchmark, on several tasks and seeds, and stands
beside what it changes by paired differences on the same trajectories. All are trained for as much processor
time as the base, whose budget is counted operations: steps of both are timed in turns. Stop it whenever you
like: run again, it goes on. docs/results/log.md has what came of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.harness.commands import chosen, show_and_keep, show_progress
from benchmarks.models.questions import BURGERS, DARCY, SHOCKS, TEST, VORTICITY, Question
from benchmarks.models.run import SEEDS
from benchmarks.models.table import WORDS, shown_interval, values_of
from benchmarks.models.training import Scores, identity_of, known_scores, make_data, ratio_of_times, scores_of
from ups.config import RunConfig, load_config
from ups.eval.intervals import Paired, Resamples, compare

_HERE = Path(__file__).resolve().parent
BASE, MODEL, FNO, SHIFT = "base", "operator", "fno", "amplitude 1.5x"

# The base's loss, the benchmark's until 2026-11-23: relative l2, now the default, is an ablation.
_SQUARES = ("training.rollout_loss=mse", "training.lambda_relative=1")


def _short(question: Question, flops: float) -> Question:
    """Leave one shifted set, with a smaller budget and the base's loss."""
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
    """One change."""

    title: str  # for people
    # `key=value` of the run, or what gives them for a question.
    overrides: Callable[[Question], Sequence[str]] | Sequence[str] = ()
    against: str = BASE  # name of what it stands beside
    questions: Sequence[str] = USUAL  # names of the tasks
    model: str = MODEL  # the stage that is scored
    # What is trained, in this order, and the share of the processor time that each has.
    stages: Mapping[str, float] = field(default_factory=lambda: {MODEL: 1.0})

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
    "conservation": Ablation("prior: conservation, weight 1", (f"{PRIOR}.conservation=1",)),
}

BySeed = Sequence[Scores]


def main(
    only: Annotated[list[str] | None, typer.Option(help="an ablation's name; may be repeated")] = None,
    tasks: Annotated[str, typer.Option(help="which of them")] = ",".join(QUESTIONS),
    seeds: Annotated[str, typer.Option(help="training seeds")] = SEEDS,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of data, scores and table [default: benchmarks/models/out-ablations]"),
    ] = None,
) -> None:
    """Train what isn't trained yet, and print the table of what is."""
    show_progress()
    torch.set_num_threads(1)
    folder, numbers = out or _HERE / "out-ablations", [int(seed) for seed in seeds.split(",")]
    names = set(chosen(only, ABLATIONS))
    while missing := {ABLATIONS[name].against for name in names} - names:  # what they stand beside
        names |= missing
    for name in (name for name in ABLATIONS if name in names):
        for question in (task for task in ABLATIONS[name].questions if task in tasks.split(",")):
            for seed in numbers:
                train(name, QUESTIONS[question], seed, folder)
    scores: dict[str, dict[str, BySeed]] = {}
    for name, ablation in ABLATIONS.items():
        for question in ablation.questions:
            changed = ablation.of(QUESTIONS[question])
            known = [known_scores(changed, ablation.model, seed, folder, variant=name) for seed in numbers]
            if all(known):
                scores.setdefault(question, {})[name] = [one for one in known if one]
    show_and_keep(markdown(scores), folder / "ablations.md")


def train(name: str, question: Question, seed: int, folder: Path) -> None:
    """One training of an ablation, unless it is known."""
    ablation, base = ABLATIONS[name], ABLATIONS[BASE].of(question)
    changed = ablation.of(question)

    def steps(stage: str, config: RunConfig) -> int:
        """Steps of a stage that take its share of the base's processor time."""
        share, of_base = ablation.stages[stage], known_scores(base, MODEL, seed, folder, variant=BASE)
        assert of_base is not None, "the base is trained first"
        if not share:
            return 1
        path = make_data(question, folder / question.name)
        unit = load_config(path, overrides=[*base.overrides, f"seed={seed}"])
        ratios = folder / "ratios" / f"{question.name}-{name}-{stage}-{identity_of(changed)}.json"
        ratio = ratio_of_times((stage, config), (MODEL, unit), ratios)
        return max(1, round(share * of_base["steps"] / ratio))

    given = None if name == BASE else steps
    scores_of(changed, ablation.model, seed, folder, variant=name, stages=tuple(ablation.stages), steps=given)


def markdown(scores: Mapping[str, Mapping[str, BySeed]]) -> str:
    """A table of ratios on the test sets of the training's distribution, one on larger amplitudes.

    Args:
        scores: By question and ablation, one a seed.
    """
    lines = []
    for name, title in ((TEST, "As trained"), (SHIFT, SHIFT)):
        by_question = {key: by for key, by in scores.items() if name in next(iter(by.values()))[0]["sets"]}
        lines += [f"### {title}", "", f"| | beside | {' | '.join(by_question)} |"]
        lines += ["|---|---|" + "---|" * len(by_question), *_rows(by_question, name), ""]
    return "\n".join(lines)


def _rows(scores: Mapping[str, Mapping[str, BySeed]], set_name: str) -> Iterator[str]:
    """nRMSE, ratio with its interval, verdict, steps and processor time; empty where it isn't known."""
    for name, ablation in ABLATIONS.items():
        cells, against = [], ablation.against
        for by_name in scores.values():
            if name not in by_name:
                cells.append("")
                continue
            seeds = by_name[name]
            sets = [one["sets"][set_name] for one in seeds]
            nrmse, first = (
                np.mean([[np.inf if value is None else value for value in one[key]] for one in sets])
                for key in ("nrmse", "first_step")
            )
            cell = f"{nrmse:.3g}, first step {first:.3g}"
            if name != against and against in by_name:
                pair = paired(seeds, by_name[against], set_name)
                cell += f"; {shown_interval(pair.ratio)} {WORDS[pair.verdict]}"
            seconds = np.mean([one["cpu_seconds"] for one in seeds])
            cells.append(f"{cell}; {seeds[0]['steps']:,} steps, {seconds:.0f} s")
        if any(cells):
            beside = "" if name == against else ABLATIONS[against].title
            yield f"| {ablation.title} | {beside} | {' | '.join(cells)} |"


def paired(seeds: BySeed, others: BySeed, set_name: str) -> Paired:
    """Compare a change with what it changes, on the same trajectories."""
    changed, against = (values_of(dict(enumerate(each)), set_name) for each in (seeds, others))
    resamples = Resamples(len(changed[0]))
    return compare(resamples.of(changed, row="changed"), resamples.of(against, row="against"))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
