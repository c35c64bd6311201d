"""A shared cache in a bucket of S3, Google Cloud Storage or Azure."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ups_store.errors import RemoteError, StoreNotFoundError
from ups_store.remote.client import PreconditionFailed, client_of, is_there, persistently
from ups_store.remote.multipart import PART_BYTES, end_upload, unfinished_uploads, upload
from ups_store.remote.pieces import ObjectOrigin
from ups_store.remote.shared_cache import TEMPORARY, SharedFile, Stray
from ups_store.remote.signing import Signer
from ups_store.sources.download import Progress
from ups_store.sources.origins import CHUNK_BYTES, Origin, joined
from ups_store.system import files
from ups_store.system.urls import Url, shown_url

_DIGEST = "sha256"  # attribute of an object


class BucketCache:
    """See `SharedCache`.

    Args:
        url: Of its root, such as `s3://bucket/prefix`.
        deadline_s: For one request, with all its attempts.
    """

    is_read_only = False

    def __init__(self, url: str, deadline_s: float) -> None:
        self.location = shown_url(url).rstrip("/")
        self._url, self._deadline_s = url, deadline_s

    def look(self, config_hash: str, names: Sequence[str]) -> list[SharedFile]:
        """See `SharedCache`."""
        found = (SharedFile.at(*each) for each in self._listed(f"{config_hash}/"))
        return [entry for entry in found if entry]

    def entries(self) -> tuple[list[SharedFile], list[Stray]]:
        """See `SharedCache`; without keys in the environment uploads that were killed aren't seen."""
        entries, strays = [], []
        for each in self._listed(""):
            entry = SharedFile.at(*each)
            if entry:
                entries.append(entry)
            else:
                strays.append(Stray(*each, is_temporary=_is_ours(each[0])))
        signer = self._signer
        if signer is not None:
            with contextlib.suppress(RemoteError):  # keys that may only read mayn't list them
                begun = unfinished_uploads(self._place(""), signer, stall_s=self._deadline_s / 2)
                strays += [Stray(each.key, 0, each.begun_s, _is_ours(each.key), each.id) for each in begun]
        return entries, strays

    def origin(self, entry: SharedFile) -> Origin:
        """See `SharedCache`; asks for the digest that the push has put beside the bytes."""
        url = self._place(entry.key)
        return ObjectOrigin(url, self._digest(url) if entry.nbytes else "")  # no byte of none is in a range

    def create(self, key: str, path: Path, *, replace: bool, progress: Progress) -> bool:
        """See `SharedCache`."""
        url = self._place(key)
        if not replace and is_there(url, deadline_s=self._deadline_s):
            return False
        progress.doing("digesting")
        digest, nbytes = _sha256(path, progress)
        if nbytes <= PART_BYTES:
            return self._put(url, path, digest, replace=replace, progress=progress)
        if (signer := self._signer) is not None:
            options: Any = {"stall_s": self._deadline_s / 2, "progress": progress}
            return upload(path, url, signer, digest=digest, replace=replace, **options)
        return self._put_and_copy(url, path, digest, replace=replace, progress=progress)

    def remove(self, key: str, upload_id: str = "") -> None:
        """See `SharedCache`."""
        import obstore

        url = self._place(key)
        if upload_id:
            if (signer := self._signer) is not None:  # else it wasn't seen either
                end_upload(url, signer, upload_id, stall_s=self._deadline_s / 2)
            return
        with contextlib.suppress(StoreNotFoundError):
            self._ask(lambda: obstore.delete(self._client(url), url.key), url)

    def _digest(self, url: Url) -> str:
        import obstore

        options: Any = {"range": (0, 1)}  # what asks for no bytes doesn't give attributes
        answer = self._ask(lambda: obstore.get(self._client(url), url.key, options=options), url)
        found = answer.attributes.get(_DIGEST, "")
        return f"{_DIGEST}:{found}" if found else ""

    def _put(self, url: Url, path: Path, digest: str, *, replace: bool, progress: Progress) -> bool:
        """Create a small object in one request."""
        import obstore

        mode, attributes = "overwrite" if replace else "create", {_DIGEST: digest}
        body = path.read_bytes()

        def put() -> object:
            options: Any = {"mode": mode, "attributes": attributes, "use_multipart": False}
            return obstore.put(self._client(url), url.key, body, **options)

        try:
            self._ask(put, url)
        except PreconditionFailed:
            return False
        progress.progressed(len(body))
        return True

    def _put_and_copy(self, url: Url, path: Path, digest: str, *, replace: bool, progress: Progress) -> bool:
        """Upload under another name, and have the server copy that to a key that is free.

        For where `upload` can't sign: Google, Azure, and S3 by the role of a machine. An upload in parts
        would replace what is there.
        """
        import obstore

        temporary = self._place(f".{TEMPORARY}/{secrets.token_hex(8)}")
        client = self._client(url)
        try:
            with path.open("rb") as file:
                body: Any = _Counted(file, progress)
                progress.doing("uploading")
                options: Any = {
                    "attributes": {_DIGEST: digest},
                    "chunk_size": PART_BYTES,
                    "max_concurrency": 4,
                }
                self._ask(lambda: obstore.put(client, temporary.key, body.from_start(), **options), temporary)
            progress.doing("copying")
            self._ask(lambda: obstore.copy(client, temporary.key, url.key, overwrite=replace), url)
        except PreconditionFailed:
            return False
        finally:
            with contextlib.suppress(RemoteError, StoreNotFoundError):
                self._ask(lambda: obstore.delete(client, temporary.key), temporary)
        return True

    def _listed(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key below the root, length and time of objects."""
        import obstore

        root = self._place(prefix)
        start = self._prefix

        def listed() -> list[Any]:
            found = obstore.list(self._client(root), prefix=f"{start}{prefix}" or None)
            return [each for some in found for each in some]

        for each in self._ask(listed, root):
            yield each["path"].removeprefix(start), each["size"], each["last_modified"].timestamp()

    @property
    def _signer(self) -> Signer | None:
        """What signs requests that `obstore` has no call for."""
        return Signer.from_environment() if self._url.lower().startswith("s3:") else None

    @property
    def _prefix(self) -> str:
        key = Url(self._url).key.strip("/")
        return f"{key}/" if key else ""

    def _place(self, key: str) -> Url:
        return Url(joined(self._url, quote(key)))

    def _client(self, url: Url) -> Any:
        return client_of(url, self._deadline_s)

    def _ask(self, work: Any, url: Url) -> Any:
        return persistently(work, url=url, deadline_s=self._deadline_s)


class _Counted(io.RawIOBase):
    """A file whose bytes are counted when they are read."""

    def __init__(self, file: Any, progress: Progress) -> None:
        self._file, self._progress = file, progress

    def from_start(self) -> _Counted:
        """The file, to be read from its beginning."""
        self._file.seek(0)
        return self

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def read(self, size: int = -1) -> bytes:
        chunk = bytes(self._file.read(size))
        self._progress.progressed(len(chunk))
        return chunk


def _is_ours(key: str) -> bool:
    """Whether a push uploads to such a key: of a store, or of what is copied to one."""
    return SharedFile.at(key, 0, 0.0) is not None or key.startswith(f".{TEMPORARY}/")


def _sha256(path: Path, progress: Progress) -> tuple[str, int]:
    """Digest and length of a file."""
    from hashlib import sha256

    hasher, at = sha256(), 0
    with files.opened(path) as fd:
        while chunk := files.read_at(fd, at, CHUNK_BYTES):
            hasher.update(chunk)
            at += len(chunk)
            progress.progressed()
    return hasher.hexdigest(), at
