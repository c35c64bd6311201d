"""Configuration of a run: values, includes, overrides, old names, and what is said about mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ups.config import RunConfig, dump_config, load_config
from ups.config.operator_size import corrector_size
from ups.config.stage_keys import stage_keys
from ups.errors import ConfigError
from ups.stages import CORRECTOR, STUDENT
from ups_store.building.config import load_config as load_build_config

OLD = Path(__file__).parents[1] / "configs"
TASK = "data.tasks=burgers1d"


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDEBENCH_ROOT", raising=False)


def error_of(*overrides: str, path: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=[TASK, *overrides])
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


def load_old(name: str, *overrides: str) -> RunConfig:
    return load_config(OLD / name, overrides=overrides)


# --- values --------------------------------------------------------------------------------------------


def test_override_is_parsed_by_yaml_rules() -> None:
    overrides = ["data.tasks=[burgers1d,darcy2d]", "training.lr=1e-4", "training.grad_clip=null", "seed=7"]
    config = load_config(overrides=overrides)
    assert config.data.tasks == ("burgers1d", "darcy2d")
    assert config.training.lr == 1e-4
    assert config.training.grad_clip is None
    assert config.seed == 7


def test_file_wins_over_its_includes_and_overrides_over_both(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("latent: {dim: 8, tokens: 16}\nseed: 1\ndata: {task: burgers1d}\n")
    (tmp_path / "sizes.yaml").write_text("latent: {dim: 2}\n")
    inner = tmp_path / "runs"
    inner.mkdir()
    (inner / "run.yaml").write_text("include: [../base.yaml, ../sizes.yaml]\nseed: 2\nlatent: {tokens: 4}\n")
    config = load_config(inner / "run.yaml", overrides=["training.batch_size=3"])
    assert (config.latent.dim, config.latent.tokens, config.seed) == (2, 4, 2)
    assert config.training.batch_size == 3


def test_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load_config(overrides=[TASK, "stages.operator.epochs=3", "training.lr=3e-5"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


def test_root_defaults_to_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDEBENCH_ROOT", "elsewhere")
    assert load_config(overrides=[TASK]).data.root == Path("elsewhere")
    assert load_config(overrides=[TASK, "data.root=here"]).data.root == Path("here")


def test_stage_takes_what_it_leaves_open_from_training() -> None:
    overrides = [TASK, "training.lr=2e-3", "training.batch_size=5", "stages.operator.batch_size=9"]
    config = load_config(overrides=overrides)
    assert config.stage("operator").batch_size == 9
    assert config.stage("autoencoder").batch_size == 5
    assert config.stage("operator").optimizer.lr == 2e-3
    assert config.stage("operator").grad_clip == config.training.grad_clip


def test_task_that_the_configuration_declares_is_known() -> None:
    declared = ["data.tasks=flow2d", "tasks.flow2d.boundary.x=periodic", "tasks.flow2d.ndim=2"]
    assert load_config(overrides=declared).build.tasks.keys() == {"flow2d"}
    assert error_of("data.tasks=flow2d").kind == "unknown_task"


# --- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("training.lrr=1", "training.lr"),
        ("trainig.batch_size=1", "training"),
        ("batch_size=4", "training.batch_size"),
        ("stages.operator.epocs=1", "stages.<name>.epochs"),
        ("data.taks=burgers1d", "data.tasks"),
        ("latent.tokns=1", "latent.tokens"),
        ("dat.tasks=burgers1d", "data"),
        ("training.epochs=3", "stages.<name>.epochs"),
        ("training.epoch=3", "stages.<name>.epochs"),
        ("stages.operator.optimzer.lr=1", "stages.<name>.optimizer"),
    ],
)
def test_unknown_key_is_an_error_naming_the_nearest_one(override: str, near: str) -> None:
    error = error_of(override)
    assert error.kind == "unknown_key"
    assert error.hint == f"did you mean {near}?"
    assert override.partition("=")[0].split(".")[0] in str(error)


@pytest.mark.parametrize("key", ["stages.operator.time_stride", "training.learning_rate", "training.dir"])
def test_unknown_key_that_resembles_none_is_no_reason_for_a_wrong_suggestion(key: str) -> None:
    assert str(error_of(f"{key}=1").hint).endswith("for the known keys")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.lr=-1", "training.lr: expected greater than 0"),
        ("training.batch_size=2.5", "training.batch_size: expected"),
        ("training.num_workers=-1", "training.num_workers: expected"),
        ("stages.operator.optimizer.name=adamx", "stages.operator.optimizer.name: expected 'adamw'"),
        ("stages.decoder.epochs=1", "stages.decoder is no stage"),
        ("encoder.width=30", "encoder.width = 30 isn't a multiple of num_heads = 4"),
        ("operator.pdet.input_dim=7", "operator.pdet.input_dim = 7, but latent.dim = 4"),
        (
            "data.split=trian",
            "expected train, val or test, found 'trian'; did you mean train?",
        ),
        ("tasks.flow2d.boundary.x=periodic", "tasks.flow2d: expected ndim or layout"),
        ("training", "override: expected key=value"),
        ("training.lr=[1", "overrides: expected YAML values"),
        ("checkpoint.interval=0", "checkpoint.interval: expected"),
    ],
)
def test_wrong_value_is_named_with_its_key(override: str, says: str) -> None:
    assert says in str(error_of(override))


def test_all_mistakes_are_told_at_once_each_with_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {task: burgers1d}\ntraining: {lrr: 1, num_workers: -1}\nlatent: {tokns: 4}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=["encoder.width=0"])
    title, *lines = str(caught.value).splitlines()
    assert title == "4 mistakes in the configuration:"
    assert set(lines) == {
        "  encoder.width: expected greater than or equal to 1, found 0",
        f"  {path}: training.num_workers: expected greater than or equal to 0, or 'auto', found -1",
        f"  {path}: unknown key: found 'latent.tokns'; did you mean latent.tokens?",
        f"  {path}: unknown key: found 'training.lrr'; did you mean training.lr?",
    }
    assert caught.value.exit_code == 2


_MIXERS = "'spectral', 'convolution', 'attention' or 'hybrid'"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "training.num_workers=many",
            "training.num_workers: expected a valid integer or 'auto', found 'many'",
        ),
        ("operator.mixer=spectrl", f"operator.mixer: expected {_MIXERS}, or a list, found 'spectrl'"),
        ("operator.mixer=[spectral,foo]", f"operator.mixer.1: expected {_MIXERS}, found 'foo'"),
    ],
)
def test_key_that_takes_several_kinds_of_values_names_them_all(override: str, says: str) -> None:
    assert str(error_of(override)) == says


def test_misspelled_key_explains_the_missing_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["data.taks=burgers1d"])
    assert str(caught.value) == "unknown key: found 'data.taks'; did you mean data.tasks?"


def test_list_in_the_place_of_keys_is_refused() -> None:
    assert str(error_of("stages=[1]")) == "stages: expected keys and values, found [1]"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages=[1]", "stages: expected keys and values, found a list; say stages.<name>=..."),
        (
            "stages.autoencoder=[1]",
            "stages.autoencoder: expected keys and values, found a list; say stages.autoencoder.<name>=...",
        ),
        (
            "data.files.0=b.hdf5",
            "data.files: expected a list, found keys and values;"
            " say data.files=[...], which replaces the list as a whole",
        ),
    ],
)
def test_list_over_keys_of_the_file_is_refused_by_the_key(tmp_path: Path, override: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {files: [a.hdf5]}\nstages: {autoencoder: {epochs: 1}}\n")
    assert str(error_of(override, path=path)) == says


def test_list_over_keys_of_an_included_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    (tmp_path / "base.yaml").write_text("stages: {autoencoder: {epochs: 1}}\n")
    path.write_text("include: base.yaml\nstages: [1]\n")
    assert str(error_of(path=path)).startswith(f"{path}: stages: a list and keys don't merge; ")


def test_missing_task_is_named() -> None:
    with pytest.raises(ConfigError, match=r"missing key: expected data\.tasks"):
        load_config()


def test_error_in_file_names_the_file_and_error_in_override_does_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {lr: -1}\n")
    assert error_of(path=path).path == str(path)
    assert error_of("training.lr=-2", path=path).path is None


def test_files_including_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    assert "a.yaml -> b.yaml -> a.yaml" in str(error_of(path=tmp_path / "a.yaml"))


def test_missing_include_names_who_includes_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: nowhere.yaml\n")
    error = error_of(path=tmp_path / "a.yaml")
    assert "nowhere.yaml" in str(error.path)
    assert "a.yaml" in str(error.hint)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\tx: 1"])
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert error_of(path=path).path == str(path)


# --- old names -----------------------------------------------------------------------------------------


def test_file_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 100_000)
    assert error_of(path=path).kind == "too_deep"  # a parser's recursion would end the process


def test_override_nested_too_deep_is_refused() -> None:
    assert error_of(f"training.lr={'[' * 100_000}").kind == "too_deep"


def test_keys_of_the_build_about_encoding_are_known() -> None:
    keys = (
        "latent.device=cpu",
        "latent.compute_dtype=bfloat16",
        "latent.micro_batch=64",
        "latent.encoder=ups",
    )
    latent = load_config(overrides=[TASK, *keys, "latent.checkpoint=weights.safetensors"]).latent
    assert (latent.device, latent.micro_batch, latent.checkpoint) == ("cpu", 64, Path("weights.safetensors"))


def test_dumped_configuration_is_one_of_the_build_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(load_config(overrides=[TASK, "latent.micro_batch=64"])))
    latent = load_build_config(path).latent
    assert latent is not None
    assert (latent.micro_batch, latent.checkpoint) == (64, Path("checkpoints/autoencoder.safetensors"))


def test_old_file_parses_once_what_is_missing_is_off() -> None:
    off = ("ttc.enabled=false", "stages.student.epochs=0")
    config = load_old("old_burgers_32dim.yaml", *off, "logging.wandb.enabled=false")
    assert (config.latent.dim, config.latent.tokens) == (32, 32)
    assert config.operator.depths == (1, 1, 1)
    assert config.data.split == ("train",)
    assert config.training.num_workers == 8
    assert config.stages["operator"].scheduler.name == "cosine"
    assert config.stages["operator"].scheduler.t_max == 40
    assert config.logging.wandb.project == "universal-simulator"


def test_corrector_of_an_old_file_is_one() -> None:
    off = ("ttc.enabled=false", "stages.student.epochs=0", "logging.wandb.enabled=false")
    config = load_old("old_burgers_32dim.yaml", *off)
    assert config.trains(CORRECTOR)
    assert config.stage("corrector").optimizer.weight_decay == 0.015
    assert config.training.tau_distribution.type == "beta"
    assert (config.training.tau_distribution.alpha, config.training.tau_distribution.beta) == (1.2, 1.0)
    size = corrector_size(config)
    assert (size.width, size.depths) == (96, (1, 1, 1))
    assert corrector_size(load_old("old_burgers_32dim.yaml", *off, "diffusion.hidden_dim=48")).width == 48


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["diffusion.latent_dim=8"], "diffusion.latent_dim = 8, but latent.dim = 4"),
        (["diffusion.residual_share=1"], "diffusion.residual_share"),
        (["diffusion.sampler=ddim"], "diffusion.sampler"),
        (["training.tau_distribution.type=gauss"], "training.tau_distribution.type"),
        (["training.tau_distribution.alpha=0"], "training.tau_distribution.alpha"),
    ],
)
def test_impossible_correctors_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(overrides=[TASK, *overrides])


def test_corrector_whose_size_does_not_fit_names_its_keys() -> None:
    keys = ["operator.mixer=attention", "operator.num_heads=4", "diffusion.hidden_dim=30"]
    with pytest.raises(ConfigError, match=r"diffusion\.hidden_dim = 30"):
        corrector_size(load_config(overrides=[TASK, *keys]))
    keys = ["operator.mixer=[spectral,attention]", "operator.depths=[1,1]", "diffusion.depths=[1,1,1]"]
    with pytest.raises(ConfigError, match=r"diffusion\.depths"):
        corrector_size(load_config(overrides=[TASK, *keys]))


def test_sections_of_generative_models_are_theirs_alone() -> None:
    changed = load_config(overrides=[TASK, "diffusion.lead_times=3", "training.tau_distribution.type=beta"])
    plain = load_config(overrides=[TASK])
    for stage in ("autoencoder", "operator"):
        assert stage_keys(changed, stage) == stage_keys(plain, stage)
    assert stage_keys(changed, "corrector") != stage_keys(plain, "corrector")
    free = ["diffusion.sampler=heun", "diffusion.residual_dir=elsewhere", "operator.noise=0.1"]
    assert stage_keys(load_config(overrides=[TASK, *free]), "corrector") == stage_keys(plain, "corrector")


def test_old_file_with_two_tasks_parses() -> None:
    config = load_old("old_two_tasks.yaml")
    assert config.data.tasks == ("advection1d", "darcy2d")
    assert config.training.amp_dtype == "bfloat16"
    assert config.training.query_sampling.num_queries == 2048
    assert config.stages["operator"].optimizer.name == "muon_hybrid"
    assert config.stages["student"].scheduler.name == "plateau"
    assert config.seed == 42


def test_old_file_says_how_a_student_is_distilled() -> None:
    config = load_old("old_burgers_32dim.yaml", "ttc.enabled=false", "logging.wandb.enabled=false")
    assert config.trains(CORRECTOR)
    assert config.trains(STUDENT)
    assert config.training.distill_micro_batch == 3
    assert config.stage("student").epochs == 8
    assert config.stage("student").method is None  # rectified flow


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.distill_num_steps=5"], "training.distill_num_steps"),
        (["training.distill_own_times=1.1"], "training.distill_own_times"),
        (["stages.student.method=progressive"], "stages.student.method"),
        (["stages.operator.method=reflow"], "stages.operator.method = reflow has no meaning"),
        (["diffusion.val_members=63"], "diffusion.val_members"),
    ],
)
def test_settings_of_students_that_can_not_be_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace(".", r"\.")):
        load_config(overrides=[TASK, *overrides])


def test_settings_of_students_are_those_of_their_stage_alone() -> None:
    plain = load_config(overrides=[TASK])
    changed = load_config(overrides=[TASK, "training.distill_num_steps=2", "training.distill_own_times=1"])
    student = stage_keys(changed, "student")
    assert student != stage_keys(plain, "student")
    for stage in ("operator", "corrector", "autoencoder"):
        assert stage_keys(changed, stage) == stage_keys(plain, stage)
    free = ["training.distill_micro_batch=4", "training.distill_teacher=other", "diffusion.hidden_dim=8"]
    assert stage_keys(load_config(overrides=[TASK, *free]), "student") == stage_keys(plain, "student")


@pytest.mark.parametrize(
    "override", ["training.dt=0.1", "training.persistent_workers=true", "data.patch_size=1"]
)
def test_key_that_means_nothing_warns(override: str, notes: list[str]) -> None:
    load_config(overrides=[TASK, override])
    assert f"warning: {override.partition('=')[0]} has no effect" in notes[0]


def test_configuration_of_a_checkpoint_can_not_name_code_to_import() -> None:
    stored = {"data": {"tasks": ["burgers1d"]}, "latent": {"encoder": "os:system"}}
    with pytest.raises(ConfigError) as caught:
        load_config(stored)
    assert (caught.value.kind, caught.value.found) == ("encoder_not_allowed", "'os:system'")
    assert load_config(stored, overrides=["latent.encoder=os:system"]).latent.encoder == "os:system"


def test_training_must_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "0.1")
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"tasks": ["burgers1d"]}, "training": {"lr": "${oc.env:LR}"}})
    assert caught.value.kind == "from_environment"
