"""What `isobit audit` is pointed at: a model by name, a factory, or a script; and its inputs."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from isobit.auditing.replay.call import without_rows
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.integrations.transformers.package import library

# The inputs of a model: samples along the first dimension, tokens along the second.

Batch = Tensor | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    named: dict[str, Any]

    def run(self) -> Any:
        """Call the model."""
        return self.model(*self.args, **self.named)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the inputs."""
        return [v for v in (*self.args, *self.named.values()) if isinstance(v, Tensor)]

    @property
    def tokens(self) -> Tensor | None:
        """The token ids, if the model reads tokens."""
        found = self.named.get("input_ids", self.args[0] if self.args else None)
        whole = isinstance(found, Tensor) and found.dtype == torch.int64 and found.dim() == 2
        return found if whole else None

    @property
    def samples(self) -> int:
        """The number of samples: the first dimension of the first tensor."""
        return int(self.tensors[0].shape[0])

    @property
    def width(self) -> int | None:
        """The number of tokens of a sample, or None if the inputs have no second dimension of tokens."""
        mask = self.mask
        if mask is not None:
            return int(mask.shape[1])
        first = self.tensors[0]
        return int(first.shape[1]) if first.dim() in (2, 3) else None

    @property
    def mask(self) -> Tensor | None:
        """The attention mask [samples, tokens], if there is one."""
        found = self.named.get("attention_mask")
        return found if isinstance(found, Tensor) and found.dim() == 2 else None

    def map(self, change: Any) -> Inputs:
        """Return inputs with every tensor changed."""

        def one(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return replace(
            self,
            args=tuple(one(v) for v in self.args),
            named={name: one(v) for name, v in self.named.items()},
        )

    def sample(self, index: int) -> Inputs:
        """Return one sample, with its padding."""
        count = self.samples
        return self.map(
            lambda t: t[index : index + 1].clone() if t.dim() and len(t) == count else t
        )

    def positions(self, index: Tensor) -> Inputs:
        """Return these tokens of every sample."""
        width = self.width
        return self.map(
            lambda t: (
                t.index_select(1, index.to(t.device)) if t.dim() > 1 and t.shape[1] == width else t
            )
        )

    def with_named(self, **more: Any) -> Inputs:
        """Return inputs with more keywords."""
        return replace(self, named={**self.named, **more})

    def accepts(self, name: str) -> bool:
        """Return whether the model's forward takes a keyword."""
        known = inspect.signature(self.model.forward).parameters
        return name in known or any(p.kind is p.VAR_KEYWORD for p in known.values())

    def marked(self, dim: int, labels: Tensor) -> tuple[tuple[Tensor, int, Tensor], ...]:
        """Return every input tensor that has these labels along a dimension."""
        return tuple(
            (t, dim, labels) for t in self.tensors if t.dim() > dim and t.shape[dim] == len(labels)
        )

    def __str__(self) -> str:
        tokens = f" of {self.width} tokens" if self.width and self.tokens is not None else ""
        return f"{self.samples} sample{'s' if self.samples != 1 else ''}{tokens}"


def as_inputs(model: nn.Module, batch: Batch, effect: str | None = None) -> Inputs:
    """Return the inputs of a batch: one tensor, keywords by name, or arguments in order.

    A model of transformers gets no cache and no labels: the loss that it would return is one number over all samples,
    so that none of it can be compared with a sample's. It keeps its labels where the effect is measured on the loss.
    """
    if isinstance(batch, Tensor):
        made = Inputs(model, (batch,), {})
    elif isinstance(batch, Mapping):
        made = Inputs(model, (), dict(batch))
    else:
        made = Inputs(model, tuple(batch), {})
    if not made.tensors or not made.tensors[0].dim():
        raise ArgumentError(
            expected="a batch with at least one tensor whose first dimension is the samples",
            received=type(batch).__name__,
            remedy="pass a tensor, a dict of tensors as for model(**batch), or a tuple of tensors",
        )
    odd = without_rows(made.tensors)
    if odd:
        raise ArgumentError(
            expected="inputs with rows, one per sample",
            received=odd,
            remedy="pass dense tensors, and make sparse or nested ones of them in the model",
        )
    config = getattr(model, "config", None)
    if (
        getattr(config, "use_cache", False)
        and "use_cache" not in made.named
        and made.accepts("use_cache")
    ):
        made = made.with_named(use_cache=False)
    if config is not None and effect != "loss" and not getattr(config, "is_encoder_decoder", False):
        made = replace(made, named={k: v for k, v in made.named.items() if k != "labels"})
    return made.map(Tensor.clone)  # a model may write to its inputs


# Run a script until it calls its model, and keep that call: what `isobit audit script.py` audits.


class Stop(BaseException):
    """Ends the script once the call is kept; not an Exception, so that a script does not catch it."""


@dataclass
class Capture:
    """Keeps the `wanted`-th outermost call of a module with parameters, counted from 0."""

    wanted: int = 0
    seen: int = 0
    depth: int = 0
    kept: list[Inputs] = field(default_factory=list)

    def enter(self, module: nn.Module, args: Any, named: Any) -> None:
        """Look at a call that begins."""
        if self.depth == 0 and next(module.parameters(), None) is not None:
            tensors = [v for v in _pytree.tree_leaves((args, named)) if isinstance(v, Tensor)]
            if tensors:
                if self.seen == self.wanted:
                    self.kept.append(Inputs(module, copy(args), copy(named)))
                    raise Stop
                self.seen += 1
        self.depth += 1


def copy(values: Any) -> Any:
    """Return arguments with tensors of their own, which the script cannot change any more."""
    return _pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


@contextmanager
def watched(capture: Capture) -> Iterator[None]:
    """Show every call of a module to the capture."""
    plain = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        capture.enter(self, args, named)
        try:
            return plain(self, *args, **named)
        finally:
            capture.depth -= 1

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def capture_call(script: Path, words: Sequence[str], wanted: int = 0) -> Inputs:
    """Run a script as `python script.py words` would, and return the model and the inputs of one of its calls.

    Args:
        script: The script; it runs until the call.
        words: Its arguments.
        wanted: Which call of a model, counted from 0.

    Raises:
        ArgumentError: If the script fails or ends before the call.
    """
    capture = Capture(wanted)
    before = list(sys.argv), list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *words], [str(script.resolve().parent)]
    error: BaseException | None = None
    try:
        with watched(capture), torch.enable_grad():
            runpy.run_path(str(script), run_name="__main__")
    except Stop:
        pass
    except (Exception, SystemExit) as raised:
        error = raised
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
    if (
        capture.kept
    ):  # also where the script itself ended the process, or called its model in a thread
        return capture.kept[0]
    ended = "ended" if error is None else f"raised {type(error).__name__}: {error}"
    raise ArgumentError(
        expected=f"a script that calls a model with tensors at least {wanted + 1} times",
        received=f"{script.name} {ended} after {capture.seen} such calls",
        remedy="run it with python first; --call N chooses an earlier call",
    ) from error


LARGEST_FILE = 1 << 30  # bytes of samples
LARGEST_ID = 2**63 - 1


def from_factory(name: str, effect: str | None, load: Callable[[str], Any]) -> Inputs:
    """Call `package.module:factory` or `file.py:factory`, which returns a model and a batch; `load` imports."""
    module, _, attribute = name.rpartition(":")
    try:
        factory = getattr(load(module), attribute)
    except AttributeError as error:
        raise ArgumentError(
            expected="package.module:factory or file.py:factory",
            received=f"{name}: {error}",
            remedy="name a function of a file, of the current folder or of an installed package",
        ) from error
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ArgumentError(
            expected=f"{name}() to return (model, batch)",
            received=type(made).__name__,
            remedy="return a module and what it is called with: a tensor, a dict or a tuple",
        )
    return as_inputs(*made, effect)


def from_transformers(name: str, dtype: torch.dtype | None, device: str) -> tuple[nn.Module, Any]:
    """Load a causal language model and, if it has one, its tokenizer."""
    transformers = library()
    try:
        given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        given["trust_remote_code"] = (
            False  # otherwise transformers asks on the terminal whether to run it
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **given)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            expected="a folder or hub id of a causal language model",
            received=f"{name}: {str(error).splitlines()[0]}",
            remedy="pass a folder that save_pretrained wrote, or package.module:factory for any other model",
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return model.to(device).eval(), tokenizer


def random_tokens(model: nn.Module, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Return random tokens of a model's vocabulary, none of them padding."""
    size = int(getattr(model, "config").get_text_config().vocab_size)  # noqa: B009 (a Module has no such attribute)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, size, shape, generator=generator)
    return batch_of(model, list(ids))


def read_samples(path: Path, tokenizer: Any) -> list[Tensor]:
    """Read one sample per line of a JSON Lines file."""
    samples = []
    for number, line in enumerate(files.read_bytes(path, LARGEST_FILE).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            samples.append(tokens_of(record, tokenizer))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                expected='lines {"prompt": text} or {"input_ids": [numbers]}',
                received=f"{path.name}, line {number}: {error}",
                remedy="write one JSON object per line; text needs a model with a tokenizer",
            ) from error
    if not samples:
        raise ArgumentError(
            expected="at least one sample", received=f"{path.name}: none", remedy="add lines"
        )
    return samples


def tokens_of(record: Any, tokenizer: Any) -> Tensor:
    """Return the tokens of one record."""
    if "input_ids" in record:
        ids = record["input_ids"]
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise TypeError("input_ids that are not a list of whole numbers")
    else:
        text = next((record[key] for key in ("prompt", "text") if key in record), None)
        if not isinstance(text, str):
            raise TypeError("no input_ids, and no prompt that is a text")
        if tokenizer is None:
            raise ValueError("the model has no tokenizer, so text cannot be read")
        ids = tokenizer(text)["input_ids"]
    if not ids or min(ids) < 0 or max(ids) > LARGEST_ID:
        raise ValueError("no tokens, or one that is no token id")
    return torch.tensor(ids)


def batch_of(model: nn.Module, samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return samples padded on the left to one width, with their mask, on the model's device.

    Raises:
        ArgumentError: A token is not in the model's vocabulary.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    largest = max(int(one.max()) for one in samples)
    if isinstance(size, int) and largest >= size:
        raise ArgumentError(
            expected=f"token ids below {size}, the size of the model's vocabulary",
            received=str(largest),
            remedy="use the tokenizer of this model",
        )
    width = max(len(s) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, width - len(sample) :] = sample
        mask[row, width - len(sample) :] = 1
    device = next(model.parameters()).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
