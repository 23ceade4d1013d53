"""Reading rollouts: vLLM's outputs, JSONL, arrays; and the command with its exit codes, JSON and page."""

import json
from types import SimpleNamespace

import pytest
import torch

from isobit import ArgumentError, bits
from isobit.cli.main import main
from isobit.comparing.checkpoints.weight_digests import digest_weights, digests_to_json
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


def hostile(**changed):
    return json.dumps(records()[0] | changed)


LINES = {
    "deep lists": "[" * 200_000 + "]" * 200_000,
    "a deep record": '{"token_ids": [1], "id": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep digests": '{"weights": ' + '{"a": ' * 5_000 + "1" + "}" * 5_000 + "}",
    "a hot temperature": hostile(temperature="hot"),
    "a true temperature": hostile(temperature=True),
    "a temperature that is not finite": hostile(temperature=float("nan")),
    "a temperature below zero": hostile(temperature=-0.5),
    "a top-k of parts": hostile(top_k=1.5),
    "a top-p above 1": hostile(top_p=2),
    "another normaliser": hostile(normaliser="half"),
    "processors without names": hostile(processors="min_p"),
    "true as a token": hostile(token_ids=[5, 6, 7, 8, True]),
    "a part of a token": hostile(token_ids=[5, 6, 7, 8, 9.5]),
    "text as a token": hostile(token_ids=[5, 6, 7, 8, "9"]),
    "a negative token": hostile(token_ids=[5, 6, 7, 8, -100]),
    "a huge token": hostile(token_ids=[5, 6, 7, 8, 10**40]),
    "a number of many digits": '{"token_ids": [' + "9" * 5_000 + "]}",
    "a huge log-probability": '{"token_ids": [1], "logprobs": [' + "9" * 400 + "]}",
    "true as a log-probability": hostile(logprobs=[-1.0, -1.0, -1.0, -1.0, True]),
    "text as a log-probability": hostile(logprobs=["-1"] * 5),
    "log-probabilities in lists": hostile(logprobs=[[-1.0]] * 5),
    "no log-probability": hostile(logprobs=[-1.0, None, -1.0, -1.0, -1.0]),
    "too few log-probabilities": hostile(logprobs=[-1.0]),
    "a mask of texts": hostile(mask=["no"] * 5),
    "a mask of numbers": hostile(mask=[2, 0, 1, 1, 1]),
    "a list as an id": hostile(id=[1]),
    "no id": hostile(id=None),
    "a key twice": '{"token_ids": [1], "token_ids": [2], "logprobs": [-1.0]}',
    "no text": b"\xff\xfe{}",
}


@pytest.mark.parametrize("name", LINES)
def test_hostile_lines_are_refused_by_file_and_line(tmp_path, capsys, name):
    good = write(tmp_path / "good.jsonl", records())
    line = LINES[name]
    wrong = tmp_path / "wrong.jsonl"
    first = json.dumps(records()[0]).encode() + b"\n"
    wrong.write_bytes(first + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    for sides in ((good, wrong), (wrong, good), (wrong, wrong)):
        assert main(["compare", "rollouts", *map(str, sides)]) == 2
        said = capsys.readouterr().err
        assert "line 2 of wrong.jsonl" in said
        assert "remedy" in said


UNUSUAL = {
    "a separator of lines in a text": {"id": "one\u2028two\x85three"},
    "a lone surrogate": {"id": "\ud800"},
    "a number as id": {"id": 10**30},
    "greedy": {"temperature": 0, "top_k": -1, "top_p": 1, "processors": ["min_p"]},
    "a mask of 0 and 1": {"mask": [1, 0, 1, 1, 1]},
    "no temperature": {"temperature": None},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_lines_are_read(tmp_path, capsys, name):
    line = json.dumps(records()[0] | UNUSUAL[name], ensure_ascii=name == "a lone surrogate")
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert main(["compare", "rollouts", str(path), str(path)]) == 0
    other = write(tmp_path / "b.jsonl", [records()[0] | UNUSUAL[name] | {"token_ids": [1] * 5}])
    page = tmp_path / "page.html"
    assert main(["compare", "rollouts", str(path), str(other), "--html", str(page)]) == 1
    assert main(["compare", "rollouts", str(path), str(other), "--json"]) == 1
    assert page.stat().st_size
    capsys.readouterr()


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity"])
def test_numbers_that_are_not_finite_are_a_finding(tmp_path, capsys, value):
    line = '{"token_ids": [1, 2], "logprobs": [-1.0, ' + value + "]}"
    path = write(tmp_path / "a.jsonl", [line])
    assert main(["compare", "rollouts", str(path), str(path)]) == 1
    assert "not finite" in capsys.readouterr().out


def test_an_id_twice_is_a_finding(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [records()[0], records()[1] | {"id": 0}])
    assert main(["compare", "rollouts", str(path), str(path)]) == 1
    assert "ids twice" in capsys.readouterr().out


def test_what_is_no_file_is_refused(tmp_path, capsys):
    good = write(tmp_path / "good.jsonl", records())
    assert main(["compare", "rollouts", str(good), "/dev/zero"]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["compare", "rollouts", str(tmp_path / "empty"), str(good)]) == 2
    capsys.readouterr()


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
    assert main(["compare", "rollouts", str(good), str(good)]) == 0
    assert "equal: 0 of 10 log-probabilities differ" in capsys.readouterr().out
    assert main(["compare", "rollouts", str(good), str(numerics), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert "numerics" in said
    assert "1 of 10" in said
    shown = page.read_text()
    for words in ("numerics: 1 finding", "weights: equal", "semantics: equal", "gen_kl_error"):
        assert words in shown
    assert "http" not in shown
    assert main(["compare", "rollouts", str(good), str(stale), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["cause"], record["equal"]) == ("weights", False)
    assert record["findings"][0]["remedy"]
    assert main(["compare", "rollouts", str(empty), str(empty)]) == 2
    assert main(["compare", "rollouts", str(good), str(tmp_path / "none.jsonl")]) == 2


def test_hostile_names_are_escaped(tmp_path):
    line = records()[0] | {"id": "<script>alert(1)</script>"}
    other = line | {"token_ids": [5, 6, 7, 8, 1]}
    page = tmp_path / "page.html"
    sides = [str(write(tmp_path / f"{i}.jsonl", [x])) for i, x in enumerate((line, other))]
    assert main(["compare", "rollouts", *sides, "--html", str(page)]) == 1
    assert "<script>" not in page.read_text()


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("step", [1, -1])
def test_a_shift_is_seen_through_the_noise_of_an_engine(noise, step):
    make = torch.Generator().manual_seed(0)
    values = -torch.rand(6, 40, generator=make).mul(5).exp().log1p()
    noisy = values + noise * torch.randn(values.shape, generator=make)
    tokens = torch.arange(240).reshape(6, 40).tolist()
    engine = {"token_ids": tokens, "logprobs": list(noisy)}
    found = compare(engine, {"token_ids": tokens, "logprobs": list(values.roll(step, 1))})
    assert (found.cause, [one.kind for one in found.findings]) == ("semantics", ["shift"])
    assert "shift" not in {
        one.kind for one in compare(engine, {**engine, "logprobs": list(values)}).findings
    }


def test_values_that_agree_in_nothing_are_no_shift():
    make = torch.Generator().manual_seed(0)
    tokens = torch.arange(240).reshape(6, 40).tolist()
    sides = [
        {"token_ids": tokens, "logprobs": list(-5 * torch.rand(6, 40, generator=make))}
        for _ in range(2)
    ]
    assert "shift" not in {one.kind for one in compare(*sides).findings}
