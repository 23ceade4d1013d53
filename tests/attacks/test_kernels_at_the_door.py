"""Theorem: whatever `isobit check` is given, it names what is wrong with the call and what to do, by its exit code.

1: the kernel has a fault that its callers would suffer from. 2: it could not be called. Right twins pass the same door.
"""

import sys

import pytest

from isobit.cli import main
from isobit.contracts.options import Options
from isobit.library.any_kernel.kernel_call import first_call
from isobit.library.any_kernel.kernel_judging import chosen

SOURCE = """
import torch
import torch.nn.functional as F

calls = []
number = 3

def right(x): return F.silu(x)
def writes(x): return x.mul_(torch.sigmoid(x))
def shares(x): return x
def keeps_state(x):
    calls.append(1)
    return F.silu(x) + len(calls) / 1000
def samples(x): return F.dropout(F.silu(x), 0.1, True)
def wide(x): return F.silu(x.float())
def detached(x): return F.silu(x.detach())
def turned(x): return F.silu(x).T
def elsewhere(x): return F.silu(x).to("meta")
def pair(x): return F.silu(x), None
def leaves(x): raise SystemExit(0)
def norm(x, weight, eps): return F.rms_norm(x, x.shape[-1:], weight, eps)
def half(x, weight): return F.rms_norm(x, x.shape[-1:], weight.detach(), 1e-6)
def row_loss(logits, targets): return F.cross_entropy(logits, targets, reduction="none")
def mean_loss(logits, targets): return F.cross_entropy(logits, targets)
def loss_in_place(logits, targets):
    loss = F.cross_entropy(logits, targets, reduction="none")
    if logits.requires_grad:
        logits.data.mul_(2)
    return loss

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return F.silu(x)
    @staticmethod
    def backward(ctx, grad): raise RuntimeError("no kernel here")

class Right(Raises):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)
    @staticmethod
    def backward(ctx, grad): return torch.ops.aten.silu_backward(grad, *ctx.saved_tensors)

class WritesGradient(Right):
    @staticmethod
    def backward(ctx, grad): return grad.copy_(Right.backward(ctx, grad))

class WritesSaved(Right):
    @staticmethod
    def backward(ctx, grad):
        found = Right.backward(ctx, grad)
        ctx.saved_tensors[0].data.zero_()
        return found

class Norm(torch.nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps
    def forward(self, x): return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

class TwoSizes(Norm):
    def __init__(self, size, groups): super().__init__(size)

class OtherName(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(size))
    def forward(self, x): return x

a_norm = Norm(64)
"""
RIGHT = [
    ("right", "silu"), ("Right", "silu"), ("Norm", "rms_norm"), ("a_norm", "rms_norm"),
    ("norm(eps=1e-6)", "rms_norm"), ("Norm(eps=1e-6)", "rms_norm"), ("row_loss", "cross_entropy"),
]  # fmt: skip
FAULTS = [
    ("writes", "silu", "it writes to argument 1; compute into a new tensor"),
    ("shares", "silu", "its output shares memory with argument 1; return a tensor of its own"),
    ("keeps_state", "silu", "it has another result for the same arguments; make it a function"),
    ("samples", "silu", "it draws random numbers; leave dropout out"),
    ("wide", "silu", "it returns torch.float32 for torch.bfloat16; return the dtype of the inputs"),
    ("detached", "silu", "its output has no gradient; give it a backward"),
    ("half", "rms_norm", "weight has no gradient; give it a backward"),
    ("Raises", "silu", "its backward raises RuntimeError: no kernel here; give it a backward"),
    ("loss_in_place", "cross_entropy", "with gradients enabled, it writes to argument 1"),
    ("WritesGradient", "silu", "its backward writes to the gradient that it is given; compute"),
    ("WritesSaved", "silu", "its backward: it writes to argument 1; compute into a new tensor"),
]
REFUSED = [
    (["turned", "--like", "silu"], "[40, 18] instead of [18, 40]"),
    (["elsewhere", "--like", "silu"], "a tensor on meta"),
    (["pair", "--like", "silu"], "a tuple instead of a tensor"),
    (["leaves", "--like", "silu"], "SystemExit: 0"),
    (["mean_loss", "--like", "cross_entropy"], "[] instead of [18]"),
    (["norm", "--like", "rms_norm"], "by --with NAME=VALUE"),
    (["norm", "--like", "rms_norm", "--with", "eps=open('x')"], "plain values"),
    (["norm", "--like", "rms_norm", "--with", "**{}"], "plain values"),
    (["TwoSizes", "--like", "rms_norm"], "TwoSizes needs size, groups"),
    (["OtherName", "--like", "rms_norm"], "only weight and bias can be given"),
    (["Norm", "--like", "silu"], "Norm needs size"),
    (["number", "--like", "silu"], "a subject that can be called"),
    (["absent", "--like", "silu"], "has no attribute 'absent'"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "kernels_at_the_door.py"
    path.write_text(SOURCE)
    sys.path.append(str(path.parent))
    yield path
    sys.path.remove(str(path.parent))


def first(name, like, forward_only=False):
    code = f"kernels_at_the_door:{name}"
    options = Options(trusted=("kernels_at_the_door",), subject=code, level=2)
    return first_call(chosen(like, ["float32", "bfloat16"]), options, like, forward_only)


@pytest.mark.parametrize(("name", "like"), RIGHT)
def test_right_kernels_pass_the_door(file, name, like):
    found = first(name, like)
    assert (found.verdict, found.detail, found.compared) == ("kept", "", 2)


@pytest.mark.parametrize(("name", "like", "told"), FAULTS)
def test_a_fault_is_named_with_a_remedy(file, name, like, told):
    found = first(name, like)
    assert found.verdict == "broken"
    assert told in found.detail


@pytest.mark.parametrize("name", ["detached", "Raises"])
def test_a_kernel_without_backward_is_judged_by_its_output(file, name):
    assert first(name, "silu", forward_only=True).verdict == "kept"
    claims = {c.id for c in chosen("silu", None, True).claims}
    assert claims == {"rows", "storage", "accuracy", "overflow"}


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_what_cannot_be_called_is_refused(file, words, told, capsys):
    assert main.main(["check", f"{file}:{words[0]}", *words[1:], "-q"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "remedy: " in err


@pytest.mark.parametrize(
    ("code", "told"),
    [("none.py:f", "no such file"), ("no_colon", "after a colon"), ("json.py:loads", "rename")],
)
def test_files_are_found_or_refused(code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("def loads(x): return x\n")
    assert main.main(["check", code, "--like", "silu"]) == 2
    assert told in capsys.readouterr().err


def test_a_broken_kernel_of_a_file_is_replayed_where_it_is(file, capsys):
    words = ["check", f"{file}:norm", "--like", "rms_norm", "--dtype", "fp32", "-q"]
    assert main.main([*words, "--with", "eps=1e-6", "--forward-only"]) == 1
    out = capsys.readouterr().out
    assert f"cd {file.parent} && isobit contract replay any-rms-norm-v1/storage" in out
    assert "--subject 'kernels_at_the_door:norm(eps=1e-6)' --trust kernels_at_the_door" in out
    assert main.main(["check", f"{file}:writes", "--like", "silu", "-q"]) == 1
    assert "BROKEN call: in float32, it writes to argument 1" in capsys.readouterr().out
