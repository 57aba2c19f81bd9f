"""What a terminal shows while a gang works."""

import errno
import io
import sys

import pytest

from moe_ep.launch.gangs import progress


class Terminal(io.StringIO):
    is_gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def shown(self) -> str:
        """The line as it stands: what came after it was cleared last."""
        return self.getvalue().rpartition("\x1b[2K")[2]


def test_a_sentence_stands_until_something_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = progress.ProgressDisplay(quiet_s=0.0)
    display.say(f"starting {progress.workers(1)}")
    assert terminal.shown() == "starting 1 worker ..."
    display.say(f"starting {progress.workers(4)}")
    assert terminal.shown() == "starting 4 workers ..."
    display(("steps", 1, 4))
    assert "steps:  25%" in terminal.shown() and "starting" not in terminal.shown()
    display.say("waiting for Ray")
    display.close()
    assert terminal.shown() == ""


def test_a_terminal_that_goes_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = progress.ProgressDisplay(quiet_s=0.0)
    display.say("starting")
    terminal.is_gone = True
    for _ in range(2):
        display.say("started")
        display(("steps", 1, 4))
        display(("steps", 2, 4))
        display.close()
    assert terminal.shown() == "starting ..."


def test_what_is_no_terminal_hears_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = progress.ProgressDisplay()
    display.say("waiting for Ray")
    display(("steps", 1, 4))
    display.close()
    assert capsys.readouterr() == ("", "")
