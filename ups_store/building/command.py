"""The verb `build`, also `python -m ups_store.build`: HDF5 in, one mapped store per task and split out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from ups_store.building.config import (
    CacheConfig,
    DataConfig,
    LatentConfig,
    ReadingConfig,
    load_config,
)
from ups_store.building.config_file import shipped_configs
from ups_store.building.progress import Stopwatch, prepare_manifest, write_manifest
from ups_store.building.ranks import BuildRank
from ups_store.building.watch import watching
from ups_store.command_line import Verb, completing, make_single
from ups_store.console import is_verbose, log, print_json, print_lines
from ups_store.errors import ConfigError, needs
from ups_store.launch import not_shared_note
from ups_store.printable import counted, one_line
from ups_store.system.interrupt import importing

with needs("hdf5"):
    from pydantic import BaseModel

if TYPE_CHECKING:
    from ups_store.building.progress import BuildReport

# Flags, by the key of the configuration that each says. What they take and their help are those of the key.
FLAGS = {
    "tasks": "data.tasks",
    "split": "data.split",
    "root": "data.root",
    "stage_dir": "data.stage_dir",
    "follow_external": "data.follow_external",
    "cache_dir": "cache.dir",
    "cache_dtype": "cache.dtype",
    "codec": "cache.codec",
    "partitions": "cache.partitions",
    "remote": "cache.remote",
    "split_fractions": "data.split_fractions",
    "limit": "data.limit",
    "on_nan": "data.on_nan",
    "source_digest": "data.source_digest",
    "checkpoint": "latent.checkpoint",
    "latent_dim": "latent.dim",
    "latent_tokens": "latent.tokens",
    "device": "latent.device",
    "pin_memory": "latent.pin_memory",
    "batch_size": "reading.batch_size",
    "num_workers": "reading.num_workers",
    "timeout": "reading.timeout_s",
    "open_timeout": "reading.open_timeout_s",
    "encode_timeout": "cache.encode_timeout_s",
    "commit_timeout": "cache.commit_timeout_s",
    "retries": "reading.retries",
    "on_error": "reading.on_error",
    "stall_warning": "reading.stall_warning_s",
    "check_on_resume": "reading.check_on_resume",
}
_LISTS = ("--tasks", "--split")  # take several words: --tasks burgers1d advection1d
_SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "cache": CacheConfig,
    "latent": LatentConfig,
    "reading": ReadingConfig,
}

# Called before the work with the configuration's file and the overrides; returns what is given the report.
Begin = Callable[[Path | None, Sequence[str]], "Callable[[BuildReport], None] | None"]


@dataclass(frozen=True)
class Run:
    """What a process gives to the command besides its arguments."""

    clock: Stopwatch  # counts since the process's main function began
    begin: Begin | None = None


def build(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="dotted overrides, such as data.reduce_space=4", metavar="KEY=VALUE"),
    ] = None,
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file; flags and overrides win over it", autocompletion=completing(shipped_configs)
        ),
    ] = None,
    parallel: Annotated[
        bool | None, typer.Option("--parallel/--no-parallel", help="as --num-workers auto, or 0")
    ] = None,
    stage_only: Annotated[
        bool, typer.Option("--stage-only", help="copy or fetch the sources, and build nothing")
    ] = False,
    engine: Annotated[
        Literal["dask"] | None,
        typer.Option(help="have a cluster make the partitions of every store [default: this process builds]"),
    ] = None,
    dask_scheduler: Annotated[
        str | None,
        typer.Option(
            help="its address or scheduler file [default: $DASK_SCHEDULER_ADDRESS]", metavar="ADDRESS"
        ),
    ] = None,
    log_json: Annotated[Path | None, typer.Option(help="append events as JSON lines to a file")] = None,
    rehash: Annotated[bool, typer.Option("--rehash", help="digest the sources again")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="build again whatever is there")] = False,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="go on without tasks that have no sources")
    ] = False,
    manifest: Annotated[Path | None, typer.Option(help="write what was done as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the manifest instead of lines")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", "--explain", help="say which stores would be built or reused and why; write nothing"
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Build a store per task and split; continue unfinished ones, keep valid ones, replace stale ones."""
    values = _values_of(flags, parallel)
    settings = load_config(config, flags=values, overrides=overrides or [], note=_warn)
    data, copies = settings.data, f" (copied into {settings.stage_dir})" if settings.stage_dir else ""
    with contextlib.suppress(OSError):  # said before anything can hang; unheard, the build can still go on
        stores_of = f"{', '.join(data.tasks)} ({', '.join(data.split)})"
        log(f"building {stores_of}: sources in {data.root}{copies}, stores in {settings.cache.dir}")
    run, rank = context.obj or Run(Stopwatch()), BuildRank.from_environment()
    if unshared := not_shared_note():
        _warn(unshared)
    if rank.is_partitioned:  # said first: that a job array means this may come as a surprise
        log(f"this process makes {rank} of every store")
    manifest, log_json = (path and rank.own_file(path) for path in (manifest, log_json))
    with run.clock.timed("imports"), importing():
        from ups_store.building import stores
        from ups_store.building.readers import describe_readers
        from ups_store.building.staging import stage_sources
    if engine is None and dask_scheduler is not None:
        raise ConfigError("--dask-scheduler", expected="--engine dask beside it", found=dask_scheduler)
    if engine is not None and rank != BuildRank():
        hint = "start it once: its workers are the several processes"
        raise ConfigError("--engine", expected="one process", found=str(rank), hint=hint)
    if dry_run and manifest:
        _warn("--manifest has no effect: --dry-run writes nothing")
    elif manifest:
        prepare_manifest(manifest)

    options: dict[str, Any] = {"overwrite": overwrite, "rehash": rehash, "skip_missing": skip_missing}
    with watching(settings, log_json=log_json) as watcher:
        if stage_only:
            staged = list(map(str, stage_sources(settings, watcher=watcher)))
            print_json(staged) if as_json else print_lines(*staged)
            return
        if dry_run:
            explained = stores.explain_all(settings, watcher=watcher, **options)
            if not rank.is_builder:  # the first of its machine's ranks speaks for the stores
                pass
            elif as_json:
                print_json([explanation.to_json() for explanation in explained])
            else:
                for explanation in explained:
                    print_lines(*str(explanation).split("\n"))
            if any(explanation.action == "refuse" for explanation in explained):
                raise typer.Exit(1)
            return
        hand_on = run.begin(config, overrides or []) if run.begin and rank.is_builder else None
        options |= {"watcher": watcher, "clock": run.clock}
        if engine == "dask":
            from ups_store.building.dask_engine import build_partitions, connected

            with connected(dask_scheduler) as cluster:
                report = build_partitions(settings, cluster, log_json=log_json, **options)
        else:
            report = stores.build_all(settings, **options)

    if is_verbose():
        log(f"sources were read {describe_readers(report.readers.num_workers)} ({report.readers.why})")
    if not rank.is_builder:  # its machine's builder reports its stores
        for result in report.stores if is_verbose() else ():
            done = counted(result.num_committed, "sample")
            log(f"{one_line(str(result.path))}: rank {rank.local_rank} committed {done}")
        return
    if manifest:
        write_manifest(manifest, report)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(*(result.summary() for result in report.stores))
    if hand_on:
        hand_on(report)


def _warn(sentence: str) -> None:
    with contextlib.suppress(OSError):  # without a place to say it, the build can still go on
        log(sentence, label="warning", style="yellow")


# --- flags of the configuration -----------------------------------------------------------------------


def _option_of(name: str, key: str) -> inspect.Parameter:
    """Return the option that says a key: with the type, the description and the default of its field."""
    section, _, field_name = key.partition(".")
    field = _SECTIONS[section].model_fields[field_name]
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds: list[Any] = [
        get_args(kind)[0] if get_origin(kind) is Annotated else kind
        for kind in (get_args(field.annotation) if is_union else [field.annotation])
        if kind is not NoneType
    ]
    first, others = kinds[0], kinds[1:]
    if f"--{name}" in _LISTS:
        first = list[str]
    elif others or get_origin(first) is tuple or (get_origin(first) is Literal and field.metadata):
        first = str  # the configuration says what it makes of it
    words, default = [], None if field.is_required() else field.default
    if first is bool:
        words, default = [f"--{name}/--no-{name}".replace("_", "-")], "do" if default else "don't"
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    elif key.endswith("_s"):
        default = f"{default:g} s"
    text = field.description if default is None else f"{field.description} [default: {default}]"
    completion = completing(lambda: ("train", "val", "test")) if name == "split" else None
    option = typer.Option(*words, help=text, autocompletion=completion)
    kind: Any = Annotated[first | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _values_of(flags: dict[str, Any], parallel: bool | None) -> dict[str, Any]:
    """Return what flags say by the keys of the configuration; None for those that weren't given."""
    num_workers = flags["num_workers"]
    if parallel is False and num_workers not in (None, "0"):
        raise ConfigError("--num-workers", expected="0 beside --no-parallel", found=num_workers)
    if num_workers is None and parallel is not None:
        flags["num_workers"] = "auto" if parallel else "0"
    for name in ("num_workers", "batch_size"):  # a number, or a word that the configuration knows or refuses
        text = flags[name]
        flags[name] = int(text) if text and text.isdecimal() else text
    for name in ("tasks", "split"):  # given several times, perhaps with commas
        flags[name] = [word for words in flags[name] or [] for word in words.split(",")] or None
    if (text := flags["split_fractions"]) is not None:
        try:
            flags["split_fractions"] = [float(part) for part in text.split(",")]
        except ValueError as error:
            expected = "three numbers, such as 0.8,0.1,0.1"
            raise ConfigError("--split-fractions", expected=expected, found=text) from error
    values = {
        key: str(flags[name]) if isinstance(flags[name], Path) else flags[name] for name, key in FLAGS.items()
    }
    # A section `latent` would ask for latents: where there is none, this flag has no effect.
    values["training.pin_memory"] = values.pop("latent.pin_memory")
    return values


_OPTIONS = [_option_of(name, key) for name, key in FLAGS.items()]
_signature = inspect.signature(build, eval_str=True)
_first, _overrides, _config, *_others, _ = _signature.parameters.values()
_signature = _signature.replace(parameters=[_first, _overrides, _config, *_OPTIONS, *_others])
build.__signature__ = _signature  # type: ignore[attr-defined]
build.__annotations__ |= {option.name: option.annotation for option in _OPTIONS}


class BuildVerb(Verb):
    """A verb whose `--tasks` and `--split` take several words: `--tasks a b` is `--tasks a --tasks b`."""

    def _present(self, arguments: Sequence[str]) -> list[str]:
        repeated, flag = list[str](), ""
        for argument in [*super()._present(arguments), "-"]:
            is_word = not argument.startswith("-") and "=" not in argument
            if is_word and flag and repeated[-1] != flag:
                repeated.append(flag)
            if not is_word:
                if flag and repeated[-1] == flag:
                    raise ConfigError(flag, expected="at least one name", found="none")
                flag = argument.partition("=")[0]
                flag = flag if flag in _LISTS else ""
            repeated.append(argument)
        return repeated[:-1]


app = make_single(build, cls=BuildVerb)


def main(
    arguments: Sequence[str] | None = None,
    *,
    name: str = "python -m ups_store.build",
    clock: Stopwatch | None = None,
    begin: Begin | None = None,
) -> None:
    """Parse a command line and build; exits by itself on success and wrong usage.

    Args:
        arguments: By default those of the process.
        name: Of the command, in its help.
        clock: Has counted imports since the process began.
        begin: Called before the work; see `Begin`.
    """
    app(arguments, prog_name=name, obj=Run(clock or Stopwatch(), begin))
