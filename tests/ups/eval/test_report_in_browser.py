"""The HTML report in a real headless Chromium: it is laid out, its pictures show, and it asks for nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from small_simulators import configure, make_autoencoder, make_data, make_simulator

from ups.eval.evaluate import evaluate
from ups.eval.report_page import write_report

torch.set_num_threads(1)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Without these it looks for updates and for a GPU, and doesn't run as root.
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    "--hide-scrollbars",
]
HEIGHT = 2600

pytestmark = [
    pytest.mark.multi_process,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_data(tmp_path_factory.mktemp("run"))
    config = configure(root)
    report = evaluate(config, make_simulator(config, make_autoencoder(config)), phases={"data": 2.5})
    return write_report(root / "report", report)["html"]


def browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [BROWSER, *QUIET, offline, f"--user-data-dir={profile}", *flags, page.as_uri()]
    environment = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)


def test_browser_finds_the_tables_and_every_picture(page: Path, tmp_path: Path) -> None:
    dom = browse(page, tmp_path, "--dump-dom").stdout
    assert dom.count("<img ") == page.read_text().count("<img ") >= 4
    for text in ("persistence", "autoencoder floor", "nRMSE", "The run", "resolved configuration"):
        assert text in dom
    assert dom.count("<tr>") == page.read_text().count("<tr>")


@pytest.mark.parametrize("width", [400, 1400])
def test_browser_draws_the_pictures_within_the_page(page: Path, tmp_path: Path, width: int) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", f"--screenshot={picture}", f"--window-size={width},{HEIGHT}")
    pixels = imread(picture)[..., :3]
    assert pixels.shape == (HEIGHT, width, 3)
    coloured = np.ptp(pixels, axis=2) > 0.25  # text and lines of tables are grey
    assert coloured.mean() > 0.02
    assert np.flatnonzero(coloured.any(1)).max() > HEIGHT / 2  # more than the first picture
    assert (pixels[:, :5] > 0.99).all()
    assert (pixels[:, -5:] > 0.99).all()  # nothing is wider than the page


@pytest.mark.parametrize("width", [400, 1400])
def test_page_scrolls_within_tables_and_wide_figures_only(page: Path, tmp_path: Path, width: int) -> None:
    """A script of the test's own measures a copy of the page, which has none."""
    probe = """<script>addEventListener("load", () => {
      const loaded = [...document.images].every(image => image.naturalWidth > 0);
      document.title = [document.documentElement.scrollWidth, innerWidth, loaded].join(" ");
    })</script></body>"""
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</body>", probe))
    dom = browse(copy, tmp_path / "profile", "--dump-dom", f"--window-size={width},{HEIGHT}").stdout
    assert f"<title>{width} {width} true</title>" in dom
