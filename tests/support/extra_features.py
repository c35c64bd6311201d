"""A program: tries every feature that an extra brings, and says as JSON which work and which name theirs.

`python extra_features.py [--without MODULE]...`: modules to treat as not installed. `--modules` imports every
module of ours instead. It runs in environments that hold the package and one extra alone.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# Each checks its packages at its entry point, before it imports them.
COMMANDS = ("ups_store.cli.", "ups_store.building.command", "ups.cli.")
HINT = re.compile(r"pip install 'ups-store\[(\w+)\]'")

here = Path()
without: list[str] = []


def store() -> Any:
    import ups_store

    path = here / "train.zarr.zip"
    if not path.exists():
        with ups_store.create(
            path, {"u": ups_store.ArraySpec((3, 64, 32), "float32")}, identity={}
        ) as writer:
            for i in writer.missing():
                writer.commit(i, {"u": [[i] * 32] * 64})
            writer.finish()
    return ups_store.open(path)


def slim_core() -> None:
    opened = store()
    assert opened.gather([2, 0], ["u"])["u"][:, 0, 0].tolist() == [2, 0]
    assert not opened.verify().problems


def bfloat16() -> None:
    import ups_store

    arrays = {"u": ups_store.ArraySpec((1, 4), "bfloat16")}
    with ups_store.create(here / "bfloat16.zarr.zip", arrays, identity={}) as writer:
        writer.commit(0, {"u": [1, 2, 3, 4]})
        writer.finish()


def export(to: str) -> Callable[[], None]:
    def run() -> None:
        from ups_store.convert import export_store

        export_store(store(), here / f"exported_{to}", to=to)

    return run


def import_pt() -> None:
    from ups_store.convert.import_pt import import_pt, torch

    (here / "pt").mkdir(exist_ok=True)
    torch.save({"x": torch.zeros(2)}, here / "pt" / "sample_0.pt")
    import_pt(here / "pt", here / "imported.zarr.zip")


def pack() -> None:
    from ups_store.packed.pack import pack_store

    pack_store(store(), here / "packed.zarr.zip", codec="pcodec")


def preview() -> None:
    from ups_store.check.preview import save_preview

    save_preview(store(), here / "preview.png")


def loader() -> None:
    import ups_store.torch

    store()
    dataset = ups_store.torch.StoreDataset(here / "train.zarr.zip")
    assert len(list(ups_store.torch.make_loader(dataset, batch_size=2))) == 2


def to_xarray() -> None:
    assert store().to_xarray()["u"][2, 0, 0].item() == 2


def verb() -> None:
    store()
    command("ups_store", "verify", "train.zarr.zip")


def build() -> None:
    if "h5py" not in without:
        write_burgers()
    command(
        "ups_store.build", "--tasks", "burgers1d", "--splits", "train", "--root", ".", "--num-workers", "0"
    )


def write_burgers() -> None:
    """One file of PDEBench's Burgers' equation, if HDF5 files can be written here."""
    try:
        import h5py
        import numpy as np
    except ImportError:
        return
    with h5py.File(here / "1D_Burgers_Sols_Nu0.01.hdf5", "w") as file:
        file["tensor"] = np.ones((8, 5, 16), "f4")
        file["x-coordinate"] = np.linspace(0, 1, 16, dtype="f4")
        file["t-coordinate"] = np.linspace(0, 1, 6, dtype="f4")


def make_data() -> None:
    from ups.data.solvers import make_dataset

    make_dataset("darcy2d", here, num_samples=1, points=16)


def load() -> None:
    import ups
    from ups.config import load_config

    load_config({"data": {"task": "burgers1d", "root": "."}})
    try:
        ups.load(here / "nowhere.safetensors")
    except Exception as error:
        if getattr(error, "kind", None) != "missing":
            raise


def ups_verb() -> None:
    command("ups", "configs")


def figure() -> None:
    from ups.eval.figure_style import Drawing

    assert Drawing("empty", "nothing", (1, 1), lambda figure: None, {}).images("png")


def wandb() -> None:
    from noted import noted

    from ups.config.run import WandbConfig
    from ups.train.tracking import open_wandb

    with noted() as notes:
        sink = open_wandb(WandbConfig(enabled=True), here, job="feature", run_config={})
    if sink is None:
        raise CommandError(notes[0])
    sink.close(has_failed=False)


def tensorboard() -> None:
    from ups.errors import check_installed

    check_installed("tensorboard", extra="tensorboard")


def neuraloperator() -> None:
    from ups.eval.baseline_model import check_kinds

    check_kinds(["fno_neuraloperator"])


def torchao() -> None:
    from ups.optim.torchao_optimizers import import_torchao

    import_torchao()


def tune() -> None:
    from ups.train.tune import import_optuna

    import_optuna()


def command(module: str, *arguments: str) -> None:
    """Run `python -m MODULE`, with the same modules missing; its one sentence becomes the error."""
    flags = [flag for name in without for flag in ("--without", name)]
    call = [sys.executable, __file__, *flags, "--command", module, *arguments]
    done = subprocess.run(call, capture_output=True, text=True, cwd=here)
    if done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1:
        raise CommandError(done.stderr)
    assert done.returncode == 0, done.stderr


class CommandError(Exception):
    """What a command said before it ended with 2."""


# By name, with the extras that it needs.
FEATURES: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "store": ((), slim_core),
    "safetensors": ((), export("safetensors")),
    "bfloat16": (("bfloat16",), bfloat16),
    "zarr": (("zarr",), export("zarr")),
    "hdf5": (("hdf5",), export("hdf5")),
    "kerchunk": ((), export("kerchunk")),
    "to_xarray": (("xarray",), to_xarray),
    "import_pt": (("torch",), import_pt),
    "pack": (("pack",), pack),
    "preview": (("plot",), preview),
    "loader": (("torch",), loader),
    "verb": (("cli",), verb),
    "build": (("hdf5",), build),
    "make_data": (("train",), make_data),
    "load": (("train",), load),
    "ups_verb": (("train",), ups_verb),
    "figure": (("train", "plot"), figure),
    "wandb": (("train", "wandb"), wandb),
    "tensorboard": (("tensorboard",), tensorboard),
    "neuraloperator": (("train", "neuraloperator"), neuraloperator),
    "torchao": (("train", "torchao"), torchao),
    "tune": (("train", "tune"), tune),
}


def outcome(run: Callable[[], object]) -> str:
    """ "works", the extra that an error names, or what went wrong instead."""
    try:
        run()
    except Exception as error:
        is_ours = isinstance(error, CommandError) or getattr(error, "kind", None) == "missing_extra"
        named = HINT.search(str(error)) if is_ours else None
        return named[1] if named else f"{type(error).__name__}: {error}"
    return "works"


def every_module() -> list[str]:
    """Names of our modules that can be imported alone."""
    import ups
    import ups_store

    found = []
    for package in (ups_store, ups):
        root = Path(package.__path__[0])
        found += [
            ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")
        ]
    names = {name.removesuffix(".__init__") for name in found if not name.endswith("__main__")}
    return sorted(name for name in names if not name.startswith(COMMANDS))


def main(arguments: list[str]) -> None:
    global here
    while arguments and arguments[0] == "--without":
        without.append(arguments[1])
        sys.modules[arguments[1]] = None  # type: ignore[assignment]  # as if it weren't there
        arguments = arguments[2:]
    if arguments[:1] == ["--command"]:
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments == ["--modules"]:
        print(json.dumps({name: outcome(lambda name=name: import_module(name)) for name in every_module()}))
    else:
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            print(json.dumps({name: outcome(run) for name, (_, run) in FEATURES.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
