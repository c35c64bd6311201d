"""What `ups.config.build_keys` names, without importing the models, is what the models have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ups.config import load_config
from ups.config.legacy import MEANINGLESS
from ups_store.build import load_config as load_build_config

OLD = Path(__file__).parents[1] / "configs"


def test_build_knows_old_keys_without_the_models() -> None:
    code = (
        "import sys, ups.config.build_keys as keys; print('pydantic' in sys.modules, *keys.OLD_KEYS['data'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded, *names = done.stdout.split()
    assert (loaded, sorted(names)) == ("False", ["download", "patch_size", "shard_limit", "task_sampling"])


@pytest.mark.parametrize("name", ["old_burgers_32dim.yaml", "old_two_tasks.yaml"])
def test_earlier_configurations_are_told_their_meaningless_keys_alone(name: str) -> None:
    notes: list[str] = []
    load_build_config(OLD / name, note=notes.append)
    told = {note.split(" has no effect; docs/guides/migrate.md")[0] for note in notes}
    assert told
    assert told <= MEANINGLESS.keys()


def test_training_takes_short_names_of_dtypes() -> None:
    keys = ["training.amp_dtype=half", "training.latent_cache_dtype=bf16"]
    training = load_config(overrides=["data.tasks=burgers1d", *keys]).training
    assert (training.amp_dtype, training.latent_cache_dtype) == ("float16", "bfloat16")
