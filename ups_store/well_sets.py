"""The sets of The Well, by number of spatial dimensions; their files say everything else."""

WELL_SETS = {
    2: (
        "acoustic_scattering_discontinuous",
        "acoustic_scattering_inclusions",
        "acoustic_scattering_maze",
        "active_matter",
        "euler_multi_quadrants_openBC",
        "euler_multi_quadrants_periodicBC",
        "gray_scott_reaction_diffusion",
        "helmholtz_staircase",
        "planetswe",
        "rayleigh_benard",
        "rayleigh_benard_uniform",
        "shear_flow",
        "turbulent_radiative_layer_2D",
        "viscoelastic_instability",
    ),
    3: (
        "convective_envelope_rsg",
        "MHD_64",
        "MHD_256",
        "post_neutron_star_merger",
        "rayleigh_taylor_instability",
        "supernova_explosion_64",
        "supernova_explosion_128",
        "turbulence_gravity_cooling",
        "turbulent_radiative_layer_3D",
    ),
}
