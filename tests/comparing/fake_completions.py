"""A server with OpenAI's completions API whose log-probabilities are hashes, with faults to choose from.

It serves one connection after the other, in the order in which clients connected, so that the order of arrival is
exact. Whether requests are concurrent is whether another client waits meanwhile.
"""

import hashlib
import json
import select
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

TOP = 3
EXTRAS = {"cache_salt", "echo", "ignore_eos", "return_tokens_as_token_ids", "return_token_ids"}


def fp32(*parts):
    """Return a log-probability that is an fp32 number, from a hash."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
    return struct.unpack("<f", struct.pack("<f", -0.5 - number / 2**32))[0]


def next_up(value):
    """Return the neighbouring fp32 number."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<i", bits + 1))[0]


class FakeServer:
    """A server on a free port, as a context manager; `fault` changes one bit of what it answers."""

    def __init__(self, prompts=(), fault="", answer=None, takes=EXTRAS, digits=None, cached=True):
        self.prompts, self.fault, self.answer = list(map(str, prompts)), fault, answer
        self.takes, self.digits, self.cached = takes, digits, cached
        self.arrived, self.seen, self.asked, self.requests = [], {}, {}, 0
        self.keys = set()  # what clients sent as Authorization

    def __enter__(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                fake.serve(self, None)

            def do_POST(self):
                fake.serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        class Listening(HTTPServer):
            request_queue_size = 64

            def handle_error(self, *_):
                pass  # a client that left

        self._http = Listening(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def serve(self, handler, body):
        self.requests += 1
        self.keys.add(handler.headers.get("Authorization"))
        if self.answer is not None and self.answer(handler, body):
            return
        if handler.path == "/v1/models":
            said = 200, {"data": [{"id": "tiny"}]}
        elif handler.path == "/v1/completions":
            said = self.complete(body)
        else:
            said = 404, {"error": "not here"}
        reply(handler, *said)

    def complete(self, body):
        unknown = (EXTRAS & body.keys()) - self.takes
        if unknown:
            return 400, {"error": f"unknown {sorted(unknown)}"}
        several = isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int)
        prompts = body["prompt"] if several else [body["prompt"]]
        if several and self.fault == "no lists":
            return 400, {"error": "one prompt only"}
        found = [self.answer_one(str(prompt), body, len(prompts)) for prompt in prompts]
        choices = [{"index": at, "logprobs": one[0]} for at, one in enumerate(found)]
        usage = {"prompt_tokens_details": {"cached_tokens": found[0][1]}} if self.cached else {}
        return 200, {"choices": choices, "usage": usage}

    def answer_one(self, prompt, body, batch):
        echo, salt = bool(body.get("echo")), body.get("cache_salt", "")
        salt = "" if self.fault == "prefix-cache, salts ignored" else salt
        earlier = self.seen.setdefault(salt, [])
        cached = (
            0 if echo else max((len(old) for old in earlier if prompt.startswith(old)), default=0)
        )
        earlier.append(prompt)
        if self.fault == "no cache":
            cached = 0
        at = self.prompts.index(prompt) if prompt in self.prompts else -1
        self.arrived.append(at)
        asked = self.asked[prompt] = self.asked.get(prompt, 0) + echo
        wrong = {
            "batch": batch > 1,
            "order": self.arrived[-3:] == [2, 1, 0],
            "prefix-cache": cached > 0,
            "prefix-cache, salts ignored": cached > 0,
            "repeats": echo and asked == 3,
            "concurrency": self.fault == "concurrency" and self.is_pending(),
            "tokens": batch > 1,
        }.get(self.fault, False)
        words = prompt.split(" ") if echo else []
        return self.logprobs(words, prompt, body["max_tokens"], wrong), cached

    def is_pending(self):
        """Return whether another client waits."""
        return bool(select.select([self._http.socket], [], [], 0.02)[0])

    def logprobs(self, words, prompt, count, wrong):
        tokens = [f"token_id:{len(word)}" for word in words]
        tokens += [f"token_id:{int(-1000 * fp32(prompt, at))}" for at in range(count)]
        if wrong and self.fault == "tokens":
            tokens[-2] = "token_id:5000"
        chosen = [fp32(prompt, token, at) for at, token in enumerate(tokens)]
        if wrong and self.fault != "tokens":
            chosen[-1] = next_up(chosen[-1])
        if self.digits is not None:
            chosen = [round(value, self.digits) for value in chosen]
        top = [
            {
                token: value,
                **{f"token_id:{k}": fp32(prompt, at, k) for k in range(9000, 9000 + TOP)},
            }
            for at, (token, value) in enumerate(zip(tokens, chosen, strict=True))
        ]
        if self.digits is not None:
            top = [{key: round(value, self.digits) for key, value in row.items()} for row in top]
        if words:
            chosen[0], top[0] = None, None
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}


def reply(handler, status, said, headers=()):
    """Answer with JSON, or with bytes as they are."""
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    handler.send_response(status)
    for name, value in (*headers, ("Content-Length", str(len(data)))):
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def ask_for(fake, *words, **more):
    """Return options of the command line, as the command has them."""
    from isobit.cli.main import parse

    options = parse(["compare", "server", fake.url, "--model", "tiny", "-q", *words])
    for name, value in more.items():
        setattr(options, name, value)
    return options
