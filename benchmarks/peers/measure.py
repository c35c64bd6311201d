"""One peer at one size: every figure in a process of its own, so that one that fails leaves the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.peers.figures import (
    Figures,
    check_values,
    cold_epoch_rate,
    epoch_rate,
    merged,
    open_ms,
    preload_s,
    random_access,
    written,
)
from benchmarks.peers.isolated import FailedError, isolated
from benchmarks.peers.peer import Peer
from benchmarks.peers.registry import make_peer
from benchmarks.peers.shared_memory import pss_over_payload
from benchmarks.peers.sizes import Samples

PSS_SIZE = "100 KB"  # at the others it would say the same


@dataclass(frozen=True)
class PeerResult:
    """A peer's row at one size.

    Attributes:
        name: The peer.
        size: Label of the size.
        version: Of its package; "" for those without one.
        figures: What was measured; None if it could not be.
        reason: Why not; "" if it was.
    """

    name: str
    size: str
    version: str
    figures: Figures | None
    reason: str = ""


def measure_peer(name: str, folder: Path, samples: Samples, timeout_s: float) -> PeerResult:
    """Everything about one peer at one size; imports it, so call it in a process that ends afterwards."""
    try:
        peer = make_peer(name, folder, samples)
        found = version(peer.package) if peer.package else ""
    except (ImportError, PackageNotFoundError) as error:
        return PeerResult(name, samples.label, "", None, f"not installed: {error}")
    try:
        parts = [isolated(written, peer, timeout_s=timeout_s)]
        isolated(_checked, peer, timeout_s=timeout_s)
    except FailedError as error:
        return PeerResult(name, samples.label, found, None, str(error))
    for what, function in _phases(peer):
        try:
            parts.append(isolated(function, timeout_s=timeout_s))
        except FailedError as error:
            parts.append(Figures(notes=(f"{what}: {error}",)))
    return PeerResult(name, samples.label, found, merged(parts))


def _phases(peer: Peer) -> Iterator[tuple[str, Callable[[], Figures]]]:
    is_stored = any(peer.folder.iterdir())
    yield "epoch", lambda: Figures(epoch=epoch_rate(peer, num_workers=0))
    if is_stored:
        yield "2 workers", lambda: Figures(epoch_2_workers=epoch_rate(peer, num_workers=2))
    if peer.is_random:
        yield "batches", lambda: _random(peer)
        if peer.samples.label == PSS_SIZE and is_stored:
            yield "8 processes", lambda: Figures(pss_over_payload=pss_over_payload(peer))
    if not is_stored:
        return
    if os.geteuid():
        yield "cold", _needs_root
        return
    yield "cold epoch", lambda: Figures(cold_epoch=cold_epoch_rate(peer))
    if peer.has_preload:
        yield "preload", lambda: Figures(preload_s=preload_s(peer))


def _random(peer: Peer) -> Figures:
    torch.set_num_threads(1)  # one memcpy is one thread too
    peer.open()
    figures = random_access(peer)
    peer.close()
    return merged([figures, Figures(open_ms=open_ms(peer))]) if any(peer.folder.iterdir()) else figures


def _checked(peer: Peer) -> None:
    peer.open()
    check_values(peer)


def _needs_root() -> Figures:
    raise PermissionError("only root may drop the page cache")
