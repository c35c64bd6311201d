"""Which mode: the one that was asked for, or for "auto" the fastest of those that are allowed and fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from ups_store.catalog import Catalog, fingerprint_of, read_finished
from ups_store.errors import DeviceError, MemoryLimitError, StoreReplacedError
from ups_store.preload.report import Outcome, PreloadReport
from ups_store.preload.request import Job, Request
from ups_store.store_file import StoreFile
from ups_store.system import files

logger = logging.getLogger(__name__)

# Each has `budget(job)` and `load(job)`. Found by name: only `ups_store.torch` may import torch.
_MODULES: dict[Outcome, str] = {
    "page-cache": "ups_store.preload.page_cache",
    "copy": "ups_store.preload.copy",
    "pinned": "ups_store.torch.pinned",
    "device": "ups_store.torch.device",
}
_IN_RAM = ("auto", "page-cache", "copy")


def preload(file: StoreFile, catalog: Catalog, request: Request) -> PreloadReport:
    """Bring a finished store into memory; see `Store.preload`."""
    file.check_open()
    request.check(catalog.layout.num_samples, path=file.path)
    if file.is_copy and request.mode in _IN_RAM and not request.lock:
        return PreloadReport("copy", "the store gathers from a copy in RAM already", file.nbytes, 0.0)
    fd = _open_again(file, catalog)
    files.expect_whole(fd)  # threads that share a descriptor confuse the kernel's own guess
    try:
        job = Job(file, catalog, fd, request)
        report = _choose(job) if request.mode == "auto" else _load(job, request.mode)
    finally:
        files.close(fd)
    logger.info("%s: preload mode %s in %.2f s: %s", file.path, report.mode, report.seconds, report.why)
    return report


def candidates(request: Request) -> Sequence[Outcome]:
    """What "auto" tries, fastest first: a mode that takes more memory only if an argument asks for it."""
    on_device: list[Outcome] = ["device", "pinned"] if request.device else []
    shared: list[Outcome] = ["copy"] if request.shared else []
    return [*on_device, *shared, "page-cache"]


def _choose(job: Job) -> PreloadReport:
    refusals: list[str] = []
    for mode in candidates(job.request):
        try:
            report = _load(job, mode)
        except (MemoryLimitError, DeviceError) as error:
            if error.kind == "memlock":
                raise  # which no other mode would be allowed either
            refusals.append(f"{mode} refused ({error.problem}: {error.found})")
        else:
            return replace(report, why="; ".join([*refusals, report.why]))
    return PreloadReport("mapped", "; ".join(refusals), 0, 0.0)


def _load(job: Job, mode: Any) -> PreloadReport:
    started = time.perf_counter()
    module = import_module(_MODULES[mode])
    budget = module.budget(job)
    budget.require(mode, margin=job.request.margin, path=job.file.path)
    on_device = module.load(job)
    nbytes = job.file.nbytes if on_device is None else on_device.nbytes
    return PreloadReport(mode, f"{mode}: {budget}", nbytes, time.perf_counter() - started, on_device)


def _open_again(file: StoreFile, catalog: Catalog) -> int:
    """Open the file for reading: the mapping, which needs no descriptor of ours, can't be read from."""
    fd = files.open_existing(file.path)
    try:
        if fingerprint_of(read_finished(fd, file.path)) != fingerprint_of(catalog):
            raise StoreReplacedError(
                "the file was replaced since it was opened", path=file.path, hint="open it again"
            )
    except BaseException:
        files.close(fd)
        raise
    return fd
