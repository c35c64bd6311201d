"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object")]
NumThreads = Annotated[int | None, typer.Option(min=1, help="[default: one per processor]")]
