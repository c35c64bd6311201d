"""What a worker of `ups_store.write(map=...)` does, and what becomes of its answers, in one process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mapped_functions import badly, one, several
from remote_stores import Counted

import ups_store
from ups_store.errors import ReadTimeoutError, SourceError, SpecError
from ups_store.sources.reader_pool import Patience
from ups_store.writing import mapped
from ups_store.writing.mapped import MapJob, text_of


@pytest.fixture(autouse=True)
def own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker of this test has unpickled is forgotten."""
    monkeypatch.setattr(mapped, "_functions", {})
    monkeypatch.setattr(mapped, "_imported_main", {})


def job_of(function: Callable[[Any], Any], inputs: Any, names: list[str] | None = None) -> MapJob:
    return MapJob(function, inputs, 0, Patience(timeout_s=1.0, retries=0), names)


def answers(function: Callable[[Any], Any], inputs: Any, *, first: int = 0, **options: Any) -> list[Any]:
    """What a worker answers to the calls for the inputs."""
    calls = mapped.calls_of(job_of(function, inputs, **options), first)
    return [pickle.loads(pickle.dumps(call)).run(Counted()) for _, call in calls]


def array(number: int) -> np.ndarray[Any, Any]:
    return np.full(3, number)


def pair(number: int) -> tuple[int, str]:
    return number, "x"


def silent(number: int) -> None:
    raise KeyError


def ours(number: int) -> None:
    raise SpecError("not this one", kind="mine")


@pytest.mark.parametrize(
    ("function", "names", "expected"),
    [
        (array, None, [{"data": [5, 5, 5]}]),
        (pair, ["i", "text"], [{"i": 5, "text": "x"}]),
        (several, None, [{"i": 5, "j": 0, "text": "xxxxx"}]),
    ],
)
def test_what_functions_give_are_samples(
    function: Callable[[Any], Any], names: list[str] | None, expected: list[dict[str, Any]]
) -> None:
    (found,) = answers(function, [5], names=names)
    assert [
        {name: getattr(value, "tolist", lambda v=value: v)() for name, value in each.items()}
        for each in found
    ] == expected


@pytest.mark.parametrize(("function", "found"), [(silent, "KeyError"), (ours, "SpecError: not this one")])
def test_function_that_fails_is_an_error_with_its_stack(function: Callable[[Any], Any], found: str) -> None:
    for work in (
        lambda: answers(function, [1]),
        lambda: list(mapped.map_inputs(job_of(function, [1]), first=0, on_error="fail")),
    ):
        with pytest.raises(SourceError) as caught:
            work()
        assert (caught.value.kind, caught.value.path, caught.value.found) == ("function_failed", "1", found)
        assert function.__name__ in caught.value.__notes__[0]
    (skipped,) = mapped.map_inputs(job_of(function, [1]), first=0, on_error="skip")
    assert (skipped.samples, getattr(skipped.error, "kind", "")) == ([], "function_failed")


@pytest.mark.parametrize(
    ("answer", "kind", "hint"),
    [
        (SourceError("it was lost", kind="reader_died", path="3"), "reader_died", "lower num_workers"),
        (ReadTimeoutError("took too long", path="3"), "read_timeout", "raise item_timeout_s"),
    ],
)
def test_answer_without_samples_is_an_error_or_left_out(
    answer: Any, kind: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SimpleNamespace(ask_each=lambda calls, raises: [answer for _ in calls])
    monkeypatch.setattr(mapped, "ReaderPool", lambda *args, **options: nullcontext(pool))
    job = replace(job_of(one, [3]), num_workers=1)
    with pytest.raises(SourceError) as caught:
        list(mapped.map_inputs(job, first=0, on_error="fail"))
    assert (caught.value.kind, caught.value.path) == (kind, "3")
    assert hint in str(caught.value.hint)
    (skipped,) = mapped.map_inputs(job, first=0, on_error="skip")
    assert (skipped.samples, getattr(skipped.error, "kind", "")) == ([], kind)


def test_what_is_no_sample_names_its_input_and_is_never_left_out() -> None:
    """Else a mistake in the function, or in what was asked for, would look like inputs that failed."""
    with pytest.raises(SpecError) as caught:
        list(mapped.map_inputs(job_of(badly, [12]), first=0, on_error="skip"))
    assert (caught.value.path, caught.value.sample) == ("12", 0)


class Unshown:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\nb", "a\\nb"), (Path("x" * 300), "x" * 200), ((1, 2), "(1, 2)"), (Unshown(), "Unshown")],
)
def test_inputs_are_shown_in_one_line(value: Any, text: str) -> None:
    assert text_of(value) == text


SCRIPT = """
import ups_store
def double(number):
    return {"i": 2 * number}
GUARD
    ups_store.write("a.zarr.zip", map=double, inputs=range(3), identity={})
"""


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    """The modules; `__main__` and the worker's own are as before afterwards."""
    names = "__main__", "__mp_main__"
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    yield sys.modules  # type: ignore[misc]
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def main_module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def defined_in_main(number: int) -> None:
    pass


def test_script_of_a_function_is_found_however_it_was_started(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script_of(function: Callable[[Any], Any]) -> dict[str, str]:
        ((_, call),) = mapped.calls_of(job_of(function, [1]), 0)
        return call.arguments[3]  # type: ignore[no-any-return]

    assert script_of(one) == {}
    monkeypatch.setattr(mapped, "_pickled", lambda value, what: b"")
    monkeypatch.setattr(defined_in_main, "__module__", "__main__")
    modules["__main__"] = main_module("__main__", __file__="/a/script.py")
    assert script_of(defined_in_main) == {"init_main_from_path": "/a/script.py"}
    modules["__main__"] = main_module("__main__", __spec__=type("Spec", (), {"name": "a.b"}))
    assert script_of(defined_in_main) == {"init_main_from_name": "a.b"}
    modules["__main__"] = main_module("__main__")
    with pytest.raises(SpecError, match="interactive session") as caught:
        script_of(defined_in_main)
    assert caught.value.kind == "function"


@pytest.mark.parametrize("is_guarded", [True, False])
def test_worker_runs_the_script_for_its_functions_alone(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", 'if __name__ == "__main__":' if is_guarded else "if True:"))
    pickled = b"c__mp_main__\ndouble\n."
    main = {"init_main_from_path": str(script)}
    call = mapped.Call(mapped._call_in_worker, ("4", pickled, pickle.dumps(4), main, None), "4", "input 0")
    if is_guarded:
        assert call.run(Counted()) == [{"i": 8}]
        script.write_text("raise AssertionError  # run once")
        assert call.run(Counted()) == [{"i": 8}]
    else:
        with pytest.raises(ups_store.SpecError, match="below `if __name__") as caught:
            call.run(Counted())
        assert caught.value.kind == "main"
    assert not mapped._is_importing_main
    assert not (tmp_path / "a.zarr.zip").exists()
