"""Curves for the detectors: real small runs, and anomalies planted into them at known steps.

`python -m tests.guards.drift_curves` prints the table of docs/how-to/watch-a-run.md.
"""

import math
import random
from functools import cache

import torch

from isobit.guards.live.drift import Drift

STEPS, AT = 2000, 1200


def regression(seed):
    """AdamW on a noisy teacher."""
    torch.manual_seed(seed)
    teacher, model = (torch.nn.Sequential(*layers(8, 16, 1)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss():
        x = torch.randn(16, 8)
        with torch.no_grad():
            y = teacher(x) + 0.1 * torch.randn(16, 1)
        return torch.nn.functional.mse_loss(model(x), y)

    return loss, model, optimizer


def language(seed):
    """SGD with momentum on the next of 32 characters of a random Markov chain."""
    torch.manual_seed(seed)
    chain = torch.softmax(2 * torch.randn(32, 32), 1)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), *layers(16, 32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss():
        x = torch.randint(0, 32, (64,))
        y = torch.multinomial(chain[x], 1)[:, 0]
        return torch.nn.functional.cross_entropy(model(x), y)

    return loss, model, optimizer


def layers(a, b, c):
    return torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, c)


@cache
def run(kind, seed, steps=STEPS, wrong_at=None):
    """Losses and gradient norms of a run; from step `wrong_at` on the learning rate is 300 times larger."""
    loss_of, model, optimizer = kind(seed)
    losses, norms = [], []
    for step in range(steps):
        if step == wrong_at:
            for group in optimizer.param_groups:
                group["lr"] *= 300
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def spread_of(losses):
    """The noise of a curve before the anomaly."""
    before = sorted(losses[AT - 200 : AT])
    return (before[168] - before[32]) / 2


def planted(losses, kind):
    """A healthy curve with an anomaly from step AT on."""
    noise, draw = spread_of(losses), random.Random(0)
    out = list(losses)
    for step in range(AT, len(out)):
        if kind == "spike":
            out[step] += 30 * noise if step == AT else 0
        elif kind == "jump":
            out[step] += 3 * noise
        elif kind == "ramp":
            out[step] += 0.1 * noise * (step - AT)
        elif kind == "noise":
            out[step] += abs(draw.gauss(0, 6 * noise))
        elif kind == "nan":
            out[step] = math.nan
    return out


ANOMALIES = ("spike", "jump", "ramp", "noise", "nan")


def alarms(curve, log=False):
    """(step, status) of every alarm."""
    detector = Drift(log=log)
    readings = ((step, detector.add(value)) for step, value in enumerate(curve))
    return [(step, reading.status) for step, reading in readings if reading.is_alarm]


def delay(curve):
    """Steps from AT to the first alarm, or None."""
    return next((step - AT for step, _ in alarms(curve) if step >= AT), None)


def healthy(seeds=range(5)):
    """False alarms and steps of losses and of norms, over real runs."""
    count, steps = {"loss": 0, "norm": 0}, 0
    for kind in (regression, language):
        for seed in seeds:
            losses, norms = run(kind, seed)
            count["loss"] += len(alarms(losses))
            count["norm"] += len(alarms(norms, log=True))
            steps += len(losses)
    return count, steps


def main():
    count, steps = healthy()
    for name, found in count.items():
        print(
            f"{name}: {found} false alarms in {steps} healthy steps, {1e4 * found / steps:.1f} per 10,000"
        )
    for anomaly in ANOMALIES:
        delays = [
            delay(planted(run(kind, seed)[0], anomaly))
            for kind in (regression, language)
            for seed in range(5)
        ]
        print(f"{anomaly}: delays {sorted(delays, key=lambda d: math.inf if d is None else d)}")
    for kind in (regression, language):
        print(f"learning rate × 300, {kind.__name__}:", delay(run(kind, 0, STEPS, AT)[0]))


if __name__ == "__main__":
    main()
