"""Ask an OpenAI-compatible server for completions with log-probabilities, and read what it answers.

[Note: what servers know] Only prompt, model, max_tokens, temperature, seed and logprobs are OpenAI's. vLLM and others
know more: `echo` returns the prompt's log-probabilities, too; `cache_salt` keeps requests of another salt from finding
their keys; `ignore_eos` makes all answers equally long; token ids are exact where their texts are not. A server may
refuse them or ignore them. So they are tried first and left out if they are refused, and nothing relies on them.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from isobit.errors import ArgumentError, ServerError
from isobit.foundation.files import read_bytes
from isobit.foundation.http_json import Exchange, Reply, Server, refuse

# Prompts that are sent to a server: random words, or lines of a file.

Prompt = str | list[int]
LARGEST_FILE = 64 << 20
TEXT = (
    "river stone light morning question answer number letter city garden paper window table music "
    "winter summer engine metal forest island market school doctor teacher history science water fire "
    "quick slow bright dark early late north south east west small large round open"
)


def random_prompts(count: int, words: int, seed: int) -> list[Prompt]:
    """Return prompts of half as many to `words` words; the same for the same seed."""
    draw, known = random.Random(seed), TEXT.split()
    found: list[Prompt] = []
    for at in range(count):
        length = words - at * words // (2 * count)
        found.append(" ".join(draw.choice(known) for _ in range(max(length, 2))))
    return found


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a JSONL file: {"prompt": text} or {"input_ids": [numbers]} per line."""
    found: list[Prompt] = []
    try:
        lines = read_bytes(path, LARGEST_FILE).decode().splitlines()
    except UnicodeDecodeError as error:
        _refuse(f"{path}: {error}", error)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            _refuse(f"{path}:{number}: {error}", error)
        prompt = _prompt_of(entry)
        if prompt is None:
            _refuse(f"{path}:{number}: {line[:100]!r}")
        found.append(prompt)
    if len(found) < 2:
        _refuse(f"{path} with {len(found)}")
    return found


def _prompt_of(entry: Any) -> Prompt | None:
    if not isinstance(entry, dict):
        return None
    text, ids = entry.get("prompt"), entry.get("input_ids")
    if isinstance(text, str) and text:
        return text
    if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
        return ids
    return None


def beginning_of(prompt: Prompt) -> Prompt:
    """Return the first two thirds of a prompt: whole words, or token ids."""
    if isinstance(prompt, list):
        return prompt[: max(2 * len(prompt) // 3, 1)]
    words = prompt.split(" ")
    return " ".join(words[: max(2 * len(words) // 3, 1)])


def backwards(prompt: Prompt) -> Prompt:
    """Return a prompt of the same length that begins otherwise."""
    return prompt[::-1] if isinstance(prompt, list) else " ".join(prompt.split(" ")[::-1])


def _refuse(received: str, cause: Exception | None = None) -> NoReturn:
    raise ArgumentError(
        expected='two lines or more of {"prompt": text} or {"input_ids": [numbers]}',
        received=received,
        remedy="write one JSON object per line",
    ) from cause


COMPLETIONS = "/v1/completions"
EXACT = {"return_tokens_as_token_ids": True, "return_token_ids": True, "ignore_eos": True}
HITS = re.compile(rb"^vllm:prefix_cache_hits(?:_total)?(?:\{[^}\n]*\})? (\d[\d.e+]*)$", re.M)
REFUSED = (400, 422, 500, 501)  # what servers answer to an option that they do not have
LISTED = 10  # names of models that an error shows


@dataclass(frozen=True)
class Answer:
    """What a server said to one prompt: token by token, its log-probability and those of the most likely ones."""

    tokens: tuple[str, ...]
    chosen: tuple[float | None, ...]
    top: tuple[Mapping[str, float], ...]
    cached: int | None = None  # prompt tokens from the prefix cache, if the server reports them


class Completions:
    """Requests to one model of a server.

    Args:
        server: The server.
        model: The model's name there.
        tokens: How many tokens to ask for.
        top: How many of the most likely tokens to ask for.
        nonce: Begins every cache salt, so that two audits do not find each other's keys.
    """

    def __init__(self, server: Server, model: str, tokens: int, top: int, nonce: str) -> None:
        self._server, self._model, self._tokens, self._top = server, model, tokens, top
        self._nonce, self._salts = nonce, itertools.count()
        self.exact = self.salted = self.echoes = True
        self.has_ids = False  # whether tokens are named by their ids

    def check_model(self) -> None:
        """Raise if the server lists its models and this is none of them."""
        reply = self._server.get("/v1/models")
        if reply.status in (404, 405):
            return  # the completions themselves will say
        entries = check_status(reply, self._model).get("data")
        listed = entries if isinstance(entries, list) else []
        names = [str(one.get("id")) for one in listed if isinstance(one, dict)]
        if names and self._model not in names:
            shown = ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")
            refuse(f"a model that the server has: {shown}", repr(self._model), "pass --model NAME")

    def settle(self, prompt: Prompt) -> None:
        """Find out which of the options in [Note: what servers know] the server takes; raise if it has no logprobs."""
        for self.exact, self.salted, self.echoes in (
            (True, True, True),
            (True, True, False),
            (True, False, False),
            (False, False, True),
            (False, False, False),
        ):
            reply = self.send([prompt], echo=True).finish()
            if reply.status not in REFUSED:
                break
        (answer,) = self.read(reply, 1)
        self.has_ids = all(token.startswith("token_id:") for token in answer.tokens)
        self.echoes = self.echoes and len(answer.tokens) > self._tokens

    def new_salt(self) -> str:
        """Return a salt that no request has had."""
        return f"isobit-{self._nonce}-{next(self._salts)}"

    def send(
        self,
        prompts: Sequence[Prompt],
        salt: str = "",
        echo: bool = False,
        tokens: int | None = None,
    ) -> Exchange:
        """Send one request, with a list if there are several prompts; a new salt unless one is given."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompts[0] if len(prompts) == 1 else list(prompts),
            "max_tokens": self._tokens if tokens is None else tokens,
            "temperature": 0,
            "seed": 0,
            "logprobs": self._top,
        }
        if self.exact:
            body |= EXACT
        if self.salted:
            body["cache_salt"] = salt or self.new_salt()
        if echo and self.echoes:
            body["echo"] = True
        return self._server.send("POST", COMPLETIONS, body)

    def read(self, reply: Reply, count: int) -> list[Answer]:
        """Return the answers of a reply, in the order of its prompts; raise if they are not what was asked for."""
        found = check_status(reply, self._model)
        choices = found.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            malformed(reply, "a list of choices", type(choices).__name__)
        if len(choices) != count:
            malformed(reply, f"{count} choices", str(len(choices)))
        if [one.get("index", at) for at, one in enumerate(choices)] != list(range(count)):
            try:
                choices = sorted(choices, key=lambda one: int(one["index"]))
            except (TypeError, ValueError, KeyError):
                malformed(reply, "choices with numbers", "others")
        cached = read_cached(found.get("usage")) if count == 1 else None
        return [read_choice(reply, one, cached) for one in choices]

    def count_cache_hits(self) -> int | None:
        """Return the tokens that vLLM took from its prefix cache since it started; None if it does not say."""
        reply = self._server.get("/metrics")
        counts = HITS.findall(reply.data) if reply.status == 200 else []
        return int(sum(float(one) for one in counts)) if counts else None

    def reset_cache(self) -> bool:
        """Drop the prefix cache by vLLM's development endpoint; False if there is none or it does not."""
        reply = self._server.post("/reset_prefix_cache", {})
        try:
            said = reply.json() if reply.data.strip() else {}
        except ServerError:  # a page of something else
            return False
        return reply.status == 200 and isinstance(said, dict) and bool(said.get("success", True))


def check_status(reply: Reply, model: str) -> dict[str, Any]:
    """Return the object that a server answered; raise for any status but 200, with what to do about it."""
    if reply.status != 200:
        said = f"status {reply.status}: {reply.words or 'no words'}"
        refuse(f"an answer of {reply.address}", said, remedy_for(reply.status, model))
    found = reply.json()
    if not isinstance(found, dict):
        malformed(reply, "a JSON object", type(found).__name__)
    return found


def remedy_for(status: int, model: str) -> str:
    """Return what to do about a status."""
    if 300 <= status < 400:
        return "redirects are not followed: name the address that it redirects to"
    if status == 404:
        return f"check the name {model!r}, and that the server has {COMPLETIONS}: chat alone is not enough"
    if status in (401, 403):
        return "pass a key by --key-file FILE or the environment variable OPENAI_API_KEY"
    if status in (400, 413, 422):
        return "ask for what the server serves: shorter prompts (--shape), --top, --tokens"
    if status == 429:
        return "audit a server without limits on the rate of requests"
    return "look at the server's log"


def malformed(reply: Reply, expected: str, received: str) -> NoReturn:
    """Raise for an answer that has another form than OpenAI's."""
    refuse(
        f"{expected} in the answer of {reply.address}",
        f"{received}: {reply.words}",
        "audit a server with OpenAI's completions API",
    )


def read_cached(usage: Any) -> int | None:
    """Return the cached tokens that a usage record reports, if it does."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int else None


def read_choice(reply: Reply, choice: dict[str, Any], cached: int | None) -> Answer:
    """Return one answer."""
    given = choice.get("logprobs")
    if not isinstance(given, dict) or not isinstance(given.get("token_logprobs"), list):
        refuse(
            f"log-probabilities from {reply.address} (logprobs.token_logprobs)",
            "an answer without them",
            "audit a server that returns logprobs of completions, such as vLLM; chat has another form",
        )
    chosen, tokens = given["token_logprobs"], given.get("tokens")
    tops = given.get("top_logprobs") or [None] * len(chosen)
    if not isinstance(tokens, list) or not isinstance(tops, list) or not chosen:
        malformed(reply, "lists of tokens and top_logprobs", "others, or none")
    if not len(tokens) == len(chosen) == len(tops):
        counts = f"{len(tokens)}, {len(chosen)} and {len(tops)}"
        malformed(reply, "as many tokens as token_logprobs and top_logprobs", counts)
    rows = [{} if row is None else row for row in tops]
    if not all(isinstance(row, dict) for row in rows):
        malformed(reply, "an object for each token in top_logprobs", "others")
    values = [
        one for one in (*chosen, *(v for row in rows for v in row.values())) if one is not None
    ]
    wrong = next((one for one in values if not is_number(one)), None)
    if wrong is not None:
        malformed(reply, "finite numbers as log-probabilities", repr(wrong)[:40])
    return Answer(
        tuple(str(token) for token in tokens),
        tuple(None if one is None else float(one) for one in chosen),
        tuple({str(k): float(v) for k, v in row.items() if v is not None} for row in rows),
        cached,
    )


def is_number(value: Any) -> bool:
    """Return whether JSON has a finite number here."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)
