"""What a run's configuration says to the build of its stores, beside the sections that both share.

`ups_store.build` finds this module by the entry point `ups` of the group `ups_store.config_keys`, and passes
over the sections of training. Where there is a section `latent`, stores hold latents: then
`training.latent_cache_dir` and `training.latent_cache_dtype` say where and in what, instead of `cache`.

Every build imports it, so the models of a run, which take longer to import, come with its first section of
training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups.config.legacy import KEYS, MEANINGLESS, SWITCHES
from ups_store.errors import near_word

# Sections and keys of earlier configurations that have no effect (docs/guides/migrate.md).
_READ = ("training", "checkpoint")  # sections of a run that the build takes something from
OLD_SECTIONS = frozenset(key.partition(".")[0] for key in (*MEANINGLESS, *KEYS)) - {"data", "training"}
OLD_KEYS: dict[str, frozenset[str]] = {
    section: frozenset(
        name for key in MEANINGLESS if (name := key.removeprefix(f"{section}.")) != key and "." not in name
    )
    for section in ("data", "training")
}

# Beginnings of keys that say where something is or how it is done, not what is trained or stored.
PLACES = (
    *("checkpoint.", "logging.", "pipeline.", "training.log_", "training.device", "training.rank_timeout_s"),
    "training.stall_timeout_s",
    *("training.num_workers", "training.pin_memory", "training.prefetch_factor", "training.preload"),
    *("training.use_parallel_encoding", "training.latent_cache_dir", "training.compile_cache"),
)
SENT = ("logging.wandb.",)

LISTS_KEYS = "`ups train --config demo --print-config`"
_LATENT_DTYPE = "float16"
_CHECKPOINT = "autoencoder.safetensors"
_ENCODER = "ups"


def without_effect(values: dict[str, Any]) -> Iterator[str]:
    """One sentence for each key of a run's configuration that isn't read.

    Args:
        values: Configuration as nested dictionaries; wrong keys of the build's own sections are errors.
    """
    for section, old in OLD_KEYS.items():
        for name in _section(values, section):
            if name in old:
                yield f"{section}.{name} has no effect; docs/guides/migrate.md says what there is instead"
    for section in _READ:
        given = list(map(str, _section(values, section)))
        known = _sections_of_run()[section].annotation.model_fields if given else ()
        passed = {*known, *OLD_KEYS.get(section, ()), *(key.rpartition(".")[2] for key in SWITCHES)}
        for name in given:
            if name not in passed:
                near = near_word(name, known)
                hint = f"did you mean {section}.{near}?" if near else f"{LISTS_KEYS} shows the known keys"
                yield f"{section}.{name} is no key and has no effect; {hint}"


def to_build(values: dict[str, Any]) -> dict[str, Any]:
    """What a run's configuration says to a build.

    Args:
        values: Configuration as nested dictionaries; unchanged.
    Returns:
        Sections of `ups_store.build.BuildConfig`, and unknown ones, for it to refuse.

    Raises:
        UpsError: As `check_own_encoder`, where stores hold latents.
    """
    from ups_store.build import BuildConfig

    kept = {key: value for key, value in values.items() if key not in OLD_SECTIONS}
    if kept.keys() - BuildConfig.model_fields.keys():
        passed = _sections_of_run().keys() - BuildConfig.model_fields.keys()
        kept = {key: value for key, value in kept.items() if key not in passed}
    if isinstance(data := kept.get("data"), dict):
        kept["data"] = {key: value for key, value in data.items() if key not in OLD_KEYS["data"]}
    training, checkpoint = _section(values, "training"), _section(values, "checkpoint")
    kept["reading"] = _reading(training) | _section(values, "reading")
    if not kept["reading"]:
        del kept["reading"]
    latent = values.get("latent")
    if not isinstance(latent, dict):
        return kept
    folder = Path(str(checkpoint.get("dir") or "checkpoints"))
    said = {name: value for name, value in latent.items() if value is not None}
    own = folder / _CHECKPOINT
    if said.get("encoder", _ENCODER) == _ENCODER and Path(str(said.get("checkpoint", own))) == own:
        _check_own_encoder(own, values)
    kept["latent"] = {"checkpoint": str(folder / _CHECKPOINT)} | _pinned(training) | said
    kept["cache"] = _section(values, "cache") | _latent_cache(training)
    return kept


def _sections_of_run() -> Mapping[str, Any]:
    from ups.config.run import RunConfig

    return RunConfig.model_fields


def _check_own_encoder(path: Path, values: dict[str, Any]) -> None:
    """As `check_own_encoder`, of sections as they are said; what is wrong with these a run says."""
    if not path.exists():  # the usual case imports nothing
        return
    from pydantic import ValidationError

    from ups.config.architecture import DecoderConfig, EncoderConfig
    from ups.config.own_encoder import check_own_encoder

    encoder, decoder = (_section(values, name) for name in ("encoder", "decoder"))
    with contextlib.suppress(ValidationError):
        check_own_encoder(path, encoder=EncoderConfig(**encoder), decoder=DecoderConfig(**decoder))


def _reading(training: dict[str, Any]) -> dict[str, Any]:
    """How sources are read, by the names of `training`."""
    if training.get("use_parallel_encoding") is False:
        return {"num_workers": 0}
    return {"num_workers": training["num_workers"]} if training.get("num_workers") is not None else {}


def _pinned(training: dict[str, Any]) -> dict[str, Any]:
    return {"pin_memory": training["pin_memory"]} if training.get("pin_memory") is not None else {}


def _latent_cache(training: dict[str, Any]) -> dict[str, Any]:
    dtype = training.get("latent_cache_dtype") or _LATENT_DTYPE
    folder = training.get("latent_cache_dir")
    return {"dtype": dtype} | ({"dir": folder} if folder else {})


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name)
    return dict(section) if isinstance(section, dict) else {}
