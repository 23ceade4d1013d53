"""A console of rich whose output is plain text. Imported when something is printed: rich takes a while to load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from isobit.foundation.plain_text import plain


class PlainConsole(Console):
    """A console that removes control characters from everything except rich's own output."""

    def render_str(self, text: str, **style: Any) -> Text:
        """Remove control characters before measuring, so that tables stay aligned."""
        return super().render_str(plain(text), **style)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Remove control characters from text; rich's own control segments are kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError, so that the command chooses the exit code: rich would exit with 1."""
        raise BrokenPipeError
