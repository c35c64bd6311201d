"""The application of `python -m ups_store VERB`: options before the verb, and the verbs of all modules."""

from __future__ import annotations

from typing import Annotated

import typer

import ups_store
from ups_store.cli import check, convert, info, show
from ups_store.console import Verbose

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # a quarter of the time that --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ups_store.system import runs

        major, minor = ups_store.FORMAT_VERSION
        copies = (
            "compiled code"
            if runs.compiled
            else "NumPy (ups_store._runs isn't compiled: see README, Installing)"
        )
        print(f"ups-store {ups_store.__version__}, format {major}.{minor}, batches copied by {copies}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    verbose: Verbose = 0,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and exit"),
    ] = False,
) -> None:
    """Stores: one dataset split in one mapped, checked, resumable Zarr file.

    Build them with `python -m ups_store.build`.
    """


app.command()(info.info)

app.command()(check.verify)

app.command()(show.preview)

app.command()(show.diff)

app.command()(check.gc)

app.command()(convert.export)

app.command("import-pt")(convert.import_pt)

app.command()(convert.concat)

app.command()(convert.split)

app.command()(convert.pack)

app.command()(convert.unpack)

app.command()(check.doctor)
