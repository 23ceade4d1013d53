"""Whatever is done to a contract's text, the loader gives a contract or a ContractError, soon, and imports nothing."""

import random
import sys
import time
from collections import Counter

import pytest

from isobit.contracts.language.contract import Contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.store.sources import ROOT
from isobit.errors import ContractError

TRAP = "fuzz_trap_package"
SMALL = f"""id: trap-v1
version: 1.0.0
title: Names code that must not be imported
subject: {TRAP}:run
obligations:
  - {{id: T-1, text: nothing happens}}
inputs:
  few: {{arguments: {{x: [n]}}, sizes: {{n: [1, 2..4]}}, dtypes: [float32], options: {{scale: 1.5}}}}
claims:
  - {{id: it, obligations: [T-1], relation: holds, predicate: "{TRAP}.inner:check", inputs: few, level: L2}}
  - {{id: that, obligations: [T-1], relation: bound, low: 0, high: 1e3, inputs: [few], level: L3}}
waivers:
  - {{claim: it, reason: "not yet", owner: me, expires: 2027-01-31}}
"""
TOKENS = (
    *(
        "&a ",
        "*a",
        "*a ",
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
        "!x ",
        "! ",
        "<<: *a",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "[[[[" * 40,
        "{a: " * 40,
        "- " * 40,
        "? " * 40,
        "- ",
        ": ",
        "? ",
        "---\n",
        "...\n",
        "%TAG ! x\n",
    ),
    *(
        "9" * 60,
        "9" * 5000,
        "1e999",
        ".nan",
        "-.inf",
        "-0",
        "1..9999999",
        "0..100000",
        "null",
        "~",
        "''",
        '"',
        "'",
    ),
    *(
        "\x00",
        "\x07",
        "\x1b",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud800",
        "\uffff",
        "🙂",
        "\t",
        "\r",
        "\n",
        "#",
        "|\n",
        ">-\n",
    ),
    *(
        "yes",
        "@",
        "`",
        "=",
        "\\",
        "\\x",
        "\\U00110000",
        "id: x\n",
        "limit: -1\n",
        "__import__",
        ":_private",
        "os:system",
    ),
)


def byte_flips(text: str, random: random.Random) -> str:
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.randint(1, 4)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data.decode("utf-8", random.choice(["replace", "ignore", "surrogateescape"]))


def line_swaps(text: str, random: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(random.randint(1, 3)):
        a, b = random.randrange(len(lines)), random.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return "".join(lines)


def lines_dropped_or_doubled(text: str, random: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    return "".join(lines[:at] + lines[at : at + 1] * random.choice([0, 2, 3]) + lines[at + 1 :])


def tokens_inserted(text: str, random: random.Random) -> str:
    for _ in range(random.randint(1, 3)):
        # Most where a value begins, since elsewhere most of them are but letters of a word.
        starts = [n + 2 for n in range(len(text) - 2) if text[n : n + 2] in (": ", "- ", ", ")]
        at = (
            random.choice(starts)
            if starts and random.random() < 0.7
            else random.randint(0, len(text))
        )
        text = text[:at] + random.choice(TOKENS) + text[at:]
    return text


def values_replaced(text: str, random: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    head, colon, _ = lines[at].partition(": ")
    lines[at] = f"{head}{colon}{random.choice(TOKENS)}\n"
    return "".join(lines)


def letters_replaced(text: str, random: random.Random) -> str:
    letters = list(text)
    for _ in range(random.randint(1, 5)):
        letters[random.randrange(len(letters))] = chr(
            random.choice([random.randrange(128), random.randrange(0x110000)])
        )
    return "".join(letters)


def truncated(text: str, random: random.Random) -> str:
    return text[: random.randrange(len(text))]


def indented(text: str, random: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    lines[at] = random.choice(
        [" " * random.randrange(9) + lines[at], lines[at].lstrip(), "\t" + lines[at]]
    )
    return "".join(lines)


MUTATIONS = (
    *(byte_flips, line_swaps, lines_dropped_or_doubled, tokens_inserted),
    *(values_replaced, letters_replaced, truncated, indented),
)


def fuzz(count: int, seed: int) -> Counter:
    """Outcomes of so many mutations; fails with the seed and the number of the first that does anything else."""
    texts = [SMALL, (ROOT / "library" / "linear" / "contract.yaml").read_text()]
    for text in texts:
        parse_contract(text, "unchanged")
    outcomes: Counter = Counter()
    for number in range(count):
        source = random.Random(seed * 10_000_000 + number)
        # Mostly the small one: a change in it is more often in a place that matters, and it is ten times quicker.
        text = texts[source.random() < 0.15]
        for _ in range(source.choice([1, 1, 1, 2])):
            text = source.choice(MUTATIONS)(text, source) or " "
        started = time.thread_time()
        try:
            found = parse_contract(text, "mutated")
            assert isinstance(found, Contract)
            outcomes["loaded"] += 1
        except ContractError as error:
            outcomes[
                "refused"
                if error.expected and error.received and error.remedy
                else "refused without a word"
            ] += 1
        except BaseException as error:
            raise AssertionError(
                f"mutation {number} of seed {seed}: {type(error).__name__}: {error}\n{text}"
            ) from error
        # Of this thread's own time: machines are shared.
        outcomes["slowest, ms"] = max(
            outcomes["slowest, ms"], int(1000 * (time.thread_time() - started))
        )
    return outcomes


@pytest.fixture
def nothing_imported(tmp_path, monkeypatch):
    """A package that leaves a file behind when it is imported; and no module may be new afterwards."""
    trap = tmp_path / TRAP
    trap.mkdir()
    for name in ("__init__.py", "inner.py"):
        (trap / name).write_text("open(__file__ + '.was_here', 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fuzz(50, 99)  # what the loader itself imports late
    before = set(sys.modules)
    yield
    assert set(sys.modules) - before == set()
    assert TRAP not in sys.modules
    assert list(trap.glob("*.was_here")) == []


def check(outcomes: Counter, count: int) -> None:
    assert outcomes["loaded"] + outcomes["refused"] == count
    assert outcomes["slowest, ms"] < 1000
    # Were all refused, or hardly any, the mutations would say little.
    assert 0.05 * count < outcomes["loaded"] < 0.8 * count, outcomes


@pytest.mark.usefixtures("nothing_imported")
def test_mutated_contracts_load_or_are_refused():
    check(fuzz(5_000, 1), 5_000)


@pytest.mark.full
@pytest.mark.usefixtures("nothing_imported")
def test_many_mutated_contracts_load_or_are_refused(capsys):
    outcomes = fuzz(100_000, 2)
    with capsys.disabled():
        print(f"\n100,000 mutations: {dict(outcomes)}")
    check(outcomes, 100_000)


def test_the_trap_can_close(tmp_path, monkeypatch):
    (tmp_path / "fuzz_trap_sprung.py").write_text("open(__file__ + '.was_here', 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("fuzz_trap_sprung")
    assert list(tmp_path.glob("*.was_here"))
