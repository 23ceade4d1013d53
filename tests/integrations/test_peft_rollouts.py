"""Weights that a server is given: of a model with LoRA the merged ones, which compute the trainer's bits.

vLLM itself is not started: what is saved for it is loaded as a plain model and enabled.
"""

import peft
import pytest
import torch
import transformers
from peft_cases import SAMPLES, adapted, base_digest, plain

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.integrations.transformers import merged_copy
from isobit.integrations.vllm import Rollouts
from isobit.rollout import send_weights


def process(folder):
    """Return the path of a program that stands for vLLM's Python and keeps a copy of the weights."""
    path = folder / "python"
    lines = ["#!/bin/sh", f'cp -r "$3" {folder}/first; echo "{{}}"']
    lines += [f'read line; cp -r "$3" {folder}/second; echo "{{}}"; read line']
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "asked", [{}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}], ids=str
)
def test_what_is_saved_for_vllm_computes_the_trainer_s_bits(asked, tmp_path):
    model = isobit.enable(adapted(dtype=torch.bfloat16, **asked), adapters="merged")
    kept, found = base_digest(model), []
    with Rollouts(model, process(tmp_path)) as rollouts, torch.no_grad():
        found.append(isobit.logprobs(model, SAMPLES[1]))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
        rollouts.update_weights(model)
        found.append(isobit.logprobs(model, SAMPLES[1]))
        for folder, expected in zip(("first", "second"), found, strict=True):
            served = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / folder, dtype=torch.bfloat16
            )
            assert bits.equal(isobit.logprobs(isobit.enable(served), SAMPLES[1]), expected)
    assert not bits.equal(*found)
    assert base_digest(model) == kept


def test_adapters_next_to_the_weights_are_not_what_a_server_has(tmp_path):
    model = isobit.enable(adapted(dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r'(?s)next to the weights.*adapters="merged"'):
        Rollouts(model, process(tmp_path))
    with pytest.raises(ArgumentError, match="merged_copy"):
        send_weights("http://localhost:1", model, tmp_path)


def test_a_copy_has_no_adapters_and_shares_what_is_not_merged():
    model = adapted(target_modules=["q_proj"])
    before = {name: bits.digest(p) for name, p in model.named_parameters()}
    copy = merged_copy(model)
    own, theirs = dict(plain().named_parameters()), dict(copy.named_parameters())
    assert own.keys() == theirs.keys()
    inner = model.get_base_model()
    assert theirs["lm_head.weight"].data_ptr() == inner.lm_head.weight.data_ptr()
    merged = "model.layers.0.self_attn.q_proj.weight"
    assert not bits.equal(theirs[merged], own[merged])
    assert {name: bits.digest(p) for name, p in model.named_parameters()} == before
    assert not any(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        torch.testing.assert_close(copy(SAMPLES[1]).logits, model(SAMPLES[1]).logits)
    assert [p.requires_grad for p in model.parameters()].count(True) == 4


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_a_tied_head_stays_tied_unless_one_was_trained():
    for asked, tied in (({}, True), ({"modules_to_save": ["lm_head"]}, False)):
        config = adapted().get_base_model().config
        config.tie_word_embeddings = True
        torch.manual_seed(0)
        base = type(plain())(config)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], **asked))
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data.add_(0.01)
        made = merged_copy(model)
        assert (made.lm_head.weight is made.model.embed_tokens.weight) is tied
        assert made.config.tie_word_embeddings is tied
        with torch.no_grad():
            torch.testing.assert_close(made(SAMPLES[0]).logits, model(SAMPLES[0]).logits)
