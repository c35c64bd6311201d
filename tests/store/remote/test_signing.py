"""Signatures of requests to S3, against the examples of its documentation."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ups_store.remote.signing import Signer

EXAMPLE = Signer("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "", "us-east-1")


@pytest.mark.parametrize(
    ("query", "signature"),
    [
        ({"lifecycle": ""}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            {"prefix": "J", "max-keys": "2"},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_signature_is_that_of_the_documentation(query: dict[str, str], signature: str) -> None:
    """docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""
    headers = EXAMPLE.headers(
        "GET",
        "examplebucket.s3.amazonaws.com",
        "/",
        query,
        body=b"",
        extra={},
        now=datetime(2013, 5, 24, tzinfo=UTC),
    )
    assert headers["authorization"].endswith(f"Signature={signature}")


def test_keys_come_from_the_environment_and_are_not_shown() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "very secret", "AWS_SESSION_TOKEN": "token"}
    signer = Signer.from_environment(keys)
    assert signer == Signer("id", "very secret", "token", "us-east-1")
    assert "secret" not in repr(signer)
    assert Signer.from_environment({"AWS_ACCESS_KEY_ID": "id"}) is None


def test_public_buckets_get_no_signature() -> None:
    signer = Signer.from_environment({"AWS_SKIP_SIGNATURE": "true"})
    assert signer is not None
    assert signer.headers("GET", "host", "/", {}, body=b"", extra={"If-None-Match": "*"}) == {
        "if-none-match": "*"
    }
