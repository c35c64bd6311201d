"""Whether a run fits into this machine: GPUs and their memory, and that of the machine; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

import ups_store
from ups.config import RunConfig
from ups.errors import ConfigError
from ups.grid import GridSpec
from ups.pipeline.gpus import Gpu, visible_gpus
from ups.pipeline.memory_estimate import device_bytes, estimate_stages, host_bytes
from ups.pipeline.report import Checks
from ups_store.console import format_nbytes
from ups_store.errors import MemoryLimitError

_GROUP = "hardware"


def check_machine(
    config: RunConfig, stages: tuple[str, ...], grids: Mapping[str, GridSpec], checks: Checks
) -> None:
    """Compare what stages take, estimated too high rather than too low, with what there is."""
    gpus = [] if config.training.device == "cpu" else visible_gpus()
    gpu = _gpu_of(config, gpus, checks)
    estimates = estimate_stages(config, stages, grids)
    for name, estimate in estimates.items() if gpu is not None else ():
        assert gpu is not None
        needed, states = device_bytes(estimate), estimate.states
        _compare(f"stage {name} on a {gpu.name}", states, needed, gpu.free_bytes, checks)
    workers = config.training.num_workers
    num_workers = workers if isinstance(workers, int) else 4
    needed = host_bytes(estimates, has_gpu=gpu is not None, num_workers=num_workers)
    states = 0 if gpu is not None else max((each.states for each in estimates.values()), default=0)
    _compare("the run in RAM", states, needed, ups_store.available_memory_bytes(), checks)


def _gpu_of(config: RunConfig, gpus: list[Gpu], checks: Checks) -> Gpu | None:
    """The GPU that a run would take, the least of those of several ranks; None for the CPU."""
    name = config.training.device
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()):
        checks.refuse(
            _GROUP, ConfigError("training.device", expected="auto, cpu, cuda or cuda:N", found=repr(name))
        )
        return None
    if kind == "cpu" or (kind == "auto" and not gpus):
        checks.ok(_GROUP, f"training.device = {name}: the CPU")
        return None
    if int(number or 0) >= len(gpus):
        checks.warn(
            _GROUP, f"training.device = {name}, but {len(gpus)} GPUs are visible: the CPU would be used"
        )
        return None
    world_size = (
        int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if os.environ.get("LOCAL_WORLD_SIZE", "1").isdecimal()
        else 1
    )
    taken = [gpus[int(number)]] if number else gpus[: max(1, world_size)]
    checks.ok(_GROUP, f"training.device = {name}: {len(gpus)} GPUs, {', '.join({gpu.name for gpu in gpus})}")
    return min(taken, key=lambda gpu: gpu.free_bytes)


def _compare(what: str, states: int, needed: int, available: int, checks: Checks) -> None:
    text = f"{what}: at most about {format_nbytes(needed)} of {format_nbytes(available)} that are free"
    if states > available:
        checks.refuse(
            _GROUP,
            MemoryLimitError(
                f"{what}: weights, gradients and optimiser alone don't fit",
                needed_bytes=states,
                available_bytes=available,
                expected=f"{format_nbytes(states)}",
                found=f"{format_nbytes(available)} free",
                hint="take a smaller model, or a machine with more memory",
            ),
        )
    elif needed > available:
        hint = "a smaller training.batch_size takes less, so does training.activation_checkpointing"
        checks.warn(_GROUP, f"{text}; {hint}, and `ups dry-run` measures it")
    else:
        checks.ok(_GROUP, text)
