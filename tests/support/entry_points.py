"""The project's entry points, as an installed distribution has them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install_entry_points(folder: Path, group: str) -> Path:
    """Make a folder that says on `sys.path` what the project's entry points of a group are."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    info = folder / "ups_store-9.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: ups-store\nVersion: 9\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder
