"""Reports: intervals, tables and pictures that a reader gets."""

from __future__ import annotations

import csv
import errno
import html
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ups.errors import OutputError
from ups.eval.figure_style import Drawing
from ups.eval.intervals import Interval, Paired
from ups.eval.metrics import FIELD_METRICS
from ups.eval.report import Report, Row, TaskReport, show_evaluation, to_html, write_report
from ups.eval.scores import Scores
from ups.eval.training_logs import StageLog
from ups_store.console import results

ABOUT = {metric.name: metric for metric in FIELD_METRICS}


# Rendered once, as they take most of the time.
def draw(figure: Figure) -> None:
    figure.subplots().plot([1, 2], [0.1, math.nan], label="operator")


SPECTRA = Drawing("burgers1d_spectra", "a & b", (3.0, 2.0), draw)
CURVES = Drawing("training_loss", "curves", (6.9, 2.0), draw)


def scores(nrmse: Interval, **others: Interval) -> Scores:
    by_step, compat = {"nrmse": [nrmse, nrmse]}, {"nrmse": nrmse.mean}
    return Scores({"nrmse": nrmse, **others}, by_step, pdebench_compat=compat, about=ABOUT)


def report() -> Report:
    rows = [
        Row("operator", "operator", scores(Interval(0.1, 0.08, 0.12), vrmse=Interval(0.2, 0.1, 0.3))),
        Row("persistence", "persistence", scores(Interval(1.1, 1.0, 1.2)), note="the last frame, <kept>"),
        Row("autoencoder_floor", "autoencoder floor", scores(Interval(0.01, 0.009, 0.011))),
    ]
    task = TaskReport("burgers1d", "1 frame given, 2 predicted", rows, (0.5, 1.0), figures=[SPECTRA])
    log = StageLog("operator", 10.0, 1.0, 8.0, 0.104, 100, 3200)
    return Report("Demo <1>", [task], "test", {"build": 2.0}, [log], 0.013, {"seed": 0}, [CURVES])


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
    write_report(tmp_path, report())
    before = contents(tmp_path)
    written = []

    def fail(number: int) -> None:
        written.append(number)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("ups.output.os.fsync", fail)
    with pytest.raises(OutputError, match="no room") as caught:
        write_report(tmp_path, report())
    assert (caught.value.exit_code, caught.value.path) == (6, str(tmp_path))
    assert contents(tmp_path) == before


def test_report_stands_beside_the_files_of_its_figures(tmp_path: Path) -> None:
    write_report(tmp_path, report())
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{stem}.{suffix}" for stem in (SPECTRA.name, CURVES.name) for suffix in SPECTRA.files}
    assert (tmp_path / "figures" / "training_loss.csv").read_text() == (
        "panel,line,x,y\n,operator,1.0,0.1\n,operator,2.0,\n"
    )
    before = contents(tmp_path)
    write_report(tmp_path, report())
    assert contents(tmp_path) == before


def test_figures_that_a_report_has_no_more_go_and_others_stay(tmp_path: Path) -> None:
    write_report(tmp_path, report())
    (tmp_path / "figures" / "mine.svg").write_text("kept")
    write_report(tmp_path, replace(report(), figures=()))
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"mine.svg", *(f"{SPECTRA.name}.{suffix}" for suffix in SPECTRA.files)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    sources = [attrs["src"] for _, attrs in parser.seen if "src" in attrs]
    assert len(sources) == 2
    assert all(str(source).startswith("data:image/svg+xml;base64,") for source in sources)
    links = [attrs["href"] for tag, attrs in parser.seen if "href" in attrs and tag == "a"]
    assert links[:3] == [f"figures/burgers1d_spectra.{suffix}" for suffix in ("svg", "pdf", "csv")]
    assert "link" not in {tag for tag, _ in parser.seen}
    assert "script" not in {tag for tag, _ in parser.seen}
    assert "Demo &lt;1&gt;" in page
    assert "&lt;kept&gt;" in page


def test_report_html_marks_the_best_row_that_is_not_the_floor() -> None:
    best = re.findall(r"<td class=best>([\d.]+)", to_html(report()))
    assert best == ["0.1", "0.2"]


def test_report_html_takes_the_longest_correlation_for_the_best() -> None:
    long, short = Interval(2.0, 1.0, 3.0), Interval(1.0, 0.5, 1.5)
    rows = [
        Row("fno", "FNO", Scores({"correlation_time": short}, about=ABOUT)),
        Row("unet", "U-Net", Scores({"correlation_time": long}, about=ABOUT)),
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


def test_seeds_and_verdicts_stand_in_every_form_of_the_report() -> None:
    near = Paired(Interval(0.017, 0.012, 0.022), Interval(1.17, 1.12, 1.23), "behind")
    rows = [
        Row("operator", "latent operator", scores(Interval(0.1, 0.08, 0.12)), seeds=(0, 1, 2)),
        Row("fno", "FNO (60 s)", scores(Interval(0.117, 0.1, 0.13)), seeds=(0,), paired={"nrmse": near}),
    ]
    task = TaskReport("burgers1d", "1 frame given.", rows, (0.5, 1.0), num_trajectories=20)
    found = Report("t", [task], test_uses=1)
    out = io.StringIO()
    show_evaluation(found, Console(file=out, width=80))
    for shown in (
        "3 seeds",
        "1 seed",
        "behind",
        "1.17x, 1.12 to 1.23",
        "The test split was used once so far.",
    ):
        assert shown in out.getvalue()
    assert "over training seeds (up to 3 a row) and 20 trajectories" in " ".join(out.getvalue().split())
    page = to_html(found)
    for shown in (
        "3 seeds",
        "behind</div><div>+0.017",
        "[0.012, 0.022]",
        "1.17x",
        "The test split was used once so far.",
    ):
        assert shown in page
    fno = found.to_json()["rows"]["fno"]
    assert fno["paired"]["nrmse"]["ratio"] == {"mean": 1.17, "low": 1.12, "high": 1.23}
    line = next(line for line in csv.DictReader(io.StringIO(found.to_csv())) if line["row"] == "fno")
    assert [line[name] for name in ("seeds", "difference_low", "verdict")] == ["0", "0.012", "behind"]


def test_report_of_few_trajectories_says_why_it_has_no_intervals() -> None:
    rows = [Row("operator", "operator", scores(Interval(0.1)))]
    found = Report("t", [TaskReport("burgers1d", "", rows, (0.5, 1.0), num_trajectories=19)])
    assert "No intervals and no verdicts: 19 trajectories, fewer than 20" in to_html(found)
    assert "nan" not in to_html(found)
    out = io.StringIO()
    show_evaluation(found, Console(file=out, width=80))
    assert "nan" not in out.getvalue()
    one = replace(found.tasks[0], num_trajectories=20)
    assert "another training may end otherwise" in one.confidence
    assert "can't be told" not in one.confidence, "there is nothing to compare"


@pytest.mark.parametrize(("num", "seeds"), [(19, (0,)), (20, (0, 1))])
def test_verdict_is_explained_where_it_stands(num: int, seeds: tuple[int, ...]) -> None:
    untold = Paired(Interval(0.0, -1.0, 1.0), Interval(1.0, 0.5, 2.0), "can't be told")
    rows = [Row("operator", "operator", scores(Interval(0.1)), seeds=seeds)]
    rows.append(Row("fno", "FNO", scores(Interval(0.1)), paired={"nrmse": untold}))
    task = TaskReport("burgers1d", "", rows, (0.5, 1.0), num_trajectories=num)
    says = "zero is in it, that can't be told" if num == 20 else "which of two rows is ahead can't be told"
    assert says in task.confidence
    page = html.unescape(to_html(Report("t", [task])))
    assert page.index(says) < page.index("can't be told</div>")


def test_evaluation_on_stdout_has_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_evaluation(report(), results())
    shown = capsys.readouterr().out
    assert "0.08 to 0.12" in shown
    assert "[" not in shown


def test_rows_of_the_same_value_are_best_together() -> None:
    rows = [
        Row(name, name, Scores({"correlation_time": Interval(2.0, 2.0, 2.0)}, about=ABOUT))
        for name in ("fno", "unet")
    ]
    page = to_html(Report("t", [TaskReport("burgers1d", "", rows)]))
    assert page.count("<td class=best>") == 2


@pytest.mark.parametrize(
    ("uses", "said"),
    [
        (None, ""),
        (0, "The test split hasn't been used so far."),
        (1, "The test split was used once so far."),
        (3, "The test split was used 3 times so far."),
    ],
)
def test_uses_of_the_test_split_are_said_in_words(uses: int | None, said: str) -> None:
    assert Report("t", [], test_uses=uses).shown_test_uses == said
