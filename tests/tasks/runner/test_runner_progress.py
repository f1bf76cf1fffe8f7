"""What a run shows: plain lines, seldom, or a live bar, with the same facts."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tasks.runner import progress
from tasks.runner.progress import PLAIN_SECONDS, Plain, Rich, Silent, duration, make_display


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def shown(display: Any, clock: Clock, steps: int, seconds: float, capsys: Any) -> list[str]:
    """Return what is printed for `steps` steps of `seconds` each."""
    with display:
        display.begin("text/tiny xsa", steps, 0, "tokens")
        for step in range(1, steps + 1):
            clock.now += seconds
            display.advance(step, loss=5 - step / 100, rate=12_345.6)
        display.end()
    return capsys.readouterr().out.splitlines()


def test_plain_line_says_step_loss_speed_and_time_left(clock: Clock, capsys: Any) -> None:
    first = shown(Plain(), clock, 100, 2.0, capsys)[0]
    assert first == "text/tiny xsa: 1/100, loss 4.9900, 12,346 tokens/s, 3:18 min left"


def test_plain_lines_are_seldom_and_end_with_the_last_step(clock: Clock, capsys: Any) -> None:
    lines = shown(Plain(), clock, 100, PLAIN_SECONDS / 10, capsys)
    done = [int(re.search(r": ([\d,]+)/100", line)[1]) for line in lines]
    assert done == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert lines[-1] == "text/tiny xsa: 100/100, loss 4.0000, 12,346 tokens/s"


def test_slow_steps_are_each_shown(clock: Clock, capsys: Any) -> None:
    assert len(shown(Plain(), clock, 5, PLAIN_SECONDS * 2, capsys)) == 5


def test_a_last_step_told_twice_is_shown_once(clock: Clock, capsys: Any) -> None:
    display = Plain()
    display.begin("x", 2, 0, "tokens")
    for done in (1, 2, 2):
        clock.now += 60
        display.advance(done, loss=1.0, rate=1.0)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_time_left_of_a_resumed_run_counts_its_own_steps(clock: Clock, capsys: Any) -> None:
    display = Plain()
    display.begin("x", 100, 90, "tokens")
    clock.now += 4
    display.advance(91, loss=1.0, rate=1.0)
    assert capsys.readouterr().out.strip().endswith("36 s left")  # nine steps of four seconds


def test_plain_work_is_told_once_for_each_kind(capsys: Any) -> None:
    with Plain().work("corpus") as report:
        for message, fraction in (("reading", 0.1), ("reading", 0.5), ("sorting", 0.9), ("sorting", 1.0)):
            report(message, fraction)
    assert capsys.readouterr().out.splitlines() == ["corpus: reading", "corpus: sorting"]


def test_live_bar_has_the_same_facts() -> None:
    file = io.StringIO()
    display = Rich(Console(file=file, force_terminal=True, width=140))
    with display:
        with display.work("corpus") as report:
            report("reading", 0.4)
        display.begin("text/tiny xsa", 200, 100, "tokens")
        display.advance(101, loss=4.99, rate=12_345.6)
        display.advance(150, loss=4.5, rate=12_345.6)
        display.note("a [line] that stays")
        display.end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    for part in (
        "text/tiny xsa",
        "150/200",
        "loss 4.5000",
        "12,346 tokens/s",
        "a [line] that stays",
        "corpus",
    ):
        assert part in text
    assert re.search(r"\d:\d\d", text)  # time left or taken
    assert "100/100" in text  # the work that ended, in hundredths


def test_live_bar_before_its_first_news_shows_no_loss_or_speed() -> None:
    file = io.StringIO()
    display = Rich(Console(file=file, force_terminal=True, width=140))
    with display:
        display.begin("text/tiny xsa", 200, 0, "tokens")
    assert "loss" not in file.getvalue()
    assert "tokens/s" not in file.getvalue()


def test_silent_shows_nothing(clock: Clock, capsys: Any) -> None:
    assert shown(Silent(), clock, 3, 60, capsys) == []


def test_auto_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, kind in ((True, Rich), (False, Plain)):
        monkeypatch.setattr(
            progress.sys, "stdout", type("Out", (io.StringIO,), {"isatty": lambda self, t=terminal: t})()
        )
        assert type(make_display("auto")) is kind
    assert type(make_display("none")) is Silent


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (200, "3:20 min"), (3599, "59:59 min"),
     (3600, "1:00 h"), (7500, "2:05 h"), (90_000, "25:00 h")],
)  # fmt: skip
def test_duration_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_shows_its_progress_in_plain_lines(lab: Any, capsys: Any) -> None:
    from tasks.runner import cli

    assert cli.main(["run", "text/tiny", *lab.overrides("output.progress=plain")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"text/tiny xsa: 1/6, loss \d\.\d{4}, [\d,]+ tokens/s, \d+ s left", printed)
    assert re.search(r"text/tiny xsa: 6/6, loss \d\.\d{4}, [\d,]+ tokens/s\n", printed)
