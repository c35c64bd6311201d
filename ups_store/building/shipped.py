"""Configurations that installed packages ship: `--config demo` where no such file is there.

A package names its folder of YAML files by an entry point of the group `ups_store.configs`; what the entry
point names is not imported. A file of the user's own always comes first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from ups_store.system.urls import check_local

GROUP = "ups_store.configs"
_EARLIER_FOLDER = "configs/"  # of the repository, as in `--config configs/demo.yaml`


def find_config(name: Path, *, folder: Path = Path()) -> Path:
    """The file of a name, or the shipped configuration; the file that is missing if there is neither.

    Args:
        name: Such as `run.yaml`, `demo`, `demo.yaml` or `pdebench/burgers1d`.
        folder: What the path of a file is relative to.
    Raises:
        SpecError: Kind "url".
    """
    check_local(name)
    own = folder / name
    return own if own.is_file() else shipped_configs().get(_name_of(name), own)


def near_config(path: Path) -> str | None:
    """The shipped configuration, or the file beside it, that a path was probably meant to be."""
    own = [str(file) for file in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(str(path), own, n=1)
    near = near or difflib.get_close_matches(_name_of(path), shipped_configs(), n=1)
    return near[0] if near else None


def shipped_configs() -> dict[str, Path]:
    """All shipped configurations by name, without `.yaml`: those of runs first, then those in folders."""
    files = ((folder, file) for folder in _folders() for file in sorted(folder.rglob("*.yaml")))
    named = {file.relative_to(folder).with_suffix("").as_posix(): file for folder, file in files}
    return dict(sorted(named.items(), key=lambda item: ("/" in item[0], item[0])))


def _name_of(path: Path) -> str:
    return path.as_posix().removeprefix("./").removeprefix(_EARLIER_FOLDER).removesuffix(".yaml")


def _folders() -> Iterator[Path]:
    for point in entry_points(group=GROUP):
        spec = find_spec(point.value)
        for place in spec.submodule_search_locations or () if spec else ():
            yield Path(place)
