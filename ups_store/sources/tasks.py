"""The tasks that can be built: families of PDEBench's files, sets of The Well, and what the files don't say.

PDEBench's files hold no boundary types and no channel names, and their names are spelled in several ways;
both are written down here. Boundary types are those of PDEBench's generators; where we didn't run a generator
and its files can't confirm it, the entry says so. Files of The Well say everything but their number of
spatial dimensions.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ups_store.errors import ConfigError

if TYPE_CHECKING:
    from ups_store.sources.declaration import LayoutDeclaration


_WELL_SETS = {  # names by their number of spatial dimensions
    2: "acoustic_scattering_discontinuous acoustic_scattering_inclusions acoustic_scattering_maze "
    "active_matter euler_multi_quadrants_openBC euler_multi_quadrants_periodicBC "
    "gray_scott_reaction_diffusion helmholtz_staircase planetswe rayleigh_benard rayleigh_benard_uniform "
    "shear_flow turbulent_radiative_layer_2D viscoelastic_instability",
    3: "convective_envelope_rsg MHD_64 MHD_256 post_neutron_star_merger rayleigh_taylor_instability "
    "supernova_explosion_64 supernova_explosion_128 turbulence_gravity_cooling turbulent_radiative_layer_3D",
}

_SUFFIX = r"\.(h5|hdf5)"
_NUMBER = r"\d+\.?\d*(e[+-]?\d+)?"  # 0.01, 1.0, 1.e-8 (1D CFD), 1e-08 (2D and 3D CFD)
_VISCOSITY = rf"Eta{_NUMBER}_Zeta{_NUMBER}"
_COMPRESSIBLE = (  # M first as published, M last as PDEBench's merging script writes it; 2D has a resolution
    rf"_CFD_([A-Za-z]+_)?(M{_NUMBER}_{_VISCOSITY}|{_VISCOSITY}_M{_NUMBER})_(periodic|trans)(_\d+)?(_Train)?"
)

_SHOCK_TUBES = (r"Sod\d+",)
_FLOWS_2D = (r"2D_shock", rf"KH_M{_NUMBER}_dk{_NUMBER}_Re{_NUMBER}", r"OTVortex")
_FLOWS_3D = (r"BlastWave", rf"Turb_M{_NUMBER}")
_REACTION_TESTS = (rf"ReacDiff_react_Nu{_NUMBER}_Rho{_NUMBER}",)


@dataclass(frozen=True)
class Task:
    """One family of simulations.

    Attributes:
        name: Short name, used in configurations and in `<task>_<split>.zarr.zip`.
        ndim: Number of spatial axes.
        channels: Names along the channel axis of `fields`, in order; empty where the files say them.
        boundary: Boundary type by spatial axis, of the training files; see `boundary_of`.
        test_part: Which end of a file PDEBench's protocol tests on: "first" where one dataset holds all
            samples, "last" where each sample has a group.
        file_patterns: Regular expressions for whole file names without suffix.
        benchmark_patterns: Those of `file_patterns` that PDEBench publishes for testing only. They have
            other grids or other physics than the training files, so they are never taken by themselves.
        boundary_exceptions: Boundary types of files whose names contain a match of the pattern.
        steady: Whether a sample is one state instead of a trajectory; None where either may be.
        parameters: Names of the parameters that a file of the task carries, as in `SourceInfo.parameters`.
        files: Glob patterns of files below the root: by split, or "all" for those that the rule shares out.
        layout: Where the files keep what, if a configuration declares it; else their content decides.
    """

    name: str
    ndim: int
    channels: tuple[str, ...]
    boundary: Mapping[str, str] = field(hash=False)
    test_part: Literal["first", "last"]
    file_patterns: tuple[str, ...] = ()
    benchmark_patterns: tuple[str, ...] = ()
    boundary_exceptions: tuple[tuple[str, Mapping[str, str]], ...] = field(default=(), hash=False)
    steady: bool | None = False
    parameters: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    layout: LayoutDeclaration | None = field(default=None, hash=False)

    def matches(self, file_name: str) -> bool:
        """Tell whether PDEBench, or its merging script, gives this name to a file of the task."""
        return _any_fullmatch(self.file_patterns, file_name)

    def is_benchmark(self, file_name: str) -> bool:
        """Tell whether the file is published for testing only (shock tubes, Kelvin-Helmholtz, ...)."""
        return _any_fullmatch(self.benchmark_patterns, file_name)

    def boundary_of(self, file_name: str) -> Mapping[str, str]:
        """Return the boundary type by axis for one file: the task's, or the exception of its name."""
        for pattern, boundary in self.boundary_exceptions:
            if re.search(pattern, file_name):
                return boundary
        return self.boundary

    @property
    def declaration(self) -> dict[str, Any]:
        """Return what a configuration declares about the files' content, as JSON; part of an identity."""
        if self.layout is None:
            return {}
        return {"boundary": dict(self.boundary), **self.layout.model_dump(mode="json", exclude_none=True)}


def _any_fullmatch(patterns: tuple[str, ...], file_name: str) -> bool:
    return any(re.fullmatch(pattern + _SUFFIX, file_name) for pattern in patterns)


def _all_axes(boundary: str, axes: str) -> dict[str, str]:
    return dict.fromkeys(axes, boundary)


_periodic_line = functools.partial(
    Task, ndim=1, channels=("u",), boundary=_all_axes("periodic", "x"), test_part="first"
)

_TASKS = (
    _periodic_line(
        name="advection1d",
        file_patterns=(rf"1D_Advection_Sols_beta{_NUMBER}",),
        parameters=("beta",),
    ),
    _periodic_line(
        name="burgers1d",
        file_patterns=(rf"1D_Burgers_Sols_Nu{_NUMBER}(_walls)?",),
        boundary_exceptions=((r"_walls", _all_axes("dirichlet", "x")),),  # `ups make-data --walls` writes it
        parameters=("nu",),
    ),
    _periodic_line(
        name="reacdiff1d",
        file_patterns=(rf"ReacDiff_Nu{_NUMBER}_Rho{_NUMBER}", *_REACTION_TESTS),
        benchmark_patterns=_REACTION_TESTS,
        parameters=("nu", "rho"),
    ),
    Task(
        name="diffsorp1d",
        ndim=1,
        channels=("concentration",),
        boundary={"x": "dirichlet_cauchy"},  # left: concentration 1; right: u = D du/dx
        test_part="last",
        file_patterns=(r"1D_diff-sorp_NA_NA",),
    ),
    Task(
        name="cfd1d",
        ndim=1,
        channels=("density", "pressure", "Vx"),
        boundary=_all_axes("periodic", "x"),
        test_part="first",
        file_patterns=(rf"1D_CFD_[A-Za-z]+_{_VISCOSITY}_(periodic|trans)(_Train)?", *_SHOCK_TUBES),
        benchmark_patterns=_SHOCK_TUBES,
        boundary_exceptions=((r"_trans|Sod\d", _all_axes("outflow", "x")),),
        parameters=("eta", "zeta"),
    ),
    Task(
        name="cfd2d",
        ndim=2,
        channels=("density", "pressure", "Vx", "Vy"),
        boundary=_all_axes("periodic", "xy"),
        test_part="first",
        file_patterns=("2D" + _COMPRESSIBLE, *_FLOWS_2D),
        benchmark_patterns=_FLOWS_2D,
        boundary_exceptions=(
            (r"_trans|2D_shock", _all_axes("outflow", "xy")),
            (r"KH_M", {"x": "periodic", "y": "outflow"}),
        ),
        parameters=("mach", "eta", "zeta"),
    ),
    Task(
        name="cfd3d",
        ndim=3,
        channels=("density", "pressure", "Vx", "Vy", "Vz"),
        boundary=_all_axes("periodic", "xyz"),
        test_part="first",
        file_patterns=("3D" + _COMPRESSIBLE, *_FLOWS_3D),
        benchmark_patterns=_FLOWS_3D,
        boundary_exceptions=((r"_trans|BlastWave", _all_axes("outflow", "xyz")),),
        parameters=("mach", "eta", "zeta"),
    ),
    Task(
        name="darcy2d",
        ndim=2,
        channels=("u",),
        boundary=_all_axes("dirichlet", "xy"),  # u = 0, as the paper says; the generator was not run
        test_part="first",
        file_patterns=(rf"2D_(DarcyFlow|DecayFlow)_beta{_NUMBER}(_Train)?",),
        steady=True,
        parameters=("beta",),
    ),
    Task(
        name="diffreact2d",
        ndim=2,
        channels=("u", "v"),  # activator, inhibitor
        boundary=_all_axes("neumann", "xy"),
        test_part="last",
        file_patterns=(r"2D_diff-react_NA_NA",),
    ),
    Task(
        name="shallow_water2d",
        ndim=2,
        channels=("h",),
        boundary=_all_axes("outflow", "xy"),
        test_part="last",
        file_patterns=(r"2D_rdb_NA_NA",),
    ),
    Task(
        name="navier_stokes2d",
        ndim=2,
        channels=("Vx", "Vy", "particles"),
        boundary=_all_axes("dirichlet", "xy"),  # of the velocity, zero; the particle field is extended
        test_part="last",  # PDEBench publishes no split of this family
        file_patterns=(r"ns_incom_inhom_2d_\d+-\d+",),
    ),
    Task(  # not of PDEBench: `ups make-data` writes it, converted
        name="incompressible2d",
        ndim=2,
        channels=("vorticity",),
        boundary=_all_axes("periodic", "xy"),
        test_part="first",
        file_patterns=(rf"2D_Vorticity_Nu{_NUMBER}",),
        parameters=("nu",),
    ),
)

TASKS: Mapping[str, Task] = {task.name: task for task in _TASKS}

WELL_TASKS: Mapping[str, Task] = {
    name: Task(name=name, ndim=ndim, channels=(), boundary={}, test_part="last")
    for ndim, names in _WELL_SETS.items()
    for name in names.split()
}


def get_task(name: str, *, declared: Iterable[str] = ()) -> Task:
    """Return the task of a name.

    Args:
        name: Name of a task of PDEBench or The Well.
        declared: Names that a configuration adds, to be suggested for one that is misspelled.

    Raises:
        ConfigError: If there is none; `kind` is "unknown_task", and the hint names the nearest one.
    """
    task = TASKS.get(name) or WELL_TASKS.get(name)
    if task is not None:
        return task
    known = [*declared, *TASKS, *WELL_TASKS]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    raise ConfigError(
        "unknown task",
        kind="unknown_task",
        expected=f"one of {', '.join(sorted([*declared, *TASKS]))}, a set of The Well, or one that the "
        "configuration declares",
        found=repr(name),
        hint=f"did you mean {near[0]!r}?" if near else None,
    )
