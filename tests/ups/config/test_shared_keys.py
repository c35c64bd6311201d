"""A run's configuration, read by a build: what concerns it, under the names that training has for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ups.config.build_keys import to_build
from ups_store import ConfigError
from ups_store.build import BuildConfig, load_config
from ups_store.building.command import app

REPOSITORY = Path(__file__).resolve().parents[3]
OLD = REPOSITORY / "tests" / "ups" / "configs"
DATA = {"data": {"task": "burgers1d"}}


def configure(*overrides: str, **flags: Any) -> BuildConfig:
    return load_config(flags={"data.tasks": "burgers1d", **flags}, overrides=overrides)


def test_build_without_latent_section_is_of_fields() -> None:
    assert configure("training.latent_cache_dir=latents", "stages.operator.epochs=3").latent is None


def test_latent_section_puts_latents_where_training_says() -> None:
    config = configure("latent.dim=4", "training.latent_cache_dir=latents", "checkpoint.dir=runs")
    assert config.latent is not None
    assert config.latent.checkpoint == Path("runs/autoencoder.safetensors")
    assert (config.cache.dir, config.cache.dtype) == (Path("latents"), "float16")
    assert configure("latent.dim=4", "training.latent_cache_dtype=float32").cache.dtype == "float32"


def test_cache_flags_and_overrides_win_over_those_of_training_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {tasks: burgers1d}\nlatent: {dim: 4}\n"
        "training: {latent_cache_dir: latents, latent_cache_dtype: float32}\n"
    )
    config = load_config(path, flags={"cache.dir": "${elsewhere"}, overrides=["cache.dtype=bfloat16"])
    assert (config.cache.dir, config.cache.dtype) == (Path("${elsewhere"), "bfloat16")


def test_latent_encoder_none_is_a_build_of_fields() -> None:
    config = configure("latent.dim=4", "latent.encoder=none", "training.latent_cache_dir=latents")
    assert config.latent is None
    assert (config.cache.dir, config.cache.dtype) == (Path("cache"), "float32")


@pytest.mark.parametrize(
    ("keys", "num_workers"),
    [
        (("training.num_workers=3",), 3),
        (("training.num_workers=3", "training.use_parallel_encoding=false"), 0),
        (("training.num_workers=3", "reading.num_workers=1"), 1),
        ((), "auto"),
    ],
)
def test_readers_are_named_by_training_too(keys: tuple[str, ...], num_workers: object) -> None:
    assert configure(*keys).reading.num_workers == num_workers


@pytest.mark.parametrize(
    ("name", "dim", "dtype"),
    [("old_burgers_32dim.yaml", 32, "float32"), ("old_two_tasks.yaml", 128, "float16")],
)
def test_earlier_configurations_build(name: str, dim: int, dtype: str) -> None:
    config = load_config(OLD / name)
    assert config.latent is not None
    assert (config.latent.dim, config.cache.dtype) == (dim, dtype)


def test_unknown_sections_are_left_for_the_build_to_refuse() -> None:
    assert to_build({**DATA, "cahce": {}, "latent": 3})["cahce"] == {}
    with pytest.raises(ConfigError, match="unknown key: found 'cahce'"):
        configure("cahce.dir=x")
    with pytest.raises(ConfigError, match="latent"):
        configure("latent=3")
    with pytest.raises(ConfigError, match=r"did you mean latent\.micro_batch"):
        configure("latent.microbatch=3")


def told(*overrides: str) -> list[str]:
    notes: list[str] = []
    load_config(flags={"data.tasks": "burgers1d"}, overrides=overrides, note=notes.append)
    return notes


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "training.latent_cache_dri=x",
            "training.latent_cache_dri is no key and has no effect; did you mean training.latent_cache_dir?",
        ),
        (
            "checkpoint.dri=x",
            "checkpoint.dri is no key and has no effect; did you mean checkpoint.dir?",
        ),
        (
            "training.zzz=1",
            "training.zzz is no key and has no effect;"
            " `ups train --config demo --print-config` shows the known keys",
        ),
        (
            "training.dt=0.1",
            "training.dt has no effect; docs/guides/migrate.md says what there is instead",
        ),
        (
            "data.patch_size=1",
            "data.patch_size has no effect; docs/guides/migrate.md says what there is instead",
        ),
    ],
)
def test_key_that_nobody_reads_is_told(override: str, sentence: str) -> None:
    assert told("latent.dim=4", override) == [sentence]


def test_keys_of_training_and_of_features_to_come_are_passed_over() -> None:
    keys = ("training.lr=0.1", "training.use_fsdp2=false", "training.distill_micro_batch=3", "seed=1")
    assert told(*keys, "checkpoint.dir=x", "operator.size=tiny") == []


@pytest.mark.parametrize(
    "name", [path.name for path in sorted((REPOSITORY / "ups" / "configs").glob("*.yaml"))]
)
def test_our_own_configurations_have_no_key_that_nobody_reads(name: str) -> None:
    notes: list[str] = []
    load_config(REPOSITORY / "ups" / "configs" / name, note=notes.append)
    assert notes == []


@pytest.mark.parametrize(
    ("short", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32")]
)
def test_dtypes_have_short_names(short: str, long: str) -> None:
    config = configure(
        f"training.latent_cache_dtype={short}", f"latent.compute_dtype={short}", "latent.dim=4"
    )
    assert config.latent is not None
    assert (config.cache.dtype, config.latent.compute_dtype) == (long, long)
    assert configure(f"cache.dtype={short}").cache.dtype == long


def test_command_warns_of_a_misspelled_key() -> None:
    keys = ["training.latent_cache_dri=x", "--tasks", "burgers1d", "--root", "nowhere"]
    done = CliRunner().invoke(app, keys)
    assert "warning: training.latent_cache_dri is no key" in done.stderr
    assert done.exit_code != 0
