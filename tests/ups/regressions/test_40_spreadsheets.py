"""No cell of a table is a formula of a spreadsheet."""

from __future__ import annotations

import csv
import io
import math

import pytest
from matplotlib.figure import Figure

from ups.eval.figure_style import Drawing
from ups.eval.intervals import Interval
from ups.eval.report import Report, Row, TaskReport
from ups.eval.scores import Scores
from ups.pipeline.leaderboard import LeaderboardRow, to_csv

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", '=HYPERLINK("http://evil")']


@pytest.mark.parametrize("text", FORMULAS)
def test_text_of_others_is_no_formula(text: str) -> None:
    row = Row(text, text, Scores({"nrmse": Interval(-0.5)}), note=text)
    report = Report("title", [TaskReport(text, "protocol", [row])])
    run = LeaderboardRow(
        text, text, "full-eval", text, 0.1, math.nan, -0.2, text, False, 1.0, None, (0,), text, text
    )

    def draw(figure: Figure) -> None:
        figure.subplots().plot([1.0], [-0.5], label=text)

    drawing = Drawing("figure", "caption", (1.0, 1.0), draw)
    for table in (report.to_csv(), to_csv([run]), drawing.files["csv"].decode()):
        cells = [cell for line in csv.reader(io.StringIO(table)) for cell in line]
        assert f"'{text}" in cells
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t"))]
        assert {"-0.5", "-0.2"} & {*cells}  # numbers stay numbers
