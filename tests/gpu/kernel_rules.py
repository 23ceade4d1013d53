"""The rules for kernels, checked in their source and in their PTX; see [Note: rules for kernels] in isobit/ops/gpu."""

import ast
from pathlib import Path

from isobit.certifying.judging.static_facts import _STATEMENT, count_open_products
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.certifying.running.compile import Compiler, specialise

OPS = Path(__file__).parents[2] / "src" / "isobit" / "ops"
SOURCES = sorted([*OPS.glob("gpu/*.py"), *OPS.glob("*/triton*.py")])
# Reductions and scans have the order of a layout, and atomics that of arrival. Maxima and minima have none.
ORDERLESS = (
    "sum",
    "xor_sum",
    "reduce",
    "associative_scan",
    "cumsum",
    "cumprod",
    "sum_rn",
    "histogram",
)
APPROXIMATE = (
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid"),
    *("softmax", "fdiv", "div", "inline_asm_elementwise", "dot_scaled"),
)
STACK = 64  # bytes per thread: ptxas calls the slow path of a division, which keeps registers on the stack
INTEGER_SUMS = {
    "exact_sum/triton.py",
    "exact_sum/triton_state.py",
}  # tl.sum of integers, which have no order


def kernels_of(tree):
    """The functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
            if "triton.jit" in decorators:
                yield node


def broken_rules(source, sums_of_integers=False):
    """Return what a file's kernels may not do, with its line."""
    found = []
    for kernel in kernels_of(ast.parse(source)):
        for name in misnamed(kernel):
            found.append(f"{kernel.name}: {name} is not tl.constexpr, and in upper case")
        for node in ast.walk(kernel):
            what = broken_rule(node, sums_of_integers)
            if what:
                found.append(f"{kernel.name}:{node.lineno}: {what}")
    return found


def misnamed(kernel):
    """Yield names in upper case that are known only at run time: parameters, and variables of the kernel."""
    constant = {
        node.arg if isinstance(node, ast.arg) else node.target.id
        for node in ast.walk(kernel)
        if isinstance(node, ast.arg | ast.AnnAssign)
        and node.annotation is not None
        and "constexpr" in ast.unparse(node.annotation)
    }
    for node in ast.walk(kernel):
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
        is_made = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if is_made and name.isupper() and name not in constant:
            yield name


def broken_rule(node, sums_of_integers):
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        return "x / y, which a GPU approximates"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add):
            sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
            if any("tl.dot(" in ast.unparse(side)[:8] for side in sides):
                return "a sum with tl.dot, which the compiler moves"
        return None
    name = node.func.attr
    if name == "sum" and sums_of_integers:
        return None
    if name in ORDERLESS or name.startswith("atomic_"):
        return f"{name}, which has no written order"
    if name in APPROXIMATE or "libdevice" in ast.unparse(node.func):
        return f"{name}, which is an approximation"
    if name == "dot":
        keywords = {each.arg for each in node.keywords}
        if len(node.args) < 3 and not keywords & {"acc", "max_num_imprecise_acc"}:
            return "tl.dot without its accumulator"
    return None


def planned_fma(kernel):
    """Whether a kernel's module writes fused multiply-adds, or products of tiles, which are chains of them."""
    source = Path(kernel.fn.__code__.co_filename).read_text()
    return "tl.math.fma(" in source or "dot(" in source or "add_products(" in source


class Reading:
    """A backend that compiles kernels, runs nothing, and keeps what their PTX breaks."""

    def __init__(self, target, **options):
        self.target, self.engine = target, ENGINE_OF_TARGET[target]
        self.compiler, self.options = Compiler(target), options
        self.read, self.broken = set(), []

    def launch(self, kernel, grid, args, constants, options):
        call = specialise(kernel, self.target, args, {**constants, **options, **self.options})
        made = self.compiler.compile(kernel, call)
        self.read.add(made.facts.digest)
        facts = made.facts
        wrong = {
            "flushes": facts.flushes,
            "approximate": facts.approximate,
            "atomics": facts.atomics,
            "fused": 0 if planned_fma(kernel) else facts.fused,
            "may be fused": count_open_products(_STATEMENT.findall(made.ptx)),
            "fusion allowed": facts.fusion_allowed,
            "spilled bytes": max((facts.spill_bytes or 0) - STACK, 0),
        }
        self.broken += [
            f"{kernel.__name__}: {name} {value}" for name, value in wrong.items() if value
        ]
