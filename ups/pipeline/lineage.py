"""What a file was made from, link by link: store, checkpoint, prediction, report; `ups lineage` shows it.

Every file names those before it by hashes. Here they are looked for and hashed again, without torch: where
they were, beside the files that were found, where the configuration in a checkpoint or report says, and below
folders that are given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal

import ups_store
from ups.data.identities import checkpoint_identity, file_identity
from ups.data.origins import (
    CONFIG_HASH,
    FINGERPRINT,
    FULL,
    MADE_FROM,
    SAMPLED,
    SOURCE,
    STORE,
    WEIGHTS,
    Origin,
    autoencoder_path,
    digest_of_source,
    folders_of_sources,
    origins_of_checkpoint,
    origins_of_data,
    section,
    store_folders,
    text_of,
)
from ups.data.stores import StoreError, place_of
from ups.errors import CheckpointError, ConfigError
from ups.grid import GridSpec
from ups.pipeline.metadata import KIND as RUN
from ups.trained.checkpoint import hash_tensors, read_any_document
from ups.trained.specs import (
    AUTOENCODER,
    AUTOENCODER_FILE,
    CORRECTOR,
    CORRECTOR_FILE,
    OPERATOR,
    OPERATOR_FILE,
    PRIOR,
)

State = Literal["same", "changed", "missing", "unnamed"]

REPORT, PREDICTION, FILE = "report", "prediction", "file"
_IDENTITY, _SHA256 = "identity", "sha256"  # hashes that a run notes of checkpoints, and of other files
_UNREADABLE = (StoreError, CheckpointError, OSError, ValueError)
_Hashes = dict[tuple[Path, str], str | None]


@dataclass(frozen=True)
class Link:
    """A file of a chain.

    Attributes:
        origin: How the file after it names it.
        state: "same", "changed" (another hash), "missing", or "unnamed" where no hash was noted.
        found: Where it is now; of a changed one what is in its place.
        found_hash: Its hash now; None if it can't be read.
        made_from: What it was made from itself; empty unless it is the same.
    """

    origin: Origin
    state: State
    found: str | None = None
    found_hash: str | None = None
    made_from: Sequence[Link] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it and all before it are there and the same."""
        return self.state == "same" and all(link.is_whole for link in self.made_from)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            **self.origin.to_json(),
            "state": self.state,
            "found": self.found,
            "found_hash": self.found_hash,
            "made_from": [link.to_json() for link in self.made_from],
        }


@dataclass(frozen=True)
class Lineage:
    """A file and what it was made from.

    Attributes:
        path: The file.
        kind: "store", "prediction", "report", "ups_run", or the kind of a checkpoint.
        made_from: The links before it.
    """

    path: str
    kind: str
    made_from: Sequence[Link]

    @property
    def is_whole(self) -> bool:
        """Whether every link is there and the same."""
        return all(link.is_whole for link in self.made_from)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        links = [link.to_json() for link in self.made_from]
        return {"path": self.path, "kind": self.kind, "is_whole": self.is_whole, "made_from": links}


@dataclass(frozen=True)
class _Named:
    """What a file says of those before it.

    Attributes:
        kind: Of the file itself.
        origins: Those before it.
        folders: Where its configuration says that files lie.
    """

    kind: str
    origins: Sequence[Origin]
    folders: Sequence[Path] = ()


def lineage_of(path: Path, *, search: Sequence[Path] = ()) -> Lineage:
    """Follow a file back to the sources.

    Args:
        path: A store, a checkpoint, a prediction, `report.json`, or the `metadata.json` of a run.
        search: Folders in which, at any depth, files are looked for that aren't where they were.

    Raises:
        ConfigError: If there is no such file, or it is none of these.
        CheckpointError: If it is a checkpoint that can't be read.
        ups_store.StoreError: If it is a store that can't be read.
    """
    place = _place_of(path)
    if place is None:
        raise ConfigError("no such file", path=path)
    for folder in search:
        if not folder.is_dir():
            raise ConfigError("--search", path=folder, expected="a folder")
    named = _read(place)
    return Lineage(str(path), named.kind, _Tracer(search).links(named, place, ()))


# --- what files say -----------------------------------------------------------------------------------------


def _read(path: Path) -> _Named:
    """What a file says of those before it."""
    if path.suffix == ".safetensors":
        return _read_checkpoint(path)
    return _read_json(path) if path.suffix == ".json" else _read_store(path)


def _read_store(path: Path) -> _Named:
    with ups_store.open(path) as store:
        content, attrs = store.identity, store.attrs
    if content.get("kind") == "prediction":
        operator = Origin("operator", OPERATOR, None, WEIGHTS, text_of(content.get("checkpoint")))
        return _Named(PREDICTION, _said(attrs, path) or [operator])
    origins = [*_encoder(content), *_residuals(content), *_parents(content), *_sources(content)]
    return _Named(STORE, origins, folders_of_sources(path))


def _encoder(content: Mapping[str, Any]) -> Iterator[Origin]:
    """The autoencoder that made a store's latents, by the weights of its encoder for the store's grid."""
    if content.get("kind") != "latents":
        return
    encoder = content.get("encoder")
    try:
        grid = GridSpec.from_json(encoder["configuration"]["grid"]).name  # type: ignore[index]
        digest = str(encoder["weights_sha256"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):  # somebody else's encoder, or latents that say nothing
        yield Origin("encoder", AUTOENCODER, None, WEIGHTS, None)
        return
    yield Origin("encoder", AUTOENCODER, AUTOENCODER_FILE, f"{WEIGHTS}:encoder.{grid}.", digest)


def _residuals(content: Mapping[str, Any]) -> Iterator[Origin]:
    """The operator whose residuals a store holds, and the trajectories that they are of; a pair's teacher."""
    if content.get("kind") == "teacher_pairs":
        yield Origin("teacher", CORRECTOR, CORRECTOR_FILE, WEIGHTS, text_of(content.get("teacher_sha256")))
    if content.get("kind") == "residuals":
        yield Origin("operator", OPERATOR, OPERATOR_FILE, WEIGHTS, text_of(content.get("operator_sha256")))
        trajectories = str(content.get("trajectories"))
        yield from origins_of_data(trajectories, role="held-out trajectories", path=None)


def _parents(content: Mapping[str, Any]) -> Iterator[Origin]:
    """The stores that another one joins, or is cut from."""
    for parent in _listed(content.get("parents")):
        yield Origin("samples", STORE, None, CONFIG_HASH, text_of(parent.get("config_hash")))


def _sources(content: Mapping[str, Any]) -> Iterator[Origin]:
    kind = content.get("source_digest")
    digest_of = kind if kind in (FULL, SAMPLED) else FULL
    for source in _listed(content.get("sources")):
        name = text_of(source.get("name"))
        yield Origin("source", SOURCE, name, digest_of, text_of(source.get("digest")))
        for outer in _listed(source.get("external")):
            where = text_of(outer.get("path") or outer.get("name"))
            yield Origin(f"data of {name}", SOURCE, where, digest_of, text_of(outer.get("digest")))


def _read_checkpoint(path: Path) -> _Named:
    kind, document = read_any_document(path)
    return _Named(kind, origins_of_checkpoint(path), _all_folders(section(document, "config")))


def _read_json(path: Path) -> _Named:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"it can't be read ({error})", path=path) from error
    found: Mapping[str, Any] = document if isinstance(document, dict) else {}
    if found.get("kind") == RUN:
        return _Named(RUN, list(_outputs(section(found, "identities"))))
    if "tasks" not in found or "rows" not in found:
        expected = "a store, a checkpoint, a prediction, report.json, or metadata.json of a run"
        raise ConfigError("it is none of the files that name others", path=path, expected=expected)
    unnamed = [Origin("operator", OPERATOR, None, WEIGHTS, None)]  # an earlier version named nothing
    return _Named(REPORT, _said(found, path) or unnamed, _all_folders(section(found, "config")))


def _outputs(identities: Mapping[str, Any]) -> Iterator[Origin]:
    """What the nodes of a run have left, hashed as they do."""
    for name, digest in identities.items():
        path = Path(name)
        if digest is None:  # an optional one, which wasn't made
            continue
        if path.name.endswith(".zarr.zip"):
            kind, hash_of = STORE, FINGERPRINT
        elif path.suffix == ".safetensors" and path.stem in (AUTOENCODER, OPERATOR, CORRECTOR, PRIOR):
            kind, hash_of = path.stem, _IDENTITY
        else:
            kind = {".safetensors": "baseline", ".json": REPORT}.get(path.suffix, FILE)
            hash_of = _SHA256
        yield Origin("output", kind, name, hash_of, str(digest))


def _said(document: Mapping[str, Any], path: Path) -> list[Origin]:
    """The origins that a report or a prediction lists itself."""
    said = document.get(MADE_FROM) or []
    try:
        return [Origin.from_json(values) for values in said]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"what it was made from can't be read ({error})", path=path) from error


def _all_folders(config: Mapping[str, Any]) -> list[Path]:
    found = [*store_folders(config), autoencoder_path(config).parent]
    if root := text_of(section(config, "data").get("root")):
        found += [Path(root), *sorted(Path(root).rglob("*/"))]
    return found


def _listed(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _place_of(path: Path) -> Path | None:
    """As `place_of`; a store's partitions may also be named by the pattern that opens them."""
    if "-*-of-" in path.name:
        return path if any(path.parent.glob(escape(path.name).replace("[*]", "*"))) else None
    return place_of(path)


# --- where they are -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tracer:
    """Finds files and hashes them, each once.

    Attributes:
        search: Folders in which files are looked for at any depth.
        folders: Where files were found, or configurations say that they are, in this order.
        hashes: What was found by path and what the hash is of.
    """

    search: Sequence[Path]
    folders: dict[Path, None] = field(default_factory=dict)
    hashes: _Hashes = field(default_factory=dict)

    def links(self, named: _Named, path: Path, before: tuple[Path, ...]) -> list[Link]:
        """The links before a file.

        Args:
            named: What the file says.
            before: Files of the chain so far; one that claims to be made from itself isn't followed.
        """
        self.folders.update(dict.fromkeys([path.parent, *named.folders]))
        return [self._link(origin, (*before, path.resolve())) for origin in named.origins]

    def _link(self, origin: Origin, before: tuple[Path, ...]) -> Link:
        if origin.hash is None:
            return Link(origin, "unnamed")
        other: Link | None = None
        for place in self._places(origin):
            digest = self._hash(place, origin.hash_of, origin.kind)
            if digest == origin.hash:
                return self._followed(Link(origin, "same", str(place), digest), place, before)
            if other is None and origin.path is not None:
                other = Link(origin, "changed", str(place), digest)
        return other or Link(origin, "missing")

    def _followed(self, link: Link, place: Path, before: tuple[Path, ...]) -> Link:
        """A link with those before it."""
        if link.origin.kind in (SOURCE, FILE) or place.resolve() in before:
            return link
        try:
            named = _read(place)
        except (ConfigError, *_UNREADABLE):  # its hash is right, so somebody else has made it
            return link
        return replace(link, made_from=self.links(named, place, before))

    def _places(self, origin: Origin) -> Iterator[Path]:
        """Files that may be it, the likeliest first."""
        seen: set[Path] = set()
        for candidate in self._candidates(origin):
            place = _place_of(candidate)
            if place is not None and not place.is_dir() and (real := place.resolve()) not in seen:
                seen.add(real)
                yield place

    def _candidates(self, origin: Origin) -> Iterator[Path]:
        if origin.path is None:
            pattern = "*.zarr.zip" if origin.kind == STORE else "*.safetensors"
            for folder in self.folders:
                yield from sorted(folder.glob(pattern))
        else:
            recorded = Path(origin.path)
            pattern = escape(recorded.name)
            if recorded.parent != Path():  # a bare name says nothing of the working directory
                yield recorded
            for folder in self.folders:
                yield from (folder / recorded, folder / recorded.name)
        for folder in self.search:
            yield from sorted(folder.rglob(pattern))

    def _hash(self, path: Path, hash_of: str, kind: str) -> str | None:
        """Hash of a file as it is now; None if it can't be read as what it should be."""
        key = path.resolve(), hash_of
        if key not in self.hashes:
            try:
                self.hashes[key] = _hasher(hash_of, kind)(path)
            except _UNREADABLE:
                self.hashes[key] = None
        return self.hashes[key]


def _hasher(hash_of: str, kind: str) -> Callable[[Path], str | None]:
    """What hashes a file as its name in another one was.

    Raises:
        ValueError: For a hash that this version doesn't know.
    """
    if hash_of.startswith(WEIGHTS):
        return lambda path: hash_tensors(path, prefix=hash_of.partition(":")[2])
    known: dict[str, Callable[[Path], str | None]] = {
        CONFIG_HASH: lambda path: _of_store(path, CONFIG_HASH),
        FINGERPRINT: lambda path: _of_store(path, FINGERPRINT),
        FULL: lambda path: digest_of_source(path, FULL),
        SAMPLED: lambda path: digest_of_source(path, SAMPLED),
        _IDENTITY: lambda path: checkpoint_identity(path, kind=kind),
        _SHA256: file_identity,
    }
    if hash_of not in known:
        raise ValueError(hash_of)
    return known[hash_of]


def _of_store(path: Path, hash_of: str) -> str:
    with ups_store.open(path) as store:
        return store.fingerprint if hash_of == FINGERPRINT else store.config_hash
