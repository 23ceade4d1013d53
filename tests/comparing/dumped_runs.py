"""A tiny model, and dumps of its runs."""

import torch
from torch.utils._debug_mode import DebugMode


class Mlp(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(torch.nn.Module):
    """A residual block; `inner` is the attribute that holds its MLP, `extra` an operator more."""

    def __init__(self, inner="mlp", extra=False):
        super().__init__()
        self.inner, self.extra = inner, extra
        self.norm = torch.nn.LayerNorm(8)
        self.add_module(inner, Mlp())

    def forward(self, x):
        h = self.norm(x)
        if self.extra:
            h = torch.neg(torch.neg(h))
        return x + getattr(self, self.inner)(h)


class Net(torch.nn.Module):
    def __init__(self, layers=3, **kind):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(**kind) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make(seed=0, **kind):
    torch.manual_seed(seed)
    return Net(**kind)


def inputs(batch=8):
    return torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1))[:batch]


def watch(model, batch=8, hashes="norm", modules=True, outputs=False):
    """Run a model under DebugMode and return the mode."""
    x = inputs(batch)
    with (
        DebugMode(record_nn_module=modules) as mode,
        DebugMode.log_tensor_hashes(hashes),
        torch.no_grad(),
    ):
        if outputs:
            with DebugMode.record_outputs():
                model(x)
        else:
            model(x)
    return mode


def write_log(path, model, **how):
    """Write the text of a run's log."""
    path.write_text(watch(model, **how).debug_string())
    return path


def plant(model, name="layers.1.mlp.up.weight"):
    """Move one element of one weight by one ulp."""
    weight = dict(model.named_parameters())[name]
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    return model
