"""Files of a training state, whole or in shards, written at once or while training goes on.

In whole form all is in one file. In sharded form each rank writes the shards that it has into a folder beside
the file, which names that folder. The file is written last, in one step: a folder that it doesn't name isn't
taken for a state, and the next save removes it. Both forms have the same tensors (`StateTensors`).
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
from torch import Tensor
from torch.distributed.tensor import DTensor

from ups.distributed.ranks import ALONE, Ranks
from ups.distributed.sharding import Shard, load_shards, own_shards
from ups.errors import OutputError
from ups.train.saved_state import TRAINING
from ups.trained.checkpoint import load_checkpoint, save_checkpoint

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

    Raises:
        CheckpointError: As `load_checkpoint`, about the file or one of the shards.
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
