"""What `operator.name` names: an operator of one's own is a class in a file of one's own.

    @ups.operator("mine")
    class Mine(nn.Module):
        class Config(ups.Section):  # keys of `operator.config`, checked, in every checkpoint
            width: int = ups.key(64, "channels of its layers", tune=(32, 64, 128))

        def __init__(self, config, states): ...

        def forward(self, state_BLD, step): ...  # the change of the state; of a steady task the solution

It works on what the package's own operator works on, normalised tokens of latents or of patches of fields, so
that everything around it stays: windows, losses, noise, rollouts, files. Letters: B batch, L tokens, D
channels of a token, P parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ups.errors import ConfigError, did_you_mean
from ups.models.operator_blocks import TokenGeometry
from ups.models.operator_size import TOKEN_UNET
from ups.nn.activation_checkpointing import Recomputing, recomputed
from ups.nn.layers import Condition
from ups.registry import Registry
from ups.section import Section

Operator = TypeVar("Operator", bound=type[nn.Module])
_GRID_NETWORKS = "ups.models.grid_networks"
operators: Registry[type[nn.Module]] = Registry(
    "operator",
    key="operator.name",
    homes={
        TOKEN_UNET: "ups.models.latent_operator",
        **dict.fromkeys(("fno", "unet", "fno_neuraloperator"), _GRID_NETWORKS),
    },
)


def operator(name: str) -> Callable[[Operator], Operator]:
    """Decorate an operator of your own, a `torch.nn.Module`, so that `operator.name` knows it by a name.

    Args:
        name: Such as "mine"; a class that isn't decorated is named by `module:class` alone.
    """
    return operators(name)  # type: ignore[return-value]


def register_operator(name: str, cls: type[nn.Module]) -> None:
    """As `operator`, of a class that is there already, such as one of a notebook or of another package."""
    operators(name)(cls)


@dataclass(frozen=True)
class States:
    """What an operator is built for.

    Attributes:
        dim: D.
        tokens: Tokens along each axis, by task in the order of their numbers; L is their product.
        boundary: Boundary type of each axis as stores name it, by task.
        ranges: Least and largest value of each of the P parameters in the training data, by name.
    """

    dim: int
    tokens: Mapping[str, tuple[int, ...]]
    boundary: Mapping[str, tuple[str, ...]]
    ranges: Mapping[str, tuple[float, float]]


class Step(NamedTuple):
    """What a step is given besides the state; all steps of a rollout share it.

    Attributes:
        dt: Physical time of the step, shape (B,).
        parameters: Of the equation, from -1 to 1 over the training data; 0 where a task has none of the name,
            shape (B, P).
        task: Its number.
        grid: Tokens along each axis.
        boundary: Boundary type of each axis.
        steady: Whether the solution of a steady problem is wanted instead of a change.
    """

    dt: Tensor
    parameters: Tensor
    task: int
    grid: tuple[int, ...]
    boundary: tuple[str, ...]
    steady: bool


def dotted_name(name: str, *, allow_code: str | Iterable[str] | None = None) -> str:
    """How files name an operator: the package's own by their names, others as module:attribute."""
    found = operators.find(name, allow_code=allow_code)
    return name if found.__module__.startswith("ups.") else f"{found.__module__}:{found.__qualname__}"


def config_section(name: str, *, allow_code: str | Iterable[str] | None = None) -> type[Section]:
    """The class of an operator's keys, its own `Config`."""
    cls = operators.find(name, allow_code=allow_code)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        expected = "a class that derives from torch.nn.Module"
        raise ConfigError(
            f"operator.name = {name}", kind="not_an_operator", expected=expected, found=type(cls).__name__
        )
    section: type[Section] = getattr(cls, "Config", Section)
    return section


def read_config(
    name: str, values: Mapping[str, Any], *, allow_code: str | Iterable[str] | None = None
) -> Section:
    """The section of an operator, its class's `Config`, from the values of `operator.config`."""
    from pydantic import ValidationError

    section = config_section(name, allow_code=allow_code)
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        wrong = []
        for one in error.errors():
            where = ".".join(map(str, one["loc"]))
            if one["type"] == "extra_forbidden":
                near = did_you_mean(where, section.model_fields)
                known = f"known: {', '.join(section.model_fields) or 'none'}"
                wrong.append(f"operator.config.{where} is no key of {name}; {near or known}")
            else:
                wrong.append(f"operator.config.{where} = {one['input']!r}: {one['msg'].lower()}")
        raise ConfigError("; ".join(wrong), kind="operator_config") from error


class NamedOperator(Recomputing):
    """What `operator.name` names, called as a simulator calls its operator (`LatentOperator`).

    Args:
        name: See `operators`.
        config: Values of its section.
        states: What it is for.
        allow_code: See `Registry.find`.
    """

    center: Tensor  # of every parameter's range
    reach: Tensor

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        states: States,
        *,
        allow_code: str | Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        section, cls = read_config(name, config, allow_code=allow_code), operators.find(name, allow_code=())
        make = getattr(cls, "on_tokens", cls)
        try:
            inspect.signature(make).bind(section, states)
        except TypeError as error:
            problem = f"operator {name}: __init__ doesn't take what operators are made of: {error}"
            raise ConfigError(problem, kind="not_an_operator", expected="(config, states)") from error
        self.network: nn.Module = make(section, states)
        # One without parts that are computed once more is computed once more as a whole.
        self._is_whole = not any(isinstance(part, Recomputing) for part in self.network.modules())
        low, high = torch.tensor(list(states.ranges.values()), dtype=torch.float32).reshape(-1, 2).T
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("reach", ((high - low) / 2).masked_fill(high <= low, 1.0), persistent=False)

    def geometry(self, grid: tuple[int, ...], boundary: Sequence[str], *, steady: bool) -> TokenGeometry:
        """What `conditions` and `advance` have to know of a token grid."""
        return TokenGeometry(grid, boundary, steady=steady, windows=())

    def uses_all_weights(self, geometry: TokenGeometry) -> bool:
        """Nothing is known of that: ranks look in every step which weights have gradients."""
        return False

    def conditions(self, condition: Condition, dt_B: Tensor, geometry: TokenGeometry) -> Step:
        """What the network is given besides the state."""
        parameters = (condition.parameters - self.center) / self.reach
        assert isinstance(condition.task, int)
        return Step(
            dt_B,
            parameters.nan_to_num(0.0, posinf=0.0, neginf=0.0),
            condition.task,
            geometry.grid,
            geometry.boundary,
            geometry.steady,
        )

    def advance(self, state_BLD: Tensor, step: Step, geometry: TokenGeometry) -> Tensor:
        """The state a step later, or the solution; same shape, a new tensor."""
        computed = self._recomputed(state_BLD, step) if self._is_whole else self.network(state_BLD, step)
        if computed.shape != state_BLD.shape:  # else it might be broadcast
            problem = f"operator {self._name}: a step has another shape than the state"
            expected, found = f"{tuple(state_BLD.shape)} (rows, tokens, dim)", str(tuple(computed.shape))
            raise ConfigError(problem, kind="operator_shape", expected=expected, found=found)
        return computed if step.steady else state_BLD + computed

    @recomputed
    def _recomputed(self, state_BLD: Tensor, step: Step) -> Tensor:
        computed: Tensor = self.network(state_BLD, step)
        return computed
