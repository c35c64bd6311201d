"""Machines of vast.ai: offers, and instances that run a job, through the client of the package `vastai`.

What is asked and what comes back is as `vastai` 1.0.5 to 1.9.1 and the API's documentation have it
(https://docs.vast.ai). An offer that is accepted costs money from then on, so whatever interrupts that, the
last thing that is said is whether there is an instance, and how it is destroyed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ups.errors import LaunchError, check_installed, needs
from ups.log import logger
from ups.pipeline.launch.job import Job, packed

# As the API has it; longer scripts go on in a variable.
_ONSTART_LIMIT = 4048
_MAX_OFFERS = 20
_LEAST_RELIABILITY = 0.95
_POLL_S = 10.0
# States of an instance that doesn't come back by itself.
_ENDED = ("exited", "offline")
# HTTP statuses of an offer that somebody else accepted.
_GONE = (404, 409, 410)
_NEWEST = {"order_by": [{"col": "id", "dir": "desc"}], "limit": 25}

# Variables that go to the machine if they are set here, by name or beginning.
_PASSED_ON = (
    *("B2_KEY_ID", "B2_APP_KEY", "B2_S3_ENDPOINT", "B2_S3_REGION", "RCLONE_CONFIG_", "NCCL_"),
    *("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE"),
)


@dataclass(frozen=True)
class Wish:
    """Which machine.

    Attributes:
        num_gpus: GPUs, exactly.
        gpu: Their name, such as "RTX 4090"; None for any.
        max_price: Dollars an hour, the disk included; None for any.
        image: Docker image, which decides the CUDA version that the driver has to know.
        disk_gib: Size of the disk.
    """

    num_gpus: int
    gpu: str | None
    max_price: float | None
    image: str
    disk_gib: float

    def query(self) -> dict[str, dict[str, Any]]:
        """What offers have to be like, as the API takes it."""
        found: dict[str, dict[str, Any]] = {
            "num_gpus": {"eq": self.num_gpus},
            "disk_space": {"gte": self.disk_gib},
            "reliability": {"gte": _LEAST_RELIABILITY},
        }
        if self.gpu is not None:
            found["gpu_name"] = {"eq": self.gpu.replace("_", " ")}
        if self.max_price is not None:
            found["dph_total"] = {"lte": self.max_price}
        if version := re.search(r"cuda(\d+\.\d+)", self.image):
            found["cuda_max_good"] = {"gte": float(version[1])}
        return found

    def __str__(self) -> str:
        price = "" if self.max_price is None else f" for at most ${self.max_price:.3g} an hour"
        return f"{self.num_gpus} x {self.gpu or 'any GPU'}{price}"


@dataclass(frozen=True)
class Offer:
    """A machine that could be rented.

    Attributes:
        id: Number of the offer.
        gpu: Name of the GPUs.
        num_gpus: How many.
        price: Dollars an hour, the disk included.
        place: Where it is.
    """

    id: int
    gpu: str
    num_gpus: int
    price: float
    place: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Offer:
        """From a row of the API's answer."""
        name, place = str(row.get("gpu_name") or "GPU"), str(row.get("geolocation") or "unknown place")
        return cls(int(row["id"]), name, int(row["num_gpus"]), float(row["dph_total"]), place)

    def __str__(self) -> str:
        return f"offer {self.id}: {self.num_gpus} x {self.gpu}, {self.place}, ${self.price:.3f} an hour"


def request(wish: Wish, job: Job, script: str, *, price: float | None = None) -> dict[str, Any]:
    """What an instance is created with: arguments of `VastAI.create_instance`, keys among them.

    Args:
        wish: The machine.
        script: Of `job_script`.
        price: Dollars an hour, for the cost of the run.
    """
    path = f"{job.workdir.rstrip('/')}/launches/onstart.sh"
    command, rest = packed(script, path=path, limit=_ONSTART_LIMIT)
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    if price is not None:
        variables["PRICE_PER_HOUR"] = f"{price:.6g}"
    if rest:
        variables["UPS_JOB_REST"] = rest
    return {
        "image": wish.image,
        "disk": wish.disk_gib,
        "label": f"ups-{job.name}-{job.launch_id}",  # by which the instance is found again
        "runtype": "ssh_direc ssh_proxy",
        "onstart_cmd": command,
        "env": variables,
    }


class Vast:
    """The marketplace."""

    def __init__(self) -> None:
        check_installed("vastai", extra="vast")
        with needs("vast"):
            from vastai import VastAI
        url = os.environ.get("VAST_URL") or None
        try:
            self._client = VastAI(server_url=url)
            # Sent once: an offer that is accepted twice would be refused, and there would be an instance.
            self._once = VastAI(server_url=url, retry=1)
        except RuntimeError as error:
            raise LaunchError(
                "no key of vast.ai",
                kind="no_key",
                hint="set VAST_API_KEY, or `vastai set api-key KEY`; cloud.vast.ai/manage-keys makes keys",
            ) from error

    def offers(self, wish: Wish) -> list[Offer]:
        """Offers, the cheapest first."""

        def search(query: Mapping[str, Any]) -> list[Offer]:
            options = {"order": "dph_total", "limit": _MAX_OFFERS, "storage": wish.disk_gib}
            with _calling("search offers"):
                rows = self._client.search_offers(query=dict(query), **options)
            return sorted(map(Offer.of, rows), key=lambda offer: offer.price)

        query = wish.query()
        if offers := search(query):
            return offers
        problem, hint = f"no offer of {wish}", "ask for another --gpu, fewer --gpus or less --disk"
        if query.pop("dph_total", None) and (dearer := search(query)):
            cheapest = f"the cheapest costs ${dearer[0].price:.3f} an hour"
            hint = "raise --max-price, or try later"
            raise LaunchError(problem, kind="no_offer", found=cheapest, hint=hint)
        raise LaunchError(problem, kind="no_offer", hint=hint)

    def create(
        self, offers: Sequence[Offer], parameters: Callable[[Offer], dict[str, Any]]
    ) -> tuple[int, Offer]:
        """Accept the first offer that is still there.

        Args:
            offers: To be tried in turn: others rent machines, too.
            parameters: Gives what `request` does, for an offer.

        Returns:
            Number of the instance, and the offer.
        """
        for offer in offers:
            asked = parameters(offer)
            try:
                with _calling("create an instance"):
                    answer = self._once.create_instance(id=offer.id, **asked)
            except KeyboardInterrupt as error:
                raise self._interrupted(str(asked["label"]), kind="interrupted", exit_code=5) from error
            except LaunchError as error:
                if error.kind == "gone":
                    logger.info(f"offer {offer.id} is gone")
                    continue
                if error.kind == "unreachable":
                    made = self._interrupted(
                        str(asked["label"]), kind="unreachable", exit_code=error.exit_code
                    )
                    raise made from error
                raise
            if not answer.get("success") or answer.get("new_contract") is None:
                raise _refusal("create an instance", answer)
            return int(answer["new_contract"]), offer
        raise LaunchError("all offers that were found are gone", kind="no_offer", hint="run it again")

    def _interrupted(self, label: str, *, kind: str, exit_code: int) -> LaunchError:
        """What is to be said where it isn't known whether an offer was accepted."""
        problem = "interrupted while an instance was created"
        try:
            with _calling("list instances"):
                rows = self._client.show_instances_v1(_NEWEST)["instances"]
        except LaunchError:
            hint = f"look for {label} in `vastai show instances`, and `vastai destroy instance ID`"
            made = LaunchError(f"{problem}; whether there is one isn't known", hint=hint)
        else:
            numbers = [int(row["id"]) for row in rows if row.get("label") == label]
            if numbers:
                made = LaunchError(f"{problem}: instance {numbers[0]} is there", hint=_destroy(numbers[0]))
                made.instance = numbers[0]
            else:
                made = LaunchError(f"{problem}: there is none labelled {label}", hint="run it again")
        made.kind, made.exit_code = kind, exit_code
        return made

    def wait(self, instance: int, *, seconds: float, destroys: bool) -> None:
        """Wait until an instance runs, and so its script.

        Args:
            instance: Its number.
            seconds: How long.
            destroys: Whether one that doesn't start is destroyed: its script can't switch it off.
        """
        try:
            problem = self._problem(instance, time.monotonic() + seconds)
        except KeyboardInterrupt as error:
            made = LaunchError(f"instance {instance} goes on without being watched", kind="interrupted")
            made.instance, made.hint, made.exit_code = instance, _destroy(instance), 5
            raise made from error
        if problem is None:
            return
        made = LaunchError(f"instance {instance} didn't start: {problem}", kind="not_started")
        made.instance, made.hint = instance, _destroy(instance)
        if destroys:
            try:
                with _calling("destroy the instance"):
                    self._client.destroy_instance(id=instance)
            except LaunchError as error:
                error.instance, error.hint = instance, _destroy(instance)
                raise
            made.instance, made.hint = None, "it was destroyed; run it again"
        raise made

    def _problem(self, instance: int, until: float) -> str | None:
        """Look at an instance until it runs; gives why it doesn't. Each change of its state is said."""
        before = ""
        while True:
            state, is_asked_to_stop = "", False
            try:
                with _calling("show the instance"):
                    row = self._client.show_instance(id=instance) or {"actual_status": "offline"}
                state = row.get("actual_status") or "being provisioned"
                message = str(row.get("status_msg") or "").strip()
                shown = f"{state}{message and f': {message}'}"
                is_asked_to_stop = row.get("intended_status") == "stopped"  # by its script
            except LaunchError as error:
                if error.kind != "unreachable":  # else the network may come back
                    raise
                shown = error.problem
            if shown != before:
                logger.info(f"instance {instance}: {shown}")
            before = shown
            if state == "running" or is_asked_to_stop:
                return None
            if state in _ENDED:
                return shown
            if time.monotonic() >= until:
                return f"still {shown}"
            time.sleep(_POLL_S)


def _destroy(instance: int) -> str:
    return f"`vastai destroy instance {instance}` ends it and what it costs"


@contextmanager
def _calling(doing: str) -> Iterator[None]:
    """Inside, what the client raises says what was done; keys aren't shown."""
    with needs("vast"):
        import requests
    try:
        yield
    except requests.HTTPError as error:
        response: Any = error.response  # there is one of every status
        try:
            answer = response.json()
        except ValueError:
            answer = {}
        raise _refusal(doing, answer, status=response.status_code) from error
    except requests.RequestException as error:
        raise LaunchError(
            f"vast.ai can't be reached to {doing} ({type(error).__name__})",
            kind="unreachable",
            hint="check the network and VAST_URL",
        ) from error
    except (KeyError, TypeError, ValueError) as error:  # of the client, which takes answers as they come
        answer = {"msg": f"an answer that vastai doesn't understand ({error!r})"}
        raise _refusal(doing, answer) from error


def _refusal(doing: str, answer: Any, *, status: int | None = None) -> LaunchError:
    """The error for what the API refuses, with what it says of a mistake."""
    hints = {
        401: "check the key: `vastai set api-key KEY`",
        402: "add credit to the account",
        403: "the key may not do this: make another one",
        429: "wait a minute",
    }
    message = ""
    if isinstance(answer, dict) and answer:
        message = str(answer.get("msg") or answer.get("error") or json.dumps(answer))
    return LaunchError(
        f"vast.ai refused to {doing}",
        kind="gone" if status in _GONE else "refused",
        found=message or f"HTTP status {status}",
        hint=hints.get(status or 0, "look at the request and at your account"),
    )
