"""A compiled encoder: lanes share what one compiled, encoders count alone, a failure ends the build."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burgers_encoder import T, X, make_checkpoint

from ups.device import compiled_or_refused, with_own_code
from ups.errors import ConfigError
from ups.trained.encode_loop import BatchEncoder, make_encoder

N = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("compiled"), channels=(("fields", 1), ("coefficient", 1)))


@pytest.fixture
def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    fields = random.standard_normal((N, T, X, 1)).astype(np.float32)
    coefficient = random.standard_normal((N, X)).astype(np.float32)
    return {"fields": fields, "coefficient": coefficient, "nu": random.uniform(0.001, 0.01, N)}


def encoder_of(path: Path, *, num_lanes: int = 4, **options: Any) -> BatchEncoder:
    encoder = make_encoder(path, task="burgers1d").encoder
    return BatchEncoder(encoder, micro_batch=T, num_lanes=num_lanes, **options)


def latents(encoder: BatchEncoder, batch: dict[str, np.ndarray]) -> tuple[bytes, bytes]:
    encoded = encoder.encode(batch, samples=np.arange(N))
    return encoded["latent"].tobytes(), encoded["latent_input"].tobytes()


@pytest.mark.parametrize(
    ("said", "found"),
    [("no compiler\nmore", "TorchDynamoException: no compiler"), ("", "TorchDynamoException")],
)
def test_failing_compiler_ends_encoding_with_what_to_do(
    checkpoint: Path, batch: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, said: str, found: str
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise TorchDynamoException(said)

        return call

    monkeypatch.setattr("torch.compile", broken)
    with pytest.raises(ConfigError, match=r"latent\.compile=false") as caught:
        latents(encoder_of(checkpoint, compile=True), batch)
    assert (caught.value.kind, caught.value.found) == ("compile", found)


def test_failure_of_a_backend_is_told_by_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def call(*args: Any) -> Any:
        raise BackendCompilerFailed(print, ValueError("no header\nmore"), None)

    monkeypatch.setattr("torch.compile", lambda function: call)
    with pytest.raises(ConfigError) as caught:
        compiled_or_refused(len, hint="")([])
    assert caught.value.found == "ValueError: no header"


def test_lanes_wait_for_the_one_that_compiles(
    checkpoint: Path, batch: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: dict[str, list[int]] = {"fields": [], "coefficient": []}
    num, lock, overlapped = 0, threading.Lock(), threading.Event()

    def slow(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num
            with lock:
                num += 1
                at_work[kwargs["array"]].append(num)
                if num > 1:
                    overlapped.set()
                is_first = len(at_work[kwargs["array"]]) == 1
            if is_first:
                time.sleep(0.03)  # which the others could use, did they not wait
            else:
                overlapped.wait(30)
            result = function(*args, **kwargs)
            with lock:
                num -= 1
            return result

        return call

    monkeypatch.setattr("torch.compile", slow)
    latents(encoder_of(checkpoint, compile=True), batch)
    assert len(at_work["fields"]) == N
    assert at_work["fields"][:2] == [1, 1]  # the second began when the first was done
    assert max(at_work["fields"]) > 1


def test_encoder_is_compiled_as_a_whole_and_gives_the_latents_of_the_model(
    checkpoint: Path, batch: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))
    encoder = encoder_of(checkpoint, compile=True)
    assert latents(encoder, batch) == latents(encoder_of(checkpoint), batch)


class Scaled(torch.nn.Module):
    """Has a number that a compiler takes for a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.factor


def test_methods_with_code_of_their_own_do_not_count_for_one_another() -> None:
    values = torch.ones(2)
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor in (2.0, 3.0, 5.0):
            encode = compiled_or_refused(
                with_own_code(Scaled(factor).encode),
                hint="",
                backend="eager",
                dynamic=False,
                fullgraph=True,
            )
            assert encode(values).tolist() == [factor] * 2


def test_compiled_latents_are_another_store(checkpoint: Path) -> None:
    plain = encoder_of(checkpoint).identity()
    assert encoder_of(checkpoint, compile=True).identity() == {**plain, "compile": True}
