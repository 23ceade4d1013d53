"""Plans: per contract, the sizes of cases, and the claims and planted subjects that have no meaning on a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isobit.contracts.language.contract import Claim, Contract, Inputs, planted_names
from isobit.contracts.store.sources import ROOT, hash_text
from isobit.contracts.store.tree import Tree, entry_from, facts_of, library
from isobit.contracts.workspace import Workspace
from isobit.library.on_gpu.twin_names import BY_CONTRACT, TWINS

ROWS, WIDTH = (
    17,
    23,
)  # the largest sizes of axes of rows, and of other axes, unless a plan names others

THREADS = "a kernel on a GPU has no CPU threads"
REFUSALS = (
    "arguments are checked by the same Python before an executor is chosen; judged on the CPU"
)
PARTIAL = "partial sums have no Triton executor"
PACKED = "packed weights have no Triton executor"
LONG = "samples of 4,100 keys take minutes in the interpreter; tests/gpu compares chunks of keys"
CHUNKS = "samples of four chunks take minutes in the interpreter; tests/gpu compares two chunks bit for bit"
FP64 = "it differentiates in fp64, which has no Triton executor"
FEWER = "it runs on fewer tokens"
COSTLY = (
    "a case takes long in the interpreter; tests/gpu and `benchmarks comparisons` have this dtype"
)
OWN = "isobit.library.on_gpu.claims:"
ROW_COUNTS = ("qkv_rows", "o_rows", "gate_up_rows", "down_rows")
ROTATED = ("wide_heads", "gradients", "heads_apart", "normal32", "normal16")
# Inputs of attention that fill a block of 64 keys and a quarter of another: 16 rows are one tile, and an order of
# blocks shows only where the second block adds several keys.
TOKENS = 80
TWO_BLOCKS = (
    *("tokens", "typed", "windowed", "windowed_narrow", "narrow_types", "single"),
    *("capped", "chunked", "both_sides"),
)
NO_TENSOR_CORE = "in 16 bits it is near stock's in fp64: the portable executor has no tensor core"
ANY = "what it asks of any kernel, the operator's own contract asks too"
ANY_KERNELS = (
    "attention",
    "cross-entropy",
    "embedding",
    "gelu",
    "gqa",
    "layer-norm",
    "linear",
    "log-softmax",
    "logprob",
    "rms-norm",
    "rope",
    "silu",
    "softmax",
    "swiglu",
)
MODULES = "it is about Python modules that call operators, not about a kernel"


@dataclass(frozen=True)
class Plan:
    """How a contract is judged on a backend.

    Attributes:
        sizes: By name of inputs, other sizes than the default ones, by axis.
        left_out: By claim, why it does not apply.
        predicates: By claim, a predicate in place of the contract's, and what of it is left out.
        inputs_left_out: Inputs that take too long, where a claim has others.
        edges: Patterns of special values that are kept.
        dtypes: By name of inputs, the dtypes that are kept where one case takes long.
        tried_first: Inputs that come first where a claim has several: planted subjects are tried on the first.
    """

    sizes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    predicates: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    inputs_left_out: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tried_first: tuple[str, ...] = ()


PLANS: dict[str, Plan] = {
    "rmsnorm-kernel-v1": Plan(
        sizes={"tokens": {"n": (5,)}},
        predicates={
            "samples": (f"{OWN}norm_head_samples", FEWER),
            "gradients-agree": (f"{OWN}norm_gradients", FEWER),
        },
        edges=("huge",),  # so that squares in fp16 overflow
    ),
    "layernorm-kernel-v1": Plan(
        sizes={"tokens": {"n": (5,)}},
        predicates={
            "samples": (f"{OWN}norm_samples", FEWER),
            "gradients-agree": (f"{OWN}norm_gradients", FEWER),
        },
    ),
    "softmax-kernel-v1": Plan(edges=("huge",)),
    "log-softmax-kernel-v1": Plan(),
    "silu-kernel-v1": Plan(edges=("nans",)),
    "gelu-kernel-v1": Plan(),
    "swiglu-kernel-v1": Plan(),
    "rope-kernel-v1": Plan(
        sizes={
            **{name: {"heads": (2,), "d": (34,)} for name in ROTATED},
            "tokens": {"tokens": (1, 17), "heads": (2,), "d": (34,)},
            "narrow_heads": {"heads": (3,), "d": (2,)},
        },
    ),
    "embedding-kernel-v1": Plan(
        sizes={"tokens": {"n": (3,), "v": (7,)}},
        predicates={
            "samples": (f"{OWN}embedding_samples", FEWER),
            "padding": (f"{OWN}embedding_padding", FEWER),
        },
    ),
    "exact-sum-kernel-v1": Plan(
        left_out={"pieces": PARTIAL, "threads": THREADS},
        sizes={name: {"rows": (3,), "n": (23,)} for name in ("rows", "cancelling")},
        edges=("infinities",),
    ),
    "matmul-kernel-v1": Plan(
        left_out={"ranks": PARTIAL, "packed-weights": PACKED},
        inputs_left_out=("qkv", "o", "gate_up", "down", *ROW_COUNTS),
        # Stock's kernel for several rows is one chain too; its kernel for one row is not.
        sizes={"square": {"k": (70,), "n": (70,)}, "parity": {"rows": (1, 17), "k": (70,)}},
        predicates={"samples": (f"{OWN}linear_samples", f"micro-batches: {PARTIAL}; {FEWER}")},
    ),
    "linear-group-kernel-v1": Plan(
        left_out={"ranks": PARTIAL},
        sizes={"group": {"n": (1024,), "k": (5,)}, "narrow": {"n": (32,)}, "bounded": {"n": (32,)}},
        predicates={"samples": (f"{OWN}group_samples", FEWER)},
    ),
    "attention-kernel-v1": Plan(
        left_out={
            "long-decode-is-prefill": LONG,
            "unseen-chunks": LONG,
            "executors-agree-on-chunks": LONG,
            "no-gradient-through-a-cache": REFUSALS,
        },
        sizes={
            **{name: {"rows": (TOKENS,), "heads": (1,)} for name in TWO_BLOCKS},
            **{name: {"t": (TOKENS,)} for name in ("edge", "block", "block_windowed")},
            "units": {"rows": (5,)},
            "batches": {"t": (4,), "heads": (1,)},
            "few": {"t": (7,), "heads": (1,)},
        },
        dtypes={"batches": ("bfloat16",), "few": ("float32",)},
        tried_first=("tokens",),  # in `edge` one key has nearly all weight: no order shows
        predicates={
            **dict.fromkeys(
                ("decode-is-prefill", "capped-decode-is-prefill", "chunked-decode-is-prefill"),
                (f"{OWN}attention_decode", FEWER),
            ),
            **dict.fromkeys(
                ("soft-cap", "both-sides", "chunks"), (f"{OWN}attention_masks", NO_TENSOR_CORE)
            ),
            "samples": (f"{OWN}attention_samples", FEWER),
        },
    ),
    "gqa-kernel-v1": Plan(
        sizes={"samples": {"t": (18,)}, "edge": {"t": (66,)}},
        dtypes={"groups": ("float32", "bfloat16"), "samples": ("bfloat16",)},
    ),
    "logprob-kernel-v1": Plan(
        left_out={"vocabulary-shares": PARTIAL},
        # One word has the log-probability 0, above which a hair shows.
        sizes={"rows": {"k": (23,)}, "small": {"v": (1, 17)}},
        # A rounding to 16 bits hides the order of dhidden.
        dtypes={"rows": ("float32", "bfloat16")},
        predicates={"samples": (f"{OWN}logprob_samples", FEWER)},
    ),
    "knowledge-distillation-kernel-v1": Plan(
        dtypes={"plain": ("float32", "bfloat16")},
        predicates={"samples": (f"{OWN}distillation_samples", FEWER)},
    ),
    "lm-head-kernel-v1": Plan(sizes={"rows": {"k": (23,)}}, dtypes={"rows": ("bfloat16",)}),
    "grad-norm-kernel-v1": Plan(sizes={"rows": {"rows": (2,), "n": (23,)}}, edges=("tiny",)),
    "adamw-kernel-v1": Plan(
        sizes={name: {"rows": (3,), "n": (17,)} for name in ("defined", "plain")},
        edges=("tiny",),
    ),
    "cross-entropy-kernel-v1": Plan(left_out={"counts": PARTIAL}),
    "mixture-of-experts-v1": Plan(
        predicates={
            "layouts": (f"{OWN}experts_layouts", FEWER),
            "weight-gradients": (f"{OWN}experts_gradients", FEWER),
        },
    ),
    "causal-conv-v1": Plan(predicates={"samples": (f"{OWN}convolution_samples", FEWER)}),
    "delta-rule-v1": Plan(
        left_out={"accuracy": CHUNKS, "gradients": FP64},
        sizes={name: {"rows": (6,)} for name in ("tokens", "few")},
        dtypes={"tokens": ("float32",)},
        predicates={
            "pieces": (f"{OWN}delta_pieces", FEWER),
            "crops": (f"{OWN}delta_crops", FEWER),
            "samples": (f"{OWN}delta_samples", FEWER),
            "executors": (f"{OWN}delta_executors", FEWER),
        },
    ),
    "dimension-independent-kernels-v1": Plan(
        left_out={"DIM-002": "it counts loads of the native library; `binaries` counts Triton's"},
        # Stock's kernel for several rows is one chain too; its kernel for one row is not.
        sizes={
            "made": {"rows": (1, 17), "k": (70,)},
            **{name: {"rows": (17,), "k": (70,)} for name in ("shapes", "executors")},
        },
        dtypes={"executors": ("float32", "bfloat16")},
    ),
}

ELSEWHERE = {
    "select-rows-v1": "it copies rows and adds nothing; tests/gpu compares its kernel with the portable executor",
    "tree-collective-v1": "collectives move bytes between ranks and add on the CPU",
    "audit-v1": MODULES,
    "gradient-accumulation-v1": PARTIAL,
    "kv-cache-kernel-v1": "caches of keys have no Triton executor",
    "chain-v1": "whole models: tests/gpu/test_whole_model.py",
    "profile-account-v1": "it reads traces on the CPU, and computes nothing on a device",
    "rank-agreement-v1": MODULES,
    "rollout-summary-v1": "sums of integers on the host, which no kernel computes",
    **dict.fromkeys(
        ("pruning-kernel-v1", "model-merging-kernel-v1", "quantisation-kernel-v1"),
        "they judge tools that change checkpoints, on the host",
    ),
    "bpe-tokenizer-kernel-v1": "a tokenizer computes nothing on a device",
    "data-pipeline-v1": "texts and indices, which no kernel computes",
    "distill-loss-v1": f"micro-batches: {PARTIAL}",
    "post-training-v1": "it judges stages that change checkpoints, on the host",
    "tolerance-table-v1": "a table of bounds, which no kernel computes",
    "training-config-kernel-v1": MODULES,
    "training-stability-v1": MODULES,
    "distributed-training-v1": "whole runs over ranks: tests/gpu/test_parallel_on_card.py",
    **{f"any-{name}-v1": ANY for name in ANY_KERNELS},
}

PLANTS_LEFT_OUT = {
    "isobit.library.linear.planted:summed_in_call_order": f"micro-batches: {PARTIAL}",
    "isobit.library.linear.planted:samples_reversed": f"only micro-batches show it: {PARTIAL}",
    "isobit.library.log_softmax:cut_by_threads": THREADS,
    "isobit.library.logprob.planted:cut_by_threads": THREADS,
    "isobit.library.attention.planted:thread_gradients": THREADS,
    "isobit.library.lm_head:by_threads": THREADS,
}


# Derive from a contract what a backend can be held to: claims that apply, small cases, wrong Triton kernels.
#
# [Note: a contract on a backend]
# The claims of a contract are about an operator, not about an executor. A backend (`isobit.certifying.executing`) runs
# the same calls by the Triton executor, and the same relations and predicates judge the results. Four things differ:
#
# - What has no meaning there is left out by name, with a reason, and counted apart: thread counts, partial sums, packed
#   weights, ranks, and refusals, which the same Python makes before an executor is chosen.
# - Cases are few and small, because the interpreter takes seconds for what a GPU does in microseconds: one size per
#   axis, at most 17 rows and 23 of any other axis unless a plan names others, and all dtypes unless a plan names some.
#   Claims are judged up to L2: 10,000 drawn inputs (L3) would take days, and proofs (L4) are of the CPU's code. The
#   check of the operator's schema (L1) is of the CPU's operator.
# - A planted wrong subject that does not run the operator has a twin: the operator itself, with a wrong Triton kernel.
# - Evidence has a digest of its own, which covers the sources of the Triton executors, of the backend and of the twins.

LEVEL = "L2"


@dataclass(frozen=True)
class LeftOut:
    """A claim, or one transform or planted subject of a claim, that has no meaning on a backend."""

    contract: str
    what: str
    reason: str


@dataclass(frozen=True)
class Derived:
    """A contract as a backend is held to it, what was left out, and how many cases of the CPU's were kept.

    `contract` is None if no claim applies.
    """

    contract: Contract | None
    claims_left_out: tuple[LeftOut, ...]
    parts_left_out: tuple[LeftOut, ...]
    cases: int = 0
    cases_on_cpu: int = 0


def derive(contract: Contract) -> Derived:
    """Return what a backend is held to."""
    plan = PLANS.get(contract.id)
    if plan is None:
        reason = ELSEWHERE.get(contract.id, "no plan for backends names it")
        every = tuple(LeftOut(contract.id, claim.id, reason) for claim in contract.claims)
        return Derived(None, every, ())
    claims, claims_left, parts_left = [], [], []
    for claim in contract.claims:
        reason = reason_against(claim, plan)
        if reason:
            claims_left.append(LeftOut(contract.id, claim.id, reason))
            continue
        kept, left = derive_claim(contract.id, claim, plan)
        claims.append(kept)
        parts_left += [LeftOut(contract.id, f"{claim.id}: {what}", why) for what, why in left]
    parts_left += dtypes_left_out(contract, plan)
    linked = {name for claim in claims for name in claim.obligations}
    made = replace(
        contract,
        subjects={},
        depends_on=(),
        obligations=tuple(o for o in contract.obligations if o.id in linked),
        inputs={
            name: reduced(i, plan.sizes.get(name, {}), plan, plan.dtypes.get(name, i.dtypes))
            for name, i in contract.inputs.items()
        },
        claims=tuple(claims),
        waivers=(),
        operator="",
    )
    fixed = (count_cases(claims, contract.inputs), count_cases(claims, made.inputs))
    return Derived(made, tuple(claims_left), tuple(parts_left), fixed[1], fixed[0])


def reason_against(claim: Claim, plan: Plan) -> str:
    """Return why a claim does not apply to a backend; "" if it does."""
    if claim.id in plan.left_out:
        return plan.left_out[claim.id]
    if claim.relation == "refuses" or str(claim.params.get("predicate", "")).endswith(":refuses"):
        return REFUSALS
    if claim.params.get("under") == ("threads",):
        return THREADS
    return ""


def derive_claim(contract: str, claim: Claim, plan: Plan) -> tuple[Claim, list[tuple[str, str]]]:
    """Return a claim for backends, and which of its transforms and planted subjects were left out, with reasons."""
    left: list[tuple[str, str]] = []
    params = dict(claim.params)
    if "threads" in params.get("under", ()):
        params["under"] = tuple(name for name in params["under"] if name != "threads")
        left.append(("under threads", THREADS))
    if claim.id in plan.predicates:
        params["predicate"], reason = plan.predicates[claim.id]
        left.append(("part of the predicate", reason))
    if claim.proof is not None:
        left.append((f"proof by {claim.proof.engine}", "proofs are of the CPU's code"))
    kept = replace(claim, level=LEVEL, proof=None, params=params, inputs=kept_inputs(claim, plan))
    gone = [name for name in (*claim.sabotage, *claim.control) if name in PLANTS_LEFT_OUT]
    left += [(name, PLANTS_LEFT_OUT[name]) for name in gone]
    known = {**TWINS, **BY_CONTRACT.get(contract, {})}
    sabotage, control = (
        tuple(dict.fromkeys(known.get(name, name) for name in names if name not in gone))
        for names in (claim.sabotage, claim.control)
    )
    return replace(kept, sabotage=sabotage, control=control), left


def kept_inputs(claim: Claim, plan: Plan) -> tuple[str, ...]:
    """Return the inputs of a claim without those that take too long, in the order of the plan."""
    kept = [name for name in claim.inputs if name not in plan.inputs_left_out]
    kept.sort(key=lambda name: name not in plan.tried_first)
    return tuple(kept) or claim.inputs[:1]


def dtypes_left_out(contract: Contract, plan: Plan) -> list[LeftOut]:
    """Return which dtypes of which inputs are left out."""
    return [
        LeftOut(contract.id, f"inputs {name} in {dtype}", COSTLY)
        for name, kept in plan.dtypes.items()
        for dtype in contract.inputs[name].dtypes
        if dtype not in kept
    ]


def reduced(
    inputs: Inputs, sizes: Mapping[str, tuple[int, ...]], plan: Plan, dtypes: tuple[str, ...]
) -> Inputs:
    """Return inputs of one small size per axis, or of the sizes given, with one edge pattern."""
    chosen = {
        name: sizes.get(name) or (nearest(values, ROWS if name == inputs.rows else WIDTH),)
        for name, values in inputs.sizes.items()
    }
    edges = tuple(edge for edge in inputs.edges if edge in plan.edges)
    return replace(inputs, sizes=chosen, edges=edges, dtypes=dtypes, thorough={})


def nearest(values: tuple[int, ...], limit: int) -> int:
    """Return the limit if the contract has larger sizes, else its largest size."""
    return min(max(values), limit)


def count_cases(claims: list[Claim], inputs: Mapping[str, Inputs]) -> int:
    """Return how many fixed cases L2 judges: every size with every dtype, and every edge pattern."""
    total = 0
    for name in (name for claim in claims for name in claim.inputs):
        grids = 1
        for values in inputs[name].sizes.values():
            grids *= len(values)
        total += (grids + len(inputs[name].edges)) * len(inputs[name].dtypes)
    return total


def planted_in(contract: Contract) -> tuple[tuple[str, str], ...]:
    """Return (claim, name) of every wrong subject that a contract plants."""
    return tuple((claim.id, name) for claim in contract.claims for name in planted_names(claim))


# isobit's contracts as a backend is held to them, with digests of their own.

# What runs the kernels and the twins. Plans are not among them: what they make of a contract is in its digest.
BACKENDS = "isobit.certifying.running.backends:executing"
OWN_CODE = ("isobit.library.on_gpu.claims:linear_samples", "isobit.library.on_gpu.twins:twin")


class BackendTree(Tree):
    """Contracts derived for a backend. Only isobit's own are known: a backend serves isobit's operators alone."""

    def __init__(
        self, folders: Sequence[Path], home: Path, backend: str, target: str, cached: bool = True
    ) -> None:
        """Derive the contracts below some folders; `backend` and `target` are those of `executing`."""
        super().__init__(folders, home, cached)
        self.derived: dict[str, Derived] = {}
        self._kept: dict[str, Contract] = {}
        operators = sorted(p for p in ROOT.glob("ops/*/triton.py"))
        modules = [f"isobit.ops.{path.parent.name}.triton:run" for path in operators]
        sources = hash_text(*map(self._sources.digest_of, [*modules, BACKENDS, *OWN_CODE]))
        self.variant = f" by {backend} {target} {sources[:32]}"
        for name, entry in list(self.entries.items()):
            if library() not in Path(entry.path).resolve().parents:
                del self.entries[name]
                continue
            found = self.derived[name] = derive(super().load(name))
            if found.contract is None:
                del self.entries[name]
                continue
            self._kept[name] = found.contract
            facts = facts_of(found.contract)
            self.entries[name] = entry_from(entry.path, entry.text_digest, facts)
        self.chosen = [name for name in self.chosen if name in self.entries]

    def load(self, id: str) -> Contract:
        """Return a derived contract."""
        return self._kept[id]

    def digest(self, id: str, variant: str = "", on: str = "") -> str:
        """Return the digest of a derived contract, which no contract of the CPU has; its path does not count."""
        kept = self._kept.get(id)
        derived = hash_text(repr(replace(kept, path="")))[:32] if kept else ""
        return super().digest(id, f"{variant}{self.variant} {derived}", on)


class BackendWorkspace(Workspace):
    """Contracts derived for a backend, with their evidence."""

    def __init__(self, folders: Sequence[Path], home: Path, backend: str, target: str) -> None:
        """Open the contracts; `backend` and `target` are those of `executing`."""
        self.backend = (backend, target)
        super().__init__(folders, home)

    def open_tree(self, cached: bool = True) -> BackendTree:
        """Derive the contracts."""
        self.derived = BackendTree(self.folders, self.home, *self.backend, cached)
        return self.derived


def summarise(derived: Sequence[Derived], backend: str, target: str) -> dict[str, Any]:
    """Return the denominators of a backend: cases, and what was left out, with reasons."""
    return {
        "backend": backend,
        "target": target,
        "cases": sum(d.cases for d in derived),
        "cases_on_cpu": sum(d.cases_on_cpu for d in derived),
        "cases_by_contract": {d.contract.id: d.cases for d in derived if d.contract},
        "claims_not_applicable": [left for d in derived for left in d.claims_left_out],
        "parts_not_applicable": [left for d in derived for left in d.parts_left_out],
    }


def by_reason(left: Sequence[LeftOut]) -> dict[str, list[str]]:
    """Group what was left out by its reason."""
    found: dict[str, list[str]] = {}
    for one in left:
        found.setdefault(one.reason, []).append(f"{one.contract}/{one.what}")
    return found
