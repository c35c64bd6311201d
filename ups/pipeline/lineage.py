"""What a file was made from, link by link: store, checkpoint, prediction, report; `ups lineage` shows it.

Every file names those before it by hashes. Here they are looked for and hashed again, without torch: where
they were, beside the files that were found, where the configuration in a checkpoint or report says, and below
folders that are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


class _Named(NamedTuple):
    """What a file says of those before it, and where its configuration says that files lie."""

    kind: str
    origins: Sequence[Origin]
    folders: Sequence[Path] = ()


def lineage_of(path: Path, *, search: Sequence[Path] = ()) -> Lineage:
    """Follow a file back to the sources.

    Args:
        path: A store, a checkpoint, a prediction, `report.json`, or the `metadata.json` of a run.
        search: Folders in which, at any depth, files are looked for that aren't where they were.
    """
    place = _place_of(path)
    if place is None:
        raise ConfigError("no such file", path=path)
    for folder in search:
        if not folder.is_dir():
            raise ConfigError("--search", path=folder, expected="a folder")
    named = _read(place)
    return Lineage(str(path), named.kind, _Tracer(search).links(named, place, ()))


def _place_of(path: Path) -> Path | None:
    """As `place_of`; a store's partitions may also be named by the pattern that opens them."""
    if "-*-of-" in path.name:
        return path if any(path.parent.glob(escape(path.name).replace("[*]", "*"))) else None
    return place_of(path)


# --- what files say -----------------------------------------------------------------------------------------


def _read(path: Path) -> _Named:
    """Read what a file says of those before it."""
    if path.suffix == ".safetensors":
        kind, document = read_any_document(path)
        return _Named(kind, origins_of_checkpoint(path), _folders(section(document, "config")))
    if path.suffix != ".json":
        with ups_store.open(path) as store:
            content, attrs = store.identity, store.attrs
        if content.get("kind") == "prediction":
            operator = Origin("operator", OPERATOR, None, WEIGHTS, text_of(content.get("checkpoint")))
            return _Named(PREDICTION, _stated(attrs, path) or [operator])
        return _Named(STORE, list(_of_store(content)), folders_of_sources(path))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"it can't be read ({error})", path=path) from error
    document = document if isinstance(document, dict) else {}
    if document.get("kind") == RUN:
        return _Named(RUN, list(_of_run(section(document, "identities"))))
    if "tasks" not in document or "rows" not in document:
        expected = "a store, a checkpoint, a prediction, report.json, or metadata.json of a run"
        raise ConfigError("it is none of the files that name others", path=path, expected=expected)
    unnamed = [Origin("operator", OPERATOR, None, WEIGHTS, None)]  # an earlier version named nothing
    return _Named(REPORT, _stated(document, path) or unnamed, _folders(section(document, "config")))


def _of_store(content: Mapping[str, Any]) -> Iterator[Origin]:
    """What a store's identity names: encoder, operator or teacher, the stores that it joins, sources."""
    kind = content.get("kind")
    if kind == "latents":
        encoder = content.get("encoder")
        try:  # by the weights of the encoder for the store's grid
            grid = GridSpec.from_json(encoder["configuration"]["grid"]).name  # type: ignore[index]
            digest = str(encoder["weights_sha256"])  # type: ignore[index]
            yield Origin("encoder", AUTOENCODER, AUTOENCODER_FILE, f"{WEIGHTS}:encoder.{grid}.", digest)
        except (KeyError, TypeError, ValueError):  # somebody else's encoder, or latents that say nothing
            yield Origin("encoder", AUTOENCODER, None, WEIGHTS, None)
    elif kind == "teacher_pairs":
        yield Origin("teacher", CORRECTOR, CORRECTOR_FILE, WEIGHTS, text_of(content.get("teacher_sha256")))
    elif kind == "residuals":
        yield Origin("operator", OPERATOR, OPERATOR_FILE, WEIGHTS, text_of(content.get("operator_sha256")))
        trajectories = str(content.get("trajectories"))
        yield from origins_of_data(trajectories, role="held-out trajectories", path=None)
    for parent in _listed(content.get("parents")):
        yield Origin("samples", STORE, None, CONFIG_HASH, text_of(parent.get("config_hash")))
    digest_of = content.get("source_digest")
    digest_of = digest_of if digest_of in (FULL, SAMPLED) else FULL
    for source in _listed(content.get("sources")):
        name = text_of(source.get("name"))
        yield Origin("source", SOURCE, name, digest_of, text_of(source.get("digest")))
        for outer in _listed(source.get("external")):
            where = text_of(outer.get("path") or outer.get("name"))
            yield Origin(f"data of {name}", SOURCE, where, digest_of, text_of(outer.get("digest")))


def _of_run(identities: Mapping[str, Any]) -> Iterator[Origin]:
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


def _stated(document: Mapping[str, Any], path: Path) -> list[Origin]:
    """The origins that a report or a prediction lists itself."""
    try:
        return [Origin.from_json(values) for values in document.get(MADE_FROM) or []]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"what it was made from can't be read ({error})", path=path) from error


def _folders(config: Mapping[str, Any]) -> list[Path]:
    """Where a configuration says that stores, checkpoints and sources lie."""
    folders = [*store_folders(config), autoencoder_path(config).parent]
    if root := text_of(section(config, "data").get("root")):
        folders += [Path(root), *sorted(Path(root).rglob("*/"))]
    return folders


def _listed(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


# --- where they are -----------------------------------------------------------------------------------------


class _Tracer:
    """Finds files and hashes them, each once.

    Args:
        search: Folders in which files are looked for at any depth.
    """

    def __init__(self, search: Sequence[Path]) -> None:
        self._search = search
        # Where files were found, or configurations say that they are, in this order.
        self._folders: dict[Path, None] = {}
        self._hashes: dict[tuple[Path, str], str | None] = {}

    def links(self, named: _Named, path: Path, before: tuple[Path, ...]) -> list[Link]:
        """Find the files before one.

        Args:
            named: What the file says.
            before: Files of the chain so far; one that claims to be made from itself isn't followed.
        """
        self._folders.update(dict.fromkeys([path.parent, *named.folders]))
        return [self._link(origin, (*before, path.resolve())) for origin in named.origins]

    def _link(self, origin: Origin, before: tuple[Path, ...]) -> Link:
        if origin.hash is None:
            return Link(origin, "unnamed")
        other: Link | None = None
        seen: set[Path] = set()
        for candidate in self._candidates(origin):
            place = _place_of(candidate)
            if place is None or place.is_dir() or place.resolve() in seen:
                continue
            seen.add(place.resolve())
            digest = self._hash(place, origin.hash_of, origin.kind)
            if digest != origin.hash:
                if other is None and origin.path is not None:
                    other = Link(origin, "changed", str(place), digest)
                continue
            link = Link(origin, "same", str(place), digest)
            if origin.kind in (SOURCE, FILE) or place.resolve() in before:
                return link
            try:
                named = _read(place)
            except (ConfigError, *_UNREADABLE):  # its hash is right, so somebody else has made it
                return link
            return replace(link, made_from=self.links(named, place, before))
        return other or Link(origin, "missing")

    def _candidates(self, origin: Origin) -> Iterator[Path]:
        """Where a file may be, the likeliest first."""
        folders = [*self._folders]  # others are found while these are looked at
        if origin.path is None:
            pattern = "*.zarr.zip" if origin.kind == STORE else "*.safetensors"
            for folder in folders:
                yield from sorted(folder.glob(pattern))
        else:
            recorded = Path(origin.path)
            pattern = escape(recorded.name)
            if recorded.parent != Path():  # a bare name says nothing of the working directory
                yield recorded
            for folder in folders:
                yield from (folder / recorded, folder / recorded.name)
        for folder in self._search:
            yield from sorted(folder.rglob(pattern))

    def _hash(self, path: Path, hash_of: str, kind: str) -> str | None:
        """Hash a file as its name in another one was; None if it can't be read as what it should be."""
        key = path.resolve(), hash_of
        if key not in self._hashes:
            digest: str | None = None
            with suppress(*_UNREADABLE):
                if hash_of.startswith(WEIGHTS):
                    digest = hash_tensors(path, prefix=hash_of.partition(":")[2])
                elif hash_of in (CONFIG_HASH, FINGERPRINT):
                    with ups_store.open(path) as store:
                        digest = store.fingerprint if hash_of == FINGERPRINT else store.config_hash
                elif hash_of in (FULL, SAMPLED):
                    digest = digest_of_source(path, hash_of)
                elif hash_of == _IDENTITY:
                    digest = checkpoint_identity(path, kind=kind)
                elif hash_of == _SHA256:
                    digest = file_identity(path)
            self._hashes[key] = digest
        return self._hashes[key]
