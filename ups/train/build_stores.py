"""Building the stores that a stage needs: `python -m ups_store.build`, as one would type it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ups.config import RunConfig
from ups.data.stores import latent_folder, own_manifest
from ups.errors import InterruptedTrainingError, UpsError
from ups.output import Note, nobody
from ups.train.interrupt import CONTINUES

BUILD = ("-m", "ups_store.build")


def build_latents(
    config: RunConfig,
    *,
    config_path: Path | None,
    overrides: Sequence[str],
    is_first: bool,
    note: Note,
) -> dict[str, float]:
    """Build the stores of latents that the autoencoder in use makes; valid ones are kept.

    Args:
        config: Configuration of the run.
        config_path: The file that it was read from.
        overrides: `key=value` on top of that.
        is_first: Whether this is the first rank, which shows the command and writes the manifest.
        note: Told the command.

    Returns:
        `startup/cache_sec`, and `startup/cache_reused`, 1 if all stores were valid, else 0.

    Raises:
        UpsError: Kind "build", with the exit code of the build; its own message went to stderr.
        InterruptedTrainingError: On SIGTERM or SIGINT; what is committed stays.
    """
    manifest = config.checkpoint.dir / "latents.manifest.json"
    flags = ["--checkpoint", str(config.autoencoder_path)]
    flags += ["--cache-dir", str(latent_folder(config)), "--cache-dtype", config.training.latent_cache_dtype]
    flags += ["--manifest", str(manifest)] if is_first else []
    began = time.perf_counter()
    _run([*_command(config_path, overrides), *flags], note=note if is_first else nobody)
    metrics = {"startup/cache_sec": time.perf_counter() - began}
    if is_first:
        stores = json.loads(own_manifest(manifest).read_text(encoding="utf-8"))["stores"]
        metrics["startup/cache_reused"] = float(all(store["reused"] for store in stores))
    return metrics


def build_fields(
    *, config_path: Path | None, overrides: Sequence[str], is_first: bool, note: Note
) -> dict[str, float]:
    """Build stores of the fields themselves; see `build_latents`. Returns `startup/field_cache_sec`."""
    began = time.perf_counter()
    command = _command(config_path, [*overrides, "latent.encoder=none"])
    _run(command, note=note if is_first else nobody)
    return {"startup/field_cache_sec": time.perf_counter() - began}


def _command(config_path: Path | None, overrides: Sequence[str]) -> list[str]:
    config = [] if config_path is None else ["--config", str(config_path)]
    return [sys.executable, *BUILD, *config, *overrides]


def _run(command: list[str], *, note: Note) -> None:
    """Run a command with its output on stderr; signals that ask this process to stop go to it."""
    note(f"$ {shlex.join(['python', *command[1:]])}")
    # In a session of its own a Ctrl-C on the terminal reaches it once, through us.
    process = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)

    stopped_by: list[str] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopped_by.append(signal.Signals(number).name)
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code != 0 and stopped_by:
        problem = f"stopped by {stopped_by[0]} during a build of stores"
        raise InterruptedTrainingError(problem, kind="build_interrupted", hint=CONTINUES)
    if code != 0:
        error = UpsError(
            f"the build of stores ended with exit code {code}",
            kind="build",
            hint=f"its own message stands above; {CONTINUES}",
        )
        error.exit_code = code if code > 0 else UpsError.exit_code
        raise error
