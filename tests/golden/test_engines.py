"""fp32 and fp16 have one order on every CPU with FMA; bf16 without AMX is the chain. Shown by lowering oneDNN's ISA."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.ops import dispatch

GOLDEN = Path(__file__).parent / "test_digests.py"


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
@pytest.mark.parametrize("isa", ["AVX2", pytest.param("AVX512_CORE", marks=pytest.mark.full)])
def test_golden_digests_on_lesser_engines(isa):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(GOLDEN)],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        cwd=GOLDEN.parents[2],
    )
    assert re.search(r"^16 passed in", done.stdout, re.MULTILINE), done.stdout[-2000:]
