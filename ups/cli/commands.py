"""What every command shares: errors as one sentence and an exit code, a configuration with its warnings.

Light, so that `--help` and a mistake in the configuration don't wait for torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ups.config import RunConfig, load_config
from ups.data.stores import UNREADABLE, StoreError
from ups.errors import ConfigWarning, OutputError, UpsError
from ups.output import Note

# As in `ups_store.build`: 1 any other error, 2 a mistake in the configuration, 4 a deadline, 6 a full disk.
EXIT_UNREADABLE = 3
EXIT_INTERRUPTED = 5


def tell_on_stderr(text: str) -> None:
    """Print a message as it is, on one line; results alone go to stdout."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


@contextmanager
def telling_errors(
    note: Note, *, interrupted: str = "interrupted: run the same command again"
) -> Iterator[None]:
    """Inside, errors end the command with one sentence and their exit code.

    Args:
        note: Told the sentence.
        interrupted: What a Ctrl-C tells.

    Raises:
        typer.Exit: For our errors, those of the system, and Ctrl-C; anything else is a bug and passes.
    """
    try:
        yield
    except (UpsError, StoreError) as error:
        note(f"error: {error}")
        code = EXIT_UNREADABLE if isinstance(error, UNREADABLE) else error.exit_code
        raise typer.Exit(code) from None
    except OSError as error:
        ours = OutputError.of(error, error.filename or "a file", doing="can't be used")
        note(f"error: {ours}")
        raise typer.Exit(ours.exit_code) from None
    except KeyboardInterrupt:
        note(interrupted)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def resolve_config(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[str], *, note: Note, name: str | None = None
) -> RunConfig:
    """Read a configuration and note its warnings.

    Args:
        source: YAML file, or the keys that one would hold.
        overrides: `key=value` on top of it.
        note: Told each warning, such as of a setting that has no effect.
        name: What errors call the source; by default its path.

    Raises:
        ConfigError: If it can't be read or a value is wrong.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = load_config(source, overrides=overrides, name=name)
    for warning in caught:
        note(f"warning: {warning.message}")
    return config
