"""Configurations as files: references, the environment, code that they name, shipped ones, other sections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ups_store.build import load_config, near_config, read_config, shipped_configs
from ups_store.errors import ConfigError
from ups_store.system import files


def read(text: str, folder: Path, *overrides: str, **flags: Any) -> dict[str, Any]:
    path = folder / "run.yaml"
    path.write_text(text)
    return read_config(path, overrides=overrides, flags=flags)


def error_of(text: str, folder: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(text, folder, *overrides)
    return caught.value


# --- YAML ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),
        ("1.5e3", 1.5e3),
        ("-.5E2", -50.0),
        ("1_000", 1000),
        (".inf", float("inf")),
        ("2020-01-02", "2020-01-02"),
        ("1e", "1e"),
        ("e4", "e4"),
        ("yes", True),
        ("", None),
        ("'1e-4'", "1e-4"),
    ],
)
def test_numbers_are_numbers_and_dates_are_texts(text: str, expected: object, tmp_path: Path) -> None:
    assert read(f"a: {text}\n", tmp_path)["a"] == expected
    assert read("", tmp_path, f"a={text}")["a"] == expected


# --- pipes --------------------------------------------------------------------------------------------


def piped(text: str) -> Path:
    """The name of a pipe that is written and closed, as of a shell's `<(...)`."""
    ours, theirs = os.pipe()
    os.write(theirs, text.encode())
    os.close(theirs)
    return Path(f"/dev/fd/{ours}")


def test_pipe_is_read_once() -> None:
    path = piped("a: 1\n")
    assert read_config(path)["a"] == 1
    with pytest.raises(ConfigError, match=r"the pipe ended without anything in it\); .* reads it once"):
        read_config(path)
    os.close(int(path.name))


def test_pipe_without_a_writer_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"nothing came through the pipe within 0\.05 s") as caught:
        read_config(tmp_path / "pipe")
    assert caught.value.path == str(tmp_path / "pipe")


# --- references ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${b.c}", 5),
        ("${b.d}", [1, {"e": "f"}]),
        ("${b.d.1.e}", "f"),
        ("x${b.c}y${b.c}", "x5y5"),
        ("${alias}", 5),
        (r"\${b.c}", "${b.c}"),
        ("a$b{c}", "a$b{c}"),
        ("${env:SCRATCH}/x", "/scratch/x"),
        ("${oc.env:SCRATCH}/x", "/scratch/x"),
        ("${oc.env:NOT_SET,'other'}", "other"),
        ("${env:NOT_SET,http://x}", "http://x"),
        ("${oc.env:NOT_SET,null}", None),
    ],
)
def test_reference_stands_for_a_value(
    text: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("UPS_ALLOW_ENV", "NOT_SET")
    monkeypatch.delenv("NOT_SET", raising=False)
    beside = "alias: ${b.c}\nb: {c: 5, d: [1, {e: f}]}\n"
    assert read(f"checkpoint: {{dir: '{text.replace(chr(39), chr(39) * 2)}'}}\n{beside}", tmp_path)[
        "checkpoint"
    ] == {"dir": expected}


@pytest.mark.parametrize(
    "text",
    [
        *("${gone}", "${b.c.gone}", "${b.d.7}", "${a}", "${", "${b.${x}}", "${oc.decode:1}"),
        *("${env:NOT_SET}", "${ }", "${.b}", "${b.d[0]}"),
    ],
)
def test_reference_that_leads_nowhere_names_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^a: "):
        read_config({"a": text, "b": {"c": 5, "d": [1]}, "x": "c"})


def test_circles_and_long_chains_of_references_are_refused() -> None:
    with pytest.raises(ConfigError, match="refers to itself"):
        read_config({"a": "${b}", "b": "x${c.d}", "c": {"d": "${a}"}})
    chain = {f"a{i}": f"${{a{i + 1}}}" for i in range(500)}
    with pytest.raises(ConfigError) as caught:
        read_config({**chain, "a500": 1})
    assert caught.value.kind == "too_deep"


def laugh(first: str, line: str, *, num: int = 30) -> str:
    """Lines that each repeat the one before nine times; "#" is its number, "@" the number before."""
    lines = (line.replace("#", str(i)).replace("@", str(i - 1)) for i in range(1, num))
    return first + "".join(f"{each}\n" for each in lines)


LAUGHS = {
    "texts": laugh("a0: 0123456789\n", "a#: '" + "${a@}" * 9 + "'"),
    "aliases": laugh("a0: &a0 [1]\n", "a#: &a# [" + "*a@, " * 9 + "]"),
    "merged_aliases": laugh("a0: &a0 {k: 1}\n", "a#: &a# {<<: *a@, k#: *a@}"),
}


@pytest.mark.parametrize("kind", LAUGHS)
def test_values_that_expand_to_gigabytes_are_refused_before(kind: str, tmp_path: Path) -> None:
    error = error_of(LAUGHS[kind], tmp_path)
    assert (error.kind, error.path) == ("too_long", str(tmp_path / "run.yaml"))


def test_lists_that_refer_to_lists_of_references_are_refused(tmp_path: Path) -> None:
    error = error_of(laugh("a0: [1]\n", "a#: [" + "'${a@}', " * 9 + "]"), tmp_path)
    assert error.hint == "write them out"


def test_each_reference_is_followed_once_however_often_it_occurs(tmp_path: Path) -> None:
    text = laugh("a0: ''\n", "a#: '" + "${a@}" * 9 + "'", num=12)
    assert read(text, tmp_path)["a11"] == ""  # 9 ** 11 times otherwise


def test_override_that_expands_too_far_is_refused(tmp_path: Path) -> None:
    long = "x" * 50_000
    assert error_of(f"a: {long}\n", tmp_path, "b=" + "${a}" * 21).kind == "too_long"
    assert len(read(f"a: {long}\n", tmp_path, "b=" + "${a}" * 19)["b"]) == 19 * len(long)


def test_files_that_include_each_other_ever_more_often_are_refused(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.yaml").write_text(f"include: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "12.yaml").write_text("a: 1\n")
    error = error_of("include: 0.yaml\n", tmp_path)
    assert (error.kind, error.expected) == ("too_long", "at most 100")


def test_keys_over_a_reference_are_refused_instead_of_replacing_it(tmp_path: Path) -> None:
    assert "a: keys and a reference don't merge" in str(error_of("b: {c: 1}\na: ${b}\n", tmp_path, "a.d=2"))


# --- the environment ----------------------------------------------------------------------------------

PLACES = "data: {tasks: burgers1d, root: '${oc.env:SCRATCH}'}\nreading: {num_workers: '${oc.env:NUM,auto}'}\n"


def test_places_and_ways_of_reading_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    values = read(PLACES, tmp_path, "checkpoint.dir=${data.root}/runs", "training.log_path=${oc.env:SCRATCH}")
    assert (values["data"]["root"], values["checkpoint"]["dir"]) == ("/scratch", "/scratch/runs")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.limit=${oc.env:N}", "data.limit"),
        ("data.tasks=['${env:N}']", "data.tasks.0"),
        ("cache.dtype=float${reading.x}", "cache.dtype"),
        ("latent.encoder=${oc.env:N}", "latent.encoder"),
        ("training.latent_cache_dtype=${oc.env:N,float16}", "training.latent_cache_dtype"),
    ],
)
def test_what_is_stored_must_not_come_from_the_environment(
    override: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "16")
    error = error_of("reading: {x: '${oc.env:N}'}\n", tmp_path, override)
    assert (error.kind, error.found) == ("from_environment", "${env:N}")
    assert f'{key}="$N"' in str(error)


def test_variable_that_is_not_set_says_how_to_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    error = error_of("data: {tasks: burgers1d}\n", tmp_path, "data.root=${env:NOT_SET}")
    assert "${env:NOT_SET,DEFAULT}" in str(error.hint)


# --- encoders -----------------------------------------------------------------------------------------

EVIL = "data: {tasks: burgers1d}\nlatent: {encoder: 'os:system', checkpoint: /tmp/x}\n"


def test_file_alone_can_not_name_code_to_import(tmp_path: Path) -> None:
    error = error_of(EVIL, tmp_path)
    assert (error.kind, error.found) == ("encoder_not_allowed", "'os:system'")
    assert "latent.encoder=os:system" in str(error)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert caught.value.kind == "encoder_not_allowed"


@pytest.mark.parametrize("override", ["data.root='os:system'", "latent.encoder=${data.name}", "latent.dim=3"])
def test_other_overrides_allow_no_code(override: str, tmp_path: Path) -> None:
    text = EVIL.replace("tasks: burgers1d", "tasks: burgers1d, name: 'os:system'")
    assert error_of(text, tmp_path, override).kind == "encoder_not_allowed"


def test_included_file_and_mapping_can_not_name_code_either(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(EVIL)
    assert error_of("include: evil.yaml\n", tmp_path).kind == "encoder_not_allowed"
    with pytest.raises(ConfigError):
        read_config({"latent": {"encoder": "os:system"}})  # as a checkpoint has it


def test_override_or_flag_that_says_the_code_allows_it(tmp_path: Path) -> None:
    name = f"{__name__}:{os.path.basename(__file__)}"
    assert read(EVIL, tmp_path, f"latent.encoder={name}")["latent"]["encoder"] == name
    assert read(EVIL, tmp_path, **{"latent.encoder": name})["latent"]["encoder"] == name
    assert read("latent: {encoder: ups}\n", tmp_path)["latent"]["encoder"] == "ups"


# --- shipped ones -------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, without a checkout around it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["demo", "demo.yaml", "./demo", "configs/demo.yaml", "pdebench/burgers1d"])
def test_shipped_configuration_is_found_by_name(name: str, elsewhere: Path) -> None:
    assert load_config(Path(name)).data.tasks == ("burgers1d",)


def test_file_of_one_s_own_comes_first_and_a_folder_of_the_name_does_not(elsewhere: Path) -> None:
    (elsewhere / "demo").mkdir()
    assert load_config(Path("demo")).data.tasks == ("burgers1d",)
    (elsewhere / "demo.yaml").write_text("data: {tasks: cfd1d}\n")
    assert load_config(Path("demo.yaml")).data.tasks == ("cfd1d",)


def test_own_file_includes_a_shipped_one_and_a_shipped_one_its_neighbour(elsewhere: Path) -> None:
    (elsewhere / "runs").mkdir()
    (elsewhere / "runs" / "mine.yaml").write_text("include: demo\ndata: {limit: 3}\n")
    config = load_config(elsewhere / "runs" / "mine.yaml", overrides=["latent.encoder=none"])
    assert (config.data.reduce_space, config.data.limit) == (4, 3)
    assert config.cache.dir == Path("demo/cache")  # relative paths are below the present folder
    assert load_config(Path("small_burgers")).data.reduce_space == 4


def test_misspelled_name_names_the_nearest(elsewhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path("dmo"))
    assert caught.value.hint == "did you mean demo?"
    (elsewhere / "run.yaml").touch()
    assert near_config(Path("rnu.yaml")) == "run.yaml"


def test_every_shipped_file_is_a_build_s_configuration_too(elsewhere: Path) -> None:
    names = shipped_configs()
    assert len(names) > 15
    for name in names:
        assert load_config(Path(name), overrides=["latent.encoder=none"]).data.tasks


# --- sections of other packages -----------------------------------------------------------------------


def to_build(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key != "kitchen"}
    return {**kept, "reading": {"num_workers": values["kitchen"]["cooks"]}}


def without_effect(values: dict[str, Any]) -> Iterator[str]:
    yield from (f"kitchen.{name} has no effect" for name in values["kitchen"] if name != "cooks")


def test_section_of_another_package_says_to_the_build_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a section of its own is installed, and no other."""
    entry = SimpleNamespace(
        name="kitchen", load=lambda: SimpleNamespace(to_build=to_build, without_effect=without_effect)
    )
    names = {"ups_store.config_keys": [entry]}
    monkeypatch.setattr(metadata, "entry_points", lambda group: names.get(group, []))
    notes: list[str] = []
    overrides = ["data.tasks=burgers1d", "kitchen.cooks=3", "kitchen.sinks=1"]
    assert load_config(overrides=overrides, note=notes.append).reading.num_workers == 3
    assert notes == ["kitchen.sinks has no effect"]


def test_section_that_no_package_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["data.tasks=burgers1d", "training.lr=1"])
    assert caught.value.kind == "unknown_key"
    config = load_config(overrides=["data.tasks=burgers1d", "latent.encoder=none", "cache.dtype=float16"])
    assert (config.latent, config.cache.dtype) == (None, "float16")


def test_configuration_of_a_build_alone_asks_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(metadata, "entry_points", fail)
    load_config(overrides=["data.tasks=burgers1d", "cache.dtype=float16", "reading.num_workers=0"])
