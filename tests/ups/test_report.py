"""Reports: intervals, tables and pictures that a reader gets."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ups.eval.figures import curves_figure, error_figure, fields_figure, spectra_figure
from ups.eval.intervals import Interval, bootstrap
from ups.eval.report import Report, Row, TaskReport, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def report() -> Report:
    rows = [
        Row("operator", "operator", {"nrmse": Interval(0.1, 0.08, 0.12), "vrmse": Interval(0.2, 0.1, 0.3)}),
        Row("persistence", "persistence", {"nrmse": Interval(1.1, 1.0, 1.2)}, note="the last frame, <kept>"),
        Row("autoencoder_floor", "autoencoder floor", {"nrmse": Interval(0.01, 0.009, 0.011)}),
    ]
    task = TaskReport("burgers1d", "1 frame given, 20 predicted", rows, {"a & b": PNG})
    return Report("Demo <1>", [task], {"build": 2.0}, 0.013, {"seed": 0}, {"curves": PNG})


def test_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    draws = [bootstrap(random.normal(3.0, 2.0, 50), num_resamples=400, seed=i) for i in range(200)]
    covered = np.mean([interval.low <= 3.0 <= interval.high for interval in draws])
    assert 0.88 <= covered <= 0.99


def test_bootstrap_of_equal_values_is_a_point_and_repeats() -> None:
    assert bootstrap([2.0] * 5) == Interval(2.0, 2.0, 2.0)
    values = np.arange(10.0)
    assert bootstrap(values) == bootstrap(values)


def test_bootstrap_of_nan_is_nan() -> None:
    assert np.isnan(bootstrap([1.0, np.nan]).mean)


def test_report_json_has_rows_by_name_with_intervals(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "reports" / "demo", report())
    found = json.loads(paths["json"].read_text())
    assert found["rows"]["operator"]["nrmse"] == {"mean": 0.1, "low": 0.08, "high": 0.12}
    assert found["rows"] == found["tasks"]["burgers1d"]["rows"]
    assert found["seconds"] == {"build": 2.0}
    assert found["data_wait_share"] == 0.013


def test_report_csv_has_a_line_per_row_and_metric() -> None:
    lines = list(csv.DictReader(io.StringIO(report().to_csv())))
    assert [(line["row"], line["metric"]) for line in lines] == [
        ("operator", "nrmse"),
        ("operator", "vrmse"),
        ("persistence", "nrmse"),
        ("autoencoder_floor", "nrmse"),
    ]
    assert float(lines[0]["high"]) == 0.12


class Tags(HTMLParser):
    """Start tags with their attributes, and whether all are closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_html_is_well_formed_and_loads_nothing() -> None:
    page = report().to_html()
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    sources = [value for _, attrs in parser.seen for name, value in attrs.items() if name in ("src", "href")]
    assert len(sources) == 2
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    assert "script" not in {tag for tag, _ in parser.seen}
    assert "Demo &lt;1&gt;" in page
    assert "&lt;kept&gt;" in page


def test_report_html_marks_the_best_row_that_is_not_the_floor() -> None:
    best = re.findall(r"<td class=best>([\d.]+)", report().to_html())
    assert best == ["0.1", "0.2"]


@pytest.mark.parametrize("shape", [(20, 64), (20, 16, 32), (1, 16, 16)])
def test_fields_figure_is_a_picture_of_every_dimension(shape: tuple[int, ...]) -> None:
    truth = np.random.default_rng(0).standard_normal(shape)
    picture = fields_figure(truth, truth + 0.1, t=np.arange(float(shape[0])), extent=(1.0, 2.0), quantity="u")
    assert picture.startswith(PNG)
    assert len(picture) > 5000


def test_fields_figure_of_a_constant_field_is_drawn() -> None:
    flat = np.zeros((5, 8))
    assert fields_figure(flat, flat, t=np.arange(5.0), extent=(1.0,), quantity="u").startswith(PNG)


def test_line_figures_are_pictures() -> None:
    values = np.geomspace(1e-3, 1.0, 20)
    assert error_figure({"operator": values}, t=np.arange(20.0), metric="nRMSE").startswith(PNG)
    assert spectra_figure({"truth": values}, title="last frame").startswith(PNG)
    assert curves_figure({"train": (range(20), values)}, label="loss").startswith(PNG)
