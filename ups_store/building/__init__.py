"""From source files to stores: `python -m ups_store.build`, and the same from Python.

    config = load_config(Path("build.yaml"), overrides=["data.limit=100"])
    with open_build(config, "burgers1d", "train") as build:
        print(explain(build))  # reuse, build, continue, rebuild or refuse, and why
        build.begin()
        if not build.is_reused:
            build.fill()
        store = build.finish()

`build_all` does that for every task and split. With `Readers`, processes of their own read the sources, with
deadlines. All names come when they are first asked for: `import ups_store.build` alone costs nothing.
"""

from ups_store.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
