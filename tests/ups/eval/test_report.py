"""Reports: intervals, tables and pictures that a reader gets."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ups.errors import OutputError
from ups.eval.comparison import Scores
from ups.eval.figures import curves_figure, error_figure, fields_figure, spectra_figure
from ups.eval.report import Report, Row, TaskReport, show_evaluation
from ups.eval.report_page import to_html, write_report
from ups.eval.training_logs import StageLog
from ups.eval.trajectory_errors import Interval, Resamples
from ups_store.console import results

PNG = b"\x89PNG\r\n\x1a\n"


def scores(nrmse: Interval, **others: Interval) -> Scores:
    return Scores({"nrmse": nrmse, **others}, {"nrmse": [nrmse, nrmse]}, {"nrmse": nrmse.mean})


def report() -> Report:
    rows = [
        Row("operator", "operator", scores(Interval(0.1, 0.08, 0.12), vrmse=Interval(0.2, 0.1, 0.3))),
        Row("persistence", "persistence", scores(Interval(1.1, 1.0, 1.2)), note="the last frame, <kept>"),
        Row("autoencoder_floor", "autoencoder floor", scores(Interval(0.01, 0.009, 0.011))),
    ]
    task = TaskReport("burgers1d", "1 frame given, 2 predicted", rows, (0.5, 1.0), figures={"a & b": PNG})
    log = StageLog("operator", 10.0, 1.0, 8.0, 0.104, 100, 3200)
    return Report("Demo <1>", [task], "test", {"build": 2.0}, [log], 0.013, {"seed": 0}, {"curves": PNG})


def test_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    draws = [
        Resamples(50, num_resamples=400, seed=i).of_mean(random.normal(3.0, 2.0, 50)) for i in range(200)
    ]
    covered = np.mean([interval.low <= 3.0 <= interval.high for interval in draws])
    assert 0.88 <= covered <= 0.99


def test_bootstrap_of_equal_values_is_a_point_and_repeats() -> None:
    assert Resamples(5).of_mean([2.0] * 5) == Interval(2.0, 2.0, 2.0)
    values = np.arange(10.0)
    assert Resamples(len(values)).of_mean(values) == Resamples(len(values)).of_mean(values)


def test_bootstrap_of_nan_is_nan() -> None:
    assert np.isnan(Resamples(2).of_mean([1.0, np.nan]).mean)


def test_report_json_has_rows_by_name_with_intervals(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "reports" / "demo", report())
    found = json.loads(paths["json"].read_text())
    assert found["rows"]["operator"]["nrmse"] == {"mean": 0.1, "low": 0.08, "high": 0.12}
    assert found["rows"]["operator"]["by_step"]["nrmse"]["high"] == [0.12, 0.12]
    assert found["rows"] == found["tasks"]["burgers1d"]["rows"]
    assert found["tasks"]["burgers1d"]["t"] == [0.5, 1.0]
    assert found["seconds"] == {"build": 2.0}
    assert found["stages"]["operator"]["data_wait_share"] == 0.013
    assert found["data_wait_share"] == 0.013


def test_report_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    rows = [Row("fno", "FNO", scores(Interval(math.inf, math.nan, math.nan)))]
    path = write_report(tmp_path, Report("t", [TaskReport("burgers1d", "", rows, (1.0, 2.0))]))["json"]
    nothing = {"mean": None, "low": None, "high": None}
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["rows"]["fno"]["nrmse"] == nothing


def test_report_that_can_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in write_report(tmp_path, report()).values()}
    written = []

    def fail(number: int) -> None:
        written.append(number)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("ups.output.os.fsync", fail)
    with pytest.raises(OutputError, match="no room") as caught:
        write_report(tmp_path, report())
    assert (caught.value.exit_code, caught.value.path) == (6, str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_report_csv_has_a_line_per_row_metric_and_step() -> None:
    lines = list(csv.DictReader(io.StringIO(report().to_csv())))
    operator = [line for line in lines if line["row"] == "operator"]
    assert [(line["metric"], line["step"], line["t"]) for line in operator] == [
        ("nrmse", "", ""),
        ("vrmse", "", ""),
        ("pdebench_compat/nrmse", "", ""),
        ("nrmse", "1", "0.5"),
        ("nrmse", "2", "1.0"),
    ]
    assert float(operator[0]["high"]) == 0.12
    assert {line["row"] for line in lines} == {"operator", "persistence", "autoencoder_floor"}


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
    page = to_html(report())
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
    best = re.findall(r"<td class=best>([\d.]+)", to_html(report()))
    assert best == ["0.1", "0.2"]


def test_report_html_takes_the_longest_correlation_for_the_best() -> None:
    long, short = Interval(2.0, 1.0, 3.0), Interval(1.0, 0.5, 1.5)
    rows = [
        Row("fno", "FNO", Scores({"correlation_time": short})),
        Row("unet", "U-Net", Scores({"correlation_time": long})),
    ]
    page = to_html(Report("t", [TaskReport("burgers1d", "", rows)]))
    assert re.findall(r"<td class=best>([\d.]+)", page) == ["2"]


def test_report_html_says_whether_models_have_seen_the_trajectories() -> None:
    page = to_html(report())
    assert "that nothing was trained on or chosen by" in page
    assert "that models were trained on" in to_html(replace(report(), split="train"))


def test_report_html_says_where_errors_are_of_latents() -> None:
    rows = [Row("operator", "operator", scores(Interval(0.1, 0.08, 0.12)))]
    page = to_html(Report("t", [TaskReport("burgers1d", "", rows, (1.0, 2.0), space="latent")]))
    assert "All errors are of latents" in page
    assert "de-normalised fields" not in page


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


def test_table_on_a_terminal_of_80_columns_keeps_the_names_of_the_rows() -> None:
    tiny, long = Interval(0.00039, 0.000271, 0.000532), Interval(2.0, 1.9321, 2.0)
    row = Row("mean", "mean of the training split", scores(tiny, vrmse=tiny, correlation_time=long), note="n")
    out = io.StringIO()
    task = TaskReport("burgers1d", "1 frame given", [row], (0.5, 1.0))
    show_evaluation(Report("t", [task]), Console(file=out, width=80))
    text = out.getvalue()
    assert "mean of the training split" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for shown in (
        "0.00039",
        "0.00027",
        "0.00053",
        "1.9 to 2",
        "1 frame given",
        "mean of the training split: n",
    ):
        assert shown in text


def test_evaluation_on_stdout_has_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(report(), results())
    shown = capsys.readouterr().out
    assert "0.08 to 0.12" in shown
    assert "[" not in shown


def test_rows_of_the_same_value_are_best_together() -> None:
    rows = [
        Row(name, name, Scores({"correlation_time": Interval(2.0, 2.0, 2.0)})) for name in ("fno", "unet")
    ]
    page = to_html(Report("t", [TaskReport("burgers1d", "", rows)]))
    assert page.count("<td class=best>") == 2
