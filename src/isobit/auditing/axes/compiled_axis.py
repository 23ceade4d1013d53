"""The axis `compile`: eager modules against torch.compile.

[Note: blame by module] Compiled code has no dispatched operators, so the unit is a module. The whole model is compiled
first. A module whose compiled result differs is run eagerly with each of its children compiled, on the inputs that the
child then has: children that differ are looked into in turn. If the children together give the compiled module's bits,
they explain it; if not, the module is named, too: its own operators, or a fusion across its children, round
differently. A module whose compiled result is the eager one is innocent, and so is what is inside. Effects are measured
children first, so that the share of a module is what it adds to its children's.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from isobit import bits
from isobit.auditing.auditor import AuditOptions, both, some
from isobit.auditing.axes.axes import NotApplicableError, same_start
from isobit.auditing.judging.accuracy import APPROXIMATION, without_reference
from isobit.auditing.judging.blame import Blame, as_records, rank
from isobit.auditing.judging.effects import Quantity, choose, outputs_of, quantity_of
from isobit.auditing.judging.findings import GuiltyCall, compare, merge
from isobit.auditing.records import (
    ERROR,
    ORDER,
    RANDOM,
    Accuracy,
    AxisReport,
    Guilty,
    Place,
    Unjudged,
)
from isobit.auditing.replay.call import describe, spec_of, tensors_of
from isobit.auditing.replay.places import short_path
from isobit.auditing.replay.watching import Called, Hooks, count_calls, first_line
from isobit.auditing.subjects import Inputs

# Tell another rounding from an error for whole modules: both results against the module in fp64.

# A module rounds many times, and fused code fewer times, so that one result may be closer to fp64 than the other. How
# often one may be farther than the other, or than one rounding of its row's largest number, and be another rounding:
FARTHER = 16.0


def explain(call: Called, compiled: Any) -> tuple[str, Accuracy]:
    """Return whether two results of a module differ by rounding, by an error, or at random; and both errors.

    Args:
        call: The eager call.
        compiled: What the compiled module returned.
    """
    if call.draws:
        return RANDOM, Accuracy("none")
    pairs = [
        (a, b)
        for a, b in zip(tensors_of(call.out), tensors_of(compiled), strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]
    if not pairs:
        return ERROR, Accuracy("none")
    try:
        wide = [t for t in tensors_of(in_double(call)) if t.is_floating_point()]
    except Exception:  # a module may raise anything in fp64
        wide = []
    if [t.shape for t in wide] != [a.shape for a, _ in pairs]:
        judged = [without_reference(a, b) for a, b in pairs]
        errors = [accuracy for kind, accuracy in judged if kind == ERROR]
        if not errors:
            return ORDER, Accuracy("none")
        return ERROR, Accuracy("none", approximation=all(one.approximation for one in errors))
    far = [
        max(distance(pair[side], exact) for pair, exact in zip(pairs, wide, strict=True))
        for side in (0, 1)
    ]
    allowed = FARTHER * max(min(far), 1.0)
    shown = [error / allowed for error in far]
    if max(shown) <= 1:
        return ORDER, Accuracy("fp64", shown[0], shown[1])
    finest = min(torch.finfo(a.dtype).eps for a, _ in pairs)
    explained = max(far) * finest <= APPROXIMATION
    return ERROR, Accuracy("fp64", shown[0], shown[1], approximation=explained)


def in_double(call: Called) -> Any:
    """Return the result of the module in fp64."""
    module = copy.deepcopy(call.module).double()

    def widen(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floating else value

    args, kwargs = _pytree.tree_map(widen, (call.args, call.kwargs))
    return module(*args, **kwargs)


def distance(value: Tensor, exact: Tensor) -> float:
    """Return the largest distance in roundings of the row's largest number; infinite where only one is finite."""
    if not value.numel():
        return 0.0
    top = exact.abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
    step = torch.finfo(value.dtype).eps * top.clamp(min=torch.finfo(value.dtype).tiny)
    given = value.double()
    same = (given == exact) | (given.isnan() & exact.isnan())
    ratio = ((given - exact).abs() / step).nan_to_num(nan=float("inf"))
    return float(torch.where(same, 0.0, ratio).max())


# Compile the modules of a model one by one, and run a compiled module in the place of the eager one.
#
# [Note: one compilation per kind of module] Layers of a model differ in their weights only. A module is compiled as a
# copy of its structure, into which the weights of any module of the same kind are put: weights are inputs of compiled
# code. Before that is used for another module, the copy is run eagerly and must give that module's own bits.

Settings = dict[str, Any]
# Beyond the usual limit of 8, dynamo would silently run code eagerly, and nothing would be compared.
SETTINGS: Settings = {
    "recompile_limit": 10_000,
    "accumulated_recompile_limit": 100_000,
    "fail_on_recompile_limit_hit": True,
}
PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype, torch.device)
NUMBERS = {"layer_idx", "layer_id", "layer_number"}  # attributes that only count layers


class NotCompiled(Exception):
    """A module that was not compiled, and why."""


class Compiler:
    """Compiled forms of a model's modules.

    Args:
        model: The model, without any hook of the audit.
        budget: Seconds after which no further kind of module is compiled.
        say: Called with what is compiled.
        backend: The backend of torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: float,
        say: Callable[[str], None],
        backend: str = "inductor",
    ) -> None:
        """Copy the structure of the model; weights are shared."""
        self.model, self.budget, self.say = copy_structure(model), budget, say
        self.backend = backend
        self.spent = 0.0
        self.kinds: dict[object, tuple[nn.Module, Any]] = {}
        self.alike: dict[tuple[str, object], bool] = {}

    def run(self, path: str, args: Any, kwargs: Any, eager: Any) -> Any:
        """Run the compiled form of a module.

        Args:
            path: The path of the module.
            args: What it is called with.
            kwargs: What it is called with by name.
            eager: What the eager module returns.

        Raises:
            NotCompiled: It cannot be compiled, or not in time.
        """
        module = self.model.get_submodule(path) if path else self.model
        key = self.kind_of(path, module, args, kwargs, eager)
        known = self.kinds.get(key)
        if known is None:
            if self.spent > self.budget:
                raise NotCompiled(f"it was not compiled within {self.budget:.0f} seconds")
            self.say(path or "the model")
            known = self.kinds[key] = self.compile(module)
        adopt(known[0], module)
        began = time.perf_counter()
        try:
            with torch._dynamo.config.patch(SETTINGS):
                return known[1](*args, **kwargs)
        except Exception as error:  # a compiler may raise anything
            raise NotCompiled(f"it cannot be compiled: {first_line(error)}") from error
        finally:
            self.spent += time.perf_counter() - began

    def compile(self, module: nn.Module) -> tuple[nn.Module, Any]:
        """Return a copy of a module's structure and its compiled form, which is made at its first call."""
        made = copy_structure(module)
        try:
            return made, torch.compile(made, dynamic=False, backend=self.backend)
        except Exception as error:  # such as a backend that is not there
            raise NotCompiled(f"it cannot be compiled: {first_line(error)}") from error

    def kind_of(self, path: str, module: nn.Module, args: Any, kwargs: Any, eager: Any) -> object:
        """Return what modules share that one compiled form serves."""
        key = (signature(module), shape_of((args, kwargs)))
        known = self.kinds.get(key)
        if known is None:
            return key
        if (path, key) not in self.alike:
            adopt(known[0], module)
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                again = tensors_of(known[0](*args, **kwargs))
            self.alike[path, key] = same_bits(again, tensors_of(eager))
        return key if self.alike[path, key] else (path, key)


def count_graphs() -> int:
    """Return how many graphs torch.compile has captured in this process: none where all code is left eager."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def copy_structure(module: nn.Module) -> nn.Module:
    """Copy a module without its weights, which the copy shares."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def adopt(made: nn.Module, module: nn.Module) -> None:
    """Give a copy of a module's structure the weights of a module of the same kind."""
    for mine, its in zip(made.modules(), module.modules(), strict=True):
        mine._parameters.update(its._parameters)
        mine._buffers.update(its._buffers)


def signature(module: nn.Module) -> object:
    """Return what a module's compiled code may depend on, apart from values of weights and numbers of layers."""
    found: list[object] = []
    for name, sub in module.named_modules():
        plain = [
            (key, repr(value) if isinstance(value, PLAIN) else id_of(value))
            for key, value in sorted(vars(sub).items())
            if not key.startswith("_") and key not in NUMBERS
        ]
        tensors = [*sub.named_parameters(recurse=False), *sub.named_buffers(recurse=False)]
        shapes = [(key, spec_of(value)) for key, value in tensors]
        found.append((name, type(sub), tuple(plain), tuple(shapes)))
    return tuple(found)


def id_of(value: object) -> object:
    """Return what tells an attribute that is no plain value apart: its identity, as a configuration is shared."""
    return (type(value), id(value)) if not isinstance(value, Tensor) else spec_of(value)


def shape_of(values: object) -> object:
    """Return the structure of arguments with the specs of their tensors."""
    leaves, structure = _pytree.tree_flatten(values)
    kept = [
        spec_of(v) if isinstance(v, Tensor) else repr(v) if isinstance(v, PLAIN) else id_of(v)
        for v in leaves
    ]
    return (tuple(kept), str(structure))


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors have the same shapes, dtypes and bits."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bits.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


AXIS, OPERATOR = "compile", "torch.compile"
BUDGET = 120.0  # seconds of compiling
REMEDY = (
    "keep it out with torch.compiler.disable, use isobit's operators, which the compiler calls as they are, "
    "or set torch._inductor.config.emulate_precision_casts if 16-bit roundings are fused away"
)


class CompiledAudit:
    """The audit of the axis `compile`.

    Args:
        inputs: The model and its batch.
        options: What the audit is asked for.
        budget: Seconds of compiling after which no further kind of module is compiled.
        backend: The backend of torch.compile.

    Raises:
        NotApplicableError: The model cannot be compiled here.
    """

    def __init__(
        self,
        inputs: Inputs,
        options: AuditOptions,
        budget: float = BUDGET,
        backend: str = "inductor",
    ) -> None:
        """Copy the structure of the model."""
        self.inputs, self.options, self.model = inputs, options, inputs.model
        try:
            self.compiler = Compiler(self.model, budget, self.say_path, backend)
        except Exception as error:  # a module may hold anything that cannot be copied
            raise NotApplicableError(f"the model cannot be copied: {first_line(error)}") from error
        self.numbers: dict[str, int] = {}
        self.findings: dict[str, GuiltyCall] = {}
        self.unjudged: dict[str, Unjudged] = {}
        self.judged: set[str] = set()
        self.forwards = self.graphs = 0

    def report(self) -> AxisReport:
        """Run the audit."""
        self.numbers, total = self.run(lambda: count_calls(self.model, self.inputs.run))
        began = time.perf_counter()
        plain = self.run(lambda: outputs_of(self.inputs.run()))
        seconds = {"forward": time.perf_counter() - began}
        began = time.perf_counter()
        target = self.search()
        seconds["find"] = time.perf_counter() - began
        self.compiler.budget = float("inf")  # what is guilty was compiled; only strides may be new
        last = self.substituted(set(self.findings)) if self.findings else plain
        began = time.perf_counter()
        blame = self.rank(plain, last)
        seconds["rank"] = time.perf_counter() - began
        differ = [n for n in target if n not in last or not same_bits([target[n]], [last[n]])]
        measured = [self.quantity(one) for one in (plain, last, target)]
        return AxisReport(
            AXIS,
            self.sentence(),
            ("eager", "compiled"),
            operators=total,
            exact=max(total - len(self.judged) - len(self.unjudged), 0),
            judged=len(self.judged),
            guilty=self.guilty(blame),
            unjudged=tuple(self.unjudged.values()),
            effect=both(measured[0], measured[2]),
            remaining=both(measured[1], measured[2]),
            complete=not differ and bool(target),
            why_not=self.why_not(differ)
            if differ
            else ""
            if target
            else "the model returns no numbers",
            groups=tuple(blame.groups) if blame else (),
            grouped_by=blame.grouped_by if blame else "one",
            forwards=self.forwards,
            seconds=seconds,
        )

    def sentence(self) -> str:
        """Say what changes; torch.compile may leave a model as it is, as it does with one that isobit enabled."""
        if not self.graphs:
            return "the model is given to torch.compile, which compiles none of it"
        return f"the model is compiled by torch.compile into {self.graphs} graph{'s' if self.graphs > 1 else ''}"

    def say(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        if self.options.progress is not None:
            self.options.progress(f"{AXIS}: {stage}", done, total)

    def say_path(self, path: str) -> None:
        """Report what is compiled, of how many calls of modules how many were judged."""
        self.say(f"compiling {path}", len(self.judged), len(self.numbers))

    def run(self, program: Callable[[], Any]) -> Any:
        """Run something with the random numbers that every run starts with."""
        with same_start():
            return program()

    def search(self) -> dict[str, Tensor]:
        """Compile the model, look for the modules that differ, and return the compiled model's outputs."""
        call = Called(
            "", self.model, self.inputs.args, self.inputs.named, self.run(self.inputs.run)
        )
        before = count_graphs()
        try:
            compiled = self.run(lambda: self.compiler.run("", call.args, call.kwargs, call.out))
        except NotCompiled as error:
            raise NotApplicableError(str(error).replace("it", "the model", 1)) from error
        self.graphs = count_graphs() - before
        self.judged.add("")
        if same_bits(tensors_of(call.out), tensors_of(compiled)):
            return outputs_of(compiled)
        self.look_into(call, compiled)
        return outputs_of(compiled)

    def look_into(self, call: Called, compiled: Any) -> None:
        """Find out which children of a module that differs explain it; see [Note: blame by module]."""
        children: list[tuple[Called, Any]] = []

        def replace(child: Called) -> Any:
            made = self.compiled(child)
            if made is None or same_bits(tensors_of(child.out), tensors_of(made)):
                return None
            children.append((child, made))
            return made

        prefix = f"{call.path}." if call.path else ""
        inside = [path for path in self.numbers if path and path.startswith(prefix)]
        with Hooks(self.model, inside, replace, outermost=True):
            out = self.run(lambda: call.module(*call.args, **call.kwargs))
        explained = bool(children) and same_bits(tensors_of(out), tensors_of(compiled))
        if not explained and (call.path or not children):
            self.find(call, compiled)
        for child, made in children:
            if child.path not in self.findings:
                self.look_into(child, made)

    def compiled(self, call: Called) -> Any:
        """Return the compiled result of a call, or None if it cannot be judged."""
        try:
            if call.writes:
                raise NotCompiled("it writes to its inputs, so that it cannot be called again")
            if not tensors_of(call.out):
                raise NotCompiled("it returns no tensor that can be compared")
            found = call.with_its_random_numbers(
                lambda: self.compiler.run(call.path, call.args, call.kwargs, call.out)
            )
        except NotCompiled as error:
            if call.path not in self.judged:
                self.unjudged[call.path] = Unjudged(self.place(call.path), AXIS, str(error))
            return None
        self.judged.add(call.path)
        self.unjudged.pop(call.path, None)
        return found

    def place(self, path: str) -> Place:
        """Return the place of a module: the file and line of its forward."""
        forward = type(self.model.get_submodule(path)).forward
        code = inspect.unwrap(forward).__code__
        source = f"{short_path(code.co_filename)}:{code.co_firstlineno}"
        return Place(OPERATOR, path, source, self.numbers.get(path, 0))

    def find(self, call: Called, compiled: Any) -> None:
        """Name a module."""
        total = None
        pairs = zip(tensors_of(call.out), tensors_of(compiled), strict=False)
        for eager, other in pairs:
            if eager.shape == other.shape and eager.dtype == other.dtype:
                total = merge(total, compare(eager, other))
        if total is None:
            reason = "its compiled form returns tensors of other shapes"
            self.unjudged[call.path] = Unjudged(self.place(call.path), AXIS, reason)
            return
        kind, accuracy = explain(call, compiled)
        shapes = describe(tensors_of((call.args, call.kwargs)))
        place = self.place(call.path)
        self.findings[call.path] = GuiltyCall(
            place, total, kind, accuracy, OPERATOR, shapes, shapes, None
        )

    def substituted(self, paths: set[str]) -> dict[str, Tensor]:
        """Return the outputs of the eager model with these modules compiled."""
        if "" in paths:
            eager = self.run(self.inputs.run)
            whole = Called("", self.model, self.inputs.args, self.inputs.named, eager)
            return outputs_of(self.run(lambda: self.compiled(whole)))
        with Hooks(self.model, paths, self.compiled):
            return outputs_of(self.run(self.inputs.run))

    def quantity(self, outputs: dict[str, Tensor]) -> Quantity | None:
        """Return what the effect is measured on."""
        name = choose(outputs, self.options.effect)
        if name not in outputs:
            return None
        return quantity_of(outputs[name], name, self.inputs.tokens)

    def rank(self, plain: dict[str, Tensor], last: dict[str, Tensor]) -> Blame | None:
        """Substitute modules one after another, children before the modules that have them."""
        start, final = self.quantity(plain), self.quantity(last)
        if not self.findings or start is None or final is None:
            return None
        at = {f.place.call: path for path, f in self.findings.items()}

        def run(calls: set[int]) -> Quantity:
            self.forwards += 1
            self.say("substituting", self.forwards, len(self.findings))
            found = self.quantity(self.substituted({at[call] for call in calls}))
            assert found is not None
            return found

        return rank(list(self.findings.values()), self.options.blame, start, final, run)

    def guilty(self, blame: Blame | None) -> tuple[Guilty, ...]:
        """Return the records, the largest share first."""
        why = "compiled code has no dispatched operator that could be revealed"
        found = list(self.findings.values())
        return as_records(found, AXIS, blame, [REMEDY] * len(found), why)

    def why_not(self, differ: list[str]) -> str:
        """Say why the substituted run is not the compiled model."""
        if any(f.kind == "random" for f in self.findings.values()):
            return "a module draws random numbers, which compiled code draws differently"
        left = f"; {len(self.unjudged)} modules were not judged" if self.unjudged else ""
        return f"{some(differ)} still differ: a fusion across modules remains{left}"
