"""References in configurations: what they mean, that they stay small, where the environment may be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ups_store.build import load_config
from ups_store.building.config_file import MAX_FILES, read_config
from ups_store.building.references import MAX_EXPANDED, References
from ups_store.errors import ConfigError


def resolved(**values: Any) -> dict[str, Any]:
    return References(values, path=None).resolved()


def read(text: str, folder: Path, *overrides: str, **flags: Any) -> dict[str, Any]:
    path = folder / "run.yaml"
    path.write_text(text)
    return read_config(path, overrides=overrides, flags=flags)


def error_of(text: str, folder: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(text, folder, *overrides)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${b.c}", 5),
        ("${b.d}", [1, {"e": "f"}]),
        ("${b.d[1].e}", "f"),
        ("${b.d.1.e}", "f"),
        ("${.b.c}", 5),
        ("x${b.c}y${b.c}", "x5y5"),
        ("${alias}", 5),
        ("${through.c}", 5),
        (r"\${b.c}", "${b.c}"),
        (r"a\\${b.c}", "a\\5"),
        ("a$b{c}", "a$b{c}"),
        ("${oc.env:SCRATCH}/x", "/scratch/x"),
        ("${oc.env:NOT_SET,'other'}", "other"),
        ("${oc.env:NOT_SET,null}", None),
    ],
)
def test_reference_stands_for_a_value(text: str, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOT_SET", raising=False)
    beside = {"b": {"c": 5, "d": [1, {"e": "f"}]}, "alias": "${b.c}", "through": "${b}"}
    assert resolved(a=text, **beside)["a"] == expected


def test_relative_reference_counts_from_where_it_stands() -> None:
    assert resolved(a={"b": "${.c}", "c": "${..d}"}, d=3) == {"a": {"b": 3, "c": 3}, "d": 3}


@pytest.mark.parametrize(
    "text",
    [
        "${gone}",
        "${b.c.gone}",
        "${b.d.7}",
        "${a}",
        "${",
        "${b.${x}}",
        "${oc.decode:1}",
        "${oc.env:NOT_SET}",
        "${ }",
    ],
)
def test_reference_that_leads_nowhere_names_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^a: "):
        resolved(a=text, b={"c": 5, "d": [1]}, x="c")


def test_circles_and_long_chains_of_references_are_refused() -> None:
    with pytest.raises(ConfigError, match="refers to itself"):
        resolved(a="${b}", b="x${c}", c={"d": "${a}"})
    chain = {f"a{i}": f"${{a{i + 1}}}" for i in range(500)}
    with pytest.raises(ConfigError) as caught:
        resolved(**chain, a500=1)
    assert caught.value.kind == "too_deep"


def laugh(first: str, line: str, *, num: int = 30) -> str:
    """Lines that each repeat the one before nine times; "#" is its number, "@" the number before."""
    lines = (line.replace("#", str(i)).replace("@", str(i - 1)) for i in range(1, num))
    return first + "".join(f"{each}\n" for each in lines)


LAUGHS = {
    "texts": laugh("a0: 0123456789\n", "a#: '" + "${a@}" * 9 + "'"),
    "lists": laugh("a0: [1]\n", "a#: [" + "'${a@}', " * 9 + "]"),
    "aliases": laugh("a0: &a0 [1]\n", "a#: &a# [" + "*a@, " * 9 + "]"),
    "merged_aliases": laugh("a0: &a0 {k: 1}\n", "a#: &a# {<<: *a@, k#: *a@}"),
}


@pytest.mark.parametrize("kind", LAUGHS)
def test_values_that_expand_to_gigabytes_are_refused_before(kind: str, tmp_path: Path) -> None:
    error = error_of(LAUGHS[kind], tmp_path)
    assert (error.kind, error.path) == ("too_long", str(tmp_path / "run.yaml"))


def test_each_reference_is_followed_once_however_often_it_occurs(tmp_path: Path) -> None:
    text = laugh("a0: ''\n", "a#: '" + "${a@}" * 9 + "'", num=12)
    assert read(text, tmp_path)["a11"] == ""  # 9 ** 11 times otherwise


def test_override_that_expands_too_far_is_refused(tmp_path: Path) -> None:
    long = "x" * (MAX_EXPANDED // 20)
    assert error_of(f"a: {long}\n", tmp_path, "b=" + "${a}" * 21).kind == "too_long"
    assert len(read(f"a: {long}\n", tmp_path, "b=" + "${a}" * 19)["b"]) == 19 * len(long)


def test_files_that_include_each_other_ever_more_often_are_refused(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i}.yaml").write_text(f"include: [{i + 1}.yaml, {i + 1}.yaml]\n")
    (tmp_path / "12.yaml").write_text("a: 1\n")
    error = error_of("include: 0.yaml\n", tmp_path)
    assert (error.kind, error.expected) == ("too_long", f"at most {MAX_FILES}")


def test_keys_over_a_reference_are_refused_instead_of_replacing_it(tmp_path: Path) -> None:
    assert "a: keys and a reference don't merge" in str(error_of("b: {c: 1}\na: ${b}\n", tmp_path, "a.d=2"))


# --- the environment ----------------------------------------------------------------------------------

PLACES = "data: {tasks: burgers1d, root: '${oc.env:SCRATCH}'}\nreading: {num_workers: '${oc.env:NUM,auto}'}\n"


def test_places_and_ways_of_reading_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    found = read(PLACES, tmp_path, "checkpoint.dir=${data.root}/runs", "training.log_path=${oc.env:SCRATCH}")
    assert (found["data"]["root"], found["checkpoint"]["dir"]) == ("/scratch", "/scratch/runs")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.limit=${oc.env:N}", "data.limit"),
        ("data.tasks=['${oc.env:N}']", "data.tasks.0"),
        ("cache.dtype=float${reading.x}", "cache.dtype"),
        ("latent.encoder=${oc.env:N}", "latent.encoder"),
        ("training.latent_cache_dtype=${oc.env:N,float16}", "training.latent_cache_dtype"),
        ("tasks.mine=${reading}", "tasks.mine"),
    ],
)
def test_what_is_stored_must_not_come_from_the_environment(
    override: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("N", "16")
    error = error_of("reading: {x: '${oc.env:N}'}\n", tmp_path, override)
    assert (error.kind, error.found) == ("from_environment", "${oc.env:N}")
    assert f'{key}="$N"' in str(error)


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
    assert read(EVIL, tmp_path, "latent.encoder=os:system")["latent"]["encoder"] == "os:system"
    assert read(EVIL, tmp_path, **{"latent.encoder": name})["latent"]["encoder"] == name
    assert read("latent: {encoder: ups}\n", tmp_path)["latent"]["encoder"] == "ups"
