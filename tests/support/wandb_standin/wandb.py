"""Stands for wandb: appends its calls to the file in STANDIN_LOG, and fails as STANDIN_FAILS says."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def note(call: str, **values: Any) -> None:
    with open(os.environ["STANDIN_LOG"], "a") as file:
        file.write(json.dumps({"call": call, **values}) + "\n")


def fail(what: str) -> None:
    fails = os.environ.get("STANDIN_FAILS", "").split(",")
    if f"{what}:hang" in fails:
        time.sleep(600)
    if what in fails:
        raise RuntimeError(f"{what} is not to be had")
    if f"{what}:timeout" in fails:
        raise TimeoutError("Timed out finishing run.")


class Settings(dict[str, Any]):
    def __init__(self, **values: Any) -> None:
        super().__init__(values)


class Table:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.shown = {"columns": columns, "data": data}


class Image:
    def __init__(self, path: str, caption: str) -> None:
        self.shown = {"nbytes": Path(path).stat().st_size, "caption": caption}


class Artifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.shown = {"name": name, "type": type, "metadata": metadata, "files": []}

    def add_file(self, path: str) -> None:
        self.shown["files"].append(Path(path).name)

    @contextmanager
    def new_file(self, name: str) -> Any:
        self.shown["files"].append(name)
        with open(os.devnull, "w") as file:
            yield file


class Summary:
    def update(self, values: dict[str, Any]) -> None:
        note("summary", values=values)


class Run:
    entity, url = "team", None

    def __init__(self, options: dict[str, Any], mode: str | None) -> None:
        self.id, self.project, self.name = options["id"], options["project"], options["name"]
        self.offline, self.summary = mode == "offline", Summary()

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        note("define_metric", name=name, step_metric=step_metric)

    def log(self, values: dict[str, Any], *, step: int, commit: bool) -> None:
        fail("log")
        shown = {name: getattr(value, "shown", value) for name, value in values.items()}
        note("log", values=shown, step=step, commit=commit)

    def log_artifact(self, artifact: Artifact, aliases: list[str]) -> None:
        fail("artifact")
        note("log_artifact", aliases=aliases, **artifact.shown)

    def use_artifact(self, artifact: Artifact) -> None:
        note("use_artifact", **artifact.shown)

    def finish(self, *, exit_code: int) -> None:
        fail("finish")
        note("finish", exit_code=exit_code)


def teardown() -> None:
    note("teardown")


def init(*, mode: str | None, settings: Settings, **options: Any) -> Run:
    note("init", mode=mode, settings=settings, **options)
    fail("init")
    if mode != "offline" and "STANDIN_RUN" in os.environ:  # one that isn't over is given back
        options["id"] = os.environ["STANDIN_RUN"]
    if mode != "offline":
        fail("online")
    return Run(options, mode)
