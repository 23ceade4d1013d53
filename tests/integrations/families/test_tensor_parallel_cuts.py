"""Tensor parallelism cuts by names: types whose layers have other names or forms are refused before anything is cut."""

import pytest
import torch

import isobit
from benchmarks.families import build
from isobit.errors import UnsupportedError
from isobit.integrations.transformers.state import require_state
from isobit.integrations.transformers.tensor_parallel import check_known


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "smollm3", "granite", "gemma"])
def test_types_whose_cuts_are_known(kind):
    check_known(require_state(isobit.enable(build(kind, torch.float32))).plan)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("phi3", "self_attn.qkv_proj"),
        ("glm4", "mlp.gate_up_proj"),
        ("olmo2", "self_attn.q_norm"),
        ("gemma3_text", "self_attn.q_norm"),
        ("hunyuan_v1_dense", "self_attn.query_layernorm"),
        ("starcoder2", "mlp.c_fc"),
        ("arcee", "mlp.up_proj"),
    ],
)
def test_other_cuts_are_refused_by_name(kind, module):
    model = isobit.enable(build(kind, torch.float32))
    with pytest.raises(UnsupportedError, match=rf"(?s)by their names.*layers\.0\.{module}"):
        check_known(require_state(model).plan)
