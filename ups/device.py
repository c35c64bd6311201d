"""The device that a run computes on: choosing it, the memory that is free there, compiling for it.

A compilation that fails says why, also where several threads share a model. This is the one module of `ups`
beside `ups.data` that asks `ups_store`, for the free memory of a container.
"""

from __future__ import annotations

import copy
import gc
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, TypeVar, cast

import ups_store
from ups.errors import ConfigError, needs
from ups.log import logger

with needs("train"):
    import torch
    from torch import Tensor, nn

MatmulPrecision = Literal["highest", "high", "medium"]
Module = TypeVar("Module", bound="nn.Module")
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # which Inductor reads whenever it looks for what it compiled


def free_memory(device: torch.device) -> None:
    """Give back what nothing holds any more, also where objects refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def choose_device(name: str, *, key: str = "training.device") -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1", ...
        key: Where the name comes from, for messages.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _unknown(name, key) from error
    if device.type not in ("cpu", "cuda"):
        raise _unknown(name, key)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        logger.warning(f"there is no {name}; the CPU is used instead")
        return torch.device("cpu")
    return device


def device_of_rank(device: torch.device, *, variables: Mapping[str, str] = os.environ) -> torch.device:
    """The GPU of this process, where `torchrun` started several on a machine and none of them was named."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", int(variables.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def describe_device(device: torch.device) -> str:
    """Its name, and PyTorch's version, for what was measured on it."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{processor_name()}, {torch.get_num_threads()} threads"
    return f"{hardware}, PyTorch {torch.__version__}"


def cuda_state(device: torch.device) -> str:
    """What PyTorch's allocator says of a GPU's memory, for people; of another device that there is none."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return "no CUDA state"
    return torch.cuda.memory_summary(device)


def processor_name() -> str:
    """The processor's name as the kernel has it; where that doesn't say (no /proc), its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _unknown(name: str, key: str) -> ConfigError:
    return ConfigError(key, expected="auto, cpu, cuda or cuda:N", found=repr(name))


@contextmanager
def matmul_precision(precision: MatmulPrecision) -> Iterator[None]:
    """Inside, float32 matrix products have this precision, in the whole process.

    Args:
        precision: As `training.matmul_precision`.
    """
    before = torch.get_float32_matmul_precision()
    if precision != "highest":
        logger.info(f"float32 matrix products are made in {precision} precision (training.matmul_precision)")
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def compile_cache(folder: Path | None, *, variables: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Inside, what is compiled is kept in a folder, from which the next run takes it.

    It holds machine code and pickles of Inductor's: a folder that others can't write to.

    Args:
        folder: As `training.compile_cache`; None for Inductor's own, which is below the temporary folder.
    """
    named = variables.get(_CACHE_VARIABLE)
    if folder is None or named is not None:
        if folder is not None and Path(named or "") != folder.absolute():
            logger.info(f"{_CACHE_VARIABLE}={named} is used, not training.compile_cache = {folder}")
        yield
        return
    variables[_CACHE_VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        del variables[_CACHE_VARIABLE]


def with_compiled(model: Module, methods: Iterable[str], **options: Any) -> Module:
    """The same model, weights and buffers shared, some of whose methods are compiled.

    Args:
        model: Stays as it is.
        methods: Their names. What else a method does with the model isn't compiled, such as a loop of steps.
        **options: As `torch.compile` has them.
    """
    compiled = copy.copy(model)
    for name in methods:
        setattr(compiled, name, _compiled_for_each_kind(getattr(model, name), **options))
    return compiled


def with_compiled_blocks(model: Module, blocks: Iterable[nn.Module], **options: Any) -> Module:
    """The same model, weights and buffers shared, some of whose blocks are compiled, each kind once.

    Blocks of one class whose parameters have the same shapes share what is compiled, which is why it takes
    less time than the whole model; what is between blocks isn't compiled.

    Args:
        model: Stays as it is.
        blocks: Modules in it that are called as such.
        **options: As `torch.compile` has them.
    """
    failures, kinds = set[str](), dict[Any, Callable[..., Any]]()

    twins = dict[nn.Module, nn.Module]()
    for block in blocks:
        kind = (type(block), *(weight.shape for weight in block.parameters()))
        if kind not in kinds:
            forward = _with_own_code(type(block).forward)
            kinds[kind] = compiled_or_eager(forward, said=failures, **options)
        twins[block] = copy.copy(block)
        setattr(twins[block], "forward", partial(kinds[kind], block))  # noqa: B010  # mypy: a method
    return cast("Module", _with_twins(model, twins))


def _with_twins(module: nn.Module, twins: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A module in which others take the place of some modules; itself where there are none of them."""
    if module in twins:
        return twins[module]
    children = {name: child and _with_twins(child, twins) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin._modules = children
    return twin


def _compiled_for_each_kind(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a method for each kind of calls by itself: for each task, say, or array.

    A kind is the texts that are given by name. So many kinds don't make a method reach the compiler's
    limit of recompilations, which it counts by code object.
    """
    kinds: dict[Any, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        kind = tuple(sorted((name, value) for name, value in kwargs.items() if isinstance(value, str)))
        if kind not in kinds:
            kinds[kind] = compiled_or_eager(with_own_code(method), **options)
        return kinds[kind](*args, **kwargs)

    return call


def compiled_or_eager(
    function: Callable[..., Any], *, said: set[str] | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile a model or function; if the compiler fails, say so and call it as it is from then on.

    Compilation happens in the first calls, so that is where it fails. When the compiler has made as many
    forms of the function as it is willing to, those stay, and calls that need another one aren't compiled.

    Args:
        function: What is compiled; a model's parameters stay its own.
        said: Sentences that aren't repeated, of the blocks of one model.
        **options: As `torch.compile` has them.
    """
    failures, limit_reached = _failures()
    said = set() if said is None else said
    _expect_warnings()
    chosen: list[Callable[..., Any]] = [torch.compile(function, **options)]
    is_limited = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_limited
        tried = chosen[0]
        try:
            with nullcontext() if is_limited else _error_at_limit():
                return tried(*args, **kwargs)
        except limit_reached:
            is_limited = True
            name = getattr(function, "__qualname__", type(function).__name__)
            text = f"torch.compile reached its limit of forms of {name}: others aren't compiled"
            if text not in said:
                logger.warning(text)
            said.add(text)
            return tried(*args, **kwargs)
        except failures as error:
            if tried is function:
                raise
            if chosen[0] is tried:  # no other thread was first
                chosen[0] = function
                text = f"torch.compile failed, going on without: {_first_line(error)}"
                if text not in said:
                    logger.info(text)
                said.add(text)
            return function(*args, **kwargs)

    return call


def _error_at_limit() -> AbstractContextManager[None]:
    """Inside, the compiler raises where it would go on uncompiled with a line in torch's own log."""
    from torch._dynamo import config

    patched: AbstractContextManager[None] = config.patch(fail_on_recompile_limit_hit=True)
    return patched


def _expect_warnings() -> None:
    """Inductor says that it calls the complex operations of spectral layers as they are, which is right; and
    Dynamo looks at `grad` of whatever a compiled function is given, which PyTorch warns about."""
    warnings.filterwarnings("ignore", message="Torchinductor does not support code generation for complex")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def compiled_or_refused(function: Callable[..., Any], *, hint: str, **options: Any) -> Callable[..., Any]:
    """Compile a function for callers that can't go on without: the result says that it was compiled.

    Args:
        function: What is compiled.
        hint: What to do if the compiler fails.
        **options: As `torch.compile` has them.
    Returns:
        A function whose first calls compile, and raise ConfigError of kind "compile" where that fails.
    """
    failures = _failures()
    _expect_warnings()
    compiled = torch.compile(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except failures as error:
            found = _first_line(error)
            raise ConfigError("torch.compile failed", kind="compile", found=found, hint=hint) from error

    return call


def _failures() -> tuple[type[Exception], type[Exception]]:
    """What a compiler fails with, and what it raises at its limit.

    Importing them takes seconds, so only those that compile do.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _first_line(error: Exception) -> str:
    """Class and first line of an error; of what a backend failed with, where that is why."""
    error = getattr(error, "inner_exception", error)  # its own first line names the backend alone
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class FirstCallAlone:
    """A compiled function for several threads: of all calls of one kind, the first is made alone.

    Threads that made it at once would each compile the same.

    Args:
        function: Called with tensors, and with values by name that can be hashed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._kinds: set[Any] = set()

    def __call__(self, *tensors: Tensor, **values: Any) -> Any:
        """What the function returns."""
        kind = (*(tensor.shape for tensor in tensors), *values.items())
        if kind not in self._kinds:
            with self._lock:
                if kind not in self._kinds:
                    result = self._function(*tensors, **values)
                    self._kinds.add(kind)
                    return result
        return self._function(*tensors, **values)


def with_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with a code object that no other has.

    `torch.compile` counts by code object what it has compiled and gives up at 8, so methods of several models
    would count as one.
    """
    assert isinstance(method, MethodType)
    return MethodType(_with_own_code(method.__func__), method.__self__)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def free_bytes(device: torch.device) -> int:
    """Memory that can be filled now: the GPU's, or RAM within the limits of machine and container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return ups_store.available_memory_bytes()
