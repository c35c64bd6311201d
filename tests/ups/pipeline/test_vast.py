"""`ups launch vast` against a stand-in of the API: by vastai where that is installed, and a small client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import Done, run_ups
from vast_standin import KEY, StandIn, install_client, offer, serving

from ups.pipeline.launch import vast
from ups.pipeline.launch.vast import Wish

SECRET = "secret-of-the-bucket"


@pytest.fixture(params=["vastai", "small client"])
def api(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The API, its account's key, and a folder of the test's own."""
    if request.param == "small client":
        install_client(monkeypatch)
    elif find_spec("vastai") is None:
        pytest.skip("vastai isn't installed: pip install 'ups-store[vast]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VAST_API_KEY", KEY)
    monkeypatch.setenv("B2_APP_KEY", SECRET)
    monkeypatch.setattr(vast, "_POLL_S", 0.01)
    with serving() as standing:
        monkeypatch.setenv("VAST_URL", standing.url)
        standing.offers = {n: offer(n, price) for n, price in ((1, 0.5), (2, 0.3), (3, 0.4))}
        yield standing


def launch(*words: str) -> Done:
    return run_ups("launch", "vast", "--config", "demo", "--package", "", *words)


def test_the_cheapest_offer_becomes_an_instance_with_the_script_and_the_keys(api: StandIn) -> None:
    done = launch("--gpu", "RTX_4090", "--max-price", "0.45", "--max-hours", "2", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["instance"], said["offer"], said["max_cost"]) == (1002, 2, 0.6)
    (query,) = api.sent("POST", "/api/v0/bundles/")
    assert query["gpu_name"] == {"eq": "RTX 4090"}
    assert query["dph_total"] == {"lte": 0.45}
    assert (query["order"], query["allocated_storage"]) == ([["dph_total", "asc"]], 64)
    (body,) = api.sent("PUT", "/api/v0/asks/2/")
    assert len(body["onstart"]) <= 4048
    assert (body["env"]["B2_APP_KEY"], body["env"]["PRICE_PER_HOUR"]) == (SECRET, "0.3")
    assert SECRET not in Path(".vast/onstart.sh").read_text() + body["onstart"] + done.output
    assert "being provisioned" in done.stderr


def test_offers_that_are_gone_are_passed_over(api: StandIn) -> None:
    api.gone = {2}
    done = launch()
    assert done.exit_code == 0, done.output
    assert "offer 2 is gone" in done.stderr
    assert list(api.instances) == [1003]
    api.gone = {1, 2, 3}
    assert "all offers that were found are gone" in launch().stderr


def test_no_offer_below_the_price_says_what_the_cheapest_costs(api: StandIn) -> None:
    done = launch("--max-price", "0.2")
    assert done.exit_code == 1
    assert "no offer of 1 x any GPU for at most $0.2 an hour: found the cheapest costs $0.300" in done.stderr
    assert not api.instances
    assert not Path(".vast").exists()


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (400, {"success": False, "error": "insufficient_credit", "msg": "no credit left"}, "no credit left"),
        (200, {"success": False, "msg": "image is refused"}, "image is refused"),
        (403, {}, "HTTP status 403; the key may not do this"),
    ],
)
def test_what_the_api_refuses_is_said(
    api: StandIn, status: int, answer: dict[str, object], says: str
) -> None:
    api.refusal = (status, answer)
    done = launch()
    assert done.exit_code == 1
    assert "vast.ai refused to create an instance" in done.stderr
    assert says in done.stderr
    assert len(api.sent("PUT", "/api/v0/asks/")) == 1


def test_without_a_key_or_with_a_wrong_one_it_says_where_keys_are_from(
    api: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "another")
    assert "Invalid user key; check the key" in launch().stderr
    monkeypatch.delenv("VAST_API_KEY")
    done = launch()
    assert (done.exit_code, "no key of vast.ai; set VAST_API_KEY" in done.stderr) == (1, True), done.stderr


def test_an_answer_that_is_lost_ends_with_the_instance_that_there_is(api: StandIn) -> None:
    api.drops = True
    done = launch()
    assert done.exit_code == 1
    assert "instance 1002 is there; `vastai destroy instance 1002`" in done.stderr
    assert len(api.sent("PUT", "/api/v0/asks/")) == 1  # never sent again


def test_ctrl_c_while_an_instance_is_created_says_which_is_there(
    api: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = vast.Vast()
    create = made._once.create_instance

    def interrupt(**arguments: object) -> None:
        create(**arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(made._once, "create_instance", interrupt)
    monkeypatch.setattr(vast, "Vast", lambda: made)
    done = launch()
    assert done.exit_code == 5
    assert "interrupted while an instance was created: instance 1002 is there" in done.stderr


@pytest.mark.parametrize(("flags", "left"), [((), [1002]), (("--auto-shutdown",), [])])
def test_an_instance_that_does_not_start_is_named_or_destroyed(
    api: StandIn, flags: tuple[str, ...], left: list[int]
) -> None:
    api.states = [None, "exited"]
    done = launch(*flags)
    assert done.exit_code == 1
    assert "instance 1002 didn't start: exited" in done.stderr
    assert list(api.instances) == left
    assert ("`vastai destroy instance 1002` ends it and what it costs" in done.stderr) == bool(left)


def test_one_that_takes_too_long_did_not_start(api: StandIn) -> None:
    api.states = ["loading"]
    assert "didn't start: still loading" in launch("--wait-minutes", "0").stderr


def test_dry_run_shows_query_parameters_price_and_script_and_creates_nothing(api: StandIn) -> None:
    done = launch("--dry-run", "--auto-shutdown", "--max-hours", "2")
    assert done.exit_code == 0, done.output
    assert "offers: {'num_gpus': {'eq': 1}" in done.stdout
    assert (
        "price: offer 2: 1 x RTX 4090, Norway, NO, $0.300 an hour, at most $0.60 for 2 hours" in done.stdout
    )
    assert "'B2_APP_KEY': '(set)'" in done.stdout
    assert re.search(r"^SHUTS_DOWN=1$", done.stdout, re.MULTILINE)
    assert SECRET not in done.output
    assert (api.instances, list(Path().iterdir())) == ({}, [])


def test_dry_run_works_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vastai", None)
    done = launch("--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["instance"]["image"].startswith("pytorch/")
    assert "pip install 'ups-store[vast]'" in done.stderr
    refused = launch()
    assert (refused.exit_code, "pip install 'ups-store[vast]'" in refused.stderr) == (2, True)


def test_query_asks_for_a_driver_that_knows_the_cuda_of_the_image() -> None:
    wish = Wish(4, None, None, "pytorch/pytorch:2.9.0-cuda13.0-cudnn9-devel", 64)
    assert wish.query()["cuda_max_good"] == {"gte": 13.0}
    assert "cuda_max_good" not in Wish(4, None, None, "mine:latest", 64).query()
