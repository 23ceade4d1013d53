"""How contracts are judged: the level, the subject, trusted packages and time limits, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

THOROUGH = " thorough"  # no name of a subject contains a space


@dataclass(frozen=True)
class Options:
    """Options of one verification. Plain data, so that they can be sent to another process.

    Attributes:
        trusted: Packages whose code contracts may name; isobit always is.
        level: The highest level to judge.
        thorough: Whether to add the sizes that contracts list for long runs.
        subject: Another subject to judge: a name from the contract's `subjects`, or `package:function`.
        seconds: Time limit of the whole verification; no claim is started after it.
        claim_seconds: Time limit of one claim's search at L3.
        device: Where tensors are when the subject is called; they are drawn and compared on the CPU.
    """

    trusted: tuple[str, ...] = ()
    level: int = 4
    thorough: bool = False
    subject: str = ""
    seconds: float = float("inf")
    claim_seconds: float = 120.0
    device: str = "cpu"

    @property
    def variant(self) -> str:
        """What distinguishes evidence besides the contract: another subject, or thorough sizes."""
        return self.subject + (THOROUGH if self.thorough else "")
