"""The model card beside an exported checkpoint: what it is, what made it, its errors, and its use.

Markdown with the YAML front matter that the Hugging Face hub reads (https://huggingface.co/docs/hub/model-cards).
Everything in it is from the checkpoint's own document, so it can be written again at any time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, Any]

_TITLES = {
    "operator": "Neural operator",
    "autoencoder": "Autoencoder",
    "corrector": "Operator with a generative corrector",
    "student": "Operator with a distilled corrector",
    "prior": "Prior of steady solutions",
    "baseline": "Baseline",
}
_ROLLED_OUT = ("operator", "corrector", "student")
KINDS = frozenset(_TITLES)  # of checkpoints that get a card
_MEASURED = {
    "nrmse": "nRMSE",
    "latent_nrmse": "nRMSE of latents",
    "floor_nrmse": "nRMSE of the autoencoder alone",
}
# What decided the weights; the checkpoint has all of the configuration, with the paths of a machine.
_OF_DATA = ("reduce_space", "reduce_time", "split_fractions", "limit")
_OF_TRAINING = (
    *("lr", "batch_size", "global_batch_size", "accum_steps", "grad_clip", "ema_decay", "amp", "amp_dtype"),
    *("augment", "horizon", "stride", "latent_cache_dtype"),
)


def card_path(checkpoint: Path) -> Path:
    """Where the card of a checkpoint lies: `operator.card.md` beside `operator.safetensors`."""
    return checkpoint.with_name(f"{checkpoint.stem}.card.md")


def model_card(file: str, *, kind: str, document: Values, digest: str, num_weights: int) -> str:
    """The card of a checkpoint.

    Args:
        file: Name of the checkpoint's file.
        kind: Of `KINDS`.
        document: Of the checkpoint; what it doesn't have isn't in the card.
        digest: sha256 of the checkpoint's tensors.
        num_weights: Numbers in them.
    """
    spec, report = _section(document, "spec"), _section(document, "report")
    tasks = _tasks(kind, spec)
    title = f"{_name(kind, spec)} for {', '.join(tasks) or 'an unknown task'}"
    parts = {
        "": _what_it_is(kind, spec, num_weights),
        "Tasks": _task_table(tasks, spec),
        "Training data": _training_data(document, tasks),
        "Training": _training(document),
        "Validation errors": _errors(report),
        "Gates": _gates(document),
        "Intended use and limits": _limits(kind, tasks, report),
        "Load it": _loading(file, kind, tasks, spec),
    }
    text = "\n\n".join(f"## {head}\n{body}" if head else body for head, body in parts.items() if body)
    origin = f"Written with `{file}`, whose tensors have the sha256 `{digest}`."
    return f"---\n{_front_matter(file, kind, tasks, report)}---\n\n# {title}\n\n{text}\n\n{origin}\n"


def _front_matter(file: str, kind: str, tasks: Mapping[str, Values], report: Values) -> str:
    import yaml

    values: dict[str, Any] = {
        "library_name": "ups-store",
        "tags": [
            "pde",
            "physics",
            "surrogate-model",
            f"neural-{kind}" if kind == "operator" else kind,
            *tasks,
        ],
        "metrics": ["nrmse"],
    }
    results = [
        {
            "task": {"type": "pde-surrogate", "name": "PDE surrogate"},
            "dataset": {"type": task, "name": f"{task}, validation split"},
            "metrics": [{"type": metric, "value": value, "name": _MEASURED[metric]}],
        }
        for metric, task, value in _measured(report)
        if metric in ("nrmse", "latent_nrmse")
    ]
    if results:
        values["model-index"] = [{"name": Path(file).stem, "results": results}]
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def _name(kind: str, spec: Values) -> str:
    return f"{_TITLES[kind]} ({spec['kind']})" if kind == "baseline" and "kind" in spec else _TITLES[kind]


def _what_it_is(kind: str, spec: Values, num_weights: int) -> str:
    size = f"{num_weights:,} weights"
    if kind in _ROLLED_OUT:
        where = "latent tokens of an autoencoder, which is part of the file"
        if spec.get("autoencoder_sha256") is None:
            where = (
                "patches of the fields"
                if spec.get("is_encoder_known", True)
                else "latents of an unknown encoder"
            )
        sizes = _section(spec, "operator")
        if "name" in sizes:
            sizes = {"name": sizes["name"], **_section(sizes, "config")}
        operator = f"Operator: {_listed(sizes)}."
        text = f"Predicts how fields go on, one step after the other, on {where}. {size}. {operator}"
        return text if kind == "operator" else f"{text} {_correction(_section(spec, 'corrector'))}"
    if kind == "prior":
        network = _listed(_section(spec, "operator"))
        return f"{_solutions(_section(spec, 'prior'), spec)} {size}. Network: {network}."
    if kind == "autoencoder":
        latent = f"{spec.get('num_tokens', '?')} tokens of {spec.get('latent_dim', '?')} channels"
        return f"Turns a frame of a field into {latent}, and these back into the field at any point. {size}."
    return f"A network that an operator is compared with; one frame in, the next out. {size}."


def _solutions(prior: Values, spec: Values) -> str:
    on = "patches of the fields" if spec.get("autoencoder_sha256") is None else "latents of an autoencoder"
    num = prior.get("observed_points")
    given = "their input" if num is None else f"their input at {num} points"
    if prior.get("method") == "regression":
        return f"Predicts the mean of steady solutions, given {given}, on {on}."
    drawn = _listed(_section(prior, "sampling"))
    return f"Draws steady solutions at random, given {given}, on {on}; drawn by: {drawn}."


def _correction(corrector: Values) -> str:
    sigma = _listed(_section(corrector, "sigma"))
    operator, taught = corrector.get("operator_sha256"), _section(corrector, "taught")
    teacher = f" Distilled ({taught['method']}) from `{taught['teacher_sha256']}`." if taught else ""
    return (
        "Each step adds a residual that is drawn at random, so several rollouts are an ensemble. Corrector: "
        f"{_listed(_section(corrector, 'size'))}; root mean square of the residuals, in normalised units: "
        f"{sigma}; drawn by: {_listed(_section(corrector, 'sampling'))}. Of the operator `{operator}`."
        f"{teacher}"
    )


def _tasks(kind: str, spec: Values) -> dict[str, Values]:
    """What is known of each task."""
    if kind == "baseline":
        steady = spec.get("dt") is None
        return {str(spec["task"]): {**spec, "steady": steady}} if "task" in spec else {}
    return {str(name): task for name, task in _section(spec, "tasks").items() if isinstance(task, Mapping)}


def _task_table(tasks: Mapping[str, Values], spec: Values) -> str:
    lines = []
    for name, task in tasks.items():
        grid = _section(task, "grid")
        points = " x ".join(map(str, grid.get("points", ())))
        ends = task.get("boundary") or [
            "periodic" if one else "with ends" for one in grid.get("periodic", ())
        ]
        step = "steady" if task.get("steady") else f"{task['dt']:.6g}" if task.get("dt") else ""
        ranges = _section(task, "parameters").items()
        parameters = ", ".join(
            f"{key} = {low:.4g}" if low == high else f"{key} from {low:.4g} to {high:.4g}"
            for key, (low, high) in ranges
        )
        if not parameters and isinstance(listed := spec.get("parameters"), list):
            parameters = ", ".join(listed)
        cells = (
            name,
            points,
            ", ".join(map(str, ends)),
            ", ".join(task.get("channels", ())),
            step,
            parameters,
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if not lines:
        return ""
    head = (
        "| task | points | boundaries | channels | time of a step | parameters |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(lines)


def _training_data(document: Values, tasks: Mapping[str, Values]) -> str:
    data, config = _section(document, "data"), _section(document, "config")
    lines = [f"- {task}, training split: {data[task]}" for task in tasks if task in data]
    if settings := _listed(_section(config, "data"), only=_OF_DATA):
        lines.append(f"- data: {settings}")
    autoencoder = _section(document, "spec").get("autoencoder_sha256")
    if autoencoder:
        lines.append(f"- latents of the autoencoder `{autoencoder}`")
    return "\n".join(lines)


def _training(document: Values) -> str:
    """Seed and budget; the rest of the configuration is in the file."""
    config, effort = _section(document, "config"), dict(_section(document, "effort"))
    effort.pop("curve", None)
    lines = [f"- seed: {config['seed']}"] if "seed" in config else []
    for stage, settings in _section(config, "stages").items():
        if isinstance(settings, Mapping):
            lines.append(f"- stage {stage}: {_listed(settings)}")
    if training := _listed(_section(config, "training"), only=_OF_TRAINING):
        lines.append(f"- training: {training}")
    if effort:
        lines.append(f"- effort: {_listed(effort)}")
    if config:
        lines.append("- all else: the configuration in the checkpoint's header")
    return "\n".join(lines)


def _errors(report: Values) -> str:
    lines = [
        f"| {_cell(task)} | {_MEASURED[metric]} | {value:.6g} |" for metric, task, value in _measured(report)
    ]
    if not lines:
        return ""
    head = (
        "They decided which weights were kept, so they are somewhat too small; see also what "
        "`ups evaluate --split test` reports.\n\n| of | metric | value |\n|---|---|---|\n"
    )
    return head + "\n".join(lines)


def _gates(document: Values) -> str:
    gates = document.get("gates", ())
    lines = [f"- {'passed' if gate['passed'] else '**missed**'}: {gate['says']}" for gate in gates]
    return "\n".join(lines)


def _measured(report: Values) -> list[tuple[str, str, float]]:
    """Metric, task (and array) and value of everything that was validated."""
    found = []
    for key, value in report.items():
        prefix, _, rest = key.partition("/")
        metric, _, of = rest.partition("/")
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if prefix == "val" and metric in _MEASURED and of and is_number:
            found.append((metric, of, float(value)))
    return found


def _limits(kind: str, tasks: Mapping[str, Values], report: Values) -> str:
    lines = [
        f"For {' and '.join(tasks) or 'its task'}, on the grid and within the parameters above.",
        "Nothing is known of other equations, boundaries or resolutions, or of unlike initial states.",
    ]
    if kind != "autoencoder" and not all(task.get("steady") for task in tasks.values()):
        lines.append(
            "Errors grow with the number of steps; nothing makes a long rollout conserve what physics does."
        )
    lines.append("A surrogate for research: check it against a solver before something depends on it.")
    return "\n".join(f"- {line}" for line in lines)


def _loading(file: str, kind: str, tasks: Mapping[str, Values], spec: Values) -> str:
    """Code that works as it stands once there are fields."""
    if not tasks:
        return ""
    task = next(iter(tasks))
    known = tasks[task]
    points = ", ".join(map(str, _section(known, "grid").get("points", ())))
    code = [f"# fields: physical units, float32, shape (B, {points}, C)"]
    if kind in (*_ROLLED_OUT, "prior"):
        code += ["import ups", f'model = ups.load("{file}")']
        if spec.get("is_encoder_known", True):
            ranges = _section(known, "parameters").items()
            varied = {name: round((low + high) / 2, 6) for name, (low, high) in ranges if low != high}
            steps = 1 if known.get("steady") else 10
            given = f", parameters={varied}" if varied else ""
            prior = _section(spec, "prior")
            is_ensemble = kind in ("corrector", "student") or prior.get("method") == "flow"
            ensemble, axis = (", members=64, seed=0", "64, ") if is_ensemble else ("", "")
            if prior.get("observed_points") is not None:
                code.insert(1, f"# observed: where they are known, bool, shape (B, {points})")
                given += ", observed=observed"
            call = f'model.rollout(fields, steps={steps}, task="{task}"{given}{ensemble})'
            code.append(f"frames = {call}  # (B, {axis}{steps}, {points}, C)")
    elif kind == "autoencoder":
        parameters = spec.get("parameters", ())
        code += [
            "import torch",
            "from ups.trained.autoencoder import load_autoencoder",
            f'model = load_autoencoder("{file}")',
            f"parameters = torch.zeros(len(fields), {len(parameters)})  # {', '.join(parameters) or 'none'}",
            f'tokens = model.encode(fields, parameters, task="{task}")',
        ]
    else:
        means = _section(_section(spec, "statistics"), "parameters").get("mean", ())
        numbers = dict(zip(spec.get("parameters", ()), means, strict=False))
        steps = 1 if known.get("steady") else 10
        code += [
            "import torch",
            "from ups.eval.baseline_model import load_baseline",
            "from ups.eval.forecasters import Start",
            f"parameters = {{name: torch.full((len(fields),), value) for name, value in {numbers}.items()}}",
            f'start = Start("{task}", fields, parameters, dt={known.get("dt")})',
            f'frames = load_baseline("{file}").forecast(start, {steps})  # (B, {steps}, {points}, C)',
        ]
    return "```python\n" + "\n".join(code) + "\n```"


def _section(values: Values, key: str) -> Values:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _listed(values: Values, *, only: Collection[str] | None = None) -> str:
    keys = [key for key in values if only is None or key in only]
    shown = {key: values[key] for key in keys if not isinstance(values[key], Mapping | None)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _cell(text: str) -> str:
    """Text in a table of Markdown."""
    return str(text).replace("|", "\\|").replace("\n", " ")
