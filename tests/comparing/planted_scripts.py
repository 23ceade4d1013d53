"""Training scripts: a clean one, and the same with one cause of run-to-run differences planted."""

CLEAN = """
import os, random, sys, time, uuid
import torch

{before}
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 8)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.act(self.fc(x)))

    def act(self, x):
        {act}

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.arange(48.0).reshape(8, 6).sin()
order = list(range(8))
for step in range(4):
    {batch}
    loss = model(x).square().mean()
    {loss}
    optimizer.zero_grad()
    loss.backward()
    {gradients}
    optimizer.step()
    {after}
"""

DEFAULTS = {
    "before": "",
    "act": "return torch.relu(x)",
    "batch": "x = data[order]",
    "loss": "",
    "gradients": "",
    "after": "",
}

ROULETTE = """
@torch.library.custom_op("planted::roulette", mutates_args=())
def roulette(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(-1)[0] += int.from_bytes(os.urandom(4), "little") * 1e-9
    return y

@roulette.register_fake
def _(x):
    return torch.empty_like(x)

roulette.register_autograd(lambda ctx, grad: grad)
"""

# name -> (what is planted, the cause to be named)
PLANTED = {
    "numpy is not seeded": (
        {
            "before": "import numpy",
            "batch": "x = data + torch.from_numpy(numpy.random.randn(8, 6)).float()",
        },
        "seed not set",
    ),
    "random is not seeded": (
        {"batch": "random.shuffle(order); x = data[order[:4]]"},
        "seed not set",
    ),
    "torch is not seeded": (
        {"before": "torch.manual_seed = lambda seed: None"},
        "seed not set",
    ),
    "a set orders the data": (
        {
            "batch": "words = list({f'w{i}' for i in range(8)}); "
            "x = data[[int(w[1:]) for w in words[:5]]]"
        },
        "data order",
    ),
    "the clock is in the loss": (
        {"loss": "loss = loss * (1 + time.time() % 1)"},
        "time or process number",
    ),
    "the process number is in the weights": (
        {"before": "pid = os.getpid()", "loss": "loss = loss + model.fc.weight.sum() * pid"},
        "time or process number",
    ),
    "an operator is not repeatable": (
        {"before": ROULETTE, "act": "return roulette(x).relu()"},
        "operator that is not repeatable",
    ),
    "a variable differs": (
        {
            "before": "os.environ['PLANTED_RUN'] = uuid.uuid4().hex",
            "loss": "loss = loss * (1 + int(os.environ['PLANTED_RUN'][:6], 16))",
        },
        "environment",
    ),
    "the number of threads differs": (
        {
            "before": "torch.set_num_threads(1 + os.urandom(8)[0] % 100)",
            "loss": "loss = loss * torch.get_num_threads()",
        },
        "threads",
    ),
    "the second run resumes": (
        {
            "before": "resumed = os.path.exists('saved.pt')",
            "batch": "\n    if resumed and step == 0:\n"
            "        model.load_state_dict(torch.load('saved.pt'))\n    x = data",
            "after": "torch.save(model.state_dict(), 'saved.pt')",
        },
        "files of the first run",
    ),
}


def write(folder, **planted):
    """Write the script with something planted."""
    path = folder / "train.py"
    path.write_text(CLEAN.format(**{**DEFAULTS, **planted}))
    return path
