"""`python -m ups_store.build`: HDF5 in, one mapped store per task and split out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ups_store.build.config import load_config
from ups_store.build.watch import ConsoleWatcher
from ups_store.console import Verbose, console, interruptible, log, print_json
from ups_store.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_LISTS = ("--tasks", "--splits")  # take several words: --tasks burgers1d advection1d


class OnNan(StrEnum):
    """What to do with NaN and Inf in the sources."""

    fail = "fail"
    keep = "keep"


class SourceDigest(StrEnum):
    """How sources are identified."""

    full = "full"
    sampled = "sampled"


@app.command()
def build(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="dotted overrides, such as data.reduce_space=4", metavar="[KEY=VALUE]..."),
    ] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file; flags and overrides win over it")] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="burgers1d advection1d ...")] = None,
    splits: Annotated[list[str] | None, typer.Option(help="train val test")] = None,
    root: Annotated[
        Path | None, typer.Option(help="folder of the HDF5 files [default: $PDEBENCH_ROOT]")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="folder of the stores [default: cache]")] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="float16, bfloat16, float32 or float64")] = None,
    split_fractions: Annotated[str | None, typer.Option(help="train,val,test, such as 0.8,0.1,0.1")] = None,
    limit: Annotated[int | None, typer.Option(help="at most so many samples a store")] = None,
    on_nan: Annotated[OnNan | None, typer.Option(help="fail on NaN and Inf, or keep them")] = None,
    source_digest: Annotated[
        SourceDigest | None, typer.Option(help="digest all bytes of a source, or some")
    ] = None,
    rehash: Annotated[bool, typer.Option("--rehash", help="digest the sources again")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="build anew whatever is there")] = False,
    manifest: Annotated[Path | None, typer.Option(help="write what was done as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the manifest instead of lines")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be built, write nothing")
    ] = False,
    verbose: Verbose = 0,
) -> None:
    """Build a store per task and split; continue unfinished ones, keep valid ones, replace stale ones."""
    flags = {
        "data.task": tasks and _words(tasks),
        "data.split": splits and _words(splits),
        "data.root": root and str(root),
        "cache.dir": cache_dir and str(cache_dir),
        "cache.dtype": cache_dtype,
        "data.split_fractions": split_fractions and _numbers(split_fractions),
        "data.limit": limit,
        "data.on_nan": on_nan and on_nan.value,
        "data.source_digest": source_digest and source_digest.value,
    }
    settings = load_config(config, flags=flags, overrides=overrides or [])
    from ups_store.build import stores  # h5py: not for --help

    if dry_run and (overwrite or rehash or manifest):
        log("--dry-run writes and digests nothing: other flags have no effect", label="warning")
    elif manifest:
        stores.prepare_manifest(manifest)
    with interruptible(), ConsoleWatcher(console) as watcher:
        if dry_run:
            print_json([stores.describe_plan(plan) for plan in stores.plan_all(settings, {}, watcher)])
            return
        report = stores.build_all(settings, watcher=watcher, overwrite=overwrite, rehash=rehash)
    if manifest:
        stores.write_manifest(manifest, report)
    if as_json:
        print_json(report.to_json())
    else:
        for result in report.stores:
            print(result.summary())


def repeat_lists(arguments: Sequence[str]) -> list[str]:
    """Repeat --tasks and --splits before each of their words: `--tasks a b` as `--tasks a --tasks b`."""
    repeated: list[str] = []
    flag = ""
    for argument in arguments:
        is_word = not argument.startswith("-") and "=" not in argument
        if is_word and flag and repeated[-1] != flag:
            repeated.append(flag)
        if not is_word:
            _expect_words(flag, repeated)
            flag = argument.partition("=")[0]
            flag = flag if flag in _LISTS else ""
        repeated.append(argument)
    _expect_words(flag, repeated)
    return repeated


def _expect_words(flag: str, repeated: Sequence[str]) -> None:
    if flag and repeated[-1] == flag:
        raise ConfigError(flag, expected="at least one name", found="none")


def _words(lists: Sequence[str]) -> list[str]:
    return [word for words in lists for word in words.split(",")]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            "--split-fractions", expected="three numbers, such as 0.8,0.1,0.1", found=text
        ) from error


def main() -> None:
    """Parse the command line and build; exits by itself on success and wrong usage."""
    command = typer.main.get_command(app)
    command(repeat_lists(sys.argv[1:]), prog_name="python -m ups_store.build")
