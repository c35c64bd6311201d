"""The HTML report in a real headless Chromium: it is laid out, its pictures show, and it asks for nothing."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from small_simulators import configure, make_autoencoder, make_data, make_simulator

from ups.eval.evaluate import evaluate
from ups.eval.report import write_report
from ups.eval.runs import Run

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
    pytest.mark.rendered,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_data(tmp_path_factory.mktemp("run"))
    config = configure(root)
    report = evaluate(config, [Run(make_simulator(config, make_autoencoder(config)))], phases={"data": 2.5})
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
    """A script of the test's own measures the page, which has none, in a frame.

    Windows of Chromium are 500 wide at least, frames aren't. Virtual time stands still while anything is
    loaded, so what is dumped is never the page before that.
    """
    around = tmp_path / "around.html"
    around.write_text(
        f"""<title>not measured</title><iframe style="border: 0; width: {width}px; height: {HEIGHT}px"
        srcdoc="{html.escape(page.read_text())}"></iframe><script>addEventListener("load", () => {{
          const framed = frames[0].document;
          const loaded = [...framed.images].every(image => image.naturalWidth > 0);
          const widths = [framed.documentElement.scrollWidth, frames[0].innerWidth];
          document.title = [...widths, framed.images.length, loaded].join(" ");
        }})</script>"""
    )
    budget = "--virtual-time-budget=10000"  # milliseconds
    dom = browse(around, tmp_path / "profile", "--dump-dom", "--window-size=1600,3000", budget).stdout
    num_images = page.read_text().count("<img ")
    assert re.findall("<title>.*?</title>", dom)[0] == f"<title>{width} {width} {num_images} true</title>"
