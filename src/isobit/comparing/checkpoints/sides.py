"""What is compared with what: pieces of stored tensors, put together along a dimension."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A stored tensor, or the elements from `start` to `stop` of its dimension `dim`."""

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.start is None:
            return self.name
        return f"{self.name}[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: pieces, put together along a dimension."""

    pieces: tuple[Piece, ...]
    dim: int = 0

    def __str__(self) -> str:
        return " + ".join(str(piece) for piece in self.pieces)


@dataclass(frozen=True)
class Pair:
    """Two sides that should be equal; `how` names the mapping, "" if the names are the same."""

    name: str
    left: Side
    right: Side
    how: str = ""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint by the names and shapes of its pieces: one, or one per rank."""

    name: str
    pieces: tuple[tuple[str, Shape], ...]
    sharded: bool = False

    def whole(self, dim: int = 0) -> Side:
        """Return all pieces, put together."""
        return Side(tuple(Piece(name) for name, _ in self.pieces), dim)


def said_without(side: str, name: str, key: str) -> str:
    """Return the sentence on which parts of a name its key lacks; "" if none."""
    if name == key:
        return ""
    rest, lost = key.split("."), []
    for part in reversed(name.split(".")):
        if rest and rest[-1] == part:
            rest.pop()
        else:
            lost.append(part)
    return f"{side} without '{'.'.join(reversed(lost))}.'"
