"""Sources in S3 and what speaks like it, by `obstore`: `pip install 'ups-store[s3]'`.

Keys, region and endpoint are those of the environment (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...);
AWS_SKIP_SIGNATURE=true reads public buckets without any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ups_store.errors import SourceError
from ups_store.printable import without_secrets
from ups_store.sources.origins import (
    Body,
    ChangedError,
    Listed,
    NamedOrigin,
    TransientError,
    Version,
    joined,
)

_TRUE = ("1", "true")
_CHUNK_BYTES = 64 << 10  # of a chunk that isn't whole when a connection ends, nothing comes
_NO_LIMIT = timedelta(days=30)  # for a whole body; 30 s by default


REDIRECTED = "unsupported scheme socks5"  # in errors of obstore, where an answer leads to another host
_ELSEWHERE = "socks5://127.0.0.1:0"  # a proxy that obstore can't speak to: nothing is sent
# Of Amazon, and of the machine's own services that give keys.
_KEY_GIVERS = ("amazonaws.com", "amazonaws.com.cn", "169.254.0.0/16", "fd00:ec2::/32")
_SIGNED = re.compile(r"(?i)(^|&)[^=&]*(sig|token|key|credential|secret|password)[^=&]*=")


def reaching_only_named_hosts(scheme: str, bucket: str) -> dict[str, str]:
    """Make options of a client that follows no redirect to hosts which nobody named.

    `obstore` follows redirects with all headers but one, so another host would get the session's token, and
    by `Referer` the query of a signed URL. Where the environment names a proxy, requests go through that.

    Args:
        scheme: Such as "s3"; of https only signed URLs are kept where they are.
        bucket: Of a URL all but its path.
    """
    query = urlsplit(bucket).query if scheme in ("https", "http") else ""
    has_keys = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() not in _TRUE
    if not ((scheme == "s3" and has_keys) or _SIGNED.search(query)) or _has_proxy():
        return {}
    urls = [bucket] if query else [value for name, value in os.environ.items() if name.startswith("AWS_")]
    hosts = [host for url in urls if "://" in url and (host := urlsplit(url).hostname)]
    return {"proxy_url": _ELSEWHERE, "proxy_excludes": ",".join([*hosts, *(() if query else _KEY_GIVERS)])}


def _has_proxy() -> bool:
    names = ("http_proxy", "https_proxy", "all_proxy")
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in names)


class S3Origin(NamedOrigin):
    """An object, `s3://bucket/key`."""

    def look(self, *, stall_s: float) -> Version | None:
        """Size and ETag."""
        import obstore

        try:
            with _errors(self.place):
                return _version(obstore.head(_bucket(self.place, stall_s), _key(self.place)), self.name)
        except FileNotFoundError:
            return None

    @contextmanager
    def opened(self, start: int, version: Version, *, stall_s: float) -> Iterator[Body]:
        """Its bytes from `start` on, if the ETag still is the same."""
        import obstore

        etag = version.tag.partition(" ")[2]
        options: Any = {"if_match": etag} if version.tag.startswith("etag") else {}
        if start:
            options["range"] = {"offset": start}
        try:
            with _errors(self.place):
                answer = obstore.get(_bucket(self.place, stall_s), _key(self.place), options=options)
                found = _version(answer.meta, self.name)
                if found != version:
                    raise ChangedError
                yield Body(answer.range[0], found, map(bytes, answer.stream(min_chunk_size=_CHUNK_BYTES)))
        except FileNotFoundError:
            raise ChangedError from None


@dataclass(frozen=True)
class S3Folder:
    """A prefix of a bucket."""

    location: str

    def files(self, *, stall_s: float) -> Sequence[Listed]:
        """All objects below it, with size and ETag."""
        import obstore

        prefix = _key(self.location).strip("/")
        prefix = f"{prefix}/" if prefix else ""
        found = []
        with _errors(self.location):
            for some in obstore.list(_bucket(self.location, stall_s), prefix=prefix or None):
                for each in some:
                    path = each["path"].removeprefix(prefix)
                    found.append(Listed(path, _version(each, path.rpartition("/")[2])))
        return found

    def origin(self, path: str) -> S3Origin:
        """An object below it."""
        return S3Origin(joined(self.location, quote(path)), digest="", name=path.rpartition("/")[2])


def _bucket(url: str, stall_s: float) -> Any:
    """A client of the bucket; of this process, as one that a fork inherits hangs."""
    from obstore.store import S3Store

    limit = timedelta(seconds=stall_s)
    options: Any = {"connect_timeout": limit, "read_timeout": limit, "timeout": _NO_LIMIT}
    options |= reaching_only_named_hosts("s3", urlsplit(url).netloc)
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in _TRUE:  # else options hide it
        options["allow_http"] = True
    retries: Any = {"max_retries": 0, "retry_timeout": limit}  # they are counted here
    return S3Store(urlsplit(url).netloc, client_options=options, retry_config=retries)


def _key(url: str) -> str:
    return unquote(urlsplit(url).path).lstrip("/")


def _version(meta: Any, name: str) -> Version:
    tag = f"etag {meta['e_tag']}" if meta.get("e_tag") else f"modified {meta['last_modified'].isoformat()}"
    return Version(meta["size"], tag, name)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn errors of obstore into ours; what isn't there is a `FileNotFoundError`."""
    from obstore import exceptions

    try:
        yield
    except exceptions.PreconditionError:
        raise ChangedError from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        hint = "check AWS_ACCESS_KEY_ID and the like; AWS_SKIP_SIGNATURE=true for a public bucket"
        raise SourceError(_first_line(error), kind="not_allowed", path=url, hint=hint) from None
    except exceptions.NotFoundError:
        raise FileNotFoundError(url) from None
    except exceptions.BaseError as error:
        if REDIRECTED in str(error):
            problem, hint = "the server leads to another host, which would get the keys", "name that host"
            raise SourceError(problem, kind="redirected", path=url, hint=hint) from None
        raise TransientError(without_secrets(_first_line(error))) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
