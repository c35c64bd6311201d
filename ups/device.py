"""Choosing the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ups.errors import ConfigError


def choose_device(name: str, *, note: Callable[[str], None]) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1", ...
        note: Told if a GPU was asked for and there is none: then it is the CPU.

    Raises:
        ConfigError: If it isn't the name of a device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        expected = "auto, cpu, cuda or cuda:N"
        raise ConfigError("training.device", expected=expected, found=repr(name)) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        note(f"there is no {name}; the CPU is used instead")
        return torch.device("cpu")
    return device
