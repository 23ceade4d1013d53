"""Progress on the error stream: a bar that names what is being worked on, lines off a terminal, silence on request."""

import io

import pytest

from isobit.cli.progress import Steps


class Stream(io.StringIO):
    """An error stream that is a terminal, or is not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def stream(monkeypatch):
    def make(terminal):
        made = Stream(terminal)
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        return made

    return make


def test_a_bar_names_what_is_being_judged(stream):
    shown = stream(terminal=True)
    with Steps("a-v1/first", 2) as steps:
        steps.bar.refresh()
        assert "a-v1/first" in shown.getvalue()
        assert "a-v1/second" not in shown.getvalue()
        steps.done("a-v1/first: kept", following="a-v1/second")
        steps.bar.refresh()
        assert "a-v1/second" in shown.getvalue()
        assert "1/2" in shown.getvalue()
        steps.now("[red]third[/]\x1b[2J")
        steps.bar.refresh()
        assert "[red]third[/] " in shown.getvalue()
        assert "\x1b[2J" not in shown.getvalue()


def test_a_line_a_step_elsewhere(stream, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some CI systems set it
    shown = stream(terminal=False)
    with Steps("title", 2) as steps:
        steps.done("first: kept")
        steps.done("second:\nbroken", seconds=2.5)
    assert shown.getvalue() == "[1/2] first: kept, 0.0 s\n[2/2] second: broken, 2.5 s\n"


def test_seldom_and_never(stream, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("isobit.cli.progress.time.monotonic", lambda: clock[0])
    shown = stream(terminal=False)
    with Steps("title", every=5.0) as steps:
        for second in range(12):
            clock[0] = float(second)
            steps.at("probing", second, 20)
    assert shown.getvalue() == "probing, 5 of 20, 5.0 s\nprobing, 10 of 20, 10.0 s\n"
    for terminal in (True, False):
        shown = stream(terminal)
        with Steps("title", 1, quiet=True) as steps:
            steps.now("step")
            steps.expect(3)
            steps.done("step: kept")
        assert shown.getvalue() == ""
