"""Register the Triton executors of operators with torch, each on its first use.

[Note: a third executor]
An operator `name` has a native executor `isobit::<name>` in csrc, a portable one `isobit::portable_<name>`, and may
have a Triton one, `isobit::triton_<name>`, with the same arguments and the same formulas. It is in a module of its own,
`isobit.ops.<operator>.triton`, which is imported when the executor is used for the first time: Triton is an extra on a
machine without a GPU. This module does not import Triton.

Import and formulas are completed under a lock before the executor is used; see [Note: complete before it is used] in
isobit/ops/dispatch.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.errors import EngineError, UnsupportedError
from isobit.foundation import backends
from isobit.ops.arguments import PLAIN
from isobit.ops.dispatch import constant_in_graphs

# Folders of isobit.ops.
OPERATORS = tuple(
    sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/triton.py"))
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_library = torch.library.Library("isobit", "FRAGMENT")  # type: ignore[no-untyped-call]
_lock = threading.RLock()
_formulas: dict[str, Callable[[str], None]] = {}
_modules: dict[str, str] = {}
_ready: set[str] = set()
_registered: set[str] = set()
_functions: dict[str, Callable[..., Any]] = {}
# Per operator and types of a call's arguments: which are tensors; none if the call needs torch's dispatcher.
_tensors: dict[str, dict[tuple[type, ...], tuple[int, ...]]] = {}
# The types of an argument that the dispatcher passes on as they are, by its type in the schema.
PASSED = {
    "Tensor": PLAIN,
    "Optional[Tensor]": (*PLAIN, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
}
_count_modes = torch._C._len_torch_dispatch_stack
_count_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_profiled = torch._C._autograd._profiler_enabled
_trace = torch._C._get_tracing_state


def triton_operator(
    name: str, mutates: Sequence[str] = (), *, tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function as the new operator `isobit::triton_<name>` for tensors on a GPU, or on the CPU.

    On the CPU it needs a chosen backend. The operator replaces the function. `mutates` names the arguments that it
    writes; `tags` are torch's, in addition to pt2_compliant_tag.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        every = (torch.Tag.pt2_compliant_tag, *tags)
        _library.define(f"triton_{name}{schema}", tags=every)  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            _library.impl(f"triton_{name}", function, key)  # type: ignore[no-untyped-call]
        _registered.add(f"triton_{name}")
        if not mutates:  # what is written has a new version, which the dispatcher counts
            _functions[name], _tensors[name] = function, {}
        return getattr(torch.ops.isobit, f"triton_{name}")  # type: ignore[no-any-return]

    return register


def without_dispatcher(name: str, given: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function of `isobit::triton_<name>` if torch's dispatcher would call it with `given` as they are.

    None if something may watch or change the call: a mode, a profiler, a trace, a transform of torch.func, a subclass
    of Tensor, a tensor without memory, a lazy negation, or a number that is converted. Ask only without gradients, and
    not in torch.compile.
    """
    if (
        name not in _functions
        or _count_modes()
        or _count_function_modes()
        or _transform() is not None
        or _is_profiled()
        or _trace() is not None
    ):
        return None
    types = tuple(map(type, given))
    tensors = _tensors[name].get(types)
    if tensors is None:
        tensors = _tensors[name][types] = tensors_if_passed_on(name, types)
    for at in tensors:
        tensor = given[at]
        if tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor():
            return None
    return _functions[name] if tensors else None


def tensors_if_passed_on(name: str, types: tuple[type, ...]) -> tuple[int, ...]:
    """Return which arguments of these types are tensors; none if the dispatcher would convert an argument."""
    expected = getattr(torch.ops.isobit, f"triton_{name}").default._schema.arguments
    kinds = [PASSED.get(str(argument.type), ()) for argument in expected]
    if len(types) > len(kinds) or any(t not in k for t, k in zip(types, kinds, strict=False)):
        return ()
    return tuple(at for at, one in enumerate(types) if one in PLAIN)


def declare_triton(name: str, register_formulas: Callable[[str], None], module: str) -> None:
    """Note the module of an operator's Triton executor, and the formulas to register when it is imported."""
    _formulas[name], _modules[name] = register_formulas, module


def is_triton_operator(name: str) -> bool:
    """Return whether `isobit::<name>` was made by `triton_operator`."""
    return name in _registered


def has_triton(name: str) -> bool:
    """Return whether an operator has a Triton executor."""
    return name in _modules


def folder_of(name: str) -> str:
    """Return the folder of isobit.ops that an operator's Triton executor is in."""
    return _modules[name].split(".")[2]


def home_of(folder: str) -> str:
    """Return the module that declares a folder's operators: op.py, or step.py of what only an optimizer calls."""
    public = (Path(__file__).parents[1] / folder / "op.py").is_file()
    return f"isobit.ops.{folder}.{'op' if public else 'step'}"


def names_of(folder: str) -> tuple[str, ...]:
    """Return the operators with a Triton executor in a folder of isobit.ops, once its op.py is imported."""
    return tuple(name for name in sorted(_modules) if folder_of(name) == folder)


def is_asked_for(given: tuple[Any, ...]) -> bool:
    """Return whether a call is one for the Triton executor: a backend is chosen, or a tensor is on a GPU."""
    if backends.chosen() is not None:
        return True
    for argument in given:  # noqa: SIM110 (a generator costs more than its work, at every call)
        if isinstance(argument, Tensor) and argument.is_cuda:
            return True
    return False


@constant_in_graphs
def prepare(name: str, dtype: torch.dtype) -> bool:
    """Import and register an operator's Triton executor; return True.

    Raises:
        UnsupportedError: If the operator has none, or none for this dtype.
        EngineError: If Triton is not installed.
    """
    if not has_triton(name):
        raise UnsupportedError(
            expected=f"an operator with a Triton executor: {', '.join(OPERATORS)}",
            received=f"{name}, which has none",
            remedy="call it with tensors on the CPU, outside of isobit.certifying.executing",
        )
    if dtype not in DTYPES:
        raise UnsupportedError(
            expected=f"one of {', '.join(str(d) for d in DTYPES)} on a GPU",
            received=f"{dtype} of {name}",
            remedy="convert with .to(torch.float32), or call it with tensors on the CPU",
        )
    if name in _ready:  # a name is added after its formulas
        return True
    with _lock:
        if name not in _ready:
            import_executor(_modules[name])
            _formulas[name](f"triton_{name}")
            _ready.add(name)
    return True


def import_executor(module: str) -> None:
    """Import a module that needs Triton."""
    try:
        import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise EngineError(
            expected="the package triton, which compiles the kernels",
            received=str(error),
            remedy="pip install triton (Linux)",
        ) from error
