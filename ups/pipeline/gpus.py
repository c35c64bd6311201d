"""The GPUs of this machine, without torch: asked of the driver's own command."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_ASK = ("--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use.

    Attributes:
        name: Of its kind.
        total_bytes: Its memory.
        free_bytes: What no process uses of it now.
    """

    name: str
    total_bytes: int
    free_bytes: int


def visible_gpus(variables: Mapping[str, str] = os.environ) -> list[Gpu]:
    """GPUs in the order in which CUDA numbers them for this process; none where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        asked = subprocess.run(
            [command, *_ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # a driver that doesn't answer
        return []
    return chosen_gpus(asked.stdout, variables.get("CUDA_VISIBLE_DEVICES"))


def chosen_gpus(answer: str, visible: str | None) -> list[Gpu]:
    """The GPUs that an answer of nvidia-smi lists, those that are to be visible, in that order."""
    found: dict[str, Gpu] = {}
    uuids: dict[str, str] = {}
    for line in answer.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[3].isdecimal() and words[4].isdecimal():
            index, uuid, name, total, free = words
            found[index], uuids[uuid] = Gpu(name, int(total) << 20, int(free) << 20), index
    if visible is None:
        return list(found.values())
    wanted = []
    for word in map(str.strip, visible.split(",")):
        index = next((uuids[uuid] for uuid in uuids if word and uuid.startswith(word)), word)
        if index not in found:  # as CUDA does: what follows an unknown one isn't visible either
            break
        wanted.append(found[index])
    return wanted
