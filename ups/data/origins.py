"""What files were made from: how a checkpoint, a store or a report names the files before it, each by a hash.

Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ups_store
from ups.data.stores import Store, place_of, store_path
from ups.errors import CheckpointError
from ups.stages import CORRECTOR_MODEL, ENCODER_MODEL, OPERATOR_MODEL, Model
from ups.trained.checkpoint import hash_tensors, read_any_document
from ups.trained.specs import (
    AUTOENCODER,
    CORRECTOR,
    OPERATOR,
    PRIOR,
    STUDENT,
)
from ups_store.build import DigestCache, Readers, ReadingConfig

STORE, SOURCE = "store", "source"  # kinds of files, besides those of checkpoints
# What a hash is of.
CONFIG_HASH, FINGERPRINT = "config_hash", "fingerprint"  # of a store
WEIGHTS = "weights"  # `hash_tensors`; "weights:PREFIX" of those whose names start so
FULL, SAMPLED = "full", "sampled"  # blake3 of a source, as `data.source_digest` says
MADE_FROM = "made_from"  # key of a store's attributes and of a report

# Kinds that name what they were made from.
_CHECKPOINTS = (AUTOENCODER, OPERATOR, CORRECTOR, STUDENT, PRIOR, "baseline")
_SOURCE = re.compile(r"(?:files |, )(.+?) sampled:([0-9a-f]{64})(?=, |$)")
_STORE = re.compile(r"store ([0-9a-f]{64})")


@dataclass(frozen=True)
class Origin:
    """A file that another one was made from, as that one names it.

    Attributes:
        role: What it is to the other, such as "operator" or "training data of burgers1d".
        kind: "store", "source", or the kind of a checkpoint.
        path: Where it was, or its name; None where nothing says it.
        hash_of: What the hash is of, such as "config_hash", "weights" or "sampled".
        hash: Hexadecimal digits; None where it wasn't noted.
    """

    role: str
    kind: str
    path: str | None
    hash_of: str
    hash: str | None

    def to_json(self) -> dict[str, Any]:
        """JSON values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Origin:
        """The origin that `to_json` described."""
        try:
            said = {name: values[name] for name in cls.__dataclass_fields__}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"no origin of a file: {values!r}") from error
        texts = {
            name: value for name, value in said.items() if name not in ("path", "hash") or value is not None
        }
        if not all(isinstance(value, str) for value in texts.values()):
            raise ValueError(f"no origin of a file: {values!r}")
        return cls(**said)


def origin_of_checkpoint(path: Path, *, role: str, kind: str) -> Origin:
    """A checkpoint, by its weights."""
    return Origin(role, kind, str(path), WEIGHTS, hash_tensors(path))


def origin_of_given(path: Path, *, role: str) -> Origin:
    """A store by what it was made from, or a source file by its sampled digest."""
    if path.suffix in (".h5", ".hdf5"):
        return Origin(role, SOURCE, str(path), SAMPLED, digest_of_source(path, SAMPLED))
    with ups_store.open(place_of(path) or path) as store:
        return Origin(role, STORE, str(path), CONFIG_HASH, store.config_hash)


def digest_of_source(path: Path, kind: str, readers: Readers | None = None) -> str:
    """Hash a source file by blake3: all bytes ("full"), or size, structure and some blocks ("sampled")."""
    digests = DigestCache(path.parent, rehash=True, save=False, readers=readers)
    return digests.digest(path, "full" if kind == FULL else "sampled", lambda nbytes: None)


def folders_of_sources(store: Path) -> list[Path]:
    """Where the sources of the stores beside a store were when these were built, as far as that is known."""
    paths = DigestCache(store.parent, save=False).paths
    return list(dict.fromkeys(path.parent for path in paths))


def identity_of_store(store: Store) -> str:
    """How a checkpoint names a store that it was trained on; `origins_of_data` reads it."""
    return f"store {store.config_hash}"


def identity_of_sources(paths: Sequence[Path]) -> str:
    """How a checkpoint names source files that it was trained on; `origins_of_data` reads it."""
    with Readers(ReadingConfig()) as readers:
        named = [
            f"{path.name} sampled:{digest_of_source(path, SAMPLED, readers)}" for path in dict.fromkeys(paths)
        ]
    return f"files {', '.join(named)}"


def origins_of_data(identity: str, *, role: str, path: str | None) -> list[Origin]:
    """The files that an identity of data names.

    Args:
        identity: As `identity_of_store` or `identity_of_sources` gave it.
        role: What they are to the file that names them.
        path: Where the store was, if it is one.
    """
    if store := _STORE.match(identity):
        return [Origin(role, STORE, path, CONFIG_HASH, store[1])]
    sources = [Origin(role, SOURCE, name, SAMPLED, digest) for name, digest in _SOURCE.findall(identity)]
    return sources or [Origin(role, SOURCE, identity.removeprefix("files "), SAMPLED, None)]


def is_of_other_data(path: Path, task: str, *, train: str, latents: Path) -> bool:
    """Whether a model was trained on other data than the training split of a task has now.

    A model that says nothing of its data, or whose store isn't there any more, is taken to be of these.

    Args:
        path: The model's checkpoint.
        train: Identity of the fields of the training split.
        latents: Folder of the latent stores, one of which an operator on latents was trained on.
    """
    document = read_any_document(path)[1]
    trained = str(section(document, "data").get(task, ""))
    if section(document, "spec").get("states") != "latent":
        return trained.partition(" ")[0] == train.partition(" ")[0] and trained != train
    place = place_of(store_path(latents, task, "train"))
    if place is None or not trained:
        return False
    with ups_store.open(place) as store:
        return trained != identity_of_store(store)


def origins_of_checkpoint(path: Path) -> list[Origin]:
    """What a model was trained on: its data, the autoencoder that made its latents, what it corrects."""
    kind, document = read_any_document(path)
    if kind not in _CHECKPOINTS:
        raise CheckpointError(
            "it names nothing",
            kind="other_kind",
            path=path,
            expected=" or ".join(_CHECKPOINTS),
            found=kind,
            hint="take the model that the training has written",
        )
    config, spec = section(document, "config"), section(document, "spec")
    is_latent = kind == OPERATOR and spec.get("states") == "latent"
    stores, latents = store_folders(config)
    origins: list[Origin] = []
    for task, identity in section(document, "data").items():
        place = str(store_path(latents if is_latent else stores, task, "train"))
        if kind in (CORRECTOR, STUDENT):
            folder = _place(config, Model("residuals", "residuals", "diffusion.residual_dir"))
            place = str(folder / f"{task}_fit_residuals.zarr.zip")
        origins += origins_of_data(str(identity), role=f"training data of {task}", path=place)
    if not origins:
        origins.append(Origin("training data", STORE, None, CONFIG_HASH, None))
    if kind == CORRECTOR:
        digest = text_of(section(spec, CORRECTOR).get("operator_sha256"))
        place = str(_place(config, OPERATOR_MODEL))
        origins.append(Origin("operator", OPERATOR, place, WEIGHTS, digest))
    if kind == STUDENT:
        digest = text_of(section(section(spec, CORRECTOR), "taught").get("teacher_sha256"))
        place = str(_place(config, CORRECTOR_MODEL))
        origins.append(Origin("teacher", CORRECTOR, place, WEIGHTS, digest))
    if kind in (OPERATOR, PRIOR) and spec.get("states") == "latent":
        digest = text_of(spec.get("autoencoder_sha256"))
        origins.append(Origin("autoencoder", AUTOENCODER, str(autoencoder_path(config)), WEIGHTS, digest))
    return origins


def store_folders(config: Mapping[str, Any]) -> tuple[Path, Path]:
    """Where a saved configuration puts stores, and those of latents."""
    stores = text_of(section(config, "cache").get("dir")) or "."
    return Path(stores), Path(text_of(section(config, "training").get("latent_cache_dir")) or stores)


def autoencoder_path(config: Mapping[str, Any]) -> Path:
    """Where a saved configuration has its autoencoder."""
    return _place(config, ENCODER_MODEL)


def _place(config: Mapping[str, Any], model: Model) -> Path:
    """What a saved configuration says, else a name in its folder of checkpoints."""
    part, _, key = str(model.key).partition(".")
    given = text_of(section(config, part).get(key))
    folder = text_of(section(config, "checkpoint").get("dir")) or "."
    return Path(given) if given else Path(folder) / model.file


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of JSON values; empty where there is none."""
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def text_of(value: object) -> str | None:
    """A text as it is; None of anything else."""
    return value if isinstance(value, str) else None
