"""Buffers of calls in progress: operators and reads by the host before `wait()`, and writes that overwrite them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isobit import bits
from isobit.errors import PendingError
from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import TORCH, user_stack
from isobit.simulator.collectives import Call, Operation
from isobit.simulator.program.process_state import replaced
from isobit.simulator.rank import Pending, Rank, memory_of, overlap
from isobit.simulator.torch.backward_pass import lasting

# Host reads: ways in which a program reads a tensor's memory without an operator of torch.
#
# [Note: doors]
# Operators are watched by `ReadWatch` below. Some methods of a tensor read or hand out its
# memory without one: `numpy()` returns an array of the same memory, `tolist()` reads in C++,
# `repr()` switches the watch of operators off. Each of them is a *door*, and is watched here. The
# registry is closed: every attribute of `torch.Tensor` is an operator of aten, or in one of the
# three sets below; tests/simulator/test_host_reads.py fails for one that is in none, and opens
# every door.
#
# An array, address or storage that a program took before the call of the collective is not seen.

FunctionMode: Any = TorchFunctionMode  # untyped in torch
_tensor: Any = Tensor


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Methods that read, or hand out, memory without an operator.
DOORS = names(
    "__array__ __deepcopy__ __dlpack__ __format__ __reduce_ex__ __repr__ __str__ _reduce_ex_internal _typed_storage "
    "apply_ const_data_ptr data_ptr map2_ map_ numpy share_memory_ storage tolist untyped_storage"
)
# Addresses and storages: torch itself asks for them to see whether two tensors share memory.
IDENTITIES = names("const_data_ptr data_ptr untyped_storage")
UNSEEN = ("_reduce_ex_internal", "_typed_storage")  # which no mode of torch sees
# Methods in Python that read by operators.
BY_OPERATORS = names(
    "__bool__ __complex__ __contains__ __float__ __index__ __int__ __long__ __nonzero__ __reversed__ backward bfloat16 "
    "bool byte cdouble cfloat char cpu cuda double float half int ipu long module_load mtia new_tensor short "
    "to_sparse_coo unique xpu __abs__ __add__ __div__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__ __idiv__ "
    "__ifloordiv__ __imod__ __imul__ __invert__ __ipow__ __isub__ __itruediv__ __le__ __lt__ __matmul__ __mod__ "
    "__mul__ __ne__ __neg__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ "
    "__rmul__ __ror__ __rpow__ __rrshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ lu"
)
# What describes a tensor, makes a view of it, or is no longer part of torch. The last two hand out memory to C code
# only: `__cuda_array_interface__` raises for a CPU tensor, `__dlpack_c_exchange_api__` is a capsule of the class.
DESCRIPTIONS = names(
    "H T __annotations__ __array_priority__ __array_wrap__ __class__ __delattr__ __delitem__ __dict__ __dir__ "
    "__dlpack_device__ __doc__ __getattribute__ __getstate__ __hash__ __init__ __init_subclass__ __iter__ __len__ "
    "__module__ __new__ __reduce__ __setattr__ __setstate__ __sizeof__ __subclasshook__ __torch_dispatch__ "
    "__torch_function__ __weakref__ _backward_hooks _base _cdata _clear_non_serializable_cached_data _dtensor__new__ "
    "_fix_weakref _grad _grad_fn _has_symbolic_sizes_strides _is_view _make_subclass _make_wrapper_subclass "
    "_post_accumulate_grad_hooks _python_dispatch _rev_view_func_unsafe _use_count _view_func _view_func_unsafe "
    "as_subclass device dim_order dtype eig element_size grad grad_dtype grad_fn is_cpu is_cuda is_ipu is_maia is_meta "
    "is_mkldnn is_mps is_mtia is_nested is_quantized is_shared is_sparse is_sparse_csr is_vulkan is_xla is_xpu "
    "itemsize layout lstsq name nbytes ndim ndimension nelement new register_hook register_post_accumulate_grad_hook "
    "reinforce requires_grad shape solve storage_type symeig type volatile __cuda_array_interface__ "
    "__dlpack_c_exchange_api__"
)
# Functions that read the elements of lists in C++.
READS_LISTS = (torch.tensor, torch.as_tensor, torch.asarray, _tensor.new_tensor)

Report = Callable[[str, list[Tensor]], None]


class DoorWatch(FunctionMode):  # type: ignore[misc]
    """Look at the calls of doors while the rank has pending results."""

    def __init__(self, rank: Rank, report: Report) -> None:
        """Watch the doors of a rank; `report(what, tensors)` is called with what is read."""
        super().__init__()
        self.rank, self.report = rank, report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check a door, then call it."""
        if self.rank.pending and not self.rank.communicating:
            name = getattr(func, "__name__", "")
            if name in DOORS and not (name in IDENTITIES and called_in_torch(sys._getframe(1))):
                self.report(f"Tensor.{name}", [t for t in args[:1] if isinstance(t, Tensor)])
            elif func in READS_LISTS:
                listed = [a for a in args if isinstance(a, (list, tuple))]
                self.report(name, [t for t in tree_leaves(listed) if isinstance(t, Tensor)])
        return func(*args, **(kwargs or {}))


def called_in_torch(frame: Any) -> bool:
    """Return whether a file of torch, not of the program, makes the call."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("isobit.simulator"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(TORCH)


def watched(plain: Any, name: str) -> Any:
    """Return a method of tensors that is watched, of those that no mode of torch sees. `copy.copy` reads nothing."""

    def method(self: Tensor, *args: Any) -> Any:
        if ranks.inside():
            rank, caller = ranks.current(), sys._getframe(1)
            if rank.on_host_read is not None and not is_identity(name, caller):
                rank.on_host_read(f"Tensor.{name}", self)
        return plain(self, *args)

    return method


def is_identity(name: str, caller: Any) -> bool:
    """Return whether a call only asks which memory a tensor has."""
    if name == "_typed_storage":
        return called_in_torch(caller)
    frames = (caller, caller.f_back)  # copy.copy, by __reduce_ex__
    return any(frame is not None and frame.f_code.co_filename == copy.__file__ for frame in frames)


def to_dlpack_of(plain: Any) -> Any:
    """Return a `to_dlpack` that is watched, by way of the method."""

    def to_dlpack(tensor: Tensor) -> Any:
        return tensor.__dlpack__() if ranks.inside() else plain(tensor)

    return to_dlpack


@contextmanager
def watched_functions() -> Iterator[None]:
    """Replace the functions that no mode of torch sees."""
    dlpack: Any = torch.utils.dlpack
    to_dlpack = to_dlpack_of(dlpack.to_dlpack)
    with ExitStack() as stack:
        for owner, name, value in (
            *((Tensor, name, watched(vars(Tensor)[name], name)) for name in UNSEEN),
            (torch, "to_dlpack", to_dlpack),
            (dlpack, "to_dlpack", to_dlpack),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


# Pending results: an operator, or one of the host reads above, that reads or writes a result before `wait()`.

# Namespaces of operators that wait by themselves.
WAITING = ("_c10d_functional", "c10d", "_c10d_functional_autograd")
DispatchMode: Any = TorchDispatchMode  # untyped in torch


class ReadWatch(DispatchMode):  # type: ignore[misc]
    """Look at the arguments of every operator while the rank has pending results. Views read nothing."""

    def __init__(self, rank: Rank) -> None:
        """Watch the operators of a rank."""
        super().__init__()
        self.rank, self.reported = rank, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the arguments, then call the operator."""
        if (
            self.rank.pending
            and not self.rank.communicating
            and func.namespace not in WAITING
            and not func.is_view
        ):
            leaves = tree_leaves((args, kwargs))
            self.check(str(func), [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))

    def check(self, func: str, tensors: list[Tensor]) -> None:
        """Report tensors that share memory with a pending result."""
        read = memory_of(tensors)
        for work in self.rank.pending.values():
            if overlap(read, work.memory):
                self._report(func, work)

    def _report(self, func: str, work: Pending) -> None:
        lines = user_stack(sys._getframe(2))
        line = lines[0] if lines else ""
        if line and line in self.reported:
            return
        self.reported.add(line)
        index = self.rank.index
        self.rank.findings.note(
            PendingError(
                expected=f"the result of {work.what} untouched until wait()",
                received=f"a read or write of it by {func} on rank {index}; the call was at {work.site}",
                remedy="call .wait() on the handle first",
                ranks=[index],
                stacks={index: lines},
            )
        )


@contextmanager
def watching_reads(rank: Rank) -> Iterator[None]:
    """Watch the operators and doors of the current thread, if the run watches reads."""
    if "reads" not in rank.watch:
        yield
        return
    watch = ReadWatch(rank)

    def on_host_read(what: str, tensor: Tensor) -> None:
        if rank.pending and not rank.communicating:
            watch.check(what, [tensor])

    rank.on_host_read = on_host_read
    with watch, lasting(DoorWatch(rank, watch.check)):
        yield


# Overwritten buffers: writes to an input or output of a call between the call and its `wait()`.

# Each tensor with its mark and, if a copy of it is in transit, that copy.
Snapshot = list[tuple[Tensor, int | str, Tensor | None]]


def mark_of(tensor: Tensor) -> int | str:
    """Return a mark that changes when the tensor is written to.

    It is torch's version counter, or the digest if other tensors of the same storage share that counter.
    """
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return bits.digest(tensor)
    return 0 if tensor.is_inference() else tensor._version


def take_snapshot(tensors: Sequence[Tensor], sent: Sequence[Tensor] = ()) -> Snapshot:
    """Mark the tensors of a call that is in progress."""
    copies: Sequence[Tensor | None] = sent or [None] * len(tensors)
    return [(tensor, mark_of(tensor), sent) for tensor, sent in zip(tensors, copies, strict=True)]


def find_change(snapshot: Snapshot) -> int | None:
    """Return the index of the first tensor that was written to since the snapshot."""
    for at, (tensor, mark, sent) in enumerate(snapshot):
        if tensor.untyped_storage().nbytes() < tensor.nbytes:  # its memory was freed
            return at
        if mark_of(tensor) != mark or (
            sent is not None and not bits.equal(tensor.detach().reshape(sent.shape), sent)
        ):
            return at
    return None


def changed_early(operation: Operation, call: Call) -> PendingError:
    """Report an input that was changed before the other ranks had read it."""
    return PendingError(
        expected=f"the input of rank {call.rank} to {operation.describe()} unchanged until wait()",
        received="an in-place change before the other ranks had read it",
        remedy="call .wait() first, or send a clone",
        ranks=[call.rank],
        stacks={call.rank: [call.site]},
    )


def find_shared_output(call: Call, what: str) -> PendingError | None:
    """Report two results of one call that would be written to the same memory, as `[torch.empty(2)] * n` has."""
    seen: dict[int, int] = {}
    for at, output in enumerate(call.outputs):
        first = seen.setdefault(output.data_ptr(), at) if output.numel() else at
        if first != at:
            return PendingError(
                expected=f"memory of its own for each result of {what} on rank {call.rank}",
                received=f"results {first} and {at} in the same memory: one overwrites the other",
                remedy="allocate them one by one: [torch.empty_like(x) for _ in range(world_size)]",
                ranks=[call.rank],
                stacks={call.rank: list(call.stack) or [call.site]},
            )
    return None


def overwritten(
    rank: int, what: str, site: str, tensor: Tensor, at: int, stack: Sequence[str]
) -> PendingError:
    """Report a buffer that was written to between the call and its `wait()`."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return PendingError(
        expected=f"buffer {at} of rank {rank} ({shape} {dtype}) in {what} unchanged until wait()",
        received=f"a write to it before wait(); the call was at {site}",
        remedy="call .wait() first, or pass a clone",
        ranks=[rank],
        stacks={rank: stack},
    )
