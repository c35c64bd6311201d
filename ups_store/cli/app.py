"""The application of `ups-store VERB`: options before the verb, and the verbs of all modules."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import ups_store
from ups_store.cli import check, convert, info, shared
from ups_store.cli import status as build_status
from ups_store.command_line import Verbs, make_app
from ups_store.console import print_lines


def build() -> None:
    """Build stores from HDF5: one per task and split."""


class _StoreVerbs(Verbs):
    """Imports `build`, which takes longer than all others together, where it is what was asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, words = super().resolve_command(ctx, args)
        if name == "build":
            from ups_store.building.command import app as building

            command = typer.main.get_command(building)
        return name, command, words


app = make_app(
    {
        "build": build,
        "status": build_status.status,
        "info": info.info,
        "verify": check.verify,
        "preview": info.preview,
        "diff": info.diff,
        "gc": check.gc,
        "export": convert.export,
        "import-pt": convert.import_pt,
        "concat": convert.concat,
        "split": convert.split,
        "pack": convert.pack,
        "unpack": convert.unpack,
        "doctor": check.doctor,
        "push": shared.push,
        "pull": shared.pull,
        "ls-remote": shared.ls_remote,
    },
    cls=_StoreVerbs,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from ups_store.system import runs

        major, minor = ups_store.FORMAT_VERSION
        by_numpy = "NumPy (ups_store._runs isn't compiled: see README, Installing)"
        copied_by = "compiled code" if runs.compiled else by_numpy
        print_lines(
            f"ups-store {ups_store.__version__}, format {major}.{minor}, batches copied by {copied_by}"
        )
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and exit"),
    ] = False,
) -> None:
    """Stores: one dataset split in one mapped, checked, resumable Zarr file."""
