"""Signatures of requests to S3 (AWS Signature Version 4), for what `obstore` has no call for.

Source: docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

_ALGORITHM = "AWS4-HMAC-SHA256"
_TRUE = ("1", "true")


@dataclass(frozen=True)
class Signer:
    """Signs requests by the keys of the environment.

    Attributes:
        access_key: Id of the key; "" signs nothing, as for public buckets.
        secret_key: The key.
        token: Of a session; "" if there is none.
        region: Of the bucket.
    """

    access_key: str
    secret_key: str
    token: str
    region: str

    def __repr__(self) -> str:
        return f"Signer({self.access_key!r}, region={self.region!r})"

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Signer | None:
        """The signer of AWS_ACCESS_KEY_ID and the like; None without them, as with a machine's role."""
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
        if variables.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE:
            return cls("", "", "", region)
        access, secret = variables.get("AWS_ACCESS_KEY_ID"), variables.get("AWS_SECRET_ACCESS_KEY")
        if not (access and secret):
            return None
        return cls(access, secret, variables.get("AWS_SESSION_TOKEN", ""), region)

    def headers(
        self,
        method: str,
        host: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: bytes,
        extra: Mapping[str, str],
        now: datetime | None = None,
    ) -> dict[str, str]:
        """The headers of a request, signed; the server checks the body against the signature, too.

        Args:
            method: Such as "PUT".
            host: As in the header `Host`.
            path: Of the object, with its bucket, encoded.
            query: Parameters, not encoded.
            body: All of it.
            extra: Other headers.
            now: By default the time.
        """
        given = {name.lower(): value for name, value in extra.items()}
        if not self.access_key:
            return given
        stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(body).hexdigest()
        signed = {**given, "host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
        if self.token:
            signed["x-amz-security-token"] = self.token
        names = ";".join(sorted(signed))
        lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
        request = "\n".join((method, path, encoded_query(query), lines, names, digest))
        scope = f"{stamp[:8]}/{self.region}/s3/aws4_request"
        text = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
        signature = hmac.new(self._key(stamp[:8]), text.encode(), hashlib.sha256).hexdigest()
        signed["authorization"] = (
            f"{_ALGORITHM} Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        del signed["host"]  # `http.client` adds it
        return signed

    def _key(self, date: str) -> bytes:
        key = f"AWS4{self.secret_key}".encode()
        for part in (date, self.region, "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key


def encoded_query(query: Mapping[str, str]) -> str:
    """Parameters as they stand behind "?", in the order that signatures want."""
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)
