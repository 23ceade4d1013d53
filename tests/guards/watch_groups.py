"""Flat options of planted programs, as the arguments of `watch` that they are fields of."""

from isobit.guards import Intervals, Replicas, Resume

FIELDS = {
    "every": (Intervals, "weights"),
    "gradients_every": (Intervals, "gradients"),
    "metrics_every": (Intervals, "metrics"),
    "patience": (Intervals, "patience"),
    "first_step": (Resume, "first_step"),
    "resumed_from": (Resume, "digest"),
    "weights_from": (Resume, "weights"),
    "agree_every": (Replicas, "every"),
    "group": (Replicas, "group"),
    "tensor_group": (Replicas, "tensor_group"),
    "sharded": (Replicas, "sharded"),
}


def grouped(options):
    """Return the keywords of `watch`."""
    found = {name: value for name, value in options.items() if name not in FIELDS}
    for kind in (Intervals, Resume, Replicas):
        own = {FIELDS[n][1]: v for n, v in options.items() if FIELDS.get(n, [None])[0] is kind}
        if own:
            found[kind.__name__.lower()] = kind(**own)
    return found
