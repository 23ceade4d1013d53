"""Check what `generate` returns while a program trains: no more new tokens than it was asked for, and every row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from isobit.guards.trial_run.report import Found, NotJudged

PROMPTS = ("input_ids", "inputs", "ids", "prompt", "idx")


class Generations:
    """Calls of `generate` of any model, recorded while `recording` is open.

    Classes are found as their instances get submodules, or are called: a model that exists before and generates before
    its first call is seen from its second `generate` on.

    Args:
        is_mine: Whether the current thread is the program's.
    """

    def __init__(self, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self.known: set[type] = set()
        self.judged = 0
        self.found: list[Found] = []
        self.stack = ExitStack()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow the classes of modules."""
        handle = register_module_module_registration_hook(lambda module, *_: self.follow(module))
        self.stack.callback(handle.remove)
        try:
            yield
        finally:
            self.stack.close()

    def follow(self, module: nn.Module) -> None:
        """Replace `generate` of a module's class by one that is checked."""
        kind = type(module)
        if kind in self.known or not self.is_mine():
            return
        self.known.add(kind)
        for owner in kind.__mro__:
            plain = owner.__dict__.get("generate")
            if inspect.isfunction(plain) and not hasattr(plain, "is_checked_by"):
                setattr(owner, "generate", self.checked(plain))  # noqa: B010
                self.stack.callback(setattr, owner, "generate", plain)

    def checked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `generate` whose result is judged."""
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = plain(model, *args, **kwargs)
            if self.is_mine():
                given = signature.bind(model, *args, **kwargs).arguments
                self.judge(model, {**given, **given.get("kwargs", {})}, result)
            return result

        generate.is_checked_by = self  # type: ignore[attr-defined]
        return generate

    def judge(self, model: nn.Module, given: dict[str, Any], result: Any) -> None:
        """Compare the lengths of a prompt and of what was returned with the limit."""
        returned = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
        prompt = next((given[name] for name in PROMPTS if is_tokens(given.get(name))), None)
        limit = limit_of(model, given)
        is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if prompt is None or not is_tokens(returned) or limit is None or is_pair:
            return
        assert returned is not None
        self.judged += 1
        new = returned.shape[1] - prompt.shape[1]
        if new > limit and not self.found:
            self.found.append(
                (
                    "generated-too-much",
                    "error",
                    f"{type(model).__name__}.generate was asked for at most {limit} new tokens and returned {new} "
                    f"after a prompt of {prompt.shape[1]}",
                )
            )

    def check(self) -> Iterator[Found]:
        """Yield what was found.

        Raises:
            NotJudged: If nothing was generated with a limit.
        """
        if not self.judged:
            raise NotJudged("nothing was generated with max_new_tokens in these steps")
        yield from self.found


def is_tokens(value: Any) -> bool:
    """Return whether a value is a batch of token ids."""
    return (
        isinstance(value, Tensor)
        and value.ndim == 2
        and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    )


def limit_of(model: nn.Module, given: dict[str, Any]) -> int | None:
    """Return the number of new tokens that a call allows: its own, that of its configuration, or the model's."""
    places = (given.get("generation_config"), getattr(model, "generation_config", None))
    values = [given.get("max_new_tokens"), *(getattr(p, "max_new_tokens", None) for p in places)]
    return next((value for value in values if isinstance(value, int)), None)
