"""The texts of compiled kernels: what a GPU runs, and what the PTX machine runs for that GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelText:
    """One compiled kernel.

    Attributes:
        kernel: Its name.
        options: Constants and options that it was compiled with.
        digest: BLAKE3 of the text that ran, without comments and debug lines.
        in_machine: The same of the text that the PTX machine runs for this target; "" if it runs none.
        sass: The digest of the machine code that ran; "" if it is not known.
        recorded_sass: The digest of the machine code that isobit's records have for this text; "" if they have none.
    """

    kernel: str
    options: str
    digest: str
    in_machine: str
    sass: str = ""
    recorded_sass: str = ""

    @property
    def same(self) -> bool:
        """Whether what is known of the machine's text holds for the text that ran."""
        return self.digest == self.in_machine


def distinct(texts: Iterable[KernelText]) -> list[KernelText]:
    """Return each text once, sorted by kernel and options."""
    return sorted(set(texts), key=lambda text: (text.kernel, text.options, text.digest))
