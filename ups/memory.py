"""Memory that is free on a device; the one module of `ups` beside `ups.data` that asks `ups_store`."""

from __future__ import annotations

import torch

import ups_store


def free_bytes(device: torch.device) -> int:
    """Memory that can be filled now: the GPU's, or RAM within the limits of machine and container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return ups_store.available_memory_bytes()
