"""Ranks of one machine: processes forked from one that has imported torch, which takes seconds each time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

_WARM = multiprocessing.get_context("forkserver")
# What a stage imports, and what torch imports when the first optimizer is made.
_WARM.set_forkserver_preload(
    ["ups.train.operator", "ups.train.distributed", "ups.train.trainer", "torch._dynamo"]
)


def start(main: Callable[..., int | None], *arguments: object, **variables: str) -> BaseProcess:
    """A process that ends with what `main` returns; `variables` are added to its environment."""
    process = _WARM.Process(target=_run, args=(main, arguments, variables | {"CUDA_VISIBLE_DEVICES": ""}))
    process.start()
    return process


def _run(main: Callable[..., int | None], arguments: tuple[object, ...], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    sys.exit(main(*arguments))


def rank_variables(world_size: int) -> list[dict[str, str]]:
    """What torchrun sets for each rank of one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = str(world_size)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def wait(processes: Sequence[BaseProcess], *, timeout_s: float = 400) -> list[int | None]:
    """Their exit codes; None of one that had to be killed."""
    try:
        for process in processes:
            process.join(timeout_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
