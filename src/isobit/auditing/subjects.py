"""What `isobit audit` is pointed at: a model by name, a factory, or a script; and its inputs."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from isobit.auditing.inputs import Inputs, as_inputs
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.integrations.transformers.package import library

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


def from_factory(name: str, effect: str | None = None) -> Inputs:
    """Call `package.module:factory`, which returns a model and a batch."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            expected="package.module:factory",
            received=f"{name}: {error}",
            remedy="name a function that can be imported from the current folder or an installed package",
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
