"""Model cards: what they say, and that the code in them works."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_simulators import configure, make_autoencoder, make_data, make_simulator
from trained_baselines import untrained

from ups.errors import OutputError
from ups.eval.baseline_model import save_baseline
from ups.trained.autoencoder import save_autoencoder
from ups.trained.card import card_path
from ups.trained.checkpoint import load_checkpoint, save_checkpoint, write_card
from ups.trained.simulator import save_simulator

TASKS = ("burgers1d", "darcy2d")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all kinds that are exported."""
    root = make_data(tmp_path_factory.mktemp("run"))
    config = configure(root, *TASKS)
    autoencoder = make_autoencoder(config)
    said: dict[str, Any] = {"config": config.model_dump(mode="json"), "data": {"burgers1d": "store 0123"}}
    report = {"score": 0.25, "val/nrmse/burgers1d": 0.25, "val/nrmse/darcy2d": float("nan")}
    save_autoencoder(root / "autoencoder.safetensors", autoencoder, report=report, **said)
    save_simulator(root / "operator.safetensors", make_simulator(config, autoencoder), report=report, **said)
    for kind, task in (("fno", "burgers1d"), ("unet", "darcy2d")):
        save_baseline(root / f"{kind}.safetensors", untrained(root, kind, task), config={}, report={})
    return root


def parts(card: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text."""
    _, front, text = card.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_card_of_an_operator_says_what_the_hub_and_a_reader_ask(folder: Path) -> None:
    front, text = parts(folder / "operator.card.md")
    assert front["library_name"] == "ups-store"
    assert {"pde", "neural-operator", *TASKS} <= {*front["tags"]}
    assert front["metrics"] == ["nrmse"]
    (result,) = front["model-index"][0]["results"]  # what isn't a number isn't there
    assert result["dataset"]["type"] == "burgers1d"
    assert result["metrics"] == [{"type": "nrmse", "value": 0.25, "name": "nRMSE"}]
    assert "| burgers1d | 32 | periodic | u | 0.4 | nu = 0.1 |" in text
    assert "| darcy2d | 16 x 16 |" in text
    assert "- burgers1d, training split: store 0123" in text
    assert "split_fractions [0.8, 0.1, 0.1]" in text
    assert "- seed: 0" in text
    assert str(folder) not in text  # paths say something about a machine, not about the model


@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("operator", "burgers1d", (2, 10, 32, 1)),
        ("autoencoder", "burgers1d", (2, 8, 4)),
        ("fno", "burgers1d", (2, 10, 32, 1)),
        ("unet", "darcy2d", (2, 1, 16, 16, 1)),
    ],
)
def test_code_of_a_card_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, task: str, expected: tuple[int, ...]
) -> None:
    monkeypatch.chdir(folder)
    _, text = parts(folder / f"{name}.card.md")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    points = {"burgers1d": (32,), "darcy2d": (16, 16)}[task]
    names: dict[str, Any] = {"fields": torch.rand(2, *points, 1)}
    exec(code, names)
    found = names["tokens"] if name == "autoencoder" else names["frames"]
    assert tuple(found.shape) == expected
    assert found.isfinite().all()


def test_card_names_the_tensors_of_its_file_and_is_renewed_with_it(tmp_path: Path) -> None:
    path, digests = tmp_path / "operator.safetensors", []
    for value in (0.0, 1.0):
        save_checkpoint(path, {"w": torch.full((2, 3), value)}, kind="operator", document={})
        _, text = parts(card_path(path))
        assert "6 weights" in text
        digests.append(re.search(r"sha256 `([0-9a-f]{64})`", text)[1])  # type: ignore[index]
        header = path.read_bytes()[8:].split(b"}}")[0].decode()
        assert digests[-1] in header
    assert digests[0] != digests[1]


def test_card_can_be_written_again_under_another_name(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine.safetensors"
    copy.write_bytes((folder / "operator.safetensors").read_bytes())
    write_card(copy, kind="operator")
    text = card_path(copy).read_text(encoding="utf-8")
    original = (folder / "operator.card.md").read_text(encoding="utf-8")
    assert text == original.replace("operator.safetensors", "mine.safetensors").replace(
        "name: operator\n", "name: mine\n"
    )


def test_full_disk_leaves_the_old_checkpoint_and_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, {"w": torch.zeros(2)}, kind="autoencoder", document={"one": 1})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"a.safetensors", "a.card.md"}

    def fail(number: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("ups.output.os.fsync", fail)
    with pytest.raises(OutputError, match="no room"):
        save_checkpoint(path, {"w": torch.ones(2)}, kind="autoencoder", document={"one": 2})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert load_checkpoint(path, kind="autoencoder")[1] == {"one": 1}


def test_card_of_an_incomplete_document_says_what_there_is(tmp_path: Path) -> None:
    report: dict[str, Any] = {"val/nrmse/a|b": None}
    document = {"spec": {"tasks": {"a|b": {}}}, "config": None, "report": report}
    save_checkpoint(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, kind="operator", document=document)
    front, text = parts(tmp_path / "a.card.md")
    assert "model-index" not in front
    assert "Validation errors" not in text
    assert "| a\\|b |" in text


def test_states_of_a_training_get_no_card(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.safetensors", {"w": torch.zeros(2)}, kind="training", document={})
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
