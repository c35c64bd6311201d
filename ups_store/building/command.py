"""The verb `build`, also `python -m ups_store.build`: HDF5 in, one mapped store per task and split out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ups_store.building.config import BuildConfig, load_config
from ups_store.building.config_file import shipped_configs
from ups_store.building.progress import Stopwatch
from ups_store.building.ranks import BuildRank
from ups_store.building.watch import watching
from ups_store.command_line import Verb, completing, make_single
from ups_store.console import is_verbose, log, print_json, print_lines
from ups_store.errors import ConfigError
from ups_store.launch import not_shared_note
from ups_store.printable import counted, one_line
from ups_store.system.interrupt import importing

if TYPE_CHECKING:
    from ups_store.building.decide import Explanation
    from ups_store.building.result import BuildReport


# Called before the work with the configuration's file and the overrides; returns what is given the report.
Begin = Callable[[Path | None, Sequence[str]], "Callable[[BuildReport], None] | None"]


@dataclass(frozen=True)
class Run:
    """What a process gives to the command besides its arguments.

    Attributes:
        clock: Counts since the process's main function began.
        begin: See `Begin`.
    """

    clock: Stopwatch
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
    tasks: Annotated[list[str] | None, typer.Option(help="burgers1d advection1d ...")] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="train val test", autocompletion=completing(lambda: ("train", "val", "test"))),
    ] = None,
    root: Annotated[
        str | None, typer.Option(help="folder of the HDF5 files, or its URL [default: $PDEBENCH_ROOT]")
    ] = None,
    stage_dir: Annotated[
        Path | None,
        typer.Option(help="folder of a local disk for copies of the sources [default: read in place]"),
    ] = None,
    stage_only: Annotated[
        bool, typer.Option("--stage-only", help="copy or fetch the sources, and build nothing")
    ] = False,
    follow_external: Annotated[
        Path | None,
        typer.Option(help="folder of other files that the HDF5 files may take data from [default: none may]"),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="folder of the stores [default: cache]")] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="float16, bfloat16, float32 or float64")] = None,
    codec: Annotated[
        Literal["none", "blosc", "pcodec"] | None,
        typer.Option(help="pack the stores: smaller on the disk, decoded when they are read [default: none]"),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(help="files that a new store is built in, one by one [default: by size if packed]"),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(help="shared cache, a URL or folder: pull stores that are there, push those built here"),
    ] = None,
    split_fractions: Annotated[str | None, typer.Option(help="train,val,test, such as 0.8,0.1,0.1")] = None,
    limit: Annotated[int | None, typer.Option(help="at most so many samples a store")] = None,
    on_nan: Annotated[
        Literal["fail", "keep"] | None, typer.Option(help="fail on NaN and Inf, or keep them")
    ] = None,
    source_digest: Annotated[
        Literal["full", "sampled"] | None, typer.Option(help="digest all bytes of a source, or some")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="autoencoder.safetensors: store latents instead of fields")
    ] = None,
    latent_dim: Annotated[int | None, typer.Option(help="channels of a latent token, to be sure")] = None,
    latent_tokens: Annotated[int | None, typer.Option(help="latent tokens of a frame, to be sure")] = None,
    device: Annotated[str | None, typer.Option(help="encode on cpu, cuda or cuda:N [default: auto]")] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(help="samples that are read and encoded at a time, or auto [default: about 32 MiB]"),
    ] = None,
    num_workers: Annotated[
        str | None, typer.Option(help="reader processes, or auto; 0 is 1 [default: auto]")
    ] = None,
    parallel: Annotated[
        bool | None, typer.Option("--parallel/--no-parallel", help="as --num-workers auto, or 0")
    ] = None,
    pin_memory: Annotated[
        bool | None,
        typer.Option(
            "--pin-memory/--no-pin-memory", help="copy to a CUDA device from page-locked memory [default: do]"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="seconds for reading a batch, or without progress [default: 300]")
    ] = None,
    open_timeout: Annotated[
        float | None, typer.Option(help="seconds for opening a file [default: 60]")
    ] = None,
    encode_timeout: Annotated[
        float | None, typer.Option(help="seconds for encoding a batch [default: 600; the first: 6000]")
    ] = None,
    commit_timeout: Annotated[
        float | None, typer.Option(help="seconds for committing a batch [default: 600]")
    ] = None,
    retries: Annotated[int | None, typer.Option(help="how often a read is tried again [default: 2]")] = None,
    on_error: Annotated[
        Literal["fail", "skip"] | None, typer.Option(help="fail on samples that can't be read, or skip them")
    ] = None,
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
    stall_warning: Annotated[
        float | None, typer.Option(help="seconds without progress until a diagnosis is shown [default: 60]")
    ] = None,
    log_json: Annotated[Path | None, typer.Option(help="append events as JSON lines to a file")] = None,
    check_on_resume: Annotated[
        bool | None,
        typer.Option(
            "--check-on-resume/--no-check-on-resume",
            help="read back and check what an unfinished store holds before continuing it [default: do]",
        ),
    ] = None,
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
) -> None:
    """Build a store per task and split; continue unfinished ones, keep valid ones, replace stale ones."""
    flags = {
        "data.tasks": tasks and words_of(tasks),
        "data.split": split and words_of(split),
        "data.root": root,
        "data.stage_dir": stage_dir and str(stage_dir),
        "data.follow_external": follow_external and str(follow_external),
        "cache.dir": cache_dir and str(cache_dir),
        "cache.dtype": cache_dtype,
        "cache.codec": codec,
        "cache.partitions": partitions,
        "cache.remote": remote,
        "data.split_fractions": split_fractions and numbers_of(split_fractions),
        "data.limit": limit,
        "data.on_nan": on_nan,
        "data.source_digest": source_digest,
        "latent.checkpoint": checkpoint and str(checkpoint),
        "latent.dim": latent_dim,
        "latent.tokens": latent_tokens,
        "latent.device": device,
        "training.pin_memory": pin_memory,
        "reading.batch_size": count_of(batch_size),
        "reading.num_workers": num_workers_of(num_workers, parallel),
        "reading.timeout_s": timeout,
        "reading.open_timeout_s": open_timeout,
        "cache.encode_timeout_s": encode_timeout,
        "cache.commit_timeout_s": commit_timeout,
        "reading.retries": retries,
        "reading.on_error": on_error,
        "reading.stall_warning_s": stall_warning,
        "reading.check_on_resume": check_on_resume,
    }
    settings = load_config(config, flags=flags, overrides=overrides or [], note=_warn)
    with contextlib.suppress(OSError):  # without a place to say it, the build can still go on
        log(_first_line(settings))
    run = context.obj or Run(Stopwatch())
    rank = BuildRank.from_environment()
    if unshared := not_shared_note():
        _warn(unshared)
    if rank.is_partitioned:  # said first: that a job array means this may come as a surprise
        log(f"this process makes {rank} of every store")
    manifest, log_json = (path and rank.own_file(path) for path in (manifest, log_json))
    with run.clock.timed("imports"), importing():
        from ups_store.building import stores
        from ups_store.building.readers import describe_readers
        from ups_store.building.result import prepare_manifest, write_manifest
        from ups_store.building.staging import stage_sources
    _check_engine(engine, dask_scheduler, rank)
    if dry_run and manifest:
        _warn("--manifest has no effect: --dry-run writes nothing")
    elif manifest:
        prepare_manifest(manifest)
    with watching(settings, log_json=log_json) as watcher:
        if stage_only:
            _show_staged(stage_sources(settings, watcher=watcher), as_json=as_json)
            return
        if dry_run:
            explained = stores.explain_all(
                settings, watcher=watcher, rehash=rehash, overwrite=overwrite, skip_missing=skip_missing
            )
            if rank.is_builder:  # it speaks for its machine's stores
                _show_explained(explained, as_json=as_json)
            if any(explanation.action == "refuse" for explanation in explained):
                raise typer.Exit(1)
            return
        hand_on = run.begin(config, overrides or []) if run.begin and rank.is_builder else None
        given: dict[str, Any] = {"overwrite": overwrite, "rehash": rehash, "clock": run.clock}
        given["skip_missing"] = skip_missing
        if engine == "dask":
            from ups_store.building.dask_engine import build_partitions, connected

            with connected(dask_scheduler) as cluster:
                report = build_partitions(settings, cluster, watcher=watcher, log_json=log_json, **given)
        else:
            report = stores.build_all(settings, watcher=watcher, **given)
    if is_verbose():
        log(f"sources were read {describe_readers(report.readers.num_workers)} ({report.readers.why})")
    if not rank.is_builder:  # its machine's builder reports its stores
        if is_verbose():
            _log_committed(report, rank)
        return
    if manifest:
        write_manifest(manifest, report)
    if as_json:
        print_json(report.to_json())
    else:
        for result in report.stores:
            print_lines(result.summary())
    if hand_on:
        hand_on(report)


def _check_engine(engine: str | None, dask_scheduler: str | None, rank: BuildRank) -> None:
    """Refuse flags that contradict each other, or how the process was started."""
    if engine is None and dask_scheduler is not None:
        raise ConfigError("--dask-scheduler", expected="--engine dask beside it", found=dask_scheduler)
    if engine is not None and rank != BuildRank():
        hint = "start it once: its workers are the several processes"
        raise ConfigError("--engine", expected="one process", found=str(rank), hint=hint)


def _log_committed(report: BuildReport, rank: BuildRank) -> None:
    """What this process did of stores that another one reports."""
    for result in report.stores:
        done = counted(result.num_committed, "sample")
        log(f"{one_line(str(result.path))}: rank {rank.local_rank} committed {done}")


def _show_explained(explained: Sequence[Explanation], *, as_json: bool) -> None:
    if as_json:
        print_json([explanation.to_json() for explanation in explained])
        return
    for explanation in explained:
        print_lines(*str(explanation).split("\n"))


def _show_staged(copies: Sequence[Path], *, as_json: bool) -> None:
    if as_json:
        print_json([str(copy) for copy in copies])
        return
    print_lines(*map(str, copies))


def _warn(sentence: str) -> None:
    with contextlib.suppress(OSError):  # without a place to say it, the build can still go on
        log(sentence, label="warning", style="yellow")


def _first_line(settings: BuildConfig) -> str:
    """What is about to be done, said before anything can hang."""
    data = settings.data
    what = f"{', '.join(data.tasks)} ({', '.join(data.split)})"
    copied = f" (copied into {settings.stage_dir})" if settings.stage_dir else ""
    return f"building {what}: sources in {data.root}{copied}, stores in {settings.cache.dir}"


_LISTS = ("--tasks", "--split")  # take several words: --tasks burgers1d advection1d


class BuildVerb(Verb):
    """A verb whose `--tasks` and `--split` take several words."""

    def _present(self, arguments: Sequence[str]) -> list[str]:
        return repeat_lists(super()._present(arguments))


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


def num_workers_of(text: str | None, parallel: bool | None) -> int | str | None:
    """`reading.num_workers` of --num-workers and --parallel or --no-parallel."""
    if parallel is False and text not in (None, "0"):
        raise ConfigError("--num-workers", expected="0 beside --no-parallel", found=text)
    if text is None and parallel is not None:
        return "auto" if parallel else 0
    return count_of(text)


def count_of(text: str | None) -> int | str | None:
    """A number, or a word that the configuration knows or refuses."""
    return int(text) if text and text.isdecimal() else text


def repeat_lists(arguments: Sequence[str]) -> list[str]:
    """Repeat --tasks and --split before each of their words: `--tasks a b` as `--tasks a --tasks b`."""
    repeated: list[str] = []
    flag = ""
    for argument in arguments:
        is_word = not argument.startswith("-") and "=" not in argument
        if is_word and flag and repeated[-1] != flag:
            repeated.append(flag)
        if not is_word:
            _check_words(flag, repeated)
            flag = argument.partition("=")[0]
            flag = flag if flag in _LISTS else ""
        repeated.append(argument)
    _check_words(flag, repeated)
    return repeated


def _check_words(flag: str, repeated: Sequence[str]) -> None:
    if flag and repeated[-1] == flag:
        raise ConfigError(flag, expected="at least one name", found="none")


def words_of(lists: Sequence[str]) -> list[str]:
    """The words of a flag that was given several times, perhaps with commas."""
    return [word for words in lists for word in words.split(",")]


def numbers_of(text: str) -> list[float]:
    """The numbers of --split-fractions."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            "--split-fractions", expected="three numbers, such as 0.8,0.1,0.1", found=text
        ) from error
