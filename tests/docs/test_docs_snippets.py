"""The Python of README and docs runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entry_points import install_entry_points
from remote_stores import object_server
from small_stores import build

import ups_store
from tools.docs_reference import reference_pages

ROOT = Path(__file__).parents[2]
NUM_SAMPLES, NUM_STEPS, NUM_POINTS = 3, 5, 8


def snippets(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(code: str) -> dict[str, Any]:
    """The variables that a block leaves."""
    variables: dict[str, Any] = {}
    exec(compile(code, "snippet", "exec"), variables)
    return variables


@pytest.fixture
def fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Fields of a store as `ups_store.build` makes them, under the name that the pages use."""
    monkeypatch.chdir(tmp_path)
    shape = (NUM_SAMPLES, NUM_STEPS, NUM_POINTS, 1)
    fields = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    build(
        tmp_path / "burgers1d_train.zarr.zip",
        {"fields": fields, "nu": np.full(NUM_SAMPLES, 0.01)},
        dims={"fields": ("sample", "time", "x", "channel"), "t": ("time",), "x": ("x",)},
        constants={
            "t": np.linspace(0, 1, NUM_STEPS, dtype=np.float32),
            "x": np.linspace(0, 1, NUM_POINTS + 1, dtype=np.float32)[:-1],
        },
    )
    return fields


def test_zarr_snippet_reads_the_last_sample(fields: np.ndarray) -> None:
    (code,) = [code for code in snippets("docs/guides/interop.md") if "zarr.open_group" in code]
    left = run(code)
    np.testing.assert_array_equal(left["sample"], fields[-1])
    left["store"].close()


def test_xarray_snippet_finds_places_by_x_and_times_by_t(fields: np.ndarray) -> None:
    (code,) = [code for code in snippets("docs/guides/interop.md") if "import xarray" in code]
    left = run(code)
    np.testing.assert_array_equal(left["series"], fields[-1, :, NUM_POINTS // 2])
    np.testing.assert_array_equal(left["frame"], fields[-1, 1])
    assert left["dataset"]["t"].dims == ("time",)
    assert set(left["dataset"].coords) == {"t", "x"}
    left["store"].close()


def test_xarray_snippet_of_the_reading_page_opens_lazily(
    fields: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = pytest.importorskip("xarray.backends.plugins")
    monkeypatch.syspath_prepend(install_entry_points(tmp_path / "site", "xarray.backends"))
    plugins.list_engines.cache_clear()
    (code,) = [code for code in snippets("docs/guides/read.md") if "xarray" in code]
    left = run(code)
    np.testing.assert_array_equal(left["series"], fields[-1, :, NUM_POINTS // 2])
    np.testing.assert_allclose(left["mean"], fields.mean(0), rtol=1e-5)
    assert not left["store"].to_xarray()["fields"]._in_memory
    left["dataset"].close()
    plugins.list_engines.cache_clear()


def test_snippets_of_object_stores_run_on_one(fields: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    first, second, third = snippets("docs/guides/remote.md")
    with object_server(monkeypatch) as server:
        data = Path("burgers1d_train.zarr.zip").read_bytes()
        server.objects["bucket/burgers1d_train.zarr.zip"] = data
        left = run(first)
        np.testing.assert_array_equal(left["batch"]["fields"], fields[[2, 0]])
        np.testing.assert_array_equal(left["windows"]["fields"], [fields[1, :2], fields[2, 1:3]])
        run(second)["store"].close()
        np.testing.assert_array_equal(run(third)["fields"], fields[1])


def test_readme_snippet_writes_and_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (first,) = snippets("README.md")
    assert run(first)["batch"]["u"].shape[1:] == (64, 256)


def test_snippet_that_commits_by_number_writes_and_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = snippets("docs/store.md")
    small = code.replace("(1000, 64, 256)", "(600, 4, 8)").replace("(64, 256)", "(4, 8)")
    assert small.count("(600, 4, 8)") == 1
    left = run(small)
    assert left["batch"]["u"].shape == (3, 4, 8)
    expected = np.random.default_rng(512).standard_normal((4, 8), "f4")
    np.testing.assert_array_equal(left["batch"]["u"][2], expected)
    assert len(ups_store.open("wave_train.zarr.zip")) == 600


def test_snippets_of_the_guide_to_writing_run(tmp_path: Path) -> None:
    """As scripts, for workers import the function."""
    *plain, last = [code for code in snippets("docs/guides/write.md") if "frames" not in code]
    (frames,) = [code for code in snippets("docs/guides/write.md") if "frames" in code]
    frames = f"paths = ['a', 'bc']\ndef decode(path): yield from ([ord(x)] for x in path)\n{frames}"
    plain.append(last + "\nassert len(train) == 1000 and arrays['u'].shape == (100, 64)")
    for code in (
        "\n".join(["import numpy as np", *plain]),
        f"import ups_store\n{frames}    print(store['image'])",
    ):
        script = tmp_path / "script.py"
        script.write_text(code)
        subprocess.run([sys.executable, script], cwd=tmp_path, check=True, timeout=100)
    with ups_store.open(tmp_path / "frames.zarr.zip") as store:
        assert store["image"][:, 0].tolist() == list(map(ord, "abc"))


PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_links_lead_to_files_and_headings_that_exist() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", (ROOT / page).read_text())
        for target, anchor in links:
            there = (ROOT / page).parent / target if target else ROOT / page
            if is_generated(there):
                continue  # `make docs` checks anchors there
            assert there.exists(), (page, target)
            if anchor:
                assert anchor[1:] in headings(there), (page, anchor)


def test_quickstart_begins_with_the_example_of_the_readme() -> None:
    assert snippets("docs/quickstart.md")[0] == snippets("README.md")[0]


def is_generated(page: Path) -> bool:
    """Whether the site has the page, made from code, although a clone has no such file."""
    return os.path.relpath(page, ROOT / "docs") in reference_pages()


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_ragged_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = run("\n".join(snippets("docs/guides/ragged.md")))
    assert left["padded"]["points"].shape == (2, 4000, 3)
    assert left["batch"]["points"].shape[2:] == (3,)
    with ups_store.open("many.zarr.zip") as store:
        assert len(store) == 1000
        assert store.verify().ok
    assert len(left["store"]) == 1000
    left["store"].close()
