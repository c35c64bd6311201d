"""The verbs `launch vast` and `launch slurm`: the same run on a rented machine, or as a batch job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.common import AsJson, Overrides, note
from ups.errors import ConfigError, LaunchError, MissingExtraError
from ups.output import write_atomically
from ups_store.build import shipped_configs
from ups_store.command_line import Verb, Verbs, completing
from ups_store.console import importing, print_json, print_lines

if TYPE_CHECKING:
    from ups.pipeline.launch.job import Job
    from ups.pipeline.launch.vast import Offer, Wish

app = typer.Typer(cls=Verbs, no_args_is_help=True)

# torch.compile needs a C compiler, which the images "devel" have.
_IMAGE = "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-devel"
_MASKED = ("KEY", "SECRET", "PASS", "TOKEN", "RCLONE_CONFIG_", "UPS_JOB_REST")
_SLURM_VALUE = re.compile(r"[\w.:,@%+/=-]+")

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", help="YAML file, or a name of `ups configs`", autocompletion=completing(shipped_configs)
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", "--num-gpus", min=1, help="GPUs, which train together [default: training.num_gpus, or 1]"
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="as it is without: a run goes on with the checkpoints that are there")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show everything, write and create nothing")]
MaxHours = Annotated[
    float | None, typer.Option(min=0.01, help="after these the run is stopped; for what it costs at most")
]
Results = Annotated[
    str | None, typer.Option(help="remote that results are uploaded to [default: <bucket>/runs of B2TRAIN]")
]


@app.callback()
def launch() -> None:
    """Run a configuration on a rented machine, or as a batch job."""


@app.command(cls=Verb)
def vast(
    overrides: Overrides = None,
    *,
    config: ConfigOption,
    gpus: Gpus = None,
    gpu: Annotated[str | None, typer.Option(help="name, such as 'RTX 4090' [default: any]")] = None,
    max_price: Annotated[float | None, typer.Option(min=0, help="dollars an hour")] = None,
    image: Annotated[str, typer.Option(help="Docker image with Python and PyTorch")] = _IMAGE,
    disk: Annotated[float, typer.Option(min=1, help="GiB")] = 64,
    package: Annotated[
        str | None,
        typer.Option(help="what pip installs there: a wheel's URL, git+https://...; '' if it is there"),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(help="remote of rclone with the sources, '' for none [default: B2TRAIN:pdebench/full]"),
    ] = None,
    results: Results = None,
    workdir: Annotated[str, typer.Option(help="folder on the machine")] = "/workspace",
    auto_shutdown: Annotated[
        bool, typer.Option("--auto-shutdown", help="stop the machine at the end, however the run ended")
    ] = False,
    max_hours: MaxHours = None,
    resume: Resume = False,
    wait_minutes: Annotated[float, typer.Option(min=0, help="for the machine to start")] = 20,
    out: Annotated[Path, typer.Option(help="where the script is kept")] = Path(".vast/onstart.sh"),
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Rent the cheapest machine of vast.ai that will do, and run a configuration there.

    Keys (VAST_API_KEY, B2_KEY_ID and B2_APP_KEY, WANDB_API_KEY) are taken from the environment.
    """
    with importing():
        from ups.pipeline.launch.job import job_script, make_job
        from ups.pipeline.launch.vast import Vast, Wish, request
    if remote is None:  # of the variables that the earlier system had
        bucket, prefix = os.environ.get("B2_BUCKET") or "pdebench", os.environ.get("B2_PREFIX") or "full"
        remote = f"B2TRAIN:{bucket}/{prefix}"
    if results is None:
        name, _, path = remote.partition(":")
        results = f"{name}:{path.split('/')[0]}/runs" if name == "B2TRAIN" else ""
    job = make_job(
        config,
        overrides or (),
        num_gpus=gpus,
        workdir=workdir,
        remote=remote,
        results=results,
        package=package or "",
        installs=True,
        shuts_down=auto_shutdown,
        max_hours=max_hours,
    )
    if package is None:
        expected = "what pip installs there: a wheel's URL, git+https://...; '' if it is there"
        error = ConfigError("--package", kind="no_package", expected=expected, found="nothing")
        if not dry_run:
            raise error
        note(f"warning: {error}")
    wish = Wish(job.num_gpus, gpu, max_price, image, disk)
    script = job_script(job)
    if not job.results:
        note("warning: results stay on the machine's disk: --results says where they go")
    if dry_run:
        _show_plan(wish, job, script, as_json=as_json)
        return
    market = Vast()
    offers = market.offers(wish)
    write_atomically(out, script.encode())
    instance, offer = market.create(offers, lambda offer: request(wish, job, script, price=offer.price))
    note(f"instance {instance}, {_cost(offer, job)}; `vastai destroy instance {instance}` ends it")
    market.wait(instance, seconds=60 * wait_minutes, destroys=job.shuts_down)
    if as_json:
        print_json({"instance": instance, **_price_json(offer, job), "script": str(out)})
        return
    print_lines(f"instance {instance}: `vastai logs {instance}` and `vastai ssh-url {instance}` show it")


def _show_plan(wish: Wish, job: Job, script: str, *, as_json: bool) -> None:
    """What would be asked for, and what it costs now if that can be asked."""
    from ups.pipeline.launch.vast import Vast, request

    parameters = request(wish, job, script)
    for name in parameters["env"]:
        if any(part in name for part in _MASKED):
            parameters["env"][name] = "(set)"
    parameters["onstart_cmd"] = f"({len(parameters['onstart_cmd'])} characters: the script, packed)"
    try:
        offer = Vast().offers(wish)[0]
    except (LaunchError, MissingExtraError) as error:
        note(f"warning: no price: {error}")
        offer = None
    if as_json:
        price = {} if offer is None else _price_json(offer, job)
        print_json({"query": wish.query(), "instance": parameters, **price, "script": script})
        return
    print_lines(
        f"offers: {wish.query()}", *(f"instance: {key}: {value}" for key, value in parameters.items())
    )
    if offer is not None:
        print_lines(f"price: {_cost(offer, job)}")
    print_lines(*script.splitlines())


def _cost(offer: Offer, job: Job) -> str:
    hours = job.max_hours
    return f"{offer}, at most ${offer.price * hours:.2f} for {hours:g} hours" if hours else str(offer)


def _price_json(offer: Offer, job: Job) -> Mapping[str, Any]:
    most = {"max_cost": offer.price * job.max_hours} if job.max_hours else {}
    return {"offer": offer.id, "price_per_hour": offer.price, **most}


@app.command(cls=Verb)
def slurm(
    overrides: Overrides = None,
    *,
    config: ConfigOption,
    gpus: Gpus = None,
    time: Annotated[str, typer.Option(help="time limit of the job; it is queued again")] = "04:00:00",
    partition: Annotated[str | None, typer.Option(help="of the cluster")] = None,
    account: Annotated[str | None, typer.Option(help="that pays")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="processor cores")] = None,
    memory: Annotated[str | None, typer.Option(help="such as 64G")] = None,
    remote: Annotated[
        str, typer.Option(help="remote of rclone with the sources [default: none, data.root has them]")
    ] = "",
    results: Annotated[str, typer.Option(help="remote that results are uploaded to [default: none]")] = "",
    workdir: Annotated[
        Path | None, typer.Option(help="folder of the run, which nodes see [default: this one]")
    ] = None,
    resume: Resume = False,
    max_hours: MaxHours = None,
    out: Annotated[Path, typer.Option(help="where the script goes")] = Path(".slurm/job.sh"),
    submit: Annotated[bool, typer.Option("--submit", help="give it to sbatch")] = False,
    dry_run: DryRun = False,
) -> None:
    """Write the job as a script for Slurm: one node, whose GPUs train together."""
    with importing():
        from ups.pipeline.launch.job import job_script, make_job
    asked = {"time": time, "partition": partition, "account": account, "cpus-per-task": cpus, "mem": memory}
    job = make_job(
        config,
        overrides or (),
        num_gpus=gpus,
        workdir=str((workdir or Path()).absolute()),
        remote=remote,
        results=results,
        requeues=True,
        max_hours=max_hours,
    )
    given = {option: str(value) for option, value in asked.items() if value is not None}
    for option, value in given.items():
        if not _SLURM_VALUE.fullmatch(value):
            raise ConfigError(f"--{option}", expected="a value for sbatch, without spaces", found=repr(value))
    header = {
        "job-name": re.sub(r"[^\w.-]", "-", f"ups-{job.name}"),
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.num_gpus),
        "signal": "B:TERM@120",  # the script hears two minutes before the end, and the run saves itself
        "open-mode": "append",
        **given,
    }
    options = [f"#SBATCH --{option}={value}" for option, value in header.items()]
    script = job_script(job, header=[*options, "#SBATCH --requeue"])
    if dry_run:
        print_lines(*script.splitlines())
        return
    write_atomically(out, script.encode())
    command = ["sbatch", str(out)]
    if not submit:
        print_lines(shlex.join(command))
        return
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LaunchError(
            "sbatch: no such command", kind="refused", hint=f"submit {out} on the cluster"
        ) from error
    if done.returncode:
        raise LaunchError("sbatch refused the job", kind="refused", path=out, found=done.stderr.strip())
    print_lines(done.stdout.strip())
