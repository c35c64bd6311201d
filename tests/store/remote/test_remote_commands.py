"""`info`, `verify`, `diff` and `preview` take URLs, and show no secret of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_ups_store
from object_server import ObjectServer
from remote_stores import KEY, URL, object_server, some_values, upload


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    monkeypatch.chdir(tmp_path)
    with object_server(monkeypatch) as state:
        upload(state, tmp_path, some_values())
        yield state


def test_info_says_what_lies_there(server: ObjectServer) -> None:
    found = json.loads(run_ups_store("info", URL, "--json").stdout)
    assert (found["path"], found["reads"], found["network"]) == (URL, "remote", "s3")
    assert (found["num_samples"], found["build"], found["modified"][:10]) == (40, None, "2026-11-23")
    shown = run_ups_store("info", URL, "--stats")
    assert shown.exit_code == 0
    assert URL in shown.stdout
    assert "reads: remote" in shown.stdout


def test_verify_reads_all_and_shows_no_secret(server: ObjectServer) -> None:
    done = run_ups_store("verify", f"{server.url}/{KEY}?key=secret")
    assert done.exit_code == 0
    assert f"{server.url}/{KEY}: ok" in done.stdout
    assert "secret" not in done.stdout + done.stderr
    data = bytearray(server.objects[KEY])
    data[len(data) // 2] ^= 1
    server.objects[KEY] = bytes(data)
    assert run_ups_store("verify", URL).exit_code == 1


def test_verify_of_nothing_is_an_error_of_the_store(server: ObjectServer) -> None:
    done = run_ups_store("verify", "s3://bucket/none.zarr.zip", "--json")
    found = json.loads(done.stdout)
    assert (found["path"], found["error"]["kind"]) == ("s3://bucket/none.zarr.zip", "not_found")
    assert done.exit_code != 0


def test_diff_compares_a_store_here_with_one_there(server: ObjectServer) -> None:
    found = json.loads(run_ups_store("diff", "a.zarr.zip", URL, "--json").stdout)
    assert (found["same_identity"], found["same_content"]) == (True, True)
    assert found["paths"] == ["a.zarr.zip", URL]


def test_preview_draws_a_sample_into_this_folder(server: ObjectServer) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot]")
    done = run_ups_store("preview", URL, "--array", "u")
    assert done.exit_code == 0
    assert Path(done.stdout.strip()).read_bytes().startswith(b"\x89PNG")
