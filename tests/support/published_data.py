"""What the files of PDEBench and of The Well hold as they are published, for the configurations of them.

PDEBench: shapes of the files at doi:10.18419/darus-2986 (Takamoto et al. 2022, arXiv:2210.07182); of 2D CFD
the 128 x 128 files, of 3D CFD the 128 x 128 x 128 ones. `incompressible2d`: what `ups make-data` writes by
default. The Well: `spatial_resolution`, `n_steps_per_trajectory`, `field_names` and
`boundary_condition_types` in datasets/<name>/<name>.yaml of github.com/PolymathicAI/the_well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ups_store.sources.tasks import get_task


@dataclass(frozen=True)
class Published:
    """One family or set.

    Attributes:
        points: Points along x, y, z.
        frames: Time steps of a trajectory.
        boundary: Type along x, y, z, as the file says it; of PDEBench's files empty, which say none.
        orders: Tensor order of each field of The Well, by name; of PDEBench's files empty.
    """

    points: tuple[int, ...]
    frames: int
    boundary: tuple[str, ...] = ()
    orders: Mapping[str, int] = field(default_factory=dict)

    def periodic(self, task: str) -> tuple[bool, ...]:
        """Whether each of x, y, z is."""
        known = get_task(task).boundary
        kinds = self.boundary or [known[axis] for axis in "xyz"[: len(self.points)]]
        return tuple(kind.lower() == "periodic" for kind in kinds)

    def num_channels(self, task: str) -> int:
        """Channels of the fields."""
        return sum(len(self.points) ** order for order in self.orders.values()) or len(
            get_task(task).channels
        )


PLANE = ("PERIODIC", "PERIODIC")
EULER = {"energy": 0, "density": 0, "pressure": 0, "momentum": 1}

PUBLISHED = {
    "advection1d": Published((1024,), 201),
    "burgers1d": Published((1024,), 201),
    "reacdiff1d": Published((1024,), 101),
    "diffsorp1d": Published((1024,), 101),
    "cfd1d": Published((1024,), 101),
    "cfd2d": Published((128, 128), 21),
    "cfd3d": Published((128, 128, 128), 21),
    "darcy2d": Published((128, 128), 1),
    "diffreact2d": Published((128, 128), 101),
    "shallow_water2d": Published((128, 128), 101),
    "navier_stokes2d": Published((512, 512), 1000),
    "incompressible2d": Published((64, 64), 21),
    "active_matter": Published((256, 256), 81, PLANE, {"concentration": 0, "velocity": 1, "D": 2, "E": 2}),
    "gray_scott_reaction_diffusion": Published((128, 128), 1001, PLANE, {"A": 0, "B": 0}),
    "rayleigh_benard_uniform": Published(
        (512, 128), 200, ("PERIODIC", "WALL"), {"buoyancy": 0, "pressure": 0, "velocity": 1}
    ),
    "shear_flow": Published((256, 512), 200, PLANE, {"tracer": 0, "pressure": 0, "velocity": 1}),
    "euler_multi_quadrants_periodicBC": Published((512, 512), 101, PLANE, EULER),
    "euler_multi_quadrants_openBC": Published((512, 512), 101, ("OPEN", "OPEN"), EULER),
    "turbulent_radiative_layer_2D": Published(
        (128, 384), 101, ("PERIODIC", "OPEN"), {"density": 0, "pressure": 0, "velocity": 1}
    ),
    "MHD_64": Published(
        (64, 64, 64), 100, (*PLANE, "PERIODIC"), {"density": 0, "magnetic_field": 1, "velocity": 1}
    ),
}
