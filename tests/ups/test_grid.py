"""Geometry: patches, tokens, and what can't be cut."""

from __future__ import annotations

import pytest

from ups.errors import ConfigError
from ups.grid import GridSpec, TokenGrid, boundary_types, cut_grid, domain_lengths


def make_grid(*points: int, periodic: bool = True) -> GridSpec:
    return GridSpec(points, (periodic,) * len(points), (("fields", 1),))


def refused(grid: GridSpec, **sizes: int | None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        cut_grid(grid, **sizes)
    return caught.value


def test_line_is_cut_into_patches_and_equal_groups() -> None:
    cut = cut_grid(make_grid(256), patch_size=4, num_tokens=16)
    assert cut == TokenGrid(4, (64,), (16,))
    assert cut.groups == (4,)
    assert cut.points_per_token == (16,)


def test_plane_is_cut_into_groups_as_square_as_can_be() -> None:
    assert cut_grid(make_grid(64, 64), patch_size=4, num_tokens=16).tokens == (4, 4)
    assert cut_grid(make_grid(32, 128), patch_size=8, num_tokens=16).tokens == (2, 8)


def test_points_that_are_no_multiple_of_the_patch_are_refused() -> None:
    error = refused(make_grid(96, 64), patch_size=7, num_tokens=24)
    assert error.kind == "patch_size"
    assert str(error) == (
        "encoder.patch_size = 7 on a grid of 96 x 64 points: expected a divisor of all of them:"
        " 1, 2, 4, 8, 16 or 32; 1, 2, 4, 8 or 16 goes with latent.tokens = 24"
    )
    for patch_size in (1, 2, 4, 8, 16):
        cut_grid(make_grid(96, 64), patch_size=patch_size, num_tokens=24)
    assert refused(make_grid(96, 64), patch_size=7, num_tokens=5).hint is None  # no size gives 5 tokens


def test_number_of_tokens_that_cannot_be_grouped_names_those_near_it_and_patches_that_give_it() -> None:
    error = refused(make_grid(256), patch_size=8, num_tokens=24)
    assert error.kind == "num_tokens"
    assert error.expected == "a number that they can be grouped into: 1, 2, 4, 8, 16 or 32"
    assert error.hint is None  # nothing cuts 256 points into 24
    error = refused(make_grid(64, 64), patch_size=8, num_tokens=256)
    assert str(error) == (
        "latent.tokens = 256 of 8 x 8 patches: expected a number that they can be grouped into:"
        " 1, 2, 4, 8, 16, 32 or 64; or say encoder.patch_size = 1, 2 or 4"
    )
    many = refused(make_grid(96, 96, 96), patch_size=1, num_tokens=5 * 96)
    assert many.expected == (
        "a number that they can be grouped into: 256, 288, 384, 432, 512, 576, 768 or 864"
    )


def test_each_patch_is_a_token_where_no_number_is_said() -> None:
    assert cut_grid(make_grid(32, 16), patch_size=8, num_tokens=None) == TokenGrid(8, (4, 2), (4, 2))
    assert refused(make_grid(32, 16), patch_size=24, num_tokens=None).hint is None


def test_name_tells_grids_apart() -> None:
    names = {
        make_grid(64).name,
        make_grid(64, periodic=False).name,
        make_grid(32).name,
        make_grid(64, 64).name,
        GridSpec((64,), (True,), (("fields", 2),)).name,
        GridSpec((64,), (True,), (("fields", 1), ("coefficient", 1))).name,
    }
    assert len(names) == 6
    assert not any("." in name for name in names)  # dots separate modules


def test_grid_survives_json() -> None:
    grid = GridSpec((8, 16), (True, False), (("fields", 2), ("force", 2)))
    assert GridSpec.from_json(grid.to_json()) == grid
    assert grid.num_values("force") == 256


def test_boundary_types_are_in_the_order_of_the_axes() -> None:
    named = {"x": "periodic", "y": "neumann"}
    assert boundary_types(named, ndim=1) == ("periodic",)
    assert boundary_types(named, ndim=2) == ("neumann", "periodic")
    assert boundary_types(named, ndim=3) == ("unknown", "neumann", "periodic")


def test_lengths_of_the_domain_are_in_the_order_of_the_axes() -> None:
    named = {"x": 2.0, "y": 3.0}
    assert domain_lengths(named, ndim=1) == [2.0]
    assert domain_lengths(named, ndim=3) == [1.0, 3.0, 2.0]
