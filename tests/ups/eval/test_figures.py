"""Figures: what they show, in whose colours, and the files that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ups.eval.field_figures import Trajectory, fields_figure, points_along
from ups.eval.figure_style import Drawing, line_of
from ups.eval.figures import curves_figure, error_figure, spectra_figure, stages_figure
from ups.eval.intervals import Interval

LABELS = {"operator": "operator", "fno": "FNO"}
AXES = {1: "x", 2: "yx", 3: "zyx"}

pytestmark = pytest.mark.rendered


def draw(drawing: Drawing) -> Figure:
    figure = Figure(figsize=drawing.size, layout="constrained")
    drawing.draw(figure)
    return figure


def lines(drawing: Drawing) -> dict[str, list[tuple[str, str]]]:
    """The points of each line in the CSV file of a figure, by panel and label."""
    found: dict[str, list[tuple[str, str]]] = {}
    for panel, label, x, y in drawing._rendered()[1]:  # without the pictures, which take a second
        found.setdefault(f"{panel}: {label}", []).append((x, y))
    return found


def trajectory(shape: Sequence[int], *, shift: float = 0.0, **options: Any) -> Trajectory:
    truth = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(shift)
    predictions = {"operator": truth * np.float32(1.1), "fno": truth + np.float32(0.5)}
    axes = {"t": np.arange(shape[0]) / 2}
    axes |= {
        axis: (np.arange(num) + 0.5) / num for axis, num in zip(AXES[len(shape) - 1], shape[1:], strict=True)
    }
    return Trajectory(truth, predictions, LABELS, axes, "u", **options)


def meshes(figure: Figure) -> list[tuple[str, QuadMesh]]:
    """Of the panels, with their titles; colour bars have none that `axes` share an x axis with."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    return [
        (axes.get_title(), mesh) for axes in panels for mesh in axes.collections if isinstance(mesh, QuadMesh)
    ]


def test_models_have_colours_of_their_own_and_their_other_budgets_the_same() -> None:
    names = (
        "truth",
        "operator",
        "operator_fields",
        "corrected",
        "student",
        "fno",
        "fno_neuraloperator",
        "unet",
        "persistence",
        "mean",
    )
    assert len({line_of(name)["color"] for name in names}) == len(names)
    for one, other in (("fno", "fno_samples"), ("unet", "unet_2"), ("operator_fields", "operator_fields_2")):
        assert line_of(one)["color"] == line_of(other)["color"]
        assert line_of(one)["linestyle"] != line_of(other)["linestyle"]
    assert line_of("fno_neuraloperator_samples")["color"] == line_of("fno_neuraloperator")["color"]
    assert line_of("transformer") == line_of("transformer")


def test_space_time_cells_have_their_points_in_the_middle_and_axes_in_common() -> None:
    shown = trajectory((5, 8))
    figure = draw(fields_figure("example", "", shown))
    panels = meshes(figure)
    assert [title for title, _ in panels] == ["truth", "operator", "FNO", "", ""]
    for _, mesh in panels:
        corners = mesh.get_coordinates()
        np.testing.assert_allclose(corners[:, 0, 1], [-0.25, 0.25, 0.75, 1.25, 1.75, 2.25])
        np.testing.assert_allclose(corners[0, :, 0], np.arange(9) / 8, atol=1e-15)
    axes = [mesh.axes for _, mesh in panels]
    assert len({(one.get_xlim(), one.get_ylim()) for one in axes}) == 1
    own, errors = panels[:3], panels[3:]
    assert len({mesh.get_clim() for _, mesh in own}) == len({mesh.get_clim() for _, mesh in errors}) == 1
    low, high = own[0][1].get_clim()
    assert low == -high  # both signs
    assert {mesh.get_cmap().name for _, mesh in own} == {"coolwarm"}
    assert all(isinstance(mesh.norm, LogNorm) for _, mesh in errors)


def test_data_of_one_sign_have_a_sequential_map() -> None:
    panels = meshes(draw(fields_figure("example", "", trajectory((5, 8), shift=10.0))))
    assert panels[0][1].get_cmap().name == "viridis"


def test_frames_are_those_after_the_given_one_and_errors_of_every_model() -> None:
    shown = trajectory((9, 4, 6))
    drawing = fields_figure("example", "", shown)
    panels = meshes(draw(drawing))
    assert [title for title, _ in panels[:4]] == ["t = 0.5", "t = 1.5", "t = 3", "t = 4"]
    assert len(panels) == 4 * 4
    for number, step in enumerate((1, 3, 6, 8)):
        np.testing.assert_array_equal(panels[number][1].get_array(), shown.truth[step])
        np.testing.assert_allclose(panels[12 + number][1].get_array(), 0.5, atol=1e-6)


def test_volume_is_shown_by_its_middle_plane_and_says_so() -> None:
    shown = trajectory((2, 4, 3, 5), units={"z": "m"})
    drawing = fields_figure("example", "u", shown)
    assert drawing.caption == "u; the middle plane, z = 0.625 m"
    np.testing.assert_array_equal(meshes(draw(drawing))[0][1].get_array(), shown.truth[1, 2])


def test_steady_solution_stands_beside_what_it_is_predicted_from() -> None:
    coefficient = np.linspace(0.1, 1.0, 24).reshape(4, 6)
    shown = trajectory((1, 4, 6), given={"coefficient": coefficient}, units={"u": "m", "x": "km"})
    drawing = fields_figure("example", "", shown)
    panels = meshes(draw(drawing))
    assert [title for title, _ in panels] == ["truth", "operator", "FNO", "given: coefficient", "", ""]
    np.testing.assert_array_equal(panels[3][1].get_array(), coefficient)


def test_single_frame_in_1d_is_lines() -> None:
    shown = trajectory((1, 8), given={"force": np.ones(8)})
    drawing = fields_figure("example", "", shown)
    (axes,) = draw(drawing).axes
    assert [line.get_label() for line in axes.lines] == ["truth", "operator", "FNO", "given: force"]
    assert [line.get_color() for line in axes.lines[:3]] == [line_of(k)["color"] for k in ("truth", *LABELS)]
    assert list(lines(drawing)) == [
        f"u over x: {name}" for name in ("truth", "operator", "FNO", "given: force")
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_model_that_blew_up_hides_no_other(bad: float) -> None:
    shown = trajectory((5, 8))
    shown.predictions["fno"][2:] = bad
    drawing = fields_figure("example", "", shown)
    *_, (_, error) = meshes(draw(drawing))
    assert error.get_clim()[1] <= np.ptp(shown.truth)


def test_constant_field_without_error_is_drawn() -> None:
    flat = np.zeros((5, 8))
    shown = Trajectory(flat, {"operator": flat}, LABELS, {"t": np.arange(5.0), "x": np.arange(8.0)}, "u")
    assert fields_figure("example", "", shown).images("png")["png"].startswith(b"\x89PNG")


def test_points_lie_where_the_source_says_else_in_the_middle_of_equal_cells() -> None:
    found = points_along({"x": np.array([0.0, 0.3])}, {"y": 2.0, "x": 1.0}, points=(4, 2))
    np.testing.assert_array_equal(found["y"], [0.25, 0.75, 1.25, 1.75])
    np.testing.assert_array_equal(found["x"], [0.0, 0.3])


def intervals(values: npt.NDArray[Any]) -> list[Interval]:
    return [Interval(float(value), float(value) / 2, float(value) * 2) for value in values]


def test_error_figure_has_a_line_and_a_band_for_every_model_in_every_panel() -> None:
    t, values = np.arange(3.0), np.geomspace(1e-3, 1.0, 3)
    panels = {
        "low": {"operator": intervals(values), "fno": intervals(2 * values)},
        "high": {"fno": intervals(values)},
    }
    drawing = error_figure("a_error", "errors", panels, LABELS, t=t, metric="fRMSE", time="t [s]")
    left, right = draw(drawing).axes
    assert [line.get_color() for line in left.lines] == [line_of(name)["color"] for name in LABELS]
    assert [line.get_color() for line in right.lines] == [line_of("fno")["color"]]
    assert len(left.collections) == 2
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlabel() == "t [s] since the given frame"
    found = lines(drawing)["low fRMSE over t [s] since the given frame: FNO"]
    np.testing.assert_array_equal(np.float64(found), np.stack([t, 2 * values], axis=1))


def test_ticks_of_logarithms_are_text_without_markup() -> None:
    t = np.arange(1.0, 4)
    for values, shown in ((np.geomspace(1e-4, 1.0, 3), "10⁻²"), (np.array([0.11, 0.2, 0.3]), "0.2")):
        panels = {"": {"operator": intervals(values)}}
        panels[""]["operator"] = [Interval(value, value, value) for value in values]
        figure = draw(error_figure("e", "", panels, LABELS, t=t, metric="nRMSE"))
        figure.draw_without_rendering()
        assert shown in [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_spectra_leave_out_the_mean_and_what_is_nothing() -> None:
    spectra = {"truth": np.array([9.0, 1.0, 0.1, 0.0]), "fno": np.array([9.0, 1.0, 0.2, 0.1])}
    found = lines(spectra_figure("a_spectra", spectra, LABELS))
    assert found["energy over wave number: truth"] == [("1.0", "1.0"), ("2.0", "0.1"), ("3.0", "")]
    assert [y for _, y in found["energy over wave number: FNO"]] == ["1.0", "0.2", "0.1"]


def test_curves_and_stages_show_what_training_went_through() -> None:
    curves = {"operator": ([1, 2], [0.5, 0.25]), "FNO, burgers1d": ([4], [0.125])}
    models = {"operator": "operator", "FNO, burgers1d": "fno_samples"}
    found = lines(curves_figure("loss", "losses", curves, models, quantity="training loss"))
    assert found["training loss over optimiser step: operator"] == [("1.0", "0.5"), ("2.0", "0.25")]
    parts = {"startup": 1.0, "waiting for data": 0.5, "computing": 2.0, "validation, saving": 0.25}
    drawing = stages_figure({"operator": parts})
    assert [bar.get_width() for bar in draw(drawing).axes[0].patches] == list(parts.values())


def test_same_values_give_the_same_files_without_a_date() -> None:
    """Of figures that share nothing, the names of which are text and no markup."""

    def files() -> list[Mapping[str, bytes]]:
        shown = trajectory((4, 8))
        own = {"operator": shown.predictions["operator"]}
        cells = fields_figure("a", "", replace(shown, predictions=own, quantity="$u_{$"))
        panels = {"": {"operator": intervals(np.array([0.1, 0.2]))}}
        return [cells.files, error_figure("b", "", panels, LABELS, t=np.arange(2.0), metric="nRMSE").files]

    first, second = files(), files()
    assert first == second
    for one in first:
        assert b"dc:date" not in one["svg"]
        assert b"CreationDate" not in one["pdf"]
        assert one["pdf"].startswith(b"%PDF")
