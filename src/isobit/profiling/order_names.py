"""What a kernel's name says about its order of addition.

A name proves nothing: `isobit audit` runs an operator again and compares bits. But some families are known to choose
the order by the shape, by the number of ranks or by which thread comes first, and a trace shows that they ran.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Family:
    """Kernels whose names match, what is known of their order of addition, and where that is written."""

    pattern: re.Pattern[str]
    order: str
    source: str


FAMILIES = (
    Family(
        re.compile(r"splitKreduce|split_?k_?reduce|reduceSplitK", re.I),
        "split-K: the number of partial sums depends on the shape",
        "cuBLAS: heuristics choose split-K by the sizes of a product",
    ),
    Family(
        re.compile(r"stream_?k", re.I),
        "stream-K: where a sum is cut depends on the shape and the number of processors",
        "Osama et al., Stream-K, PPoPP 2023",
    ),
    Family(
        re.compile(r"^Cijk_", re.I),
        "cannot be told from the name: split-K (GSU) is an argument at run time",
        "Tensile: GlobalSplitU with UserArgs",
    ),
    Family(
        re.compile(
            r"indexing_backward|embedding_backward(?!.*(?:sort|segment))|scatter_add|index_add|index_put.*accum",
            re.I,
        ),
        "atomics: the order differs from run to run",
        "torch.use_deterministic_algorithms, list of operators",
    ),
    Family(
        re.compile(r"(?:flash|fmha|attn).*bwd|flash_bwd", re.I),
        "atomics in the gradient of the queries, unless deterministic=True",
        "flash-attention: deterministic backward",
    ),
    Family(
        re.compile(r"nccl.*(?:AllReduce|ReduceScatter|_Reduce_)", re.I),
        "reduction over ranks: the order depends on their number, the algorithm and the size",
        "NCCL: ring and tree algorithms are chosen by size and topology",
    ),
    Family(
        re.compile(r"\bgemv|gemmSN|gemmk1|::dot_kernel", re.I),
        "the path of few rows: larger batches use another kernel",
        "cuBLAS: gemv and small-N kernels serve products with few rows",
    ),
)


@lru_cache(maxsize=1 << 16)  # a trace has few names
def order_of(kernel: str) -> str:
    """Return what is known of the order of addition of a kernel, or nothing."""
    return next((family.order for family in FAMILIES if family.pattern.search(kernel)), "")
