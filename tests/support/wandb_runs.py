"""Runs of Weights & Biases in tests: a stand-in for the package, and what the real one keeps offline."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

STANDIN = Path(__file__).with_name("wandb_standin")


@dataclass(frozen=True)
class Standin:
    """The stand-in, as this process and those that it starts import it."""

    log: Path
    monkeypatch: pytest.MonkeyPatch

    def fails(self, *what: str) -> None:
        """Let calls fail: "init", "online", "log", "artifact", "finish"; "init:hang" hangs instead."""
        self.monkeypatch.setenv("STANDIN_FAILS", ",".join(what))

    def calls(self, name: str) -> list[dict[str, Any]]:
        """What one function was called with."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines]
        return [call for call in found if call.pop("call") == name]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was logged."""
        return [call["values"] for call in self.calls("log")]

    @classmethod
    def installed(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
        """Put it in the place of the package, also in processes that are started from now on."""
        monkeypatch.syspath_prepend(STANDIN)
        for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
            monkeypatch.delitem(sys.modules, name)
        spec = spec_from_file_location("wandb", STANDIN / "wandb.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, "wandb", module)
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        monkeypatch.delenv("STANDIN_FAILS", raising=False)
        monkeypatch.setenv("PYTHONPATH", str(STANDIN))
        monkeypatch.setenv("STANDIN_LOG", str(folder / "wandb-calls.jsonl"))
        for name in ("WANDB_MODE", "WANDB_CONTEXT_FILE", "FAST_TO_SOTA_WANDB_INFO"):
            monkeypatch.delenv(name, raising=False)
        return cls(folder / "wandb-calls.jsonl", monkeypatch)


def read_offline(path: Path) -> list[Any]:
    """The records of a run that wandb kept offline, as its protocol buffers.

    The file is LevelDB's log behind 7 bytes: blocks of 32 KiB, in which each piece of a record has a head of
    7 bytes (checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    records = []
    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        records.append(record)
    return records


def _records(data: bytes) -> Iterator[bytes]:
    block, head = 32768, struct.Struct("<IHB")
    at, content = 7, b""
    while at + head.size <= len(data):
        if block - at % block < head.size:
            at += block - at % block
            continue
        _, length, kind = head.unpack_from(data, at)
        at += head.size
        content += data[at : at + length]
        at += length
        if kind in (1, 4):
            yield content
            content = b""
