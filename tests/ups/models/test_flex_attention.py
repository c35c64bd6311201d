"""FlexAttention for windows equals `scaled_dot_product_attention`; its switch, and where it isn't taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ups.config import load_config
from ups.errors import ConfigError
from ups.nn.shifted_window import ShiftedWindowAttention, Windows, set_attention, with_sdpa
from ups.train.flops import count_flops
from ups.train.stage import attention_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of the compiler's own imports
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
CPU = torch.device("cpu")
GRIDS = [
    ((16,), (True,)),
    ((16,), (False,)),
    ((4,), (True,)),
    ((8, 12), (True, True)),
    ((8, 12), (False, True)),
    ((8, 12), (False, False)),
]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """With the windows of one grid, as an operator has them, and weights that aren't those of the start."""

    def __init__(
        self, grid: tuple[int, ...], periodic: tuple[bool, ...], is_shifted: bool, width: int
    ) -> None:
        super().__init__()
        self.windows = Windows(grid, periodic, largest=4)
        self.attention = ShiftedWindowAttention(width, num_heads=2, num_axes=len(grid), is_shifted=is_shifted)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(tokens, self.windows)


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize(("grid", "periodic"), GRIDS)
def test_windows_mix_as_with_sdpa(
    grid: tuple[int, ...], periodic: tuple[bool, ...], is_shifted: bool
) -> None:
    model = Attention(grid, periodic, is_shifted, width=12)
    tokens = torch.randn(3, *grid, 12)
    with torch.no_grad():
        expected = model(tokens)
        set_attention(model, "flex")
        found = model(tokens)
        with with_sdpa(model):
            again = model(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert torch.equal(again, expected)
    assert model.attention.kernel == "flex"


def test_tokens_of_other_windows_and_pieces_change_nothing() -> None:
    model, tokens = Attention((8, 8), (False, True), True, width=8), torch.randn(1, 8, 8, 8)
    set_attention(model, "flex")
    with torch.no_grad():
        before = model(tokens)
        tokens[:, 0] += 1  # at the edge: the roll brings it beside the last rows, which don't touch it
        changed = (model(tokens) - before).abs().amax((0, 2, 3)) > 0
    assert changed.tolist() == [True, True, False, False, False, False, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize(("grid", "periodic"), [GRIDS[1], GRIDS[4]])
def test_gradients_on_a_gpu_are_those_of_sdpa(
    grid: tuple[int, ...], periodic: tuple[bool, ...], is_shifted: bool, is_compiled: bool
) -> None:
    model = Attention(grid, periodic, is_shifted, width=64).cuda()
    tokens, found = torch.randn(3, *grid, 64, device="cuda"), []
    for kernel in ("sdpa", "flex"):
        set_attention(model, kernel)
        called: Any = torch.compile(model) if is_compiled and kernel == "flex" else model
        mixed = called(tokens)
        found.append([mixed, *torch.autograd.grad(mixed.square().sum(), list(model.parameters()))])
    for flex, sdpa in zip(found[1], found[0], strict=True):
        assert (flex - sdpa).abs().max() <= 2e-2 * sdpa.abs().max()  # TF32 inside the kernel


# --- the switch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "sdpa"),
        (["operator.attention=flex"], "flex"),
        (["operator.pdet.use_flex=true"], "flex"),
        (["training.use_flex=true"], "flex"),
        (["operator.pdet.use_flex=false", "training.use_flex=false"], "sdpa"),
    ],
)
def test_earlier_keys_mean_flex(overrides: list[str], expected: str) -> None:
    config = load_config(overrides=["data.tasks=[burgers1d]", *overrides])
    assert config.operator.attention == expected
    assert load_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("key", ["operator.pdet.use_flex", "training.use_flex"])
def test_earlier_key_against_the_present_one_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"means operator\.attention = flex, not sdpa"):
        load_config(overrides=["data.tasks=[burgers1d]", f"{key}=true", "operator.attention=sdpa"])


def test_training_on_a_cpu_takes_sdpa_and_says_so(notes: list[str]) -> None:
    config = load_config(overrides=["data.tasks=[burgers1d]", "operator.attention=flex"])
    model = Attention((16,), (True,), True, width=8)
    assert attention_of(model, config, device=CPU) == "sdpa"
    assert notes == [
        "operator.attention = flex: FlexAttention has no backward pass on a CPU, so sdpa is taken"
    ]
    assert attention_of(nn.Linear(1, 1), config, device=CPU) == "sdpa"  # has no attention


def test_heads_of_few_channels_are_refused_for_the_gpus_kernel() -> None:
    config = load_config(overrides=["data.tasks=[burgers1d]", "operator.attention=flex"])
    model = Attention((16,), (True,), True, width=16)
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match="at least 16 channels of each head, found 8") as caught:
        attention_of(model, config, device=gpu)
    assert caught.value.kind == "flex_heads"


def test_counted_operations_do_not_depend_on_the_kernel() -> None:
    model, tokens = Attention((16,), (False,), True, width=8), torch.randn(2, 16, 8)
    plain = count_flops(lambda: model(tokens))
    set_attention(model, "flex")
    with with_sdpa(model):
        assert count_flops(lambda: model(tokens)) == plain
