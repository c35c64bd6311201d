"""`ups lineage`: a report and a prediction are followed to the sources, and every change is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run_ups, run_ups_store
from small_simulators import configure, make_autoencoder, make_simulator
from trained_baselines import untrained

import ups_store
from ups.config import RunConfig
from ups.data.identities import checkpoint_identity, file_identity, store_identities
from ups.data.origins import origins_of_data
from ups.data.solvers import make_dataset
from ups.data.splits import open_fields
from ups.eval.baseline_model import save_baseline
from ups.eval.runs import baseline_path
from ups.pipeline.metadata import FILE, KIND
from ups.trained.autoencoder import save_autoencoder
from ups.trained.checkpoint import hash_tensors, load_checkpoint, save_checkpoint
from ups.trained.encoder import LatentEncoder
from ups.trained.simulator import save_simulator
from ups_store.sources import find_sources

torch.set_num_threads(1)

AUTOENCODER, OPERATOR = "checkpoints/autoencoder.safetensors", "checkpoints/operator.safetensors"
STORE, REPORT, PREDICTION = "cache/burgers1d_train.zarr.zip", "report/report.json", "predicted.zarr.zip"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, stores, autoencoder, operator, baseline, prediction and report; nothing is trained."""
    folder = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        folder.mkdir()
        patch.chdir(folder)
        for drawn in ("task_figures", "run_figures"):
            patch.setattr(f"ups.eval.evaluate.{drawn}", lambda *found: [])
        make_dataset("burgers1d", Path("data"), num_samples=20, points=32, frames=6, nu=0.1)
        config = configure(
            Path("data"), **{"cache.dir": "cache", "checkpoint.dir": "checkpoints", "training.device": "cpu"}
        )
        flags = ["--tasks", "burgers1d", "--root", "data", "--cache-dir", "cache", "--no-parallel"]
        assert run_ups_store("build", *flags).exit_code == 0
        _save_models(config)
        assert run_ups("evaluate", "--checkpoint", OPERATOR, "--out", "report").exit_code == 0
        given = ["cache/burgers1d_test.zarr.zip", "--checkpoint", OPERATOR, "--out", PREDICTION]
        assert run_ups("predict", *given).exit_code == 0
    return folder.rename(folder.with_name("kept"))


def _save_models(config: RunConfig) -> None:
    said: dict[str, Any] = {"config": config.model_dump(mode="json"), "report": {}}
    said["data"] = {"burgers1d": open_fields(config.build, "burgers1d", "train").identity}
    autoencoder = make_autoencoder(config)
    save_autoencoder(AUTOENCODER, autoencoder, **said)
    simulator = make_simulator(config, autoencoder)
    simulator.spec = type(simulator.spec)(
        **{**vars(simulator.spec), "autoencoder_sha256": hash_tensors(AUTOENCODER)}
    )
    save_simulator(OPERATOR, simulator, **said)
    save_baseline(baseline_path(config, "fno", "burgers1d", "samples"), untrained(config.data.root), **said)


@pytest.fixture
def run(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy where all of it was made, as absolute paths are recorded, too."""
    folder = made.with_name("run")
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def lineage(*words: object) -> tuple[int, dict[str, Any]]:
    done = run_ups("lineage", *words, "--json")
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def links(found: dict[str, Any], *roles: str) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every link with the roles on the way to it."""
    for link in found["made_from"]:
        here = (*roles, link["role"])
        yield here, link
        yield from links(link, *here)


def states(found: dict[str, Any]) -> dict[tuple[str, ...], str]:
    return {roles: link["state"] for roles, link in links(found)}


def test_a_report_is_followed_to_the_sources(run: Path) -> None:
    code, found = lineage(REPORT)
    data = "training data of burgers1d"
    assert (code, found["kind"], found["is_whole"]) == (0, "report", True)
    assert set(states(found)) == {
        ("operator",),
        ("operator", data),
        ("operator", data, "source"),
        ("operator", "autoencoder"),
        ("operator", "autoencoder", data),
        ("operator", "autoencoder", data, "source"),
        ("fno_samples of burgers1d",),
        ("fno_samples of burgers1d", data),
        ("fno_samples of burgers1d", data, "source"),
        ("dev split of burgers1d",),
        ("dev split of burgers1d", "source"),
    }
    assert set(states(found).values()) == {"same"}
    by_role = dict(links(found))
    assert by_role["operator",]["hash"] == hash_tensors(OPERATOR)
    with ups_store.open(STORE) as store:
        assert by_role["operator", data]["hash"] == store.config_hash
    page = Path("report/report.html").read_text()
    assert all(link["hash"] in page for link in found["made_from"])


def test_a_prediction_is_followed_to_its_operator_and_given_states(run: Path) -> None:
    code, found = lineage(PREDICTION)
    assert (code, found["kind"]) == (0, "prediction")
    assert [link["role"] for link in found["made_from"]] == ["operator", "given states"]
    assert ("given states", "source") in states(found)


def test_a_store_finds_its_sources_where_the_build_found_them(run: Path, tmp_path: Path) -> None:
    (run / "cache").rename(tmp_path / "cache")
    path = tmp_path / STORE
    assert lineage(path)[0] == 0
    (path.parent / ".source_digests.json").unlink()
    code, found = lineage(path)
    assert (code, states(found)) == (1, {("source",): "missing"})


def change_weights(name: str) -> None:
    kind = Path(name).stem
    tensors, document = load_checkpoint(name, kind=kind)
    first = next(key for key, tensor in tensors.items() if tensor.is_floating_point())
    tensors[first] = tensors[first] + 1
    save_checkpoint(name, tensors, kind=kind, document=document)


def test_another_autoencoder_is_a_changed_link_of_the_operator(run: Path) -> None:
    was = hash_tensors(AUTOENCODER)
    change_weights(AUTOENCODER)
    code, found = lineage(OPERATOR)
    (link,) = [link for roles, link in links(found) if roles == ("autoencoder",)]
    assert (code, link["state"], link["hash"]) == (1, "changed", was)
    assert (link["found_hash"], link["made_from"]) == (hash_tensors(AUTOENCODER), [])
    shown = run_ups("lineage", OPERATOR).stdout
    assert f"changed autoencoder {AUTOENCODER}" in shown
    assert f"weights {was[:12]}, now {link['found_hash'][:12]}" in shown


def test_another_operator_ends_the_chain_of_report_and_prediction(run: Path) -> None:
    change_weights(OPERATOR)
    for name in (REPORT, PREDICTION):
        code, found = lineage(name)
        assert (code, states(found)["operator",]) == (1, "changed")
        assert ("operator", "autoencoder") not in states(found)


def test_a_store_that_is_gone_is_missing_and_a_source_of_other_bytes_changed(run: Path) -> None:
    Path(STORE).unlink()
    (source,) = find_sources(
        Path("data"), task=configure(Path("data")).build.get_task("burgers1d"), split="val"
    )
    content = bytearray(source.path.read_bytes())
    content[-1] ^= 1
    source.path.write_bytes(content)
    code, found = lineage(REPORT)
    assert (code, states(found)["operator", "training data of burgers1d"]) == (1, "missing")
    assert states(found)["dev split of burgers1d", "source"] == "changed"


def test_what_moved_is_found_below_a_folder_that_is_searched(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert lineage(moved / REPORT)[0] == 1
    code, found = lineage(moved / REPORT, "--search", moved)
    assert (code, set(states(found).values())) == (0, {"same"})


def test_latents_name_the_encoder_that_made_them(run: Path) -> None:
    arrays = {"latent": ups_store.ArraySpec((1, 2, 8, 4), "float16")}
    identity = {"kind": "latents", "encoder": LatentEncoder.load(AUTOENCODER).identity()}
    path = Path("checkpoints/burgers1d_train.zarr.zip")
    with ups_store.create(path, arrays, identity=identity) as writer:
        writer.commit(0, {"latent": np.zeros((2, 8, 4), np.float16)})
        writer.finish()
    code, found = lineage(path)
    assert (code, states(found)["encoder",]) == (0, "same")
    change_weights(AUTOENCODER)
    tensors, document = load_checkpoint(AUTOENCODER, kind="autoencoder")
    changed = {
        name: tensor + 1 if name.startswith("encoder.") else tensor for name, tensor in tensors.items()
    }
    save_checkpoint(AUTOENCODER, changed, kind="autoencoder", document=document)
    code, found = lineage(path)
    assert (code, states(found)) == (1, {("encoder",): "changed"})


def test_a_run_s_metadata_name_what_its_nodes_left(run: Path) -> None:
    config = configure(Path("data"), **{"cache.dir": "cache"})
    identities = {
        **store_identities(config, Path("cache")),
        OPERATOR: checkpoint_identity(Path(OPERATOR), kind="operator"),
        REPORT: file_identity(Path(REPORT)),
        "report/report.csv": file_identity(Path("report/report.csv")),
    }
    Path(FILE).write_text(json.dumps({"kind": KIND, "identities": identities}))
    code, found = lineage(FILE)
    assert (code, [link["path"] for link in found["made_from"]]) == (0, list(identities))
    assert ("output", "operator", "autoencoder") in states(found)  # by the report
    with Path("report/report.csv").open("a") as file:
        file.write("more\n")
    code, found = lineage(FILE)
    assert (code, found["made_from"][-1]["state"]) == (1, "changed")


def test_data_that_were_read_from_files_are_named_by_their_digests(run: Path) -> None:
    config = configure(Path("data"))
    fields = open_fields(config.build, "burgers1d", "dev", source="hdf5")
    said: dict[str, Any] = {"config": config.model_dump(mode="json"), "report": {}}
    path = Path("own/autoencoder.safetensors")
    save_autoencoder(path, make_autoencoder(config), data={"burgers1d": fields.identity}, **said)
    code, found = lineage(path)
    assert (code, [link["kind"] for link in found["made_from"]]) == (0, ["source"])
    assert fields.origin in found["made_from"][0]["path"]


def test_names_of_files_may_have_commas_and_blanks() -> None:
    one, other = "0" * 64, "f" * 64
    text = f"files a, b.h5 sampled:{one}, c d.h5 sampled:{other}, every second sample"
    found = origins_of_data(text, role="data", path=None)
    assert [(origin.path, origin.hash) for origin in found] == [("a, b.h5", one), ("c d.h5", other)]


def test_a_report_that_names_nothing_is_not_whole(run: Path) -> None:
    report = json.loads(Path(REPORT).read_text())
    del report["made_from"]
    Path("old.json").write_text(json.dumps(report))
    code, found = lineage("old.json")
    assert (code, states(found)) == (1, {("operator",): "unnamed"})


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.json", None, 2),
        ("text.json", b"text", 2),
        ("other.json", b"{}", 2),
        ("wrong.json", b'{"tasks": {}, "rows": {}, "made_from": [1]}', 2),
        ("cut.safetensors", b"\x80\0\0", 3),
        ("cut.zarr.zip", b"PK", 3),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    name: str, content: bytes | None, code: int, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = run_ups("lineage", tmp_path / name)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.output
    assert name in done.stderr


def test_a_chain_is_followed_without_torch(run: Path) -> None:
    code = (
        "import sys\nfrom ups.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "lineage", REPORT], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False"), done.stderr
