"""Pairs of switches, and products that people run: a step equals plain training's, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_training import CPU
from switched_steps import NUM_RANKS, config_of, step_of, steps_on_ranks, traced
from torch import Tensor

from ups.config import load_config
from ups.errors import ConfigError
from ups.train.contenders import SWITCHED_TOGETHER
from ups.train.run import run_stage
from ups.train.switches import REFUSED, SWITCHES, check_switches, combination, switches_on

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
GPU = torch.device("cuda")
PAIRS = list(combinations(SWITCHES, 2))
# How ranks train comes last. Joint training with priors, sharded, in bfloat16: regressions/test_47.
PRODUCTS = [
    ("amp bfloat16", "checkpointing full", "muon_hybrid", "grad_clip", "accum_steps"),
    ("compile", "amp bfloat16", "checkpointing full", "muon_hybrid", "grad_clip", "ema_decay"),
    ("amp bfloat16", "checkpointing full", "muon_hybrid", "accum_steps", "ddp"),
    ("compile", "amp bfloat16", "checkpointing full", "muon_hybrid", "grad_clip", "accum_steps", "ddp"),
    ("compile blocks", "amp bfloat16", "checkpointing full", "muon_hybrid", "accum_steps", "fsdp2"),
    ("compile", "amp bfloat16", "checkpointing selective", "grad_clip", "ema_decay", "hsdp"),
]
ONLY_SPEED = [
    name for name, switch in SWITCHES.items() if switch.drift is not None and switch.least_ranks == 1
]
ON_A_GPU = ("attention flex", "cpu_offload_optimizer")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with traced():
        yield


@pytest.fixture(scope="module")
def plain_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensor]:
    """A step of one process with nothing on but what means another change."""
    found: dict[Any, Tensor] = {}

    def step(names: tuple[str, ...], device: torch.device) -> Tensor:
        meant = tuple(name for name in names if SWITCHES[name].drift is None)
        if (meant, device) not in found:
            found[meant, device] = step_of(tmp_path_factory.mktemp("plain"), meant, device=device)
        return found[meant, device]

    return step


@pytest.fixture(scope="module")
def ranks_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Tensor]:
    """A step of switches of which the last says how ranks train; once for all with it."""
    found: dict[tuple[str, bool], dict[str, Tensor]] = {}

    def step(names: tuple[str, ...]) -> Tensor:
        key = way, is_dear = names[-1], is_slow(names)
        if key not in found:
            left_out = {*ON_A_GPU, *([] if find_spec("torchao") else ["adamw8bit"])}
            cases = [one for one in ALLOWED if one[-1] == way and is_slow(one) == is_dear]
            cases = [one for one in cases if not left_out & set(one)]
            found[key] = steps_on_ranks(tmp_path_factory.mktemp(way), cases, world_size=NUM_RANKS[way])
        return found[key][",".join(names)]

    return step


def is_slow(names: tuple[str, ...]) -> bool:
    is_dear = names[0].startswith("compile") or names[-1] in ("fsdp2", "hsdp")
    return is_dear or names == ("amp float16", "ddp")


def marks_of(names: tuple[str, ...]) -> list[Any]:
    marks = [pytest.mark.gpu] if set(names) & set(ON_A_GPU) else []
    marks += [pytest.mark.multi_process] if names[-1] in NUM_RANKS else []
    return [*marks, pytest.mark.slow, pytest.mark.timeout(600)] if is_slow(names) else marks


ALLOWED = [*(pair for pair in PAIRS if combination(*pair) == "yes"), *PRODUCTS]


@pytest.mark.parametrize(
    "names", [pytest.param(names, marks=marks_of(names), id=" and ".join(names)) for names in ALLOWED]
)
def test_step_with_switches_is_that_of_plain_training(
    tmp_path: Path,
    plain_step: Callable[..., Tensor],
    ranks_step: Callable[[tuple[str, ...]], Tensor],
    names: tuple[str, ...],
) -> None:
    if "adamw8bit" in names:
        pytest.importorskip("torchao", reason="there is no torchao")
    device = GPU if set(names) & set(ON_A_GPU) else CPU
    if names[-1] in NUM_RANKS and device == GPU:
        pytest.skip("ranks of gloo train on CPUs, and NCCL wants a GPU for each")
    drift = sum(SWITCHES[name].drift or 0.0 for name in names) or 1e-6
    expected = plain_step(names, device)
    found = ranks_step(names) if names[-1] in NUM_RANKS else step_of(tmp_path, names, device=device)
    assert expected.norm() > 1e-3
    assert (found - expected).norm() <= drift * expected.norm()


@pytest.mark.parametrize("name", ["muon_hybrid", "grad_clip", "accum_steps", "amp bfloat16"])
def test_switch_changes_a_step(tmp_path: Path, name: str) -> None:
    """Or the comparison of pairs with it would say nothing."""
    plain, found = (step_of(tmp_path / str(len(names)), names) for names in ((), (name,)))
    assert (found - plain).norm() > 1e-4 * plain.norm()


@pytest.mark.parametrize("pair", sorted(map(sorted, REFUSED)), ids=" and ".join)
def test_pair_that_does_not_combine_is_refused_with_its_reason(tmp_path: Path, pair: list[str]) -> None:
    num_ranks = max(SWITCHES[name].least_ranks for name in pair)
    with pytest.raises(ConfigError) as caught:
        check_switches(config_of(tmp_path, *pair), "operator", device=GPU, num_ranks=num_ranks)
    assert caught.value.kind == "switches"
    sentence = str(caught.value)
    for name in pair:
        assert SWITCHES[name].settings[0].removesuffix("=0.001") in sentence
    assert REFUSED[frozenset(pair)] in sentence


@pytest.mark.parametrize("name", SWITCHES)
def test_switch_is_on_by_its_settings_alone(tmp_path: Path, name: str) -> None:
    num_ranks = SWITCHES[name].least_ranks
    without = [] if num_ranks == 1 else ["ddp"]  # ranks train in some way
    assert switches_on(config_of(tmp_path), "operator", num_ranks=num_ranks) == without
    assert switches_on(config_of(tmp_path, name), "operator", num_ranks=num_ranks) == [name]


def test_offloading_needs_a_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cpu_offload_optimizer")
    check_switches(config, "operator", device=GPU, num_ranks=1)
    with pytest.raises(ConfigError) as caught:
        check_switches(config, "operator", device=CPU, num_ranks=1)
    assert caught.value.kind == "needs_gpu"


def test_run_is_refused_before_its_data_are_opened(tmp_path: Path) -> None:
    overrides = ["data.tasks=[burgers1d]", "data.root=nowhere", "training.cpu_offload_optimizer=true"]
    pytest.importorskip("torchao", reason="there is no torchao")
    config = load_config(overrides=[*overrides, "training.device=cpu", f"checkpoint.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"training\.grad_clip=null") as caught:
        run_stage("operator", config)
    assert caught.value.kind == "switches"


def test_another_optimizer_than_adamw_stays_on_the_gpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cpu_offload_optimizer")
    stage = config.stages["operator"].model_copy(
        update={"optimizer": config.stages["operator"].optimizer.model_copy(update={"name": "sgd"})}
    )
    other: Mapping[str, Any] = {"stages": {"operator": stage}}
    with pytest.raises(ConfigError, match="expected optimizer.name = adamw, found sgd"):  # noqa: RUF043
        check_switches(config.model_copy(update=other), "operator", device=GPU, num_ranks=1)


@pytest.mark.parametrize("name", ONLY_SPEED)
def test_switch_that_changes_nothing_but_speed_can_be_compared(name: str) -> None:
    """`ups validate optimizations` refuses keys that it doesn't know as switches."""
    assert {setting.partition("=")[0] for setting in SWITCHES[name].settings} <= SWITCHED_TOGETHER.keys()
