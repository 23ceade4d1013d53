"""Claims of bpe-tokenizer-kernel-v1: byte-level BPE, a reference, a user's tokenizer.json, and planted wrong ones.

The subject is called without arguments and returns a tokenizer: `encode(text)` → ids, `encode_batch(texts)`,
`decode(ids)`, `words(text)` → pieces that merges do not cross, in the file's alphabet, `merges` by rank, `vocab`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.errors import ArgumentError

# A text in which merges overlap, so that their order decides.
TRAINED_ON = (
    "aaa aaaa aaaaa the theme of these other ethers: aab aabb abab baab then thus hat that at a path "
    * 3
)
PAIRS = 60


@cache
def alphabet() -> tuple[str, ...]:
    """Return GPT-2's visible character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found, extra = {}, 0
    for byte in range(256):
        found[byte] = chr(byte if byte in plain else 256 + extra)
        extra += byte not in plain
    return tuple(found[byte] for byte in range(256))


def merge_by_rank(word: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Merge the pair of the lowest rank, the leftmost first, until none is known."""
    word = list(word)
    while len(word) > 1:
        best, at = min((rank.get(pair, len(rank)), i) for i, pair in enumerate(pairwise(word)))
        if best == len(rank):
            break
        word[at : at + 2] = [word[at] + word[at + 1]]
    return word


class Bpe:
    """Byte-level BPE in its plainest form: every space begins a word."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        """Give ids to bytes first, then to merges."""
        self.merges = merges
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.vocab = {
            piece: i for i, piece in enumerate([*alphabet(), *(a + b for a, b in merges)])
        }

    def words(self, text: str) -> list[list[str]]:
        """Return the words of a text as characters of the alphabet."""
        found = text.replace(" ", "\n ").split("\n ") if "\n" not in text else [text]
        words = [w if not i or len(found) == 1 else f" {w}" for i, w in enumerate(found)]
        return [[alphabet()[byte] for byte in word.encode()] for word in words if word]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [self.vocab[p] for word in self.words(text) for p in merge_by_rank(word, self.rank)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        pieces = {i: piece for piece, i in self.vocab.items()}
        byte_of = {c: byte for byte, c in enumerate(alphabet())}
        return bytes(byte_of[c] for i in ids for c in pieces[i]).decode(errors="replace")


@cache
def trained() -> tuple[tuple[str, str], ...]:
    """Return the merges that counting pairs gives, the most frequent first."""
    words = [
        [alphabet()[b] for b in w.encode()] for w in TRAINED_ON.replace(" ", "\n ").split("\n")
    ]
    found: list[tuple[str, str]] = []
    while len(found) < PAIRS:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        found.append(best)
        words = [merge_by_rank(word, {best: 0}) for word in words]
    return tuple(found)


def tokenizer(*_: Tensor) -> Any:
    """Return the reference."""
    return Bpe(list(trained()))


class OfFile:
    """A user's tokenizer.json, through the package `tokenizers`."""

    def __init__(self, path: str) -> None:
        """Read the file; raise for what is not byte-level BPE."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ArgumentError(
                expected="the package tokenizers, to read tokenizer.json",
                received="it is not installed",
                remedy="pip install tokenizers",
            ) from None
        self.made = Tokenizer.from_file(path)
        model = json.loads(self.made.to_str())["model"]
        if model.get("type") != "BPE" or self.made.pre_tokenizer is None:
            raise ArgumentError(
                expected="byte-level BPE with a pre-tokenizer",
                received=f"{model.get('type')} in {path}",
                remedy="other models are not judged",
            )
        listed = model["merges"]
        self.merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in listed]
        self.vocab = {piece: int(i) for piece, i in model["vocab"].items()}
        self.ignores = bool(model.get("ignore_merges"))

    def words(self, text: str) -> list[list[str]]:
        """Return the pieces that merges do not cross."""
        normal = self.made.normalizer
        text = normal.normalize_str(text) if normal is not None else text
        return [list(word) for word, _ in self.made.pre_tokenizer.pre_tokenize_str(text)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(self.made.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts."""
        return [list(e.ids) for e in self.made.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        text: str = self.made.decode(ids, skip_special_tokens=False)
        return text


@cache
def opened(path: str) -> OfFile:
    """Open a file once."""
    return OfFile(path)


def of_file(*_: Tensor, path: str = "tokenizer.json") -> Any:
    """Return a user's tokenizer; the subject of `isobit check tokenizer.json --like tokenizer`."""
    return opened(path)


def count_retokenised(
    made: Any, count: int = 1000, length: int = 8, seed: int = 0
) -> tuple[int, int]:
    """Count drawn sequences of ids that become other ids when they are decoded and encoded again.

    A model may draw any of them; a trainer that tokenizes the text of a rollout again then scores other tokens. It is
    no fault of a tokenizer. Sequences that are not whole UTF-8 are left out.

    Returns:
        How many change, and of how many.
    """
    make = torch.Generator().manual_seed(seed)
    ids = torch.tensor(sorted(made.vocab.values()))
    drawn = ids[torch.randint(len(ids), (count, length), generator=make)].tolist()
    texts = [made.decode(one) for one in drawn]
    whole = [(one, text) for one, text in zip(drawn, texts, strict=True) if "\ufffd" not in text]
    return sum(made.encode(text) != one for one, text in whole), len(whole)


# ---- texts drawn from numbers

COMMON: tuple[str, ...] = (
    *"taheb ABC01.,'(\n\t",
    "the",
    " the",
    " th",
    "aaa",
    "aaaa",
    "aab",
    "abab",
    "ethe",
    "at",
    " path",
)
RARE = (0xE9, 0x301, 0x200D, 0xFEFF, 0x4E2D, 0x1F600, 0x1F3FD, 0x0, 0x7F, 0x2028, 0xFB01, 0x3000)


def texts_of(case: Case) -> list[str]:
    """Return a text per row: mostly letters that merge, some of any script."""
    drawn = next(iter(case.arguments.values()))
    codes = (drawn.double().nan_to_num(0.0, 1.0, -1.0).clamp(-1e6, 1e6) * 1e4).long().abs()
    return ["".join(letter(int(c)) for c in row) for row in codes.tolist()]


def letter(code: int) -> str:
    """Return a character of a number."""
    kind, rest = code % 10, code // 10
    if kind < 8:
        return COMMON[rest % len(COMMON)]
    return chr(RARE[rest % len(RARE)]) if kind == 8 else chr(0xA1 + rest % 0x2000)


def round_trip(subject: Callable[[], Any], case: Case, tally: Tally) -> None:
    """Decoding returns the text, byte for byte."""
    made, texts = subject(), texts_of(case)
    tally.count(case.rows)
    same = [
        made.decode(ids) == text for text, ids in zip(texts, made.encode_batch(texts), strict=True)
    ]
    require(tally, same, texts, "round trip")


def require(tally: Tally, same: list[bool], texts: list[str], where: str) -> None:
    """Require every text, and show the first that fails."""
    tally.compared += len(same)
    if not all(same):
        tally.fail(
            f"{where}: {same.count(False)} of {len(same)}, first {texts[same.index(False)]!r}"
        )


def covers_bytes(subject: Callable[[], Any], case: Case, tally: Tally) -> None:
    """Each of 256 bytes has an id, ids are those of the vocabulary, and no two pieces share one."""
    made, texts = subject(), texts_of(case)
    tally.count(case.rows)
    tally.true(torch.tensor([c in made.vocab for c in alphabet()]), "bytes without an id")
    ids = set(made.vocab.values())
    tally.true(torch.tensor(len(ids) == len(made.vocab)), "ids of two pieces")
    require(tally, [set(made.encode(text)) <= ids for text in texts], texts, "ids of no piece")
    pieces = [a + b in made.vocab for a, b in made.merges]
    tally.true(torch.tensor(pieces), "merges whose result has no id")


def merges_by_rank(subject: Callable[[], Any], case: Case, tally: Tally) -> None:
    """Ids are those of merging by rank, the leftmost first, word by word."""
    made, texts = subject(), texts_of(case)
    tally.count(case.rows)
    rank = {pair: i for i, pair in enumerate(made.merges)}
    same = []
    for text in texts:
        wanted = []
        for word in made.words(text):
            whole = "".join(word)
            skip = getattr(made, "ignores", False) and whole in made.vocab
            wanted += [whole] if skip else merge_by_rank(word, rank)
        same.append([made.vocab.get(piece) for piece in wanted] == made.encode(text))
    require(tally, same, texts, "merges by rank")


def batch_is_single(subject: Callable[[], Any], case: Case, tally: Tally) -> None:
    """A text has the same ids in a batch as alone, and again."""
    made, texts = subject(), texts_of(case)
    tally.count(case.rows)
    both = made.encode_batch(texts)
    require(
        tally, [made.encode(t) == ids for t, ids in zip(texts, both, strict=True)], texts, "alone"
    )
    again = made.encode_batch(texts[::-1])[::-1]
    require(tally, [a == b for a, b in zip(both, again, strict=True)], texts, "in another order")


# ---- planted, and stock controls


class InFileOrder(Bpe):
    """Apply each merge everywhere, in the order of the file, once."""

    def encode(self, text: str) -> list[int]:
        found = []
        for word in self.words(text):
            for pair in self.merges[::-1]:
                word = merge_by_rank(word, {pair: 0})
            found += [self.vocab[piece] for piece in word]
        return found


class DroppedByte(Bpe):
    """Have no id for byte 0, and drop it."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        super().__init__(merges)
        del self.vocab[alphabet()[0]]

    def words(self, text: str) -> list[list[str]]:
        return super().words(text.replace("\0", ""))


class PrefixSpace(Bpe):
    """Put a space in front, and keep it."""

    def words(self, text: str) -> list[list[str]]:
        return super().words(f" {text}")


class Normalised(Bpe):
    """Lower the case."""

    def words(self, text: str) -> list[list[str]]:
        return super().words(text.lower())


class OffByOne(Bpe):
    """Give the first merge an id beyond the vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [i + (i == 256) * 10_000 for i in super().encode(text)]

    def decode(self, ids: list[int]) -> str:
        return super().decode([i - 10_000 * (i >= 10_000) for i in ids])


class SharedId(Bpe):
    """Give an added token the id of a piece."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        super().__init__(merges)
        self.vocab["<pad>"] = 97


class Rightmost(Bpe):
    """Merge the rightmost of equal pairs first."""

    def encode(self, text: str) -> list[int]:
        found = []
        rank = {(b[::-1], a[::-1]): i for (a, b), i in self.rank.items()}
        for word in self.words(text):
            turned = merge_by_rank(word[::-1], rank)
            found += [self.vocab[piece[::-1]] for piece in turned[::-1]]
        return found


class BatchDiffers(Bpe):
    """Merge less in a batch."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if len(texts) < 2:
            return super().encode_batch(texts)
        fewer = Bpe(self.merges[: len(self.merges) // 2])
        return [fewer.encode(text) for text in texts]


class CleanedUp(Bpe):
    """Decode as transformers does with clean_up_tokenization_spaces: spaces before punctuation are dropped."""

    def decode(self, ids: list[int]) -> str:
        text = super().decode(ids)
        for mark in (".", "?", "!", ",", " ' ", "n't", "'m", "'s", "'ve", "'re"):
            text = text.replace(mark if mark == " ' " else f" {mark}", mark.strip())
        return text


class SavedWithPadding(Bpe):
    """Encode as a tokenizer.json that was saved with padding switched on: a batch is filled up to its longest text."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        found = super().encode_batch(texts)
        longest = max(map(len, found), default=0)
        return [ids + [0] * (longest - len(ids)) for ids in found]


def cleaned_up(*_: Tensor) -> Any:
    """Return a stock control."""
    return CleanedUp(list(trained()))


def saved_with_padding(*_: Tensor) -> Any:
    """Return a stock control."""
    return SavedWithPadding(list(trained()))


def in_file_order(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return InFileOrder(list(trained()))


def dropped_byte(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return DroppedByte(list(trained()))


def prefix_space(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return PrefixSpace(list(trained()))


def normalised(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return Normalised(list(trained()))


def off_by_one(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return OffByOne(list(trained()))


def shared_id(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return SharedId(list(trained()))


def rightmost(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return Rightmost(list(trained()))


def batch_differs(*_: Tensor) -> Any:
    """Return a wrong tokenizer."""
    return BatchDiffers(list(trained()))
