"""Progress: a bar where a line can be drawn again, whole lines where it cannot, estimates in words."""

import builtins
import io
import os
import pty
import subprocess
import sys
import termios
import threading

import pytest

from dpngd import progress


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""
    at = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: at[0])
    return at


def test_a_log_gets_whole_lines_with_the_time_left(now, capsys):
    with progress.bar(40, "runs", unit="run") as bar:
        assert isinstance(bar, progress.Lines)
        now[0] = 30.0
        bar.update(10)
        bar.set_postfix(failed=1)
        bar.write()
        now[0] = 120.0
        bar.update(30)
        bar.set_postfix_str("")
    assert capsys.readouterr().err == ("runs: 10 of 40, 0:30 so far, about 1:30 left; failed 1\n"
                                       "runs: 40 of 40, 2:00 so far\n")


def test_what_was_done_before_does_not_make_it_faster(now):
    with progress.bar(100, "steps", initial=50) as bar:
        now[0] = 10.0
        bar.update(10)
        assert "60 of 100, 0:10 so far, about 0:40 left" in bar.line()


def test_a_line_comes_by_itself_while_nothing_moves(monkeypatch):
    written = threading.Event()

    class Log(io.StringIO):
        def write(self, text):
            written.set()
            return super().write(text)

    file = Log()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.bar(3, "runs"):
        assert written.wait(60)
    assert file.getvalue().startswith("runs: 0 of 3, 0:00 so far\n")


def test_after_the_end_no_line_comes(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    before = threading.active_count()
    with progress.bar(1, "runs"):
        pass
    deadline = threading.Event()
    for _ in range(1000):
        if threading.active_count() <= before:
            break
        deadline.wait(0.01)
    assert threading.active_count() <= before, "its thread has ended"


def test_a_bar_that_is_not_left_says_nothing_unless_it_took_long(capsys):
    assert list(progress.over("abc", "reading", leave=False)) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    with progress.bar(2, "reading", leave=False) as bar:
        bar.write()
    assert capsys.readouterr().err.count("\n") == 2


def test_quiet_is_silent(capsys):
    with progress.bar(2, "steps", quiet=True) as bar:
        bar.update()
        bar.write()
    assert capsys.readouterr().err == ""


def test_bytes_are_counted_in_their_own_units(now):
    with progress.bar(139_000_000, "npm pack", unit="B", scale=True) as bar:
        bar.update(1_500_000)
        assert "npm pack: 1.5 MB of 139 MB" in bar.line()
    with progress.bar(None, "download", unit="B", scale=True) as bar:
        bar.update(2_000)
        assert bar.line() == "download: 2 kB, 0:00 so far"


def test_an_error_ends_the_bar_where_it_was(capsys):
    def fail():
        with progress.bar(4, "runs") as bar:
            bar.update()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err.startswith("runs: 1 of 4")


def on_a_terminal(code):
    """What a program writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end was closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait() == 0
    return said.decode()


BAR = "from dpngd import progress\nwith progress.bar(3, 'runs', unit='run') as b:\n    [b.update() for _ in range(3)]"


def test_a_terminal_gets_a_bar():
    said = on_a_terminal(BAR)
    assert "\r" in said
    assert "3/3" in said


def test_without_tqdm_a_terminal_gets_lines():
    said = on_a_terminal("import sys; sys.modules['tqdm'] = None\n" + BAR)
    assert said.replace("\r\n", "\n") == "runs: 3 of 3, 0:00 so far\n"


def test_the_output_of_a_notebook_is_live():
    class OutStream(io.StringIO):
        pass

    OutStream.__module__ = "ipykernel.iostream"
    assert progress.is_live(OutStream())
    assert not progress.is_live(io.StringIO())


def test_without_tqdm_a_notebook_gets_lines(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name == "tqdm":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(progress, "is_live", lambda file: True)
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert isinstance(progress.bar(1, "runs", quiet=False), progress.Lines)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.2, "1 seconds"), (40, "40 seconds"), (89, "89 seconds"), (90, "2 minutes"), (3000, "50 minutes"),
    (5400, "1.5 hours"), (86_400, "24.0 hours"), (345_600, "4 days")])
def test_estimates_in_words(seconds, text):
    assert progress.span(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3725, "1:02:05")])
def test_clocks(seconds, text):
    assert progress.clock(seconds) == text


def test_an_outlook_counts_what_is_missing_and_who_works():
    assert progress.outlook(7, [], 2) == "7 runs, none to train"
    assert progress.outlook(7, [60.0, 60.0, 60.0, 60.0], 2) == "4 of 7 runs to train, about 2 minutes with 2 workers"
    assert progress.outlook(7, [60.0], 8) == "1 of 7 runs to train, about 60 seconds with 8 workers"
