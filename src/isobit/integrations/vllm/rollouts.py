"""Rollouts for a trainer by vLLM in a process of its own; vLLM and the trainer need two versions of transformers.

[Note: lines of JSON] The process is `python -m isobit.integrations.vllm.serving`, in vLLM's environment. A request and
its answer are one line each. Weights travel as a checkpoint in a temporary folder, which vLLM reloads; a
log-probability travels as the decimal that names its double, which is exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.adapters import merged_copy
from isobit.integrations.transformers.package import without_bars
from isobit.integrations.transformers.parts.lora import is_tuner_layer
from isobit.integrations.transformers.state import find_state

ENGINES = ("isobit", "stock")
SAID = 3000  # characters of the process's messages that an error shows


class Completion(NamedTuple):
    """What vLLM generated for one request: the tokens, with the one that ended it, and log p of each."""

    tokens: list[int]
    logprobs: list[float]


class Rollouts:
    """vLLM in a process of its own, with the weights of a model of this process.

    Pass it to `isobit.integrations.trl.GRPOTrainer(rollouts=...)`, which updates the weights before each step's
    rollout; or call `update_weights` and `generate`. Close it after use, or use it in a `with` block.

    Args:
        model: The trainer's model, of transformers. Its dtype is the engine's.
        python: The Python of the environment with vLLM and isobit, such as ".venv-vllm/bin/python".
        max_model_len: The longest prompt with its completion, in tokens.
        engine: "isobit", or "stock" for vLLM's own operators, as a control.

    Raises:
        ArgumentError: If the engine is neither, there is no such Python, or rotary frequencies of the model were cast.
        UnsupportedError: If vLLM refuses the model or a request, or its process has ended.

    Example:
        >>> rollouts = isobit.integrations.vllm.Rollouts(model, ".venv-vllm/bin/python")  # doctest: +SKIP
        >>> made = rollouts.generate([[1, 2, 3]], seed=7, requests=[0], max_tokens=8)  # doctest: +SKIP
    """

    def __init__(
        self, model: Any, python: str | Path, *, max_model_len: int = 1024, engine: str = "isobit"
    ) -> None:
        if engine not in ENGINES:
            raise ArgumentError(
                expected=f"engine= one of {', '.join(ENGINES)}",
                received=repr(engine),
                remedy='pass engine="isobit"',
            )
        if not Path(python).is_file():
            raise ArgumentError(
                expected="the Python of an environment with vLLM and isobit",
                received=f"{str(python)!r}, which is no file",
                remedy="run ./setup_vllm and pass .venv-vllm/bin/python",
            )
        refuse_rounded_angles(model)
        refuse_beside(model)
        self.engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="isobit-rollouts-")
        self._weights = str(Path(self._folder.name) / "weights")
        self._messages = Path(self._folder.name) / "messages.txt"
        self._save(model)
        command = [str(python), "-m", "isobit.integrations.vllm.serving", self._weights]
        command += [str(model.dtype).removeprefix("torch."), str(max_model_len), engine]
        pipe = subprocess.PIPE
        with self._messages.open("w") as messages:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=messages, text=True
            )
        began = time.monotonic()
        say(
            f"starting vLLM ({engine}), which takes a minute or more; its messages: {self._messages}"
        )
        try:
            self._read()  # it is ready, or raises why not
            say(f"vLLM is ready after {time.monotonic() - began:.0f} s")
        except BaseException:
            self.close()
            raise

    def update_weights(self, model: Any) -> None:
        """Give vLLM the model's present weights, and drop the keys that older ones computed."""
        self._save(model)
        self._ask({"weights": self._weights})

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        requests: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        ends: Sequence[int] = (),
    ) -> list[Completion]:
        """Generate one completion per prompt, as `isobit.KeyedSampling` would draw it in transformers.

        Args:
            prompts: Token ids of each prompt.
            seed: The seed of all draws.
            requests: The number of each request: with seed and position the key of a draw. Stock vLLM has one seed
                per request: the sum of the two.
            max_tokens: The largest number of tokens to generate.
            temperature: Divides the logits.
            top_k: How many tokens can be drawn; None for all.
            top_p: The mass of the tokens that can be drawn.
            ends: Tokens that end a completion.

        Returns:
            The completions, with log p of the policy that sampled.
        """
        policy = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
        answer = self._ask(
            {
                "prompts": [list(prompt) for prompt in prompts],
                "seed": seed,
                "requests": list(requests),
                "params": {**policy, "max_tokens": max_tokens, "stop_token_ids": list(ends)},
            }
        )
        return [Completion(*one) for one in answer["completions"]]

    def close(self) -> None:
        """End the process and remove the checkpoint."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()  # the process ends when it has no more to read
                self._process.wait(timeout=60)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self, model: Any) -> None:
        with without_bars():
            served_model(model).save_pretrained(self._weights)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # a process that ended, or that was closed
            self._refuse(str(error), error)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._refuse(f"a process that ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._refuse(answer["error"])
        return answer

    def _refuse(self, received: str, cause: BaseException | None = None) -> NoReturn:
        said = self._messages.read_text()[-SAID:] if self._messages.exists() else ""
        raise UnsupportedError(
            expected=f"an answer of vLLM ({self.engine})",
            received=f"{received}\n{said}".strip(),
            remedy="see the message of vLLM above; start a new Rollouts after an error",
        ) from cause


def served_model(model: Any) -> Any:
    """Return the model whose weights vLLM is given: of one with LoRA, a plain copy with merged weights."""
    refuse_beside(model)
    return merged_copy(model) if has_adapters(model) else model


def has_adapters(model: Any) -> bool:
    """Return whether a model has layers of PEFT."""
    return isinstance(model, nn.Module) and any(map(is_tuner_layer, model.modules()))


def refuse_beside(model: Any) -> None:
    """Raise if the trainer computes adapters next to the weights: the server would be another function."""
    state = find_state(model) if has_adapters(model) else None
    if state is not None and state.plan.adapters != "merged":
        raise UnsupportedError(
            expected="a model whose adapters are computed as vLLM serves them: merged into the weights",
            received="one with adapters next to the weights, whose log-probabilities differ by their rounding",
            remedy='call isobit.disable(model), then isobit.enable(model, adapters="merged")',
        )


def say(line: str) -> None:
    """Print a line of progress on the error stream."""
    sys.stderr.write(f"isobit: {line}\n")
    sys.stderr.flush()


def refuse_rounded_angles(model: Any) -> None:
    """Raise if rotary frequencies were cast: no checkpoint contains them, and vLLM computes them in fp32."""
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and str(buffer.dtype) != "torch.float32":
            raise ArgumentError(
                expected="rotary frequencies in fp32, as vLLM has them",
                received=f"{name} in {buffer.dtype}: the model was cast by .to()",
                remedy="load the model with from_pretrained(folder, dtype=...), which keeps them",
            )
