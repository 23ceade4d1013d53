"""`isobit compare server`: a server that keeps its bits is kept on every axis; one that depends on one thing is broken
on that axis and no other; a server that cannot be audited is refused by name, in bounded time and memory."""

import json
import time

import pytest

from isobit.cli.compare.server import run as run_server
from isobit.comparing.server.completions import Completions, random_prompts, read_prompts
from isobit.comparing.server.report import AXES, ServerAudit, Variant, write_server_page
from isobit.comparing.server.running import audit_server
from isobit.errors import ArgumentError, ServerError
from isobit.foundation.http_json import Server, read_key
from tests.comparing.fake_completions import EXTRAS, FakeServer, ask_for, reply

PROMPTS = random_prompts(8, 6, 0)


def audit(axes=tuple(AXES), timeout=20.0, key="", largest=1 << 20, **fake):
    with FakeServer(PROMPTS, **fake) as served:
        server = Server(served.url, key, timeout, largest)
        asked = Completions(server, "tiny", 4, 3, "test")
        return audit_server(asked, server.url, "tiny", PROMPTS, axes, tokens=4, repeats=3)


def test_a_server_that_keeps_its_bits_is_kept_on_every_axis():
    found = audit()
    assert found.exit_code == 0, found
    assert found.verdicts == dict.fromkeys(AXES, "kept")
    assert all(one.values >= 128 for one in found.variants)
    lengths = [len(prompt.split()) + 4 for prompt in PROMPTS]
    # The first token of a prompt has no log-probability; others have their own and three more.
    again = next(one for one in found.variants if one.axis == "repeats")
    assert again.values == 3 * 4 * sum(n - 1 for n in lengths)
    assert again.requests == 24
    assert again.tokens == 3 * sum(lengths)
    assert all(one.cached for one in found.variants if one.axis == "prefix-cache")
    assert "token ids" in found.compared
    assert found.notes == ()


@pytest.mark.parametrize("axis", ["repeats", "batch", "order", "prefix-cache"])
def test_a_server_that_depends_on_one_thing_is_broken_on_that_axis_alone(axis):
    found = audit(fault=axis)
    assert found.exit_code == 1
    assert found.verdicts == {name: "broken" if name == axis else "kept" for name in AXES}
    assert 0 < max(one.largest for one in found.variants) < 1e-6
    assert all(one.first for one in found.variants if one.verdict == "broken")


def test_order_is_broken_where_concurrency_is_since_it_sends_all_at_once():
    found = audit(fault="concurrency").verdicts
    assert {axis for axis, verdict in found.items() if verdict == "broken"} == {
        "order",
        "concurrency",
    }


def test_prefix_cache_is_broken_alone_where_salts_are_ignored():
    found = audit(fault="prefix-cache, salts ignored")
    assert found.verdicts == {a: "broken" if a == "prefix-cache" else "kept" for a in AXES}


def test_what_follows_another_token_is_not_compared():
    found = audit(axes=["batch"], fault="tokens").variants[0]
    assert (found.changed, found.left_out) == (8, 8)  # the last but one of each answer
    assert found.verdict == "broken"
    assert "token_id:5000" in found.first


def test_a_server_that_knows_only_openai_is_asked_only_that():
    found = audit(takes=set(), cached=False)
    assert found.exit_code == 0
    assert "not of prompts" in found.compared
    assert any("cache_salt" in note for note in found.notes)
    assert any("does not report cached tokens" in note for note in found.notes)
    assert audit(takes=EXTRAS - {"echo"}).exit_code == 0


def test_rounded_numbers_are_noted():
    assert any("at most 5 digits" in note for note in audit(axes=["batch"], digits=4).notes)


def test_an_axis_that_was_not_exercised_is_not_judged():
    unused = audit(fault="no cache")
    assert unused.verdicts["prefix-cache"] == "not-judged"
    reasons = [one.reason for one in unused.variants if one.axis == "prefix-cache"]
    assert all("0 cached tokens" in reason for reason in reasons)
    assert unused.exit_code == 2
    lists = audit(fault="no lists")
    assert lists.verdicts == {a: "not-judged" if a == "batch" else "kept" for a in AXES}
    assert lists.exit_code == 2
    assert ServerAudit("", "", 0, 0, ()).exit_code == 2
    assert ServerAudit("", "", 0, 0, (Variant("batch", "2 prompts"),)).exit_code == 2


# ---- servers that cannot be audited ---------------------------------------------------------------------------


def answers(status, said, headers=()):
    """Answer all completions so."""

    def answer(handler, body):
        if handler.path != "/v1/completions":
            return False
        reply(handler, status, said, headers)
        return True

    return answer


def choices(**logprobs):
    return {"choices": [{"index": 0, "logprobs": logprobs}]}


GOOD = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
BROKEN = {
    "server error": (answers(500, {"error": "it broke"}), "it broke"),
    "no key": (answers(401, {"error": "who are you"}), "--key-file"),
    "no completions": (answers(404, {}), "chat alone is not enough"),
    "too long": (answers(400, {"error": "maximum context"}), "--shape"),
    "limited": (answers(429, {}), "rate of requests"),
    "redirect": (answers(302, b"", [("Location", "http://elsewhere/")]), "not followed"),
    "a page": (answers(200, b"<html>hello"), "not (JSONDecodeError"),
    "not UTF-8": (answers(200, b'{"choices": "\xff"}'), "UnicodeDecodeError"),
    "nested": (answers(200, b"[" * 100_000), "RecursionError"),
    "NaN": (answers(200, b'{"choices": [{"logprobs": {"token_logprobs": [NaN]}}]}'), "NaN"),
    "infinite": (answers(200, choices(**GOOD | {"token_logprobs": [10**400]})), "finite numbers"),
    "text as number": (
        answers(200, choices(**GOOD | {"token_logprobs": ["-1"]})),
        "finite numbers",
    ),
    "truth as number": (
        answers(200, choices(**GOOD | {"token_logprobs": [True]})),
        "finite numbers",
    ),
    "a list": (answers(200, []), "a JSON object"),
    "no choices": (answers(200, {}), "a list of choices"),
    "other choices": (answers(200, {"choices": [1]}), "a list of choices"),
    "too many choices": (answers(200, {"choices": [{}, {}]}), "1 choices"),
    "no logprobs": (answers(200, {"choices": [{"text": "hi", "logprobs": None}]}), "without them"),
    "chat's logprobs": (answers(200, choices(content=[])), "without them"),
    "other lengths": (answers(200, choices(**GOOD | {"tokens": ["a", "b"]})), "2, 1 and 1"),
    "no tokens": (answers(200, choices(tokens=[], token_logprobs=[], top_logprobs=[])), "or none"),
    "other rows": (
        answers(200, choices(**GOOD | {"top_logprobs": [[1]]})),
        "object for each token",
    ),
    "huge": (answers(200, b" " * (3 << 20)), "at most 1,048,576 bytes"),
    "escapes": (answers(500, b"\x1b[2J\x1b]0;title\x07 broke"), "status 500: broke"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_server_is_refused_by_name(name):
    answer, words = BROKEN[name]
    with pytest.raises(ServerError) as raised:
        audit(axes=["repeats"], answer=answer)
    assert words in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_an_answer_that_never_ends_is_cut():
    def drip(handler, body):
        if body is None:
            return False
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
        try:
            for _ in range(100):
                handler.wfile.write(b"X-More: 1\r\n")
                time.sleep(0.02)
        except OSError:
            pass
        return True

    began = time.monotonic()
    with pytest.raises(ServerError, match="the time ran out"):
        audit(axes=["repeats"], answer=drip, timeout=0.2)
    assert time.monotonic() - began < 10  # and not 100 lines, nor the timeout of each


def test_a_server_that_breaks_while_others_wait_is_refused():
    seen = []

    def later(handler, body):
        seen.append(body)
        if body is None or len(seen) < 30:
            return False
        reply(handler, 503, {"error": "gone"})
        return True

    with pytest.raises(ServerError, match="status 503"):
        audit(axes=["concurrency"], answer=later)
    assert len(seen) >= 30


def test_wrong_model_and_nobody_there():
    with FakeServer(PROMPTS) as served:
        asked = Completions(Server(served.url), "other", 4, 3, "test")
        with pytest.raises(ServerError, match="a model that the server has: tiny"):
            audit_server(asked, served.url, "other", PROMPTS, tokens=4)
    with pytest.raises(ServerError, match="nobody who listens there"):
        Server(served.url).get("/v1/models")
    with pytest.raises(ServerError, match="unknown host"):
        Server("http://no-such-host.invalid").get("/v1/models")


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host", "localhost:8000", "http://", "http://h:99999", "http://h h",
     "http://user:secret@host", "http://host?key=secret", "http://host/\r\nX: 1", "http://h:0"],
)  # fmt: skip
def test_addresses_that_are_not_plain_are_refused_without_showing_secrets(url):
    with pytest.raises(ServerError) as raised:
        Server(url)
    assert "secret" not in str(raised.value)


def test_the_key_is_sent_and_never_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "key").write_text("sk-very-secret\n")
    words = ["--shape", "2x4", "--vary", "batch", "--tokens", "2"]
    with FakeServer() as served:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
        page = tmp_path / "page.html"
        asked = [*words, "--key-file", str(tmp_path / "key"), "--html", str(page)]
        assert run_server(ask_for(served, *asked)) == 0
        assert served.keys == {"Bearer sk-very-secret"}
    said = capsys.readouterr()
    assert "very-secret" not in said.out + said.err + page.read_text()
    for text in ("", "two words", "línea", "a\x00b"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ServerError) as raised:
            read_key(tmp_path / "key")
        assert "the contents of" in str(raised.value)
        assert not text or text not in str(raised.value)


# ---- the command -------------------------------------------------------------------------------------------------


def test_command_prints_one_table_and_writes_a_page_and_json(tmp_path, capsys):
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    words = ["--inputs", str(tmp_path / "prompts.jsonl"), "--html", str(tmp_path / "page.html")]
    with FakeServer(PROMPTS, fault="batch") as served:
        assert run_server(ask_for(served, *words)) == 1
        said = capsys.readouterr().out
        assert "BROKEN on batch" in said
        assert "first on batch, 2 prompts: prompt 0, token" in said
        assert "isobit compare server" in (tmp_path / "page.html").read_text()
        assert run_server(ask_for(served, *words, "--json", "--vary", "order,repeats")) == 0
        record = json.loads(capsys.readouterr().out)
    assert record["verdicts"] == {"order": "kept", "repeats": "kept"}
    assert record["audit"]["provenance"]["command"].startswith("isobit compare server")
    page = (tmp_path / "page.html").read_text()
    kept = json.loads(page.partition('id="audit">')[2].partition("</script>")[0])
    assert kept["model"] == "tiny"
    assert page.count("<tr>") > 4


def test_a_page_cannot_be_broken_out_of():
    evil = "</script><script>alert(1)</script>"
    variant = Variant("batch", evil, first=evil, reason=evil, by_prompt=((1, 2),))
    page = write_server_page(ServerAudit("http://h", evil, 1, 1, (variant,), evil, (evil,)))
    assert "<script>alert" not in page
    assert page.count("</script>") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["some-model"], "unrecognized arguments: some-model"),
        (["--backward"], "unrecognized arguments: --backward"),
        (["--vary", "padding"], "expected axes among repeats, batch"),
    ],
)
def test_options_of_other_commands_are_refused(words, said, capsys):
    with FakeServer() as served, pytest.raises(SystemExit) as stopped:
        ask_for(served, *words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert served.requests == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [({"model": None}, "--model NAME"), ({"shape": (1, 8)}, "two prompts or more")],
)
def test_what_cannot_be_asked_is_refused(more, said):
    with FakeServer() as served, pytest.raises(ArgumentError, match=said):
        run_server(ask_for(served, **more))
    assert served.requests == 0


@pytest.mark.parametrize(
    "text", ["", '{"prompt": "one"}', "[1]", '{"prompt": 3}', '{"input_ids": [-1]}', "{", "\xff"]
)
def test_prompts_that_cannot_be_read_are_refused(text, tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match="two lines or more"):
        read_prompts(tmp_path / "prompts.jsonl")
