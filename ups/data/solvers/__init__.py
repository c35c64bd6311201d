"""Small real solvers that write files in PDEBench's layout, for where the published ones aren't at hand."""

from ups.errors import needs

with needs("train"):
    from ups.data.solvers.dataset import SOLVERS, make_dataset, make_datasets
    from ups.data.solvers.problem import Problem, Trajectories

__all__ = ["SOLVERS", "Problem", "Trajectories", "make_dataset", "make_datasets"]
