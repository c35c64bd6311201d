"""Reading simulations that others wrote: what a file holds, which files make a split, and their samples.

`open_source` opens one file of a task (`get_task`), reduced as a `Selection` says; `TaskDeclaration` is what
a configuration says about files of your own. Names come when they are first asked for.
"""

from ups_store.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
