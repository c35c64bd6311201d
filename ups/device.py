"""Choosing the device."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from ups.errors import ConfigError
from ups.notes import Note


def choose_device(name: str, *, note: Note, key: str = "training.device") -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1", ...
        note: Told if a GPU was asked for and there is none: then it is the CPU.
        key: Where the name comes from, for messages.

    Raises:
        ConfigError: If it isn't the name of a device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _unknown(name, key) from error
    if device.type not in ("cpu", "cuda"):
        raise _unknown(name, key)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        note(f"there is no {name}; the CPU is used instead")
        return torch.device("cpu")
    return device


def device_of_rank(device: torch.device, *, variables: Mapping[str, str] = os.environ) -> torch.device:
    """The GPU of this process, where `torchrun` started several on a machine and none of them was named."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", int(variables.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _unknown(name: str, key: str) -> ConfigError:
    return ConfigError(key, expected="auto, cpu, cuda or cuda:N", found=repr(name))
