"""Today's step beside that of commit b271f3c, in processes of their own, on the same data.

Both train an operator on 32 tokens of fields in batches of 32 on one thread without compilation: the earlier
one in its demo's configuration, today's in the same one, and in the demo's of today with the losses of then.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import RATE, Comparison, UnavailableError, last_line, tracked
from benchmarks.harness.scale import SCALE
from benchmarks.train.inputs import REPO, build_stores, demo, environment, write_config

COMMIT = "b271f3c3b59abc121e991704785a7e0df860e327"
_SERVER = Path(__file__).with_name("step_server.py")
_PAIRS, _STEPS, _WARM_UP = (15, 5, 10) if SCALE.name == "quick" else (100, 10, 20)
_LOSS_OF_THEN = ("training.rollout_loss=mse", "training.lambda_relative=1.0")  # or losses weren't comparable
_PATIENCE_S = 300  # for an answer, the first of which comes after the imports
Answer = dict[str, float]  # "seconds" and "loss"


class EarlierStep:
    """Pairs of steps, one of each version after the other, and their losses over the last third."""

    timeout = 900
    param_names = ("configuration",)
    params = ("demo of then", "demo of today")

    def setup(self, configuration: str) -> None:
        then, earlier = earlier_tree()
        ours = demo().path if configuration == "demo of today" else earlier
        self.then = Server(then, earlier, _own_cache(then))
        self.now = Server(REPO, ours, "stages.operator.budget=null", *_LOSS_OF_THEN)
        self.pairs: list[tuple[Answer, Answer]] = []

    def teardown(self, configuration: str) -> None:
        for server in (self.then, self.now):
            server.close()

    def _measure(self) -> None:
        if self.pairs:
            return
        for server in (self.now, self.then):
            server.train(_WARM_UP)
        self.pairs = [(self.now.train(_STEPS), self.then.train(_STEPS)) for _ in range(_PAIRS)]

    @tracked("a training step, over that of commit b271f3c in its demo's configuration", RATE, at_least=1.5)
    def track_a_step(self, configuration: str) -> Comparison:
        self._measure()
        ours, theirs = ([side["seconds"] / _STEPS for side in some] for some in zip(*self.pairs, strict=True))
        return Comparison.of(ours, theirs)

    @tracked("loss after as many steps, over that of commit b271f3c", "x loss", at_most=1.1)
    def track_loss(self, configuration: str) -> float:
        self._measure()
        self.comparison = None  # it is of the times
        last = self.pairs[-_PAIRS // 3 :]
        return sum(ours["loss"] for ours, _ in last) / sum(theirs["loss"] for _, theirs in last)


@cache
def earlier_tree() -> tuple[Path, Path]:
    """The commit's files, and a configuration of the demo's data as it was; stores of both versions."""
    folder = demo().folder.path
    tree = folder / "then"
    check_out(tree)
    _compile(tree)
    config = write_config(folder, include=str(tree / "configs" / "demo.yaml"), name="then.yaml")
    build_stores(config, _own_cache(tree), tree=tree)
    build_stores(config)
    return tree, config


def _compile(tree: Path) -> None:
    """Its own compiled code: else the package that is installed would lend it today's."""
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
    subprocess.run(command, check=True, cwd=tree, env=environment(tree), capture_output=True)


def _own_cache(tree: Path) -> str:
    """Where the earlier version has its stores, which are of a format of their own."""
    return f"cache.dir={tree / 'cache'}"


class Server:
    """A version of `ups` that trains on demand."""

    def __init__(self, tree: Path, *arguments: object) -> None:
        command = [sys.executable, str(_SERVER), *map(str, arguments)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment(tree), text=True, stderr=self._said, **pipes
        )

    def train(self, num_steps: int) -> Answer:
        """Processor time of so many steps, and their mean loss.

        Raises:
            ServerError: If the server ended, or says nothing for minutes.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
            raise ServerError(f"no answer from a server of steps within {_PATIENCE_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _ended(self) -> ServerError:
        code = self._process.wait()
        self._said.seek(0)
        return ServerError(f"a server of steps ended with code {code}: {last_line(self._said.read())}")


class ServerError(Exception):
    """A server of steps didn't answer."""


def check_out(folder: Path) -> None:
    """The commit's files, with entry points of its own.

    Raises:
        UnavailableError: If this isn't a clone with the whole history.
    """
    try:
        done = subprocess.run(["git", "-C", str(REPO), "archive", COMMIT], capture_output=True, check=True)
    except FileNotFoundError:
        raise UnavailableError("there is no git to get the commit with") from None
    except subprocess.CalledProcessError as error:
        said = last_line(error.stderr.decode(errors="replace"))
        raise UnavailableError(f"the commit isn't here, it needs a clone with its history: {said}") from None
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    about = folder / "ups_store-0.0.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ups-store\nVersion: 0.0.0\n")
    (about / "entry_points.txt").write_text("[ups_store.encoders]\nups = ups.encode_loop:make_encoder\n")
