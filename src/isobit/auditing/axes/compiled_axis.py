"""The axis `compile`: eager modules against torch.compile.

[Note: blame by module] Compiled code has no dispatched operators, so the unit is a module. The whole model is compiled
first. A module whose compiled result differs is run eagerly with each of its children compiled, on the inputs that the
child then has: children that differ are looked into in turn. If the children together give the compiled module's bits,
they explain it; if not, the module is named, too: its own operators, or a fusion across its children, round
differently. A module whose compiled result is the eager one is innocent, and so is what is inside. Effects are measured
children first, so that the share of a module is what it adds to its children's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from isobit.auditing.auditor import AuditOptions, both, some
from isobit.auditing.axes.axes import NotApplicableError
from isobit.auditing.axes.compiled_accuracy import explain
from isobit.auditing.axes.compiled_modules import Compiler, NotCompiled, count_graphs, same_bits
from isobit.auditing.axes.variation import same_start
from isobit.auditing.inputs import Inputs
from isobit.auditing.judging.blame import Blame, as_records, rank
from isobit.auditing.judging.effects import Quantity, choose, outputs_of, quantity_of
from isobit.auditing.judging.findings import Finding, compare, merge
from isobit.auditing.records import AxisReport, Guilty, Place, Unjudged
from isobit.auditing.replay.call import describe, tensors_of
from isobit.auditing.replay.module_hooks import Called, Hooks, count_calls
from isobit.auditing.replay.places import short_path
from isobit.auditing.replay.watching import first_line

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
        self.findings: dict[str, Finding] = {}
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
        self.findings[call.path] = Finding(
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
