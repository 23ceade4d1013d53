"""Base weights that change while only adapters train are reported: planted by PEFT's merge and unmerge in bf16."""

import copy

import peft
import pytest
import torch
from torch import nn

from isobit.errors import GuardError
from isobit.guards import preflight, watch

RULE = "base-weights-changed"


def adapted(dtype=torch.bfloat16, **asked):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 8)).to(dtype)
    wanted = {"r": 4, "target_modules": ["0", "2"], "init_lora_weights": False, **asked}
    return peft.get_peft_model(model, peft.LoraConfig(**wanted))


def train(model, before=None, steps=4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        if before is not None:
            before(model)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        x = x.to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    return model


def merge_and_unmerge(model):
    """Do what TRL does before each rollout of vLLM."""
    model.merge_adapter()
    model.unmerge_adapter()


def merge_and_copy_back(model):
    """Merge, then put back the bits of the base."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.merge_adapter()
    model.unmerge_adapter()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])


def merge_into_a_copy(model):
    """Merge a copy of the model."""
    copy.deepcopy(model).merge_and_unload()


def copy_to_another_adapter(model):
    """Overwrite a frozen adapter: it is no base weight, as a reference policy that follows is none."""
    if "reference" not in model.peft_config:
        model.add_adapter("reference", peft.LoraConfig(r=4, target_modules=["0", "2"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".reference." in name:
                parameter.add_(1.0)


RIGHT = [None, merge_and_copy_back, merge_into_a_copy, copy_to_another_adapter]


def rules(guard):
    return [finding.name for finding in guard.findings]


def watched(model, before, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with watch(model, optimizer, sinks=[], **options) as guard:
        for step in range(4):
            if before is not None:
                before(model)
            x = torch.ones(4, 32, dtype=next(model.parameters()).dtype) * (step + 1)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    return guard


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_watch_reports_merge_and_unmerge_at_the_second_step(dtype):
    guard = watched(adapted(dtype), merge_and_unmerge)
    assert rules(guard) == [RULE]
    finding = guard.findings[0]
    assert finding.step == 1
    assert "2 of 4 weights" in finding.message
    assert "base_layer.weight" in finding.message
    assert "merge into a copy" in finding.message


@pytest.mark.parametrize("before", RIGHT)
def test_a_watch_is_silent_where_the_base_keeps_its_bits(before):
    assert rules(watched(adapted(), before)) == []


def test_a_watch_stops_the_run_if_asked():
    with pytest.raises(GuardError, match=RULE):
        watched(adapted(), merge_and_unmerge, policy="raise")


def test_a_change_after_the_last_step_is_reported_when_the_watch_ends():
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with watch(model, optimizer, sinks=[]) as guard:
        model(torch.ones(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        merge_and_unmerge(model)
    assert rules(guard) == [RULE]


def test_weights_are_not_judged_while_adapters_are_merged_and_a_base_that_trains_is_not_frozen():
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with watch(model, optimizer, sinks=[], policy="raise"):
        model(torch.ones(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        model.merge_adapter()  # on purpose, to serve it
    whole = adapted()
    whole.requires_grad_(True)
    assert rules(watched(whole, merge_and_unmerge)) == []


def test_a_frozen_module_to_save_keeps_its_original():
    model = adapted(target_modules=["0"], modules_to_save=["2"])
    assert rules(watched(model, None)) == []

    def shake(model):
        wrapper = next(m for m in model.modules() if hasattr(m, "original_module"))
        wrapper.original_module.weight.data.mul_(0.5)

    assert rules(watched(model, shake)) == [RULE]


def test_preflight_reports_it_once_and_passes_the_right_programs():
    report = preflight(lambda: train(adapted(), merge_and_unmerge))
    assert [(f.rule, f.step) for f in report.findings] == [(RULE, 1)]
    for before in RIGHT[:3]:  # a frozen adapter that moves is what moved-though-frozen reports
        found = preflight(lambda before=before: train(adapted(), before)).findings
        assert [f.rule for f in found if f.severity == "error"] == []


def test_models_without_adapters_may_move_frozen_weights():
    """A target network that follows by an average is frozen, and moves."""
    model = nn.Linear(32, 8).to(torch.bfloat16)
    model.target = nn.Linear(32, 8)
    model.target.requires_grad_(False)
    assert rules(watched(model, lambda m: m.target.weight.data.mul_(0.9))) == []
