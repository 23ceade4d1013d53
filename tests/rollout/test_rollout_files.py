"""Reading rollouts: vLLM's outputs, JSONL, arrays; and the command with its exit codes, JSON and page."""

import json
from types import SimpleNamespace

import pytest
import torch

from isobit import ArgumentError, bits
from isobit.checkpoints.weight_digests import digest_weights, digests_to_json
from isobit.cli.main import main
from isobit.rollout import Policy, compare, read

TOKENS = [[5, 6, 7, 8, 9], [3, 1, 4, 1, 5]]
VALUES = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).abs().neg()


def vllm_outputs(full=False):
    """Objects with the attributes of vLLM's RequestOutput."""

    def entry(value, token):
        others = {i: SimpleNamespace(logprob=-30.0 - i, rank=2) for i in range(10)} if full else {}
        return {**others, token: SimpleNamespace(logprob=value, rank=1)}

    return [
        SimpleNamespace(
            request_id=str(at),
            prompt_token_ids=[1, 2],
            outputs=[
                SimpleNamespace(
                    token_ids=tokens,
                    logprobs=[entry(v, t) for v, t in zip(values.tolist(), tokens, strict=True)],
                )
            ],
        )
        for at, (tokens, values) in enumerate(zip(TOKENS, VALUES, strict=True))
    ]


def records(values=VALUES, **more):
    return [
        {
            "id": at,
            "prompt_token_ids": [1, 2],
            "token_ids": TOKENS[at],
            "logprobs": values[at].tolist(),
            "temperature": 0.7,
            **more,
        }
        for at in range(2)
    ]


def write(path, lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_every_form_is_the_same_rollout(tmp_path):
    forms = [
        vllm_outputs(),
        vllm_outputs(full=True),
        records(),
        write(tmp_path / "a.jsonl", records()),
        str(tmp_path / "a.jsonl"),
        {"prompt_token_ids": [[1, 2]] * 2, "token_ids": torch.tensor(TOKENS), "logprobs": VALUES},
        {"prompt_token_ids": [[1, 2]] * 2, "token_ids": TOKENS, "logprobs": VALUES.numpy()},
    ]
    sides = [read(form) for form in forms]
    for side in sides:
        assert [one.id for one in side.sequences] == ["0", "1"]
        assert all(bits.equal(one.logprobs, VALUES[i]) for i, one in enumerate(side.sequences))
        found = compare(sides[0], side)
        assert found.equal, found
        assert found.tokens == 10
    assert sides[1].sequences[0].rows.shape == (5, 10)
    assert sides[3].sequences[0].policy == Policy(temperature=0.7)


def test_a_policy_may_be_given():
    hot, cold = (read(vllm_outputs(), policy={"temperature": t, "top_k": -1}) for t in (1.0, 0.5))
    found = compare(hot, cold)
    assert (found.cause, found.findings[0].kind) == ("semantics", "temperature")


@pytest.mark.parametrize(
    "source",
    [
        3,
        {"logprobs": VALUES},
        [SimpleNamespace(request_id="0")],
        [{"logprobs": [1.0]}],
        {"token_ids": [[1, 2]], "logprobs": [[-1.0]]},
        {"token_ids": [["a"]]},
    ],
    ids=str,
)
def test_other_forms_are_refused(source):
    with pytest.raises(ArgumentError, match="remedy"):
        read(source)


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"logprobs": [1]}', '{"weights": {"a": 1}}'])
def test_wrong_lines_are_refused(tmp_path, line):
    with pytest.raises(ArgumentError, match="remedy"):
        read(write(tmp_path / "a.jsonl", [line]))


def with_weights(lines, tensor):
    return [*lines, '{"weights": ' + digests_to_json(digest_weights({"w": tensor})) + "}"]


def test_the_command(tmp_path, capsys):
    weight = torch.ones(3, 4)
    good = write(tmp_path / "good.jsonl", with_weights(records(), weight))
    spoiled = VALUES.clone()
    spoiled[1, 2] += 1e-3
    numerics = write(tmp_path / "numerics.jsonl", with_weights(records(spoiled), weight))
    stale = write(tmp_path / "stale.jsonl", with_weights(records(spoiled), weight + 1))
    empty = write(tmp_path / "empty.jsonl", [])
    page = tmp_path / "page.html"
    assert main(["rollout", "compare", str(good), str(good)]) == 0
    assert "equal: 0 of 10 log-probabilities differ" in capsys.readouterr().out
    assert main(["rollout", "compare", str(good), str(numerics), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert "numerics" in said
    assert "1 of 10" in said
    shown = page.read_text()
    for words in ("numerics: 1 finding", "weights: equal", "semantics: equal", "gen_kl_error"):
        assert words in shown
    assert "http" not in shown
    assert main(["rollout", "compare", str(good), str(stale), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["cause"], record["equal"]) == ("weights", False)
    assert record["findings"][0]["remedy"]
    assert main(["rollout", "compare", str(empty), str(empty)]) == 2
    assert main(["rollout", "compare", str(good), str(tmp_path / "none.jsonl")]) == 2


def test_hostile_names_are_escaped(tmp_path):
    line = records()[0] | {"id": "<script>alert(1)</script>"}
    other = line | {"token_ids": [5, 6, 7, 8, 1]}
    page = tmp_path / "page.html"
    sides = [str(write(tmp_path / f"{i}.jsonl", [x])) for i, x in enumerate((line, other))]
    assert main(["rollout", "compare", *sides, "--html", str(page)]) == 1
    assert "<script>" not in page.read_text()
