"""`preview`: what a picture of one sample shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.figure import Figure
from small_stores import MakeStore, begin, mixed_values, samples_of

import ups_store
from ups_store import ArrayNotFoundError, ArraySpec, NotCommittedError, SampleIndexError, SpecError, Store
from ups_store.check import colours_of, save_preview
from ups_store.check.preview import draw_sample

X = np.linspace(0.5, 7.5, 8)
COORDINATES = {"x": X, "y": np.arange(6) / 2, "z": np.arange(4.0), "t": np.arange(10) / 10}
UNITS = {"x": "m", "t": "s", "u": "m/s"}
SPACE_TIME = ("sample", "time", "x", "channel")


def make_fields(
    path: Path,
    dims: Sequence[str],
    *,
    channels: Sequence[str] = (),
    dtype: Any = np.float32,
    without: Sequence[str] = (),
    name: str = "fields",
    extra: dict[str, npt.NDArray[Any]] | None = None,
    times: int = 10,
    dims_of_extra: Mapping[str, Sequence[str]] | None = None,
    **attrs: Any,
) -> Store:
    """A store of two samples of random numbers; `channel` has as many as there are names."""
    lengths = {"sample": 2, "time": times, "z": 4, "y": 6, "x": 8, "channel": len(channels) or 2}
    values = np.random.default_rng(0).standard_normal([lengths.get(dim, 3) for dim in dims]).astype(dtype)
    arrays = {name: values, **(extra or {})}
    others = dims_of_extra or {}
    specs = {key: ArraySpec(value.shape, value.dtype, dims=others.get(key)) for key, value in arrays.items()}
    specs[name] = ArraySpec(
        values.shape, values.dtype, dims=dims, attrs={"channels": list(channels)} if channels else {}
    )
    constants = {key: points for key, points in COORDINATES.items() if key not in without}
    with ups_store.create(path, specs, constants=constants, identity={}, attrs=attrs) as writer:
        writer.commit_many([0, 1], arrays)
        writer.finish()
    return ups_store.open(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.zarr.zip"


def images_of(figure: Figure) -> list[Any]:
    return [axes.images[0] for axes in figure.axes if axes.images]


def colour_labels_of(figure: Figure) -> list[str]:
    return [axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"]


def labels_of(figure: Figure) -> list[tuple[str, str]]:
    return [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]


def test_space_time_sample_is_an_image_a_channel_with_time_upwards(path: Path) -> None:
    store = make_fields(path, SPACE_TIME, channels=["u", "p"], units=UNITS)
    figure = draw_sample(store, sample=1)
    images = images_of(figure)
    for c, image in enumerate(images):
        np.testing.assert_array_equal(image.get_array(), store["fields"][1, :, :, c])
        assert image.get_extent() == pytest.approx([0, 8, -0.05, 0.95])
        assert image.origin == "lower"
    assert labels_of(figure) == [("", "t [s]"), ("x [m]", "t [s]"), ("", "u [m/s]"), ("", "p [-]")]


def test_title_names_task_sample_and_parameters(path: Path) -> None:
    extra = {"nu": np.array([0.1, 0.01]), "beta": np.array([1, 4])}
    store = make_fields(path, SPACE_TIME, extra=extra, task="burgers1d", split="val")
    title = draw_sample(store, sample=1).get_suptitle()
    assert title == "burgers1d val · fields · sample 1 of 2 · beta = 4 · nu = 0.01"


def test_frames_are_six_of_the_time_steps_with_one_scale_a_channel(path: Path) -> None:
    store = make_fields(path, ("sample", "time", "y", "x", "channel"), channels=["u", "v"], units=UNITS)
    figure = draw_sample(store)
    images = images_of(figure)
    steps = [0, 2, 4, 5, 7, 9]
    assert [axes.get_title() for axes in figure.axes[:6]] == [f"t = {step / 10:g} s" for step in steps]
    for image, step in zip(images[6:], steps, strict=True):
        np.testing.assert_array_equal(image.get_array(), store["fields"][0, step, :, :, 1])
        assert image.get_extent() == pytest.approx([0, 8, -0.25, 2.75])
    assert len({image.get_clim() for image in images[:6]}) == 1
    assert labels_of(figure)[6] == ("x [m]", "y [-]")


def test_steady_sample_is_shown_with_its_coefficient(path: Path) -> None:
    extra = {"coefficient": np.linspace(1, 2, 96).reshape(2, 6, 8)}
    dims = {"coefficient": ("sample", "y", "x"), "y": ("sample", "y")}  # no field, though on some points
    extra["y"] = np.stack([COORDINATES["y"]] * 2)
    axes = ("sample", "time", "y", "x", "channel")
    with make_fields(
        path, axes, without=["y"], times=1, channels=["u"], extra=extra, dims_of_extra=dims
    ) as store:
        figure = draw_sample(store, sample=1)
        assert colour_labels_of(figure) == ["coefficient [-]", "u [-]"]
        assert " · coefficient, fields · " in figure.get_suptitle().replace("\n", " ")
        coefficient, solution = images_of(figure)
        np.testing.assert_array_equal(coefficient.get_array(), extra["coefficient"][1])
        np.testing.assert_array_equal(solution.get_array(), store["fields"][1, 0, :, :, 0])
        assert colour_labels_of(draw_sample(store, array="fields")) == ["u [-]"]


def test_volume_is_shown_by_its_middle_plane(path: Path) -> None:
    store = make_fields(path, ("sample", "time", "z", "y", "x", "channel"), channels=["u"])
    figure = draw_sample(store)
    np.testing.assert_array_equal(images_of(figure)[-1].get_array(), store["fields"][0, -1, 2, :, :, 0])
    assert "plane z = 2" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("dims", "shape"),
    [(("sample", "time", "token", "width"), (10, 9)), (("sample", "token", "width"), (3, 3))],
)
def test_sample_of_unknown_axes_is_flattened(path: Path, dims: tuple[str, ...], shape: Any) -> None:
    store = make_fields(path, dims, name="latent")
    (image,) = images_of(draw_sample(store))
    np.testing.assert_array_equal(image.get_array(), store["latent"][0].reshape(shape))


def test_uneven_coordinates_place_cells_where_they_are(path: Path) -> None:
    store = make_fields(path, SPACE_TIME, without=["x"], extra={"x": np.geomspace([1, 1], 128, 8, axis=1)})
    (mesh, *_) = draw_sample(store).axes[0].collections
    assert mesh.get_coordinates()[0, :, 0].tolist() == pytest.approx([0.5, 1.5, 3, 6, 12, 24, 48, 96, 160])


def test_ragged_run_is_shown_up_to_its_last_valid_step(path: Path) -> None:
    store = make_fields(path, SPACE_TIME, extra={"num_steps": np.array([10**15, 4])})
    image = images_of(draw_sample(store, sample=1))[0]
    assert image.get_array().shape == (4, 8)
    assert image.get_extent()[2:] == pytest.approx((-0.05, 0.35))
    assert images_of(draw_sample(store, sample=0))[0].get_array().shape == (10, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "uint64"])
def test_preview_of_every_kind_of_dtype_is_a_png(path: Path, dtype: str) -> None:
    from ups_store.format.metadata import dtype_of

    store = make_fields(path, SPACE_TIME, channels=["u"], dtype=np.float64)
    values = np.abs(store["fields"]).astype(dtype_of(dtype))
    path.unlink()
    specs = {"fields": ArraySpec(values.shape, values.dtype, dims=SPACE_TIME)}
    with ups_store.create(path, specs, identity={}) as writer:
        writer.commit_many([0, 1], {"fields": values})
        writer.finish()
    with ups_store.open(path) as store:
        save_preview(store, path.with_suffix(".png"))
    height, width, _ = matplotlib.image.imread(path.with_suffix(".png")).shape
    assert (width, height) == (960, 480)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_not_finite_values_are_grey_and_counted(make_store: MakeStore, tmp_path: Path, bad: float) -> None:
    fields = np.linspace(-1, 1, 2 * 8 * 8, dtype=np.float32).reshape(2, 8, 8)
    fields[0, :4] = bad
    dims = {"fields": ("sample", "y", "x")}
    with ups_store.open(make_store({"fields": fields}, dims=dims)) as store:
        assert "32 NaN or Inf" in draw_sample(store).get_suptitle()
        save_preview(store, tmp_path / "bad.png")
    picture = matplotlib.image.imread(tmp_path / "bad.png")[..., :3]
    grey = np.all(np.abs(picture - 0.6) < 0.01, axis=-1)
    lower, upper = grey[len(grey) // 2 :].mean(), grey[: len(grey) // 2].mean()
    assert lower > 0.5
    assert upper < 0.1


@pytest.mark.parametrize(
    ("values", "limits", "colours"),
    [
        (np.linspace(-1, 2, 10001), (-1.997, 1.997), "coolwarm"),
        (np.linspace(1, 2, 10001), (1.001, 1.999), "viridis"),
        (np.linspace(-0.1, 2, 10001), (-0.0979, 1.9979), "viridis"),
        (np.r_[np.zeros(9999), 1e30, np.nan], (-1.0, 1.0), "viridis"),
        (np.full(10, 5.0), (4.75, 5.25), "viridis"),
        (np.full(10, np.nan), (0.0, 1.0), "viridis"),
    ],
    ids=["both_signs", "positive", "hardly_negative", "wild_value", "constant", "no_value"],
)
def test_colours_are_robust_and_symmetric_where_both_signs_matter(
    values: npt.NDArray[np.float64], limits: tuple[float, float], colours: str
) -> None:
    low, high, name = colours_of(values)
    assert (low, high) == pytest.approx(limits)
    assert name == colours


def test_names_from_the_file_are_text_not_markup(path: Path, tmp_path: Path) -> None:
    with make_fields(path, SPACE_TIME, channels=["$\\frac{", "[red]$x$"], task="$a_{$") as store:
        save_preview(store, tmp_path / "markup.png")
    assert (tmp_path / "markup.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("channels", "dims"),
    [(1, None), (3, ("sample", "y", "x", "channel")), (4, ("sample", "row", "column", "c"))],
)
def test_bytes_of_pixels_are_a_picture_in_their_colours(
    make_store: MakeStore, channels: int, dims: tuple[str, ...] | None
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 6, 9, channels), np.uint8)
    with ups_store.open(make_store({"image": pixels}, dims={"image": dims} if dims else {})) as store:
        (image,) = images_of(draw_sample(store, sample=1))
    expected = pixels[1, ..., 0] if channels == 1 else pixels[1]
    np.testing.assert_array_equal(image.get_array(), expected)
    assert (image.origin, image.get_clim()) == ("upper", (0, 255))
    assert image.get_cmap().name == "gray"


@pytest.mark.parametrize(
    ("dtype", "shape", "dims"),
    [
        ("float32", (6, 9, 3), None),
        ("uint8", (6, 9, 2), None),
        ("uint8", (6, 9, 3), ("x", "y", "channel")),
        ("uint8", (6, 9, 3), ("a", "b", "x")),
    ],
)
def test_what_may_be_a_field_is_no_picture(
    make_store: MakeStore, dtype: str, shape: tuple[int, ...], dims: tuple[str, ...] | None
) -> None:
    named = {"image": ("sample", *dims)} if dims else {}
    with ups_store.open(make_store({"image": np.ones((2, *shape), dtype)}, dims=named)) as store:
        (image, *_) = images_of(draw_sample(store)) or [None]
    assert image is None or image.origin == "lower"


def test_large_pictures_are_thinned_out_and_saved_alike(make_store: MakeStore, tmp_path: Path) -> None:
    pixels = np.zeros((1, 5000, 10, 3), np.uint8)
    with ups_store.open(make_store({"image": pixels}, dims={})) as store:
        (image,) = images_of(draw_sample(store))
        for name in ("a.png", "b.png"):
            save_preview(store, tmp_path / name)
    assert image.get_array().shape == (1667, 10, 3)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_unfinished_store_shows_its_first_committed_sample(tmp_path: Path) -> None:
    path, values = tmp_path / "s.zarr.zip", mixed_values()
    with begin(path, values) as writer:
        writer.commit_many([2], samples_of(values, [2]))
        with ups_store.open(path, partial=True) as store:
            assert "sample 2 of 4" in draw_sample(store).get_suptitle()
            with pytest.raises(NotCommittedError):
                draw_sample(store, sample=0)


def test_what_is_not_there_is_refused(make_store: MakeStore) -> None:
    with ups_store.open(make_store()) as store:
        with pytest.raises(SampleIndexError):
            draw_sample(store, sample=4)
        with pytest.raises(ArrayNotFoundError):
            draw_sample(store, array="velocity")
        with pytest.raises(SpecError, match="no sample axis"):
            draw_sample(store, array="x")
        with pytest.raises(SpecError, match="no elements"):
            draw_sample(store, array="nothing")


def test_drawing_leaves_pyplot_and_settings_alone(make_store: MakeStore, tmp_path: Path) -> None:
    code = (
        "import sys, ups_store, ups_store.check.preview as preview\n"
        "is_early = 'matplotlib' in sys.modules\n"
        "import matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "preview.save_preview(ups_store.open(sys.argv[1]), sys.argv[2])\n"
        "print(is_early, 'matplotlib.pyplot' in sys.modules, before == matplotlib.rcParams.copy())"
    )
    command = [sys.executable, "-c", code, str(make_store()), str(tmp_path / "p.png")]
    assert subprocess.check_output(command, text=True) == "False False True\n"
