"""Progress of a certificate: which step is running, of how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, int, int], None]


@dataclass
class Steps:
    """Counts configurations; `progress` is called with a text, the steps done and all steps."""

    progress: Progress | None = None
    done: int = 0
    total: int = 0

    def expect(self, here: int, targets_to_come: int) -> None:
        """Set how many configurations this target has; later targets are expected to have as many."""
        self.total = self.done + here * (1 + targets_to_come)

    def tell(self, text: str) -> None:
        """Say what is running."""
        if self.progress is not None:
            self.progress(text, self.done, self.total)

    def finish(self) -> None:
        """Count one configuration."""
        self.done += 1
