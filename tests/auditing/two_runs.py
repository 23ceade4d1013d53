"""Run a model twice, along one axis, and return what should be the same: no audit is involved."""

import torch

from isobit.foundation.machine import thread_count


def both_runs(model, inputs, axis, sample=0, backward=False):
    """Return the result for one sample in the audited run and in its variant."""
    return RUNS[axis](model, inputs, sample, gradient if backward else forward)


def forward(model, inputs):
    with torch.no_grad():
        return result_of(model(**inputs))


def result_of(out):
    return out.logits if hasattr(out, "logits") else out


def gradient(model, inputs):
    """The gradient of x, for an upstream gradient that depends on places inside a sample only."""
    x = inputs["x"].clone().requires_grad_()
    y = model(**{**inputs, "x": x})
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(y.shape[1:], generator=generator).expand(y.shape)
    return torch.autograd.grad(y, x, upstream)[0]


def alone(inputs, sample):
    return {name: tensor[sample : sample + 1] for name, tensor in inputs.items()}


def batch(model, inputs, sample, run):
    return run(model, inputs)[sample], run(model, alone(inputs, sample))[0]


def repeat(model, inputs, sample, run):
    return run(model, inputs)[sample], run(model, inputs)[sample]


def threads(model, inputs, sample, run):
    found = []
    for count in (1, 4):
        with thread_count(count):
            found.append(run(model, inputs)[sample])
    return tuple(found)


def padding(model, inputs, sample, run):
    one, short = alone(inputs, sample), without_padding(inputs, sample)
    length = short["attention_mask"].shape[1]
    return run(model, one)[0, :length], run(model, short)[0]


def without_padding(inputs, sample):
    one = alone(inputs, sample)
    length = int(one["attention_mask"].sum())
    return {name: tensor[:, :length] for name, tensor in one.items()}


def decode(model, inputs, sample, run, chunk=1):
    one = without_padding(inputs, sample)
    cache, parts = None, []
    for ids in one["input_ids"].split(chunk, 1):
        with torch.no_grad():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return run(model, one)[0], torch.cat(parts, 1)[0]


def chunks(model, inputs, sample, run):
    return decode(model, inputs, sample, run, chunk=5)


RUNS = {
    "batch": batch,
    "repeat": repeat,
    "threads": threads,
    "padding": padding,
    "decode": decode,
    "chunks": chunks,
}
