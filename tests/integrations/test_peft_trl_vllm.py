"""GRPO with LoRA and rollouts by vLLM with the merged weights: zero at every step, and the base keeps its bits.

`benchmarks.vllm_lora` has the three runs; the record in docs/results/vllm.md is made by it. Needs ./setup_vllm, and
`pip install -c constraints.txt datasets trl`.
"""

import pytest

from benchmarks import vllm_lora

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
    pytest.mark.skipif(not vllm_lora.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]
trl = pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")


@pytest.mark.parametrize("name", vllm_lora.RUNS)
def test_vllm_with_merged_weights_is_the_trainer_at_every_step(name):
    found = vllm_lora.train(name)
    steps, changed, weights, _ = found
    print(f"\n{name}: {vllm_lora.describe(found)}")
    assert len(steps) == vllm_lora.STEPS
    assert sum(len(apart) for _, apart in steps) > 60 * vllm_lora.STEPS
    assert all((wrong == 0) is (name == "isobit") for wrong, _ in steps)
    # Only PEFT's merging and unmerging writes the base.
    assert weights > 100_000
    assert (changed > 0) is (name == "stock")
