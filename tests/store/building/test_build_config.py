from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ups_store.build import BuildConfig, load_config
from ups_store.errors import ConfigError
from ups_store.sources.source_files import SplitFractions
from ups_store.sources.tasks import TASKS

CONFIGS = Path(__file__).resolve().parents[3] / "ups" / "configs" / "pdebench"


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDEBENCH_ROOT", raising=False)


def load(
    *overrides: str, yaml: str | bytes | None = None, folder: Path | None = None, **flags: Any
) -> BuildConfig:
    """Flags are keys of `data`; a task is given unless they or the YAML name one."""
    path = None
    if yaml is not None:
        assert folder is not None
        path = folder / "build.yaml"
        path.write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
    elif "tasks" not in flags:
        flags["tasks"] = "burgers1d"
    return load_config(
        path, flags={f"data.{key}": value for key, value in flags.items()}, overrides=overrides
    )


def error_of(*overrides: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return caught.value


# --- values and where they come from ------------------------------------------------------------------


def test_defaults_are_those_of_the_documentation() -> None:
    config = load()
    assert config.data.model_dump() == {
        "tasks": ("burgers1d",),
        "root": Path("data"),
        "split": ("train", "val", "test"),
        "files": None,
        "stage_dir": None,
        "follow_external": None,
        "reduce_space": 1,
        "reduce_time": 1,
        "split_fractions": (0.8, 0.1, 0.1),
        "limit": None,
        "on_nan": "fail",
        "source_digest": "full",
    }
    assert config.cache.model_dump() == {
        "dir": Path("cache"),
        "dtype": "float32",
        "codec": "none",
        "partitions": None,
        "encode_timeout_s": 600.0,
        "commit_timeout_s": 600.0,
        "remote": None,
        "remote_timeout_s": 60.0,
    }
    assert config.data.fractions == SplitFractions(0.8, 0.1, 0.1)


def test_overrides_win_over_flags_and_flags_over_the_file(tmp_path: Path) -> None:
    yaml = "data: {task: burgers1d, limit: 1, reduce_time: 1, reduce_space: 7}\n"
    config = load("data.limit=3", yaml=yaml, folder=tmp_path, limit=2, reduce_time=2)
    assert (config.data.limit, config.data.reduce_time, config.data.reduce_space) == (3, 2, 7)


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        ("burgers1d", ("burgers1d",)),
        ("burgers1d,cfd2d", ("burgers1d", "cfd2d")),
        (["cfd2d", "burgers1d", "cfd2d"], ("cfd2d", "burgers1d")),
    ],
)
def test_tasks_are_one_or_several_each_once(given: Any, tasks: tuple[str, ...]) -> None:
    assert load(tasks=given).data.tasks == tasks


def test_override_holds_lists_in_brackets_or_with_commas() -> None:
    assert load("data.files=[a.h5,b.h5]").data.files == ("a.h5", "b.h5")
    assert load("data.files=a.h5,b.h5").data.files == ("a.h5", "b.h5")
    assert load("data.split_fractions=[0.5,0.25,0.25]").data.split_fractions == (0.5, 0.25, 0.25)


def test_override_with_null_takes_the_value_back() -> None:
    assert load("data.limit=null", limit=3).data.limit is None


def test_root_is_the_variable_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDEBENCH_ROOT", "/from/variable")
    assert load().data.root == Path("/from/variable")
    assert load(root="/from/flag").data.root == Path("/from/flag")
    monkeypatch.setenv("PDEBENCH_ROOT", "")
    assert load().data.root == Path("data")


@pytest.mark.parametrize(
    "name", ["a${b}", "${oc.env:HOME}", r"\${x}", r"a\\${x}", "a$b{c}", "ü–日 '\"[x]", "a=b"]
)
def test_flag_is_taken_as_it_is_written(name: str) -> None:
    assert load(root=name).data.root == Path(name)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_configuration_of_every_task_loads(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.data.tasks == (name,)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("data.reduce_spce=2", "did you mean data.reduce_space?"),
        ("data.taks=burgers1d", "did you mean data.tasks?"),
        ("cache.dirr=x", "did you mean cache.dir?"),
        ("cach.dir=x", "did you mean cache?"),
        ("dat.tasks=x", "did you mean data?"),
        ("zzz=1", "known keys: data.tasks, data.root, data.split, data.files, "),
        ("=1", "known keys: data.tasks"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(override: str, hint: str) -> None:
    error = error_of(override)
    assert error.kind == "unknown_key"
    assert error.hint is not None
    assert error.hint.startswith(hint)


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    error = error_of(yaml="data: {task: burgers1d}\ncache: {dtyp: float16}\n", folder=tmp_path)
    assert (error.path, error.found) == (str(tmp_path / "build.yaml"), "'cache.dtyp'")


def test_dotted_key_in_yaml_is_explained(tmp_path: Path) -> None:
    error = error_of(yaml="data: {task: burgers1d}\ndata.root: x\n", folder=tmp_path)
    assert (error.kind, error.found) == ("unknown_key", "'data.root'")
    assert "indent" in str(error)


def test_value_of_a_flag_or_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    yaml = "data: {task: burgers1d, limit: 0}\n"
    assert error_of(yaml=yaml, folder=tmp_path).path == str(tmp_path / "build.yaml")
    assert error_of(yaml=yaml, folder=tmp_path, limit=-1).path is None
    assert error_of("data.tasks=nonsense", yaml=yaml.replace("0", "1"), folder=tmp_path).path is None
    error = error_of(yaml="data: {task: nonsense}\n", folder=tmp_path)
    assert (error.kind, error.path) == ("unknown_task", str(tmp_path / "build.yaml"))


def test_missing_task_says_how_to_give_it() -> None:
    error = error_of(tasks=None)
    assert (error.kind, error.expected) == ("missing_key", "data.tasks")


@pytest.mark.parametrize("name", ["burger1d", "", "train"])
def test_unknown_task_is_refused(name: str) -> None:
    assert error_of(tasks=name).kind == "unknown_task"


@pytest.mark.parametrize("name", ["", "dev", "Train"])
def test_unknown_split_is_refused(name: str) -> None:
    assert error_of(split=name).kind == "unknown_split"


@pytest.mark.parametrize(
    ("override", "expected", "found"),
    [
        ("data.limit=0", "greater than or equal to 1", "0"),
        ("data.limit=-5", "greater than or equal to 1", "-5"),
        ("data.limit=many", "a valid integer", "'many'"),
        ("data.reduce_space=true", "a valid integer", "True"),
        ("data.reduce_space=2.5", "a valid integer", "2.5"),
        ("data.reduce_time=0", "greater than or equal to 1", "0"),
        ("data.split_fractions=0.5", "a list", "0.5"),
        ("data.split_fractions=[0.5,0.5]", "one more value", "[0.5, 0.5]"),
        ("data.split_fractions=[0.5,0.5,0,0]", "at most 3 values", "[0.5, 0.5, 0, 0]"),
        ("data.split=[]", "1 or more values", "[]"),
        ("data.tasks=[]", "1 or more values", "[]"),
        ("data.files=[]", "1 or more values", "[]"),
        ("data.files=[1]", "a valid string", "1"),
        ("data.on_nan=ignore", "'fail' or 'keep'", "'ignore'"),
        ("data.source_digest=none", "'full' or 'sampled'", "'none'"),
        ("cache.dtype=int8", "'float16', 'bfloat16', 'float32' or 'float64'", "'int8'"),
        ("cache.dir=null", "a path", "None"),
        ("data=3", "keys and values", "3"),
        ("cache=x", "keys and values", "'x'"),
    ],
)
def test_value_of_another_kind_is_refused(override: str, expected: str, found: str) -> None:
    error = error_of(override)
    assert error.problem.startswith(override.partition("=")[0])
    assert (error.expected, error.found) == (expected, found)


@pytest.mark.parametrize("fractions", [[0.9, 0.9, 0.9], [0.8, 0.1, -0.1], [float("nan"), 0.1, 0.1]])
def test_fractions_that_share_out_too_much_or_less_than_nothing_are_refused(fractions: list[float]) -> None:
    assert error_of(split_fractions=fractions).kind == "bad_fractions"


@pytest.mark.parametrize("override", ["foo", "--limit", ""])
def test_override_without_a_value_is_refused(override: str) -> None:
    error = error_of(override)
    assert (error.expected, error.found) == ("key=value", repr(override))


@pytest.mark.parametrize("override", ["data.files=[a", "data.files={a: b", "data.limit='3"])
def test_override_that_is_not_yaml_is_refused(override: str) -> None:
    error = error_of(override)
    assert (error.problem, error.found) == ("overrides", repr(override))


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("cache.dir=${nothing.there}", "check the dotted keys"),
        ("cache.dir=${oc.env:NOT_SET}", "no variable NOT_SET in the environment"),
        ("cache.dir=${", "check the dotted keys"),
    ],
)
def test_reference_to_nothing_is_refused(override: str, hint: str) -> None:
    assert hint in str(error_of(override))


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("data: {task: burgers1d", "is not YAML"),
        ("data:\n  task: burgers1d\n  task: cfd1d\n", "duplicate key"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("&a [*a]", "is not YAML"),
        ("- 1\n", "expected keys and values, found a list"),
        ("3\n", "a single value instead of keys"),
        ("data: 3\n", "expected keys and values, found 3"),
        ("data:\n", "expected keys and values, found None"),
        ("data: {task: burgers1d, root: '???'}\n", "mandatory"),
        ("data: {task: burgers1d, 1: 2}\n", "expected a name, found 1"),
        ("", "missing key: expected data.tasks"),
    ],
)
def test_file_that_is_no_configuration_is_refused_by_name(
    yaml: str | bytes, message: str, tmp_path: Path
) -> None:
    error = error_of(yaml=yaml, folder=tmp_path)
    assert error.path == str(tmp_path / "build.yaml")
    assert message.lower() in str(error).lower()


@pytest.mark.parametrize(("name", "reason"), [("gone.yaml", "No such file"), (".", "Is a directory")])
def test_file_that_can_not_be_read_is_named(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
    assert caught.value.hint == "check the name; `ups configs` lists those that are shipped"


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 100_000])
def test_file_that_nests_too_deep_is_refused(text: str, tmp_path: Path) -> None:
    error = error_of(yaml=text, folder=tmp_path)
    assert (error.kind, error.path) == ("too_deep", str(tmp_path / "build.yaml"))


@pytest.mark.parametrize(
    "override", ["data.files=" + "[" * 60_000, "a." * 60_000 + "a=1"], ids=["value", "key"]
)
def test_override_that_nests_too_deep_is_refused(override: str) -> None:
    assert error_of(override).kind == "too_deep"


def test_file_of_references_alone_is_refused(tmp_path: Path) -> None:
    error = error_of(yaml="a: " + "${" * 60_000, folder=tmp_path)
    assert (error.kind, error.found) == ("too_long", 60_000)


def test_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    assert error_of(yaml=b"# no end\n" * 150_000, folder=tmp_path).kind == "too_long"


@pytest.mark.parametrize(
    ("yaml", "hint"),
    [
        ("data: {task: burgers1d", "check the indentation, brackets and quotes"),
        ("a: 1\na: 2\n", "keep one of them"),
        ("a: !path b\n", "write plain values"),
        ("a: *b\n", "quote values that start with"),
        (b"a: \xff\n", "save it as UTF-8"),
        ("a: 1\n---\nb: 2\n", "keep one document"),
    ],
)
def test_hint_fits_what_is_wrong_with_a_file(yaml: str | bytes, hint: str, tmp_path: Path) -> None:
    assert hint in str(error_of(yaml=yaml, folder=tmp_path).hint)
