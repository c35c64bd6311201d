"""Keys and names of earlier versions, and of the system before: what they are now, or why they are gone.

A configuration has today's words as soon as it is read, and is hashed in those in which runs were hashed
first (`as_hashed`), so that what was trained before stays what it is. A build reads the same files: nothing
that takes time is imported here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups_store.old_names import with_present_names as with_present_names_of_build

# Stages, wherever somebody may have written one: in configurations, command lines, logs and documents.
STAGES = {"diff_residual": "corrector", "consistency_distill": "student", "steady_prior": "prior"}

# Dotted keys and sections, earlier and now.
KEYS = {
    **{f"stages.{old}": f"stages.{new}" for old, new in STAGES.items()},
    **{
        f"pipeline.{check}.gates.throughput.{old}": f"pipeline.{check}.gates.throughput.{new}"
        for check in ("small", "full")
        for old, new in STAGES.items()
    },
    "steady_prior": "prior",
    "operator.pdet.hidden_dim": "operator.width",
    **{
        f"operator.pdet.{name}": f"operator.{name}"
        for name in ("depths", "depth", "num_heads", "window_size", "mlp_ratio", "drop_path", "dropout")
    },
}

# Patterns of dotted keys, and why the key means nothing.
MEANINGLESS = {
    "training.dt": "the physical step is the difference of the stored times",
    "training.persistent_workers": "readers live as long as the build does",
    "training.cache_dir": "training.latent_cache_dir says where latents are",
    "training.checkpoint_interval": "checkpoint.interval says it, in optimiser steps",
    "training.log_per_task_metrics": "metrics are always logged per task",
    "training.query_sampling.enabled": "query_sampling.num_queries switches it on",
    "training.query_sampling.strategy": "points are drawn uniformly",
    "data.patch_size": "encoder.patch_size says it",
    "data.shard_limit": "data.limit says it",
    "data.download": "data.files and data.root name the sources",
    "data.task_sampling": "every task gives as many batches as it has data",
    "operator.pdet.input_dim": "latent.dim says it",
    "operator.pdet.group_size": "layers are normalised over all channels",
    "operator.pdet.qk_norm": "queries and keys are always normalised",
    "operator.pdet.attention_type": "windows of attention are always shifted",
    "diffusion.latent_dim": "latent.dim says it",
    "ttc.steps": "a rollout is as long as --horizon says",
    "ttc.dt": "the physical step is the difference of the stored times",
    "ttc.beam_width": "one state is kept a step",
    "ttc.horizon": "candidates are compared after one step",
    "ttc.max_evaluations": "ttc.candidates bounds them",
    "ttc.early_stop_margin": "all candidates are compared",
    "ttc.gamma": "candidates are compared after one step",
    "ttc.sampler": "ttc.noise_std says it",
    "ttc.reward": "candidates are scored by the laws of their task",
    "ttc.decoder": "the operator's file holds its decoder",
    "stages.*.optimizer.muon_backend": "Muon is always PyTorch's",
    "stages.*.scheduler.mode": "errors are always minimised",
    "stages.student.tau_schedule": "training.distill_num_taus says it, for all epochs",
    "stages.student.target_loss": "gates decide on a student, and no single loss",
    "stages.student.distill_*": "training.distill_num_taus and distill_micro_batch say it",
    "benchmark": "cuDNN chooses its algorithms itself",
    "deterministic": "runs on a CPU always repeat to the bit",
}

# Sections that there never were here, and what to write instead.
INSTEAD = {
    "optimizer": "say it of each stage: stages.operator.optimizer",
    "scheduler": "say it of each stage: stages.operator.scheduler",
}

# Switches of the system before, and the key and value that each means where it is true.
SWITCHES = {
    "operator.pdet.use_activation_checkpoint": ("training.activation_checkpointing", "full"),
    "operator.pdet.use_flex": ("operator.attention", "flex"),
    "training.use_flex": ("operator.attention", "flex"),
    "training.use_fsdp2": ("training.parallel", "fsdp2"),
}

# What those of the keys above that configurations once held said where nobody said anything, by the key that
# they stood beside. It needs no word now; hashes have it still.
_SAID_NOTHING: dict[str, dict[str, Any]] = {
    "operator.width": {
        "operator.pdet.input_dim": None,
        "operator.pdet.group_size": None,
        "operator.pdet.qk_norm": True,
        "operator.pdet.attention_type": "standard",
    },
    "operator.attention": {
        "operator.pdet.use_activation_checkpoint": False,
        "operator.pdet.use_flex": False,
    },
    "diffusion.hidden_dim": {"diffusion.latent_dim": None},
    "training.parallel": {"training.use_flex": False, "training.use_fsdp2": False},
    "stages.*.optimizer.implementation": {"stages.*.optimizer.muon_backend": "auto"},
    "stages.*.scheduler.name": {"stages.*.scheduler.mode": "min"},
}
_DEFAULTS = {key: value for beside in _SAID_NOTHING.values() for key, value in beside.items()}

# Naming one of these, and no mixer, means the PDE-Transformer that the operator once always was.
_OF_ATTENTION = (
    *("operator.num_heads", "operator.window_size"),
    *("operator.pdet.attention_type", "operator.pdet.qk_norm"),
)

# Keys of these that have to say the same as others, if they say anything.
SAME_AS = {"operator.pdet.input_dim": "latent.dim", "diffusion.latent_dim": "latent.dim"}


def present_stage(name: Any) -> Any:
    """Today's name of a stage; whatever else is given as it is."""
    return STAGES.get(name, name) if isinstance(name, str) else name


def earlier_stage(name: str) -> str:
    """The name under which a stage was hashed first."""
    return next((old for old, new in STAGES.items() if new == name), name)


def stage_file(path: Path) -> Path:
    """A file that a stage's name begins; the one under its earlier name where a run began with that."""
    name, dot, rest = path.name.partition(".")
    earlier = path.with_name(f"{earlier_stage(name)}{dot}{rest}")
    return earlier if earlier.exists() and not path.exists() else path


def with_present_names(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give the keys of one source their present names, in references `${...}` too.

    Args:
        values: Nested mappings of one file, of one command line's overrides, or of a document; unchanged.
    """
    present: dict[Any, Any] = _with_present_references(with_present_names_of_build(values))
    for old, new in KEYS.items():
        *sections, name = old.split(".")
        section = inner(present, *sections)
        if name not in section:
            continue
        if new.split(".")[-1] in inner(present, *new.split(".")[:-1]):
            raise ValueError(f"{old} is the earlier name of {new}: give one of them")
        present = _with(without(present, old), new, section[name])
    return present


def as_read(values: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str], list[str]]:
    """Settle what keys of earlier versions say: by today's keys, or not at all.

    Args:
        values: Of all sources together, with present names; unchanged.

    Returns:
        The values without such keys, the reason of each that has no effect, and sentences about those that
        contradict others.
    """
    values, reasons, problems = dict(values), dict[str, str](), list[str]()
    if _get(values, "operator.mixer") is None and any(_get(values, key) is not None for key in _OF_ATTENTION):
        values = _with(values, "operator.mixer", "attention")
    for section in INSTEAD.keys() & values.keys():
        problems.append(f"{section} is no section; {INSTEAD[section]}")
        values = without(values, section)
    for old, (new, value) in SWITCHES.items():
        if (switch := _get(values, old)) is not None and not isinstance(switch, bool):
            problems.append(f"{old} = {switch}: expected true or false")
        elif switch:
            said = _get(values, new)
            # Of parameters that are shared out in two ways either is what the switch means.
            if said not in (None, value) and not (new == "training.parallel" and said != "ddp"):
                problems.append(f"{old} means {new} = {value}, not {said}")
            elif said is None:
                values = _with(values, new, value)
        values = without(values, old)
    for path, value in list(_leaves(values, with_sections=True)):
        key = ".".join(map(str, path))
        if reason := next((why for old, why in MEANINGLESS.items() if fnmatch.fnmatch(key, old)), None):
            values = without(values, key)
            default = next((said for old, said in _DEFAULTS.items() if fnmatch.fnmatch(key, old)), ...)
            if value != default and key not in SAME_AS:
                reasons[key] = reason
    if inner(values, "operator").get("pdet") == {}:
        values = without(values, "operator.pdet")
    return values, reasons, problems


def of_document(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version wrote into a document, in today's words."""
    return as_read(with_present_names(values))[0]


def as_hashed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a configuration in the words in which runs were first hashed: the one border to them.

    Hashes of what runs did hold the keys that there were then. Another word for a stage, or a key that went
    because it said nothing, makes no other training: so they are put back here, and nowhere else.

    Args:
        values: By dotted key, or nested as `RunConfig.model_dump` gives them all.
    """
    is_flat = not any(isinstance(value, Mapping) and value for value in values.values())
    leaves = ((tuple(key.split(".")), value) for key, value in values.items()) if is_flat else _leaves(values)
    hashed = dict[tuple[str, ...], Any]()
    for path, value in leaves:
        hashed[_earlier(path)] = value
        for beside, constants in _SAID_NOTHING.items():
            if fnmatch.fnmatch(".".join(path), beside):
                for key, constant in constants.items():  # a star is the name of a stage
                    hashed[_earlier(tuple(key.replace("*", path[1]).split(".")))] = constant
    if is_flat:
        return {".".join(path): value for path, value in hashed.items()}
    nested = dict[str, Any]()
    for path, value in hashed.items():
        section = nested
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value
    return nested


def inner(values: Any, *names: Any) -> dict[Any, Any]:
    """An inner mapping; an empty one where there is none."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Values without a dotted key."""
    name, _, rest = key.partition(".")
    if name not in values:
        return values
    if not rest:
        return {other: value for other, value in values.items() if other != name}
    return {**values, name: without(values[name], rest)} if isinstance(values[name], dict) else values


def _with(values: dict[Any, Any], key: str, value: Any) -> dict[Any, Any]:
    """Values with another one of a dotted key."""
    name, _, rest = key.partition(".")
    return {**values, name: _with(inner(values, name), rest, value) if rest else value}


def _get(values: dict[Any, Any], key: str) -> Any:
    *sections, name = key.split(".")
    return inner(values, *sections).get(name)


def _leaves(
    values: Mapping[Any, Any], before: tuple[Any, ...] = (), *, with_sections: bool = False
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Values by the names that lead to them, inner ones before sections, which come only if wanted."""
    for name, value in values.items():
        if is_section := isinstance(value, Mapping) and bool(value):
            yield from _leaves(value, (*before, name), with_sections=with_sections)
        if with_sections or not is_section:
            yield (*before, name), value


def _earlier(path: tuple[str, ...]) -> tuple[str, ...]:
    """The names that led to a value when it was hashed first."""
    for old, new in KEYS.items():
        names = tuple(new.split("."))
        if path[: len(names)] == names:
            return (*old.split("."), *path[len(names) :])
    return path


def _with_present_references(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_present_references(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_present_references(inner) for inner in value]
    if isinstance(value, str) and "${" in value:
        for old, new in KEYS.items():
            value = value.replace(f"${{{old}}}", f"${{{new}}}").replace(f"${{{old}.", f"${{{new}.")
    return value
