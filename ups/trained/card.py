"""The model card beside an exported checkpoint: what it is, what made it, its errors, and its use.

Markdown with the YAML front matter that the Hugging Face hub reads (https://huggingface.co/docs/hub/model-cards).
Everything in it is from the checkpoint's own document, so it can be written again at any time; `card.md.j2`
has the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TITLES = {
    "operator": "Neural operator",
    "autoencoder": "Autoencoder",
    "corrector": "Operator with a generative corrector",
    "student": "Operator with a distilled corrector",
    "prior": "Prior of steady solutions",
    "baseline": "Baseline",
}
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


def model_card(file: str, *, kind: str, document: Mapping[str, Any], digest: str, num_weights: int) -> str:
    """The card of a checkpoint.

    Args:
        file: Name of the checkpoint's file.
        kind: Of `KINDS`.
        document: Of the checkpoint; what it doesn't have isn't in the card.
        digest: sha256 of the checkpoint's tensors.
        num_weights: Numbers in them.
    """
    import yaml
    from jinja2 import Environment, PackageLoader

    spec, report, config = (_section(document, name) for name in ("spec", "report", "config"))
    tasks: dict[str, Mapping[str, Any]]
    if kind == "baseline":
        steady = spec.get("dt") is None
        tasks = {str(spec["task"]): {**spec, "steady": steady}} if "task" in spec else {}
    else:
        tasks = {
            str(name): task for name, task in _section(spec, "tasks").items() if isinstance(task, Mapping)
        }
    measured = [
        (metric, of, float(value))
        for key, value in report.items()
        for prefix, metric, of in [(*key.split("/", 2), "", "")[:3]]
        if prefix == "val" and metric in _MEASURED and of
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    front: dict[str, Any] = {
        "library_name": "ups-store",
        "tags": [
            "pde",
            "physics",
            "surrogate-model",
            "neural-operator" if kind == "operator" else kind,
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
        for metric, task, value in measured
        if metric in ("nrmse", "latent_nrmse")
    ]
    if results:
        front["model-index"] = [{"name": Path(file).stem, "results": results}]
    name = f"{_TITLES[kind]} ({spec['kind']})" if kind == "baseline" and "kind" in spec else _TITLES[kind]
    network = _section(spec, "operator")
    if "name" in network:  # of another operator than ours
        network = {"name": network["name"], **_section(network, "config")}
    module, colon, _ = str(network.get("name", "")).partition(":")
    first, known = next(iter(tasks.items()), ("", {}))
    means = _section(_section(spec, "statistics"), "parameters").get("mean", ())
    environment = Environment(loader=PackageLoader("ups.trained", ""), keep_trailing_newline=True)
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template("card.md.j2").render(
        file=file,
        kind=kind,
        digest=digest,
        spec=spec,
        config=config,
        network=network,
        prior=_section(spec, "prior"),
        rolled_out=("operator", "corrector", "student"),
        size=f"{num_weights:,} weights",
        title=f"{name} for {', '.join(tasks) or 'an unknown task'}",
        front_matter=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        tasks=tasks,
        rows=[_task_row(name, task, spec) for name, task in tasks.items()],
        data_lines={task: data for task, data in _section(document, "data").items() if task in tasks},
        of_data=_OF_DATA,
        of_training=_OF_TRAINING,
        effort={key: value for key, value in _section(document, "effort").items() if key != "curve"},
        measured=measured,
        names=_MEASURED,
        gates=document.get("gates", ()),
        all_steady=all(task.get("steady") for task in tasks.values()),
        task=first,
        known=known,
        steps=1 if known.get("steady") else 10,
        points=", ".join(map(str, _section(known, "grid").get("points", ()))),
        # Code that works as it stands once there are fields names a value of what training varied.
        varied={
            name: round((low + high) / 2, 6)
            for name, (low, high) in _section(known, "parameters").items()
            if low != high
        },
        allow_code=f', allow_code="{module}"' if colon else "",
        means=dict(zip(spec.get("parameters", ()), means, strict=False)) if kind == "baseline" else {},
    )


def _task_row(name: str, task: Mapping[str, Any], spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of what is known of a task."""
    grid = _section(task, "grid")
    ends = task.get("boundary") or ["periodic" if one else "with ends" for one in grid.get("periodic", ())]
    parameters = ", ".join(
        f"{key} = {low:.4g}" if low == high else f"{key} from {low:.4g} to {high:.4g}"
        for key, (low, high) in _section(task, "parameters").items()
    )
    if not parameters and isinstance(listed := spec.get("parameters"), list):
        parameters = ", ".join(listed)
    return (
        name,
        " x ".join(map(str, grid.get("points", ()))),
        ", ".join(map(str, ends)),
        ", ".join(task.get("channels", ())),
        "steady" if task.get("steady") else f"{task['dt']:.6g}" if task.get("dt") else "",
        parameters,
    )


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = values.get(key)
    return section if isinstance(section, Mapping) else {}
