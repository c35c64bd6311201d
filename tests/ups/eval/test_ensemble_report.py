"""Evaluations with members: rows, verdicts, tables and figures, by a stand-in for a model with members."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from small_simulators import configure, make_data, make_simulator
from torch import Tensor

from ups.data.windows import open_trajectories
from ups.errors import ConfigError
from ups.eval.ensemble_figures import QUANTILES, EnsembleExample, fan_figure, make_example, spaghetti_figure
from ups.eval.ensembles import seed_of
from ups.eval.evaluate import evaluate
from ups.eval.figure_style import Drawing, line_of
from ups.eval.forecasters import OperatorForecaster, Start, start_of
from ups.eval.report import Report, show_evaluation, to_html, write_report
from ups.eval.runs import Run

torch.set_num_threads(1)


class WithMembers(OperatorForecaster):
    """The operator with noise that grows."""

    def forecast_members(self, start: Start, steps: int, *, members: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.zeros(members, *start.given.shape[1:])
        for frame in self.forecast(start, steps).unbind(1):
            noise = noise + 0.1 * torch.randn(noise.shape, generator=generator)
            yield frame.unsqueeze(1) + noise


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def report(root: Path) -> Report:
    """Of 16 trajectories; two rows have members."""
    config = configure(root, **{"evaluation.members": 8})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ups.eval.evaluate.OperatorForecaster", WithMembers)
        return evaluate(config, [Run(make_simulator(config))], split="train", seed=5)


def drawings(report: Report) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in report.drawings}


def draw(drawing: Drawing) -> Figure:
    figure = Figure(figsize=drawing.size, layout="constrained")
    drawing.draw(figure)
    return figure


# --- rows ----------------------------------------------------------------------------------------------


def test_members_and_point_forecasts_have_rows_side_by_side(report: Report) -> None:
    rows = json.loads(json.dumps(report.to_json()))["rows"]
    operator, persistence = rows["operator"]["ensemble"], rows["persistence"]["ensemble"]
    assert (operator["members"], operator["seed"]) == (8, 5)
    assert (persistence["members"], persistence["seed"]) == (1, None)
    assert operator["seconds"] > 0
    assert operator["spread_skill"]["mean"] > 0
    assert "spread_skill" not in persistence
    assert len(operator["by_step"]["crps"]["mean"]) == 5
    assert len(operator["ranks"]["mean"]) == 9
    assert [each["quantile"] for each in operator["reliability"]] == [0.5, 0.9, 0.99]
    assert operator["paired"] == {}
    assert set(persistence["paired"]) == {"mean_nrmse", "crps", "energy_score", "skill"}


def test_nothing_is_scored_as_an_ensemble_unless_it_is_asked_for(root: Path) -> None:
    config = configure(root)
    found = evaluate(config, [Run(make_simulator(config))]).to_json()
    assert "ensemble" not in found["rows"]["operator"]
    assert not [name for name in found["figures"] if "crps" in name]


def test_models_without_members_are_point_forecasts_with_a_warning(root: Path, notes: list[str]) -> None:
    config = configure(root)
    report = evaluate(config, [Run(make_simulator(config))], members=4)
    assert "warning: no model has members, so all are scored as point forecasts" in notes
    assert {row.ensemble.num_members for row in report.tasks[0].rows if row.ensemble} == {1}
    names = [name for name in drawings(report) if name.startswith("burgers1d")]
    assert "burgers1d_crps" in names
    assert "burgers1d_fan" not in names


def test_one_member_is_refused_before_anything_is_predicted(root: Path) -> None:
    config = configure(root)
    with pytest.raises(ConfigError, match="members: expected at least 2, found 1"):
        evaluate(config, [Run(make_simulator(config))], members=1)
    with pytest.raises(ConfigError, match=r"evaluation\.members"):
        configure(root, **{"evaluation.members": 1})


def test_steady_task_has_members_of_its_solution(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.eval.evaluate.OperatorForecaster", WithMembers)
    config = configure(root, "darcy2d")
    report = evaluate(config, [Run(make_simulator(config))], members=3)
    found = drawings(report)
    assert {"darcy2d_fan", "darcy2d_spaghetti", "darcy2d_ranks", "darcy2d_reliability"} <= set(found)
    assert "darcy2d_crps" not in found  # there is one time
    assert len(draw(found["darcy2d_fan"]).axes) == 1


# --- report --------------------------------------------------------------------------------------------


def test_report_has_a_table_of_ensembles_in_every_form(report: Report, tmp_path: Path) -> None:
    report = replace(report, tasks=[replace(report.tasks[0], figures=[])], figures=[])  # drawn elsewhere
    page = to_html(report)
    assert "<h3>Ensembles</h3>" in page
    assert "8 members, seed 5" in page
    assert "a point forecast" in page
    paths = write_report(tmp_path, report)
    lines = list(csv.DictReader(io.StringIO(paths["csv"].read_text())))
    crps = [line for line in lines if line["metric"] == "ensemble/crps" and line["row"] == "persistence"]
    assert [line["step"] for line in crps] == ["", "1", "2", "3", "4", "5"]
    assert crps[0]["verdict"] == "can't be told"  # 16 trajectories
    console = Console(width=80, record=True, file=io.StringIO())
    show_evaluation(report, console)
    shown = console.export_text()
    assert "burgers1d: ensembles" in shown
    assert "spread / skill" in shown


# --- figures -------------------------------------------------------------------------------------------


def test_figures_of_ensembles_can_be_drawn(report: Report) -> None:
    found = drawings(report)
    for name in ("crps", "band_energies", "spread_skill", "ranks", "reliability", "fan", "spaghetti"):
        assert draw(found[f"burgers1d_{name}"]).axes, name
    assert len(draw(found["burgers1d_ranks"]).axes[0].patches) == 9


def example(steps: int = 4, points: int = 6) -> EnsembleExample:
    generator = np.random.default_rng(0)
    members = {name: generator.standard_normal((steps, 30, points)) for name in ("operator", "fno")}
    members["operator"][-1, :, 2] *= 10
    return EnsembleExample(
        number=3,
        quantity="u [m/s]",
        t=np.arange(1.0, steps + 1),
        x=np.arange(points) / points,
        axes=("t [s]", "x"),
        truth=np.zeros((steps, points)),
        quantiles={
            name: np.quantile(values, QUANTILES, axis=1).swapaxes(0, 1) for name, values in members.items()
        },
        members={name: values[:, :20] for name, values in members.items()},
    )


def test_fan_shows_quantiles_against_time_where_members_differ_most_and_along_the_line() -> None:
    shown = example()
    assert shown.point == 2
    drawing = fan_figure("fan", shown, {"operator": "operator", "fno": "FNO"})
    assert "x = 0.333" in drawing.caption
    figure = draw(drawing)
    over_time, along = (figure.axes[number].lines[0] for number in (0, 1))
    np.testing.assert_allclose(
        over_time.get_xydata(), np.stack([shown.t, shown.quantiles["operator"][:, 2, 2]], 1)
    )
    np.testing.assert_allclose(along.get_ydata(), shown.quantiles["operator"][-1, 2])
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "t [s]", "x"]  # a row a model
    colours = [axes.lines[0].get_color() for axes in figure.axes]
    assert colours == [line_of(model)["color"] for model in ("operator", "operator", "fno", "fno")]
    assert all(axes.lines[-1].get_color() == line_of("truth")["color"] for axes in figure.axes)


def test_spaghetti_are_at_most_twenty_members() -> None:
    drawing = spaghetti_figure("spaghetti", example(), {"operator": "operator", "fno": "FNO"})
    assert [len(axes.lines) for axes in draw(drawing).axes] == [21] * 4


def test_example_has_the_members_that_were_measured(root: Path) -> None:
    config = configure(root)
    trajectories = open_trajectories(config.build, "burgers1d", "train", max_trajectories=2)
    model = WithMembers(make_simulator(config))
    found = make_example({"operator": model}, trajectories, number=1, members=4, seed=7)
    batch = trajectories.read(np.array([1]))
    (sample,) = batch.samples
    again: list[Any] = list(
        model.forecast_members(start_of(batch, trajectories), 5, members=4, seed=seed_of(7, sample))
    )
    np.testing.assert_allclose(found.members["operator"][-1], again[-1][0, ..., 0], rtol=1e-6)
    np.testing.assert_allclose(found.truth, batch.truth[0, ..., 0], rtol=1e-6)
