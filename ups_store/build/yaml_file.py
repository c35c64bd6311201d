"""YAML files of configurations, with `include:`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ups_store.errors import ConfigError


def read_yaml(path: Path, *, including: tuple[Path, ...] = ()) -> Any:
    """A file's values over those of the files that it includes, as an OmegaConf dictionary.

    `include:` names one file or a list of them, relative to the file that it stands in; later ones win.

    Raises:
        ConfigError: If a file can't be read, isn't YAML or has no keys, or if files include each other.
    """
    real = path.resolve()
    if real in including:
        chain = " -> ".join(file.name for file in (*including, real))
        raise ConfigError("files include each other in a circle", path=path, found=chain)
    own = _read_one(path, hint=f"check `include` in {including[-1].name}" if including else "check --config")
    included = own.pop("include", None) or []
    names = [included] if isinstance(included, str) else list(included)
    parts = [read_yaml(path.parent / str(name), including=(*including, real)) for name in names]
    return OmegaConf.merge(*parts, own)


def _read_one(path: Path, *, hint: str) -> Any:
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        reason = error.strerror or "a single value instead of keys"
        raise ConfigError(f"can't be read ({reason})", path=path, hint=hint) from error
    except Exception as error:  # the YAML parser's own tree of errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"is not YAML ({reason})", path=path, hint="check the indentation") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError("configuration", path=path, expected="keys and values", found="a list")
    return loaded
