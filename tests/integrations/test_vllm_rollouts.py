"""The two ends of `Rollouts`, without vLLM: what is asked, what is answered, and how each failure is told."""

import io
import json
import sys
import types

import pytest
import torch

import isobit
from isobit.gates.model.models import build_model
from isobit.integrations.vllm import Completion, Rollouts, serving


class Model:
    dtype = "torch.bfloat16"

    def __init__(self, **buffers):
        self.saved, self.buffers = [], buffers

    def named_buffers(self):
        return self.buffers.items()

    def save_pretrained(self, folder):
        self.saved.append(folder)


def process(folder, *lines):
    """Return the path of a program that stands for vLLM's Python."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def test_requests_and_answers_are_one_line_each(tmp_path):
    asked = tmp_path / "asked"
    reply = '{"completions": [[[4, 5], [-0.5, -1.1754943508222875e-38]]]}'
    python = process(
        tmp_path,
        f'echo "$@" > {asked}; echo "{{}}"',
        f'read line; echo "$line" >> {asked}; echo "{{}}"',
        f"read line; echo \"$line\" >> {asked}; echo '{reply}'",
    )
    model = Model()
    with Rollouts(model, python, max_model_len=64, engine="stock") as rollouts:
        rollouts.update_weights(model)
        made = rollouts.generate([[1, 2]], seed=7, requests=range(3, 4), max_tokens=2, ends=[9])
    assert made == [Completion([4, 5], [-0.5, -(2.0**-126)])]
    options, weights, request = asked.read_text().splitlines()
    assert options.split()[2:] == [model.saved[0], "bfloat16", "64", "stock"]
    assert json.loads(weights) == {"weights": model.saved[1]}
    assert json.loads(request) == {
        "prompts": [[1, 2]],
        "seed": 7,
        "requests": [3],
        "params": {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_tokens": 2,
            "stop_token_ids": [9],
        },
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("echo lost >&2; exit 3", "(?s)ended with 3.*lost"),
        ('echo \'{"error": "ValueError: no such model"}\'', "no such model"),
    ],
)
def test_process_that_fails_is_told(tmp_path, line, words):
    with pytest.raises(isobit.UnsupportedError, match=words):
        Rollouts(Model(), process(tmp_path, line))


def test_process_that_ends_before_a_request_is_told(tmp_path):
    with (
        Rollouts(Model(), process(tmp_path, "echo '{}'")) as rollouts,
        pytest.raises(isobit.UnsupportedError, match=r"ended with 0|pipe"),
    ):
        rollouts.update_weights(Model())


@pytest.mark.parametrize("wrong", [{"engine": "other"}, {"python": "no/such/python"}], ids=str)
def test_wrong_arguments_are_refused(tmp_path, wrong):
    given = {"model": Model(), "python": process(tmp_path, "exit 1"), **wrong}
    with pytest.raises(isobit.ArgumentError, match=next(iter(wrong.values()))):
        Rollouts(**given)


def test_rotary_frequencies_that_were_cast_are_refused(tmp_path):
    python = process(tmp_path, "echo '{}'")
    with pytest.raises(isobit.ArgumentError, match="from_pretrained"):
        Rollouts(Model(inv_freq=torch.ones(2, dtype=torch.bfloat16)), python)
    Rollouts(Model(inv_freq=torch.ones(2)), python).close()


class Engine:
    """Stands for vLLM's LLM: each prompt is answered by its last token, twice."""

    def __init__(self, resets=True):
        self.resets, self.reloaded, self.params = resets, [], []
        self.applied = []

    def collective_rpc(self, name, kwargs):
        self.reloaded.append((name, kwargs["weights_path"]))

    def apply_model(self, function):
        self.applied.append(function)

    def reset_prefix_cache(self):
        return self.resets

    def generate(self, prompts, params, use_tqdm):
        self.params += params
        rows = [[prompt["prompt_token_ids"][-1]] * 2 for prompt in prompts]
        return [types.SimpleNamespace(outputs=[self.complete(tokens)]) for tokens in rows]

    @staticmethod
    def complete(tokens):
        values = [{token: types.SimpleNamespace(logprob=-0.5)} for token in tokens]
        return types.SimpleNamespace(token_ids=tokens, logprobs=values)


def serve(monkeypatch, engine, kind, *requests):
    monkeypatch.setitem(
        sys.modules, "vllm", types.SimpleNamespace(SamplingParams=types.SimpleNamespace)
    )
    monkeypatch.setattr(serving, "start", lambda *_: engine)
    answers = io.StringIO()
    lines = [json.dumps(request) for request in requests]
    serving.serve(lines, answers, ["folder", "bfloat16", "64", kind])
    ready, *found = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    return found


REQUEST = {"prompts": [[1, 2], [3]], "seed": 7, "requests": [5, 6], "params": {"max_tokens": 2}}


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("isobit", [(7, {"isobit_request": 5}), (7, {"isobit_request": 6})]), ("stock", [12, 13])],
)
def test_each_request_has_its_own_key(monkeypatch, kind, keys):
    engine = Engine()
    weights, made = serve(monkeypatch, engine, kind, {"weights": "new"}, REQUEST)
    assert weights == {}
    assert engine.reloaded == [("reload_weights", "new")]
    assert engine.applied == ([serving.pack_tied_head] if kind == "stock" else [])
    assert made == {"completions": [[[2, 2], [-0.5, -0.5]], [[3, 3], [-0.5, -0.5]]]}
    found = [(p.seed, p.extra_args) if kind == "isobit" else p.seed for p in engine.params]
    assert found == keys


def test_keys_of_older_weights_that_stay_are_an_error(monkeypatch):
    (answer,) = serve(monkeypatch, Engine(resets=False), "isobit", {"weights": "new"})
    assert "prefix cache" in answer["error"]


def test_starting_says_so_and_shows_no_bars(tmp_path, capsys):
    """An engine takes a minute or more to start; bars of transformers between a loop's own lines tell nothing."""
    model = build_model("qwen3-micro", torch.float32)
    rollouts = Rollouts(model, process(tmp_path, "echo '{}'"))
    rollouts.close()
    said = capsys.readouterr().err
    assert said.startswith("isobit: starting vLLM (isobit), which takes")
    assert "isobit: vLLM is ready after" in said
    assert "shards" not in said


def test_an_engine_that_does_not_start_is_not_ready(tmp_path, capsys):
    with pytest.raises(isobit.UnsupportedError):
        Rollouts(Model(), process(tmp_path, "exit 3"))
    assert "ready" not in capsys.readouterr().err
