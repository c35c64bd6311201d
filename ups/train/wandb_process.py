"""Sends what a command hands over to Weights & Biases, in a process of its own (see `ups.train.wandb_sink`).

Whatever fails or hangs here, the command goes on. JSON lines come on stdin, the first with what the run
begins with; problems go out as lines `warning: ...` on stdout. Nothing of ups is imported, so that it is
there at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

RUN_STEP = "run/step"  # counts the rows of all processes; wandb's own step begins again with an offline run
_KNOWN = ("project", "entity", "name", "url")  # what wandb completes of a run


class Sender:
    """A run of Weights & Biases, as one process continues it.

    Args:
        wandb: The module.
        begin: The first message: `options` of `wandb.init`, `mode`, `timeout_s`, `axes`, `context`, its path
            `context_path` and `info_path`.
    """

    def __init__(self, wandb: Any, begin: Mapping[str, Any]) -> None:
        self._wandb, self._context = wandb, dict(begin["context"])
        self._context_path = Path(begin["context_path"])
        self._run = self._begin(begin)
        for metric, axis in begin["axes"].items():
            self._run.define_metric(axis)
            self._run.define_metric(metric, step_metric=axis)
        self._context |= {name: found for name in _KNOWN if (found := getattr(self._run, name, None))}
        self._write_context()
        if begin["info_path"]:
            info = {name: self._context.get(name) for name in _KNOWN}
            _write(Path(begin["info_path"]), {"id": self._run.id, **info})

    def _begin(self, begin: Mapping[str, Any]) -> Any:
        """The run; one that can't begin online is kept on this machine."""
        # Output isn't captured: each line of it would wait for wandb's service.
        settings = self._wandb.Settings(
            console="off", silent=True, init_timeout=begin["timeout_s"], x_stats_pid=os.getppid()
        )
        options = {**begin["options"], "settings": settings}
        try:
            return self._wandb.init(**options, mode=begin["mode"])
        except Exception as error:
            if begin["mode"] == "offline":
                raise
            self._wandb.teardown()  # else its service still has the run
            run, folder = self._wandb.init(**options, mode="offline"), Path(options["dir"]) / "wandb"
            say(
                f"Weights & Biases can't begin online ({one_line(error)}): the run is kept in {folder}; "
                "`wandb login`, then `wandb sync` sends it"
            )
            return run

    def take(self, message: Mapping[str, Any]) -> None:
        """Send one message: its only key says what it is."""
        ((kind, content),) = message.items()
        getattr(self, f"_take_{kind}")(content)

    def finish(self, exit_code: int) -> None:
        """End the run; waits until everything is sent."""
        self._run.finish(exit_code=exit_code)

    def _take_row(self, row: Mapping[str, Any]) -> None:
        self._context["step"] = step = self._context["step"] + 1
        self._write_context()  # first: a kill in between leaves a gap, and no step twice
        self._run.log({**row, RUN_STEP: step}, step=step, commit=True)

    def _take_summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(values)

    def _take_table(self, table: Mapping[str, Any]) -> None:
        self._take_row({table["name"]: self._wandb.Table(columns=table["columns"], data=table["rows"])})

    def _take_images(self, images: Mapping[str, Any]) -> None:
        self._take_row(
            {name: self._wandb.Image(path, caption=caption) for name, (path, caption) in images.items()}
        )

    def _take_artifact(self, artifact: Mapping[str, Any]) -> None:
        if not self._run.offline:  # wandb takes no inputs offline; the metadata names them all the same
            for used in artifact["uses"]:
                self._run.use_artifact(self._artifact(used))
        self._run.log_artifact(self._artifact(artifact), aliases=artifact["aliases"])

    def _artifact(self, said: Mapping[str, Any]) -> Any:
        artifact = self._wandb.Artifact(said["name"], type=said["type"], metadata=said["metadata"])
        for path in said.get("files", ()):
            artifact.add_file(path)
        if not said.get("files"):  # a file that stays where it is; the same content is the same version
            with artifact.new_file("identity.json") as file:
                json.dump(said["metadata"], file, sort_keys=True)
        return artifact

    def _write_context(self) -> None:
        _write(self._context_path, self._context)


def say(problem: str) -> None:
    """Report a problem to the command."""
    print(f"warning: {problem}", flush=True)  # noqa: T201


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _write(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file that appears whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Send what stdin says until it ends; of several problems the first is reported."""
    exit_code, has_said = 1, False  # of a command that was killed
    sender = Sender(import_module("wandb"), json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        message = json.loads(line)
        if "end" in message:
            exit_code = message["end"]
            break
        try:
            sender.take(message)
        except Exception as error:
            if not has_said:
                say(f"Weights & Biases didn't take {next(iter(message))} ({one_line(error)})")
            has_said = True
    sender.finish(exit_code)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say(f"Weights & Biases gets nothing more of this command ({one_line(error)})")
        sys.exit(1)
