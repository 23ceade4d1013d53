"""Curves of the shapes that real runs have, healthy and diverging, drawn from a seed; without a model.

`python -m tests.guards.curve_shapes` prints how many of each shape end in an error, a warning or nothing.
"""

import math
import random

from isobit.guards.live.drift import Drift

STEPS, AT = 1500, 900


def language_loss(step, noise):
    """A loss that falls from 10.8 towards 2.5 as a power of the step."""
    return 2.5 + 8.3 * (1 + step / 20) ** -0.6 + 0.04 * noise


def warm_up_spikes(draw):
    """Early spikes from which the run recovers within 4 to 12 steps, some of them 3 times the loss."""
    curve = [language_loss(step, draw.gauss(0, 1)) for step in range(STEPS)]
    for at in draw.sample(range(70, 500), 4):
        for step in range(at, at + draw.randint(4, 12)):
            curve[step] *= 1 + draw.random() * 2
    return curve


def cosine_restarts(draw):
    """A loss that follows a learning rate with restarts: it rises by a tenth after each."""
    return [
        language_loss(step, draw.gauss(0, 1))
        * (1 + 0.05 * (1 + math.cos(math.pi * (step % 500) / 500)))
        for step in range(STEPS)
    ]


def policy_loss(draw):
    """A policy-gradient loss around zero, whose level wanders by half of its noise."""
    level, curve = 0.0, []
    for _ in range(STEPS):
        level = 0.99 * level + 0.007 * draw.gauss(0, 1)
        curve.append(level + 0.1 * draw.gauss(0, 1))
    return curve


def value_loss(draw):
    """A value loss that is heavy-tailed and grows as returns grow."""
    return [(0.1 + step / 1000) * math.exp(draw.gauss(0, 0.7)) for step in range(STEPS)]


def grokking(draw):
    """A plateau, a sudden drop by four decades, and then bumps of up to 100 times the level."""
    curve = []
    for step in range(STEPS):
        fall = 1 / (1 + math.exp((step - 600) / 10))
        curve.append((1e-4 + 2 * fall) * math.exp(draw.gauss(0, 0.1)))
    for at in draw.sample(range(800, 1400), 3):
        for step in range(at, at + 40):
            curve[step] *= 100 * math.exp(-(step - at) / 10) + 1
    return curve


def new_data(draw):
    """Another mixture of data from step AT on: the loss is a fifth higher and stays there."""
    return [
        language_loss(step, draw.gauss(0, 1)) * (1.2 if step >= AT else 1) for step in range(STEPS)
    ]


def small_batches(draw):
    """A loss of batches of one: log-normal around a level that falls."""
    return [language_loss(step, 0) * math.exp(draw.gauss(0, 0.4)) for step in range(STEPS)]


HEALTHY = (
    warm_up_spikes,
    cosine_restarts,
    policy_loss,
    value_loss,
    grokking,
    new_data,
    small_batches,
)


def doubles_twice(draw):
    """The loss doubles at AT, and again 200 steps later."""
    return [
        language_loss(step, draw.gauss(0, 1)) * 2 ** ((step >= AT) + (step >= AT + 200))
        for step in range(STEPS)
    ]


def returns_to_the_start(draw):
    """From AT on the loss rises to that of a model that has learnt nothing, within 60 steps."""
    curve = []
    for step in range(STEPS):
        share = min(max(step - AT, 0) / 60, 1)
        curve.append((1 - share) * language_loss(step, draw.gauss(0, 1)) + share * 10.8)
    return curve


def grows(draw):
    """From AT on the loss grows by 3 % per step."""
    return [
        language_loss(step, draw.gauss(0, 1)) * 1.03 ** min(max(step - AT, 0), 300)
        for step in range(STEPS)
    ]


def policy_loss_grows(draw):
    """A policy-gradient loss around zero that leaves it by 30 times its noise."""
    return [value + (3.0 if step >= AT else 0) for step, value in enumerate(policy_loss(draw))]


DIVERGING = (doubles_twice, returns_to_the_start, grows, policy_loss_grows)


def readings(curve, log=False):
    """Return (step, status, severity) of every alarm."""
    detector = Drift(log=log)
    found = ((step, detector.add(value)) for step, value in enumerate(curve))
    return [(step, each.status, each.severity) for step, each in found if each.is_alarm]


def counts(shape, seeds, log=False):
    """Return runs with an error, runs with a warning at most, and the delays of the first errors after AT."""
    errors, warnings, delays = 0, 0, []
    for seed in range(seeds):
        found = readings(shape(random.Random(seed)), log)
        wrong = [step for step, _, severity in found if severity == "error"]
        errors += bool(wrong)
        warnings += bool(found) and not wrong
        delays += [wrong[0] - AT] if wrong else []
    return errors, warnings, delays


def main(seeds=50):
    for shape in (*HEALTHY, *DIVERGING):
        errors, warnings, delays = counts(shape, seeds)
        late = f"; first error {min(delays)} to {max(delays)} steps after {AT}" if delays else ""
        print(
            f"{shape.__name__}: {seeds} runs of {STEPS} steps: {errors} with an error, {warnings} with a "
            f"warning only{late}"
        )


if __name__ == "__main__":
    main()
