from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from ups_store.errors import ConfigError
from ups_store.sources.contents import Selection
from ups_store.sources.tasks import TASKS, get_task

CONFIGS = Path(__file__).resolve().parents[3] / "ups" / "configs" / "pdebench"

# Names from PDEBench's catalogue, a few of each family, and those that its merging script gives.
NAMES = {
    "advection1d": ["1D_Advection_Sols_beta0.1.hdf5", "1D_Advection_Sols_beta7.0.hdf5"],
    "burgers1d": ["1D_Burgers_Sols_Nu0.001.hdf5", "1D_Burgers_Sols_Nu4.0.hdf5", "1D_Burgers_Sols_Nu0.01.h5"],
    "reacdiff1d": ["ReacDiff_Nu0.5_Rho10.0.hdf5", "ReacDiff_react_Nu10.0_Rho1.0.hdf5"],
    "diffsorp1d": ["1D_diff-sorp_NA_NA.h5"],
    "cfd1d": [
        "1D_CFD_Rand_Eta0.01_Zeta0.01_periodic_Train.hdf5",
        "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5",
        "1D_CFD_Shock_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5",
        "Sod7.hdf5",
    ],
    "cfd2d": [
        "2D_CFD_Rand_M0.1_Eta0.01_Zeta0.01_periodic_128_Train.hdf5",
        "2D_CFD_Turb_M1.0_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5",
        "2D_CFD_Rand_Eta0.1_Zeta0.1_M1.0_periodic_Train.hdf5",
        "2D_shock.hdf5",
        "KH_M01_dk10_Re1e3.hdf5",
        "OTVortex.hdf5",
    ],
    "cfd3d": [
        "3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5",
        "3D_CFD_Turb_Eta1e-08_Zeta1e-08_M1.0_periodic_Train.hdf5",
        "BlastWave.hdf5",
        "Turb_M05.hdf5",
    ],
    "darcy2d": ["2D_DarcyFlow_beta0.01_Train.hdf5", "2D_DecayFlow_beta100.0_Train.hdf5"],
    "diffreact2d": ["2D_diff-react_NA_NA.h5"],
    "shallow_water2d": ["2D_rdb_NA_NA.h5"],
    "navier_stokes2d": ["ns_incom_inhom_2d_512-0.h5", "ns_incom_inhom_2d_512-274.h5"],
    "incompressible2d": ["2D_Vorticity_Nu0.001.hdf5"],  # of `ups make-data`
}
FOR_TESTING = {
    *("ReacDiff_react_Nu10.0_Rho1.0.hdf5", "Sod7.hdf5", "2D_shock.hdf5", "KH_M01_dk10_Re1e3.hdf5"),
    *("OTVortex.hdf5", "BlastWave.hdf5", "Turb_M05.hdf5"),
}
PAIRS = [(task, name) for task, names in NAMES.items() for name in names]


@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_published_name_belongs_to_exactly_one_task(task: str, name: str) -> None:
    assert set(NAMES) == set(TASKS)
    assert [t.name for t in TASKS.values() if t.matches(name)] == [task]
    assert TASKS[task].is_benchmark(name) == (name in FOR_TESTING)


@pytest.mark.parametrize(
    "name",
    [
        "1D_Burgers_Sols_Nu0.01.hdf5.part",
        "my_1D_Burgers_Sols_Nu0.01.hdf5",
        "burgers1d.h5",
    ],
)
def test_near_miss_of_a_published_name_belongs_to_no_task(name: str) -> None:
    assert not any(task.matches(name) for task in TASKS.values())


@pytest.mark.parametrize(
    ("task", "name", "boundary"),
    [
        ("cfd1d", "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5", {"x": "periodic"}),
        ("burgers1d", "1D_Burgers_Sols_Nu0.01.hdf5", {"x": "periodic"}),
        ("burgers1d", "burgers1d_test_1D_Burgers_Sols_Nu0.01_walls.hdf5", {"x": "dirichlet"}),
        ("cfd1d", "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5", {"x": "outflow"}),
        ("cfd2d", "KH_M01_dk1_Re1e3.hdf5", {"x": "periodic", "y": "outflow"}),
        ("cfd2d", "2D_shock.hdf5", {"x": "outflow", "y": "outflow"}),
        ("cfd2d", "OTVortex.hdf5", {"x": "periodic", "y": "periodic"}),
        ("cfd3d", "BlastWave.hdf5", {"x": "outflow", "y": "outflow", "z": "outflow"}),
    ],
)
def test_boundary_follows_the_file_name_where_a_family_mixes(
    task: str, name: str, boundary: dict[str, str]
) -> None:
    assert TASKS[task].boundary_of(name) == boundary


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_task_names_a_boundary_of_every_axis_and_survives_pickling_and_hashing(task) -> None:
    for boundary in (task.boundary, *(boundary for _, boundary in task.boundary_exceptions)):
        assert set(boundary) == set("xyz"[: task.ndim])
    assert pickle.loads(pickle.dumps(task)) == task
    assert {task: 1}[task] == 1


def test_get_task_with_typo_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        get_task("Burger1D")
    assert caught.value.kind == "unknown_task"
    assert "did you mean 'burgers1d'?" in str(caught.value)


def test_get_task_with_nonsense_lists_all_and_suggests_none() -> None:
    with pytest.raises(ConfigError) as caught:
        get_task("???")
    assert caught.value.hint is None
    assert all(name in str(caught.value) for name in TASKS)


# reduced_resolution and reduced_resolution_t of PDEBench's own pdebench/models/config/args/config_*.yaml; of
# navier_stokes2d it has none.
REDUCTIONS = {
    "advection1d": (4, 5),  # config_Adv
    "burgers1d": (4, 5),  # config_Bgs
    "cfd1d": (8, 5),  # config_1DCFD
    "cfd2d": (2, 1),  # config_2DCFD
    "cfd3d": (2, 1),  # config_3DCFD
    "darcy2d": (2, 1),  # config_Darcy
    "diffreact2d": (1, 1),  # config_diff-react
    "diffsorp1d": (1, 1),  # config_diff-sorp
    "incompressible2d": (1, 1),  # not of PDEBench
    "navier_stokes2d": (1, 1),
    "reacdiff1d": (4, 1),  # config_ReacDiff
    "shallow_water2d": (1, 1),  # config_rdb
}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_official_configuration_holds_the_published_reduction(name: str) -> None:
    data = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]
    assert data.pop("tasks") == name
    assert Selection(**data) == Selection(*REDUCTIONS[name])


def test_every_other_configuration_takes_over_the_reduction_of_one_of_these() -> None:
    for path in CONFIGS.glob("*.yaml"):
        given = yaml.safe_load(path.read_text())
        if path.stem not in REDUCTIONS:
            assert given["include"].removeprefix("pdebench/") in REDUCTIONS
            assert not {"reduce_space", "reduce_time"} & given.get("data", {}).keys()
