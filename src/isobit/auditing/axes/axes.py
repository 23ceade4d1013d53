"""The axes of an audit: what the audited run is, and what the variant is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import Ledger, Rows
from isobit.auditing.subjects import Inputs
from isobit.foundation.machine import thread_count

if TYPE_CHECKING:
    from isobit.auditing.records import AxisReport
    from isobit.auditing.replay.places import Places
    from isobit.auditing.replay.watching import Watcher


# A variation: an audited run, and the calls of the variant that compute the same rows.

SEED = 20_480


@dataclass(frozen=True)
class VariantCall:
    """One call of the variant: its rows, how to run it, and the tokens of its rows."""

    rows: Rows
    run: Callable[[], Any]
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Variation:
    """What changes on one axis.

    Attributes:
        axis: its name.
        sentence: what changes, in words.
        sides: short names of the audited run and of the variant.
        run: the audited run.
        calls: the calls of the variant, in order.
        inputs: input tensors of the audited run with the dimension and the labels of their rows.
        mixes: whether a sum over labelled rows is a sum over samples.
        joined: the dimension along which the rows of the calls are joined.
        around: a context in which every call is made again with its own inputs; the variant then has the same rows.
        accumulates: whether the variant adds gradients over its calls itself, so that the last call has them all.
        threads: the numbers of threads of the audited run and of the variant, where they are what changes.
        seed: where the variant's random numbers start.
        by_chance: whether a call made again may differ each time; see [Note: played back] in playing.py.
        watcher: makes the watcher of the audited run, where an axis has its own.
        merge: adds the gradients of the variant's calls, where that is not done one after another.
        after: adds to the report what an axis finds beside the operators of the run.
    """

    axis: str
    sentence: str
    sides: tuple[str, str]
    run: Callable[[], Any]
    calls: tuple[VariantCall, ...]
    inputs: tuple[tuple[Tensor, int, Tensor], ...] = ()
    mixes: bool = False
    joined: int = 0
    around: Callable[[], AbstractContextManager[Any]] | None = None
    accumulates: bool = False
    threads: tuple[int, int] | None = None
    seed: int = SEED
    by_chance: bool = False
    watcher: Callable[[Places], Watcher] | None = None
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None
    after: Callable[[AxisReport], AxisReport] | None = None

    def ledger(self) -> Ledger:
        """Return a ledger in which the inputs are labelled."""
        ledger = Ledger()
        marks: dict[int, dict[int, Any]] = {}
        for tensor, dim, labels in self.inputs:
            vector = marks.setdefault(id(tensor), {})[dim] = ledger.vector(labels)
            vector.of_inputs = True
            ledger.put(tensor, marks[id(tensor)])
        return ledger


@contextmanager
def same_start(seed: int = SEED) -> Iterator[None]:
    """Start a run with the same random numbers as every other run of an audit."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


STEPS = 3  # tokens that the decode axis feeds one at a time
CHUNK = 4  # chunks of the chunks axis


class NotApplicableError(Exception):
    """An axis that these inputs do not have."""


def batch(inputs: Inputs, sample: int, every: bool = False) -> Variation:
    """Compare a sample in its batch with the same sample alone; or every sample, for sums over samples."""
    count = inputs.samples
    if count < 2:
        raise NotApplicableError("the batch has one sample; pass two or more")
    which = range(count) if every else (sample,)
    alone = [inputs.sample(i) for i in which]
    said = f"each of {count} samples" if every else f"sample {sample} of {count}"
    return Variation(
        "batch",
        f"{said} runs alone",
        (f"batch of {count}", "alone"),
        inputs.run,
        tuple(
            VariantCall(Rows([i]), one.run, one.tokens) for i, one in zip(which, alone, strict=True)
        ),
        inputs.marked(0, torch.arange(count)),
        mixes=True,
    )


def padding(inputs: Inputs, sample: int) -> Variation:
    """Compare a padded sample with the same sample without padding; a sample without padding is padded."""
    one = inputs.sample(sample)
    width = one.width
    if width is None or (one.mask is None and not one.accepts("attention_mask")):
        raise NotApplicableError(
            "the inputs have no attention_mask, so nothing says what is padding"
        )
    mask = one.mask if one.mask is not None else torch.ones(1, width, dtype=torch.int64)
    one = one.with_named(attention_mask=mask.to(one.tensors[0].device))
    side = "as given"
    if bool(mask.bool().all()):
        one, side = pad_left(one, max(width // 3, 1)), "left"
    real = one.named["attention_mask"][0].bool().nonzero().flatten().cpu()
    one = with_positions(one)
    whole = one.width or 0
    short = one.positions(real)
    return Variation(
        "padding",
        f"sample {sample} runs without its {whole - len(real)} padded positions ({side})",
        (f"padded to {whole}", f"its {len(real)} tokens"),
        one.run,
        (VariantCall(Rows(real.tolist()), short.run, short.tokens),),
        one.marked(1, torch.arange(whole)),
    )


def pad_left(inputs: Inputs, count: int) -> Inputs:
    """Return inputs with positions added on the left that the mask excludes."""
    width = inputs.width

    def add(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != width:
            return tensor
        return torch.cat(
            [torch.zeros_like(tensor[:, :1]).expand(-1, count, *tensor.shape[2:]), tensor], 1
        )

    return inputs.map(add)


def through_cache(
    inputs: Inputs, sample: int, name: str, sizes: Callable[[int], list[int]]
) -> Variation:
    """Compare one call of all tokens with the same tokens fed in several calls through a cache.

    All samples are fed together, as a rollout does, unless they are padded on the right: then one is.
    """
    if (
        inputs.tokens is None
        or not inputs.accepts("past_key_values")
        or not inputs.accepts("use_cache")
    ):
        raise NotApplicableError("the model takes no past_key_values, so it has no cached call")
    together, which = inputs, f"all {inputs.samples} samples are"
    if inputs.mask is not None and not bool(inputs.mask[:, -1].all()):
        together = inputs.sample(sample)
        together = together.positions(inputs.mask[sample].bool().nonzero().flatten().cpu())
        which = f"sample {sample} is"
    together = with_positions(together)
    width, tokens = together.width or 0, together.tokens
    if width < 4 or tokens is None:
        raise NotApplicableError(f"the samples have {width} tokens; the axis needs 4")
    cached = Cached(together, sizes(width))
    calls = tuple(
        VariantCall(Rows(range(a, b), range(b)), cached.call(a, b), tokens[:, a:b])
        for a, b in cached.spans
    )
    said = ", ".join(str(b - a) for a, b in cached.spans)
    return Variation(
        name,
        f"{which} fed through a cache in calls of {said} tokens",
        (f"one call of {width}", name),
        together.run,
        calls,
        together.marked(1, torch.arange(width)),
        joined=1,
    )


def with_positions(inputs: Inputs) -> Inputs:
    """Return inputs with the position of every token, where padding would shift the positions a model makes."""
    mask = inputs.mask
    if mask is None or bool(mask.all()) or "position_ids" in inputs.named:
        return inputs
    if inputs.tokens is None or not inputs.accepts("position_ids"):
        return inputs
    return inputs.with_named(position_ids=(mask.cumsum(1) - 1).clamp(min=0))


class Cached:
    """Calls of a model that share a cache; each call is made after those before it."""

    def __init__(self, inputs: Inputs, sizes: list[int]) -> None:
        self.inputs = inputs
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.cache: Any = None

    def call(self, start: int, stop: int) -> Callable[[], Any]:
        """Return the call of these positions."""

        def run() -> Any:
            named = dict(self.inputs.named)
            mask = named.pop("attention_mask", None)
            part = self.inputs.__class__(self.inputs.model, self.inputs.args, named).positions(
                torch.arange(start, stop)
            )
            more: dict[str, Any] = {
                "past_key_values": self.cache if start else None,
                "use_cache": True,
            }
            if mask is not None:
                more["attention_mask"] = mask[:, :stop]
            out = part.with_named(**more).run()
            self.cache = out.past_key_values
            return out

        return run


def decode(inputs: Inputs, sample: int) -> Variation:
    """Compare a whole prefix with a prefill and single tokens through the cache."""
    return through_cache(
        inputs,
        sample,
        "decode",
        lambda width: [width - min(STEPS, width - 1), *[1] * min(STEPS, width - 1)],
    )


def chunks(inputs: Inputs, sample: int) -> Variation:
    """Compare a whole prefix with several chunks through the cache."""

    def sizes(width: int) -> list[int]:
        size = -(-width // CHUNK)
        return [min(size, width - at) for at in range(0, width, size)]

    return through_cache(inputs, sample, "chunks", sizes)


def packing(inputs: Inputs, sample: int) -> Variation:
    """Compare a sample packed with others in one row with the same sample alone."""
    if inputs.tokens is None or not inputs.accepts("position_ids") or inputs.samples < 2:
        raise NotApplicableError(
            "packing needs two samples of tokens and a model that takes position_ids"
        )
    mask = inputs.mask
    tokens = inputs.tokens
    real = [
        tokens[i][mask[i].bool()] if mask is not None else tokens[i] for i in range(inputs.samples)
    ]
    positions = [torch.arange(len(r), device=tokens.device) for r in real]
    row = Inputs(
        inputs.model,
        (),
        {
            "input_ids": torch.cat(real)[None],
            "position_ids": torch.cat(positions)[None],
            **({"use_cache": False} if "use_cache" in inputs.named else {}),
        },
    )
    alone = Inputs(
        inputs.model,
        (),
        {**row.named, "input_ids": real[sample][None], "position_ids": positions[sample][None]},
    )
    labels = torch.cat([torch.full((len(r),), i) for i, r in enumerate(real)])
    return Variation(
        "packing",
        f"sample {sample} runs alone instead of packed in a row with {inputs.samples - 1} others",
        (f"{inputs.samples} packed", "alone"),
        row.run,
        (VariantCall(Rows([sample]), alone.run, alone.tokens),),
        row.marked(1, labels),
    )


def threads(inputs: Inputs, sample: int) -> Variation:
    """Compare a run with the same run on another number of threads."""
    now = torch.get_num_threads()
    other = 1 if now > 1 else 2
    if inputs.tensors[0].device.type != "cpu":
        raise NotApplicableError(
            "the model is not on the CPU, so no thread count changes its order"
        )

    return Variation(
        "threads",
        f"the batch runs on {other} thread{'s' if other > 1 else ''} instead of {now}",
        (f"{now} threads", f"{other} threads"),
        inputs.run,
        (VariantCall(Rows([]), inputs.run, inputs.tokens),),
        around=partial(thread_count, other),
        threads=(now, other),
    )


def repeat(inputs: Inputs, sample: int) -> Variation:
    """Compare a run with a second one; other random numbers show operators that draw them."""
    return Variation(
        "repeat",
        "the batch runs a second time, with other random numbers",
        ("first run", "second run"),
        inputs.run,
        (VariantCall(Rows([]), inputs.run, inputs.tokens),),
        around=nullcontext,
        seed=SEED + 1,
        by_chance=True,
    )


AXES_BY_NAME: dict[str, Callable[[Inputs, int], Variation]] = {
    "batch": batch,
    "padding": padding,
    "packing": packing,
    "decode": decode,
    "chunks": chunks,
    "threads": threads,
    "repeat": repeat,
}
