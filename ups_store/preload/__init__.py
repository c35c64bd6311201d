"""Bringing a store into memory before it is read: page cache, a copy, page-locked memory, a device.

`Store.preload` is the way in; `docs/preload.md` says which mode is for what.
"""

from ups_store.preload.budget import Budget
from ups_store.preload.choice import preload
from ups_store.preload.report import PreloadReport
from ups_store.preload.request import Mode, Progress, Request

__all__ = ["Budget", "Mode", "PreloadReport", "Progress", "Request", "preload"]
