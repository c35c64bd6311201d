"""State of a training run, for an exact resume: its tensors, its files, saving and loading.

Tensors are named `model.<name>`, `ema.<name>`, `optimizer.<parameter>.<name>`, `stage.<name>` and
`rng.<device>`, the last with a row for every rank; each is plain or sharded. In whole form all is in one
file. In sharded form each rank writes the shards that it has into a folder beside the file, which names that
folder. The file is written last, in one step: a folder that it doesn't name isn't taken for a state, and the
next save removes it. What a state was made with, and whether it is of this run, `saved_state` says.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ups.config import RunConfig
from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import Shard, load_shards, own_shards, shared_out
from ups.errors import CheckpointError, OutputError
from ups.optim import AveragedWeights
from ups.train.saved_state import NAMED_BY, POSITION, TRAINING, SavedState, hinting_at_restart
from ups.trained.checkpoint import check_tensors, load_checkpoint, save_checkpoint


def save_state(
    files: StateFiles,
    tensors: StateTensors,
    *,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    position: Mapping[str, Any],
    is_over: bool,
    ema_updates: int,
    ranks: Ranks = ALONE,
) -> None:
    """Write everything that continuing needs, atomically; a collective.

    Args:
        files: What writes it, perhaps later.
        tensors: Of the training.
        scaler: Scaler of fp16 gradients.
        data_identity: What the run is trained on; JSON values.
        position: Where the run is; JSON values by the names in `POSITION`.
        is_over: Whether nothing is left to train.
        ema_updates: Updates that made the averages.
    """
    assert position.keys() == POSITION
    rng = {"rng.cpu": ranks.gather(torch.get_rng_state())}
    if torch.cuda.is_available():
        rng["rng.cuda"] = ranks.gather(torch.cuda.get_rng_state())
    document = {
        "config": config.model_dump(mode="json"),
        "data_identity": dict(data_identity),
        "position": dict(position),
        "is_over": is_over,
        "scaler": scaler.state_dict(),
        "ema_updates": ema_updates,
        "named_by": NAMED_BY,
    }
    files.save(tensors.now(), rng=rng, document=document)


def load_state(
    path: Path,
    tensors: StateTensors,
    *,
    scaler: torch.amp.GradScaler,
    config: RunConfig,
    data_identity: Mapping[str, Any],
    stage: str,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Bring everything to where `save_state` left it, and return the position and the stage's own tensors.

    A rank that wasn't there when the state was saved keeps its own state of random numbers.
    """
    with hinting_at_restart():
        saved, document = read_tensors(path, form_of=tensors.form_of, ranks=ranks)
    state = SavedState(path, document)
    state.check_config(config, stage=stage)
    state.check_data(data_identity)
    with hinting_at_restart():
        own = tensors.fill(saved, ema_updates=document["ema_updates"], path=path)
    scaler.load_state_dict(document["scaler"])
    if ranks.rank < len(saved["rng.cpu"]):
        torch.set_rng_state(saved["rng.cpu"][ranks.rank].clone())  # PyTorch wants a storage of its own
        if torch.cuda.is_available() and "rng.cuda" in saved:
            torch.cuda.set_rng_state(saved["rng.cuda"][ranks.rank].clone())
    return dict(document["position"]), own


def check_shared(path: Path, *, step: int, ranks: Ranks) -> None:
    """Fail unless all ranks found the same state; a collective."""
    if len(set(ranks.gather(torch.tensor(step)).tolist())) > 1:
        hint = "put checkpoint.dir where every machine sees it"
        raise CheckpointError("not all ranks see it", kind="not_shared", path=path, hint=hint)


_SHARDS = "training-shards"
FORM = "shards"  # what the document says of the folder: its name and number of files, None in whole form


class StateFiles:
    """The files of a stage's training state, one state after the other.

    All ranks call the methods at the same point, but `has_failed` and `close`.

    Args:
        path: The file; a folder of shards goes beside it.
        is_async: Whether `save` only copies the tensors to buffers in the CPU's memory, which are kept, and a
            thread writes them; never two states at once.
    """

    def __init__(self, path: Path, *, ranks: Ranks = ALONE, is_async: bool = False) -> None:
        self._path, self._ranks, self._is_async = path, ranks, is_async
        self._writers = ranks.apart() if is_async else ranks
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, tensors: Mapping[str, Tensor], *, rng: Mapping[str, Tensor], document: Mapping[str, Any]
    ) -> None:
        """Write a state, atomically: sharded if one of its tensors is, else the first rank writes all of it.

        Args:
            tensors: By name, on every rank the same names in the same order; in whole form alike.
            rng: More of them, whole, for the first rank to write.
            document: JSON values.

        Raises:
            OutputError: On every rank, if one can't write; the state before is still there. With a thread by
                the next `save` or `wait`.
        """
        self.wait()
        folder = None
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            token = self._ranks.tell(secrets.token_hex(4))
            folder = self._path.with_name(f"{self._path.stem}-shards-{token}")
        own = own_shards(tensors, self._ranks if folder else ALONE) if folder or self._ranks.is_first else {}
        write = partial(self._write, folder=folder, rng=dict(rng), document=dict(document))
        if not self._is_async:
            write(own)
            return
        staged = self._staged(own)
        self._thread = threading.Thread(target=self._keep_error, args=(partial(write, staged),), daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise; known as soon as the thread knows it."""
        return self._error is not None

    def wait(self) -> None:
        """Until the last state is there.

        Raises:
            OutputError: As `save`.
        """
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread, whatever comes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _staged(self, own: Mapping[str, Shard]) -> dict[str, Shard]:
        """Copies in the buffers of the state before."""
        for name, shard in own.items():
            kept, values = self._buffers.get(name), shard.values
            if kept is None or (kept.shape, kept.dtype) != (values.shape, values.dtype):
                kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                self._buffers[name] = kept
            kept.copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {name: Shard(self._buffers[name], shard.offsets) for name, shard in own.items()}

    def _keep_error(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error  # for `wait`, in the thread that trains

    def _write(
        self,
        own: Mapping[str, Shard],
        *,
        folder: Path | None,
        rng: dict[str, Tensor],
        document: dict[str, Any],
    ) -> None:
        ranks, values = self._writers, {name: shard.values for name, shard in own.items()}
        form = None if folder is None else {"folder": folder.name, "files": ranks.world_size}
        if folder is not None:
            path, offsets = _file_of(folder, ranks.rank, ranks.world_size), _offsets(own)
            self._on_all(lambda: save_checkpoint(path, values, kind=_SHARDS, document={}, offsets=offsets))

        def publish() -> None:
            whole = rng | values if folder is None else rng
            save_checkpoint(self._path, whole, kind=TRAINING, document={**document, FORM: form})
            _remove_shards(self._path, but=folder)

        self._on_all(publish if ranks.is_first else lambda: None)

    def _on_all(self, work: Callable[[], None]) -> None:
        """Do something on every rank; if one fails, all raise."""
        error: OutputError | None = None
        try:
            work()
        except OutputError as caught:
            error = caught
        num_failed = int(self._writers.sum(torch.tensor(int(error is not None))))
        if error is not None:
            raise error
        if num_failed:
            problem, hint = "another rank couldn't write the training state", "its own message says why"
            raise OutputError(problem, path=self._path, hint=hint)


def read_tensors(
    path: Path, *, form_of: Callable[[str], Tensor | None], ranks: Ranks = ALONE
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `StateFiles` wrote, of either form, on any number of ranks.

    Each rank looks at its share of the shards' digests.

    Args:
        form_of: As `load_shards` has it; whole tensors may come whole.
        ranks: The processes that read together.

    Returns:
        Tensors by name, and the document.
    """
    tensors, document = load_checkpoint(path, kind=TRAINING)
    form = document.get(FORM)
    if form is None:
        return tensors, document
    folder, num_files = path.with_name(form["folder"]), form["files"]
    for number in range(ranks.rank, num_files, ranks.world_size):
        load_checkpoint(_file_of(folder, number, num_files), kind=_SHARDS)
    return tensors | load_shards(folder, form_of), document


def remove_state(path: Path) -> None:
    """Remove a state, whatever its form; nothing if there is none."""
    path.unlink(missing_ok=True)
    _remove_shards(path)


def _remove_shards(path: Path, *, but: Path | None = None) -> None:
    for folder in path.parent.glob(f"{path.stem}-shards-{'[0-9a-f]' * 8}"):
        if folder != but:
            shutil.rmtree(folder, ignore_errors=True)  # what stays is removed by the next save


def _file_of(folder: Path, number: int, num_files: int) -> Path:
    return folder / f"{number:05d}-of-{num_files:05d}.safetensors"


def _offsets(own: Mapping[str, Shard]) -> dict[str, tuple[int, ...]]:
    return {name: shard.offsets for name, shard in own.items()}


class StateTensors:
    """The tensors of a training that continuing needs, by name, plain or sharded.

    Args:
        model: Model, without wrappers.
        optimizer: Its optimiser.
        averaged: Averaged weights, if there are any.
        stage: The stage's own, as `Stage.state` has them.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averaged: AveragedWeights | None,
        stage: Mapping[str, Tensor],
    ) -> None:
        self._model, self._optimizer, self._averaged, self._stage = model, optimizer, averaged, stage
        names = {parameter: name for name, parameter in model.named_parameters()}
        # PyTorch numbers them in this order.
        self._trained = [names[p] for group in optimizer.param_groups for p in group["params"]]

    def now(self) -> dict[str, Tensor]:
        """As they are now, on every rank in the same order; views."""
        tensors = _prefixed("model.", self._model.state_dict())
        if self._averaged is not None:
            tensors |= _prefixed("ema.", self._averaged.averages)
        for number, state in self._optimizer.state_dict()["state"].items():
            own = {name: value for name, value in state.items() if value is not None}
            tensors |= _prefixed(f"optimizer.{self._trained[number]}.", own)
        return tensors | _prefixed("stage.", self._stage)

    def form_of(self, name: str) -> Tensor | None:
        """A tensor here that has the form of the one of a name, such as a parameter that of its averages."""
        section, _, rest = name.partition(".")
        if section == "stage":
            return self._stage.get(rest)
        own = rest.rpartition(".")[0] if section == "optimizer" else rest
        return self._model.state_dict().get(own)

    def fill(self, tensors: Mapping[str, Tensor], *, ema_updates: int, path: Path) -> dict[str, Tensor]:
        """Bring model, averages and optimiser to what `now` gave, and return the stage's own.

        Args:
            tensors: Whole, or in the form of those that are here; on every rank.
            ema_updates: Updates that made the averages.
            path: Where they are from, for the error.

        Returns:
            In the form of those that are here, by the names that the stage gave.

        Raises:
            OtherTensorsError: With the names that are missing, unexpected or of another shape.
        """
        self._fill_model(_below(tensors, "model."), path)
        if self._averaged is not None:
            self._averaged.restore(_below(tensors, "ema."), num_updates=ema_updates, path=path)
        self._fill_optimizer(_below(tensors, "optimizer."), path)
        own = _below(tensors, "stage.")
        check_tensors(
            own, self._stage, path=path, problem="the training state is of a stage with other tensors"
        )
        return {name: shared_out(own[name], tensor) for name, tensor in self._stage.items()}

    def _fill_model(self, saved: Mapping[str, Tensor], path: Path) -> None:
        own = self._model.state_dict()
        check_tensors(saved, own, path=path, problem="the training state is of other parameters")
        self._model.load_state_dict({name: shared_out(saved[name], tensor) for name, tensor in own.items()})

    def _fill_optimizer(self, saved: Mapping[str, Tensor], path: Path) -> None:
        # PyTorch's `set_optimizer_state_dict` would make a step of zero gradients first, which Adam counts.
        parameters = dict(self._model.named_parameters())
        numbers = {name: number for number, name in enumerate(self._trained)}
        states: dict[int, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            name, _, part = key.rpartition(".")
            if name not in numbers:
                problem = "the training state's optimiser is of other parameters"
                check_tensors({name: tensor}, {}, path=path, problem=problem)
            has_its_shape = tensor.shape == parameters[name].shape
            value = shared_out(tensor, parameters[name]) if has_its_shape else tensor
            states.setdefault(numbers[name], {})[part] = value
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
