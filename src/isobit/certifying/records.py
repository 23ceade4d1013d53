"""What `isobit certify` found, as plain records: no torch and no triton, so that reports can be drawn anywhere.

An *expression* is what computes one output row: every floating-point operation, its operands, and the inputs at its
leaves. The inputs of a row are named without the row's number, so row 0 alone and row 69 of 70 have the same
expression exactly if they are computed alike. Equal expressions give equal bits for all float inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isobit.foundation.records import Provenance
from isobit.order.addition import Branch

# The verdict of one configuration.
EXECUTED = "executed"  # it ran, and its expressions are known
# The inputs do not fix the result: a race, an atomic on floats, an address outside a buffer, a row that reads another.
BROKEN = "broken"
REFUSED = "refused"  # it could not be executed, such as an unknown instruction
FAILED = (BROKEN, REFUSED)


@dataclass(frozen=True)
class Configuration:
    """One way to run the function.

    Attributes:
        target: the GPU that it is compiled for, such as "sm_90".
        rows: the number of rows, or None if the function has no parameter `rows`.
        settings: (parameter, value as text) of what varies, such as ("BLOCK_M", "16").
        autotune: (kernel, configuration as text) for every autotuned kernel, since the autotuner chooses by time.
    """

    target: str
    rows: int | None = None
    settings: tuple[tuple[str, str], ...] = ()
    autotune: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The configuration without its target: "rows=3 BLOCK_M=16"."""
        parts = [] if self.rows is None else [f"rows={self.rows}"]
        parts += [f"{name}={value}" for name, value in self.settings]
        parts += [f"{kernel}: {chosen}" for kernel, chosen in self.autotune]
        return " ".join(parts) or "as it is"

    def __str__(self) -> str:
        return f"{self.target} {self.label}"


@dataclass(frozen=True)
class KernelFacts:
    """One compiled kernel of one configuration, and what can be read from its text.

    Attributes:
        kernel, target: the name of the Triton function, and the GPU that it is compiled for.
        options: compile options and constants, such as "BLOCK_M=16 num_warps=4 num_stages=3".
        digest: BLAKE3 of the PTX text without its `.loc` lines and file names.
        engine: the arithmetic of its tensor-core instructions, such as "tc25x16"; "" if it has none.
        tensor_core: tensor-core instructions and how often each is in the text.
        registers, spill_bytes: per thread by ptxas, or None; spilled registers go to local memory.
        shared_bytes: shared memory per program.
        atomics, float_atomics: atomic instructions by name, and how many of them add floats.
        flushes: instructions that flush subnormal numbers to zero (`.ftz`), by name.
        fused, fusion_allowed: `fma` on floats in the text, and whether the compiler may make them (`enable_fp_fusion`).
        open_products: sums of a product that the PTX leaves unfused without forbidding it: ptxas may fuse them.
        ptxas_fuses: whether Triton's ptxas fused what a kernel with open products has apart, as its machine code shows;
            None if it was not looked at.
        approximate: approximate instructions by name, such as {"ex2.approx.ftz.f32": 2}.
        lines: lines of PTX.
    """

    kernel: str
    target: str
    options: str
    digest: str
    engine: str = ""
    tensor_core: dict[str, int] = field(default_factory=dict)
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int = 0
    atomics: dict[str, int] = field(default_factory=dict)
    float_atomics: int = 0
    flushes: dict[str, int] = field(default_factory=dict)
    fused: int = 0
    fusion_allowed: bool = True
    open_products: int = 0
    ptxas_fuses: bool | None = None
    approximate: dict[str, int] = field(default_factory=dict)
    lines: int = 0

    @property
    def may_fuse(self) -> bool:
        """Whether ptxas may have fused what the PTX leaves open."""
        return self.open_products > 0 and self.ptxas_fuses is not False


@dataclass(frozen=True)
class Share:
    """Rows of one configuration that have one expression.

    Attributes:
        digest: BLAKE3 over the names of all elements of such a row, of all outputs.
        rows, first: how many rows have it, and the first; without `rows` the whole output is one row.
    """

    digest: str
    rows: int
    first: int


@dataclass(frozen=True)
class Outcome:
    """What happened to one configuration.

    Attributes:
        configuration: which one.
        verdict: EXECUTED, BROKEN or REFUSED.
        expressions: the expressions of its rows, the one with the most rows first.
        names, unwritten: output elements whose names were compared, and those that no kernel wrote.
        rows_compared: rows that were compared with another row, or with themselves at another position; None if it
            was not counted.
        bits_equal: of `bits_rows`, rows whose bits equal those of the same row in the first configuration that has it.
        launches, kernels: how many, and indices into `TargetReport.kernels` in their sequence.
        executed: instructions executed, counted once per program, not per thread.
        seconds: time to compile and execute.
        reason, remedy: for BROKEN and REFUSED, what was found, and what to do about it.
        where: "file.py:12, PTX line 340", if known.
    """

    configuration: Configuration
    verdict: str = EXECUTED
    expressions: tuple[Share, ...] = ()
    names: int = 0
    rows_compared: int | None = None
    unwritten: int = 0
    bits_equal: int = 0
    bits_rows: int = 0
    launches: int = 0
    kernels: tuple[int, ...] = ()
    executed: int = 0
    seconds: float = 0.0
    reason: str = ""
    remedy: str = ""
    where: str = ""


@dataclass(frozen=True)
class ExpressionClass:
    """Configurations (or rows of them) that share one expression.

    Attributes:
        digest: of the expression.
        members: (configuration, rows that have the expression, of all its rows), in the sequence of judging.
        tree: the order of addition of the first element of the row, if it is one sum over one input row, else None.
            Terms are positions along the summed axis.
        formula: a short text of the expression's outermost operations, or "".
    """

    digest: str
    members: tuple[tuple[Configuration, int, int], ...]
    tree: Branch | None = None
    formula: str = ""

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """The configurations of the class."""
        return tuple(configuration for configuration, _, _ in self.members)


@dataclass(frozen=True)
class Step:
    """One operation of an expression, and where it comes from.

    Attributes:
        operation, text: such as "add.rn.f32", and with its operands: "x[k=0]·w[k=0] + (…)".
        ptx_line, ptx: line of the PTX text (0 if unknown), and that line.
        source, python: Python file and line from `.loc` (or ("", 0)), and that line.
    """

    operation: str
    text: str
    ptx_line: int = 0
    ptx: str = ""
    source: tuple[str, int] = ("", 0)
    python: str = ""


@dataclass(frozen=True)
class Parting:
    """The first place where the expressions of two classes differ.

    Attributes:
        left, right: indices into `TargetReport.classes`; left is always the first class.
        left_configuration, left_row, right_configuration, right_row: what was compared.
        output: the element that was compared, such as "output 0, element [5]".
        left_step, right_step: the first operation that differs; None where one side has no operation there.
        equal_below: how many operations below this place are the same on both sides.
        detail: one sentence that says how they differ.
    """

    left: int
    right: int
    left_configuration: Configuration
    right_configuration: Configuration
    left_row: int = 0
    right_row: int = 0
    output: str = ""
    left_step: Step | None = None
    right_step: Step | None = None
    equal_below: int = 0
    detail: str = ""


@dataclass(frozen=True)
class TargetReport:
    """What was found on one target.

    Attributes:
        target, engine: such as "sm_90", and the arithmetic of its tensor cores, such as "tc25x16".
        outcomes: one per configuration.
        classes: expressions; the first has the first configuration that ran.
        partings: one per class after the first.
        kernels: every compiled kernel once.
        most_rows: the largest row count for which it was shown that only row masks depend on the number of rows; 0 if
            it was not shown.
        rows_reason: why not.
    """

    target: str
    engine: str
    outcomes: tuple[Outcome, ...] = ()
    classes: tuple[ExpressionClass, ...] = ()
    partings: tuple[Parting, ...] = ()
    kernels: tuple[KernelFacts, ...] = ()
    most_rows: int = 0
    rows_reason: str = ""

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """Configurations whose result the inputs do not fix."""
        return tuple(one for one in self.outcomes if one.verdict == BROKEN)

    @property
    def refused(self) -> tuple[Outcome, ...]:
        """Configurations that could not be executed."""
        return tuple(one for one in self.outcomes if one.verdict == REFUSED)

    @property
    def names(self) -> int:
        """Output elements whose names were compared."""
        return sum(one.names for one in self.outcomes)

    @property
    def rows(self) -> int:
        """Output rows whose expressions were compared."""
        return sum(share.rows for one in self.outcomes for share in one.expressions)

    @property
    def digest(self) -> str | None:
        """The digest of the one expression; None if there are several, or none."""
        return self.classes[0].digest if self.kept else None

    @property
    def kept(self) -> bool:
        """True if every configuration ran and all rows of all configurations have one expression."""
        return (
            len(self.classes) == 1
            and self.names > 0
            and all(one.verdict == EXECUTED and one.names for one in self.outcomes)
            and self.rows_compared in (None, self.rows)
        )

    @property
    def rows_compared(self) -> int | None:
        """Output rows that were compared with another row, or with themselves at another position."""
        counts = [one.rows_compared for one in self.outcomes if one.rows_compared is not None]
        return sum(counts) if counts else None

    @property
    def exit_code(self) -> int:
        """0 if kept, 1 if a result is not fixed or expressions differ, 2 if not enough ran to say."""
        if self.kept:
            return 0
        return 1 if self.broken or len(self.classes) > 1 else 2


@dataclass(frozen=True)
class TensorRead:
    """How a tensor of the function was read.

    Attributes:
        role, name: "input" and its argument, such as "x of matmul_kernel"; or "output" and "output 0".
        shape: such as "rows × 256" or "[256, 64]".
        row_axis, per_row: the axis that counts rows, or None, and its entries per row: 8 if it is rows × 8 heads.
        dtype: such as "bfloat16".
    """

    role: str
    name: str
    shape: str
    row_axis: int | None
    per_row: int
    dtype: str


@dataclass(frozen=True)
class Certified:
    """A whole certificate: what `isobit.certify` found.

    Attributes:
        function: the function that launches the kernels, as it was named.
        targets: one report per target.
        rows: the row counts that were compared; empty for a function without `rows`.
        vary: (parameter, values as text) of what varied.
        tensors: how inputs and outputs were read.
        groups: targets that share one expression, each group with all its targets; targets that are not kept are
            left out.
        rows_given: whether the caller chose the row counts.
        scanned: row counts that were launched without being executed.
        unjudged: what some of them launch that no judged row count launches.
        unsettled: what the judged row counts may launch besides, such as with gradients recorded.
        notes: facts that a reader should know, such as inputs that torch computed from others.
        triton, seconds: Triton's version, and the time of everything.
        provenance: software, machine, command and time.
    """

    function: str
    targets: tuple[TargetReport, ...]
    rows: tuple[int, ...] = ()
    vary: tuple[tuple[str, tuple[str, ...]], ...] = ()
    tensors: tuple[TensorRead, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    rows_given: bool = False
    scanned: tuple[int, ...] = ()
    unjudged: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    triton: str = ""
    seconds: float = 0.0
    provenance: Provenance | None = None

    @property
    def kept(self) -> bool:
        """True if on every target all rows of all configurations have one expression, and nothing is left out.

        Whoever gives row counts asks about these; without them, a row count that launches something else is left out.
        """
        whole = not self.unsettled and (self.rows_given or not self.unjudged)
        return whole and bool(self.targets) and all(target.kept for target in self.targets)

    @property
    def most_rows(self) -> int:
        """The largest row count that it holds for, with all smaller ones that launch the same kernels; 0 if unknown."""
        if not self.kept or self.unjudged or not self.scanned:
            return 0
        return min(target.most_rows for target in self.targets)

    @property
    def classes(self) -> tuple[ExpressionClass, ...]:
        """The expressions of all targets, one after the other."""
        return tuple(one for target in self.targets for one in target.classes)

    @property
    def names(self) -> int:
        """Output elements whose names were compared, on all targets."""
        return sum(target.names for target in self.targets)

    @property
    def exit_code(self) -> int:
        """0 if kept, 1 if it fails on a target, 2 if not enough ran to say."""
        codes = [target.exit_code for target in self.targets]
        code = 1 if 1 in codes else max(codes, default=2)
        return code if self.kept or code else 2
