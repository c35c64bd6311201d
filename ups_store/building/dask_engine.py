"""Builds over a Dask cluster that there is already: Dask schedules the partitions and retries them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ups_store.building.partitions import PartitionTask, make_partition
from ups_store.building.result import BuildResult
from ups_store.errors import ConfigError, StoreError, needs

with needs("dask"):
    import dask
    from distributed import Client, as_completed, get_worker
    from distributed.scheduler import KilledWorker

RETRIES = 3  # of a task that failed; how many workers it may take down is Dask's scheduler.allowed-failures
_WHERE = "give --dask-scheduler, set DASK_SCHEDULER_ADDRESS, or start one with `dask scheduler`"


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[DaskEngine]:
    """The engine of the cluster at an address, or of a scheduler file; by default as Dask is configured.

    Raises:
        ConfigError: Kind "no_cluster", if there is no scheduler there.
    """
    address = address or dask.config.get("scheduler-address", None)
    if address is None:
        raise ConfigError("no Dask cluster is known", kind="no_cluster", hint=_WHERE)
    is_file = os.path.isfile(address)
    where: dict[str, Any] = {"scheduler_file": address} if is_file else {"address": address}
    try:
        client = Client(**where, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "no Dask scheduler answers", kind="no_cluster", path=address, found=str(error), hint=_WHERE
        ) from error
    with client:
        yield DaskEngine(client)


class DaskEngine:
    """Runs partitions on the workers of a cluster; see `partitions.Engine`.

    Args:
        client: Of the cluster; yours to close.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def num_workers(self) -> int:
        """How many workers there are now."""
        return len(self._client.nthreads())

    def run(
        self, tasks: Sequence[PartitionTask]
    ) -> Iterator[tuple[PartitionTask, BuildResult | BaseException]]:
        """See `partitions.Engine.run`; what is left when this ends early is cancelled."""
        submitted = self._client.map(_make, tasks, retries=RETRIES, pure=False)
        futures = dict(zip(submitted, tasks, strict=True))
        try:
            for future in as_completed(submitted, loop=self._client.loop):
                yield futures[future], future.result() if future.status == "finished" else _error(future)
        finally:
            self._client.cancel(submitted)


def _make(task: PartitionTask) -> BuildResult:
    return make_partition(task, get_worker().local_directory)


def _error(future: Any) -> BaseException:
    error = future.exception() if future.status == "error" else None
    if isinstance(error, KilledWorker):
        problem = (
            f"{error.allowed_failures + 1} workers died over it, the last one {error.last_worker.address}"
        )
        hint = "look at its log (memory, the encoder's deadline); run the same command again"
        return StoreError(problem, kind="workers_died", hint=hint)
    return error or StoreError(f"Dask gave it up as {future.status}", kind="cluster", hint="run it again")
