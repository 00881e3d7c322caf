"""Both scripts in an interactive shell on a real terminal (a pty): the keys, job control, and a job that asks for a line."""

import fcntl
import os
import pty
import select
import shlex
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, HANG_S, ISOLATED, PROBE, RETRY, SINGLE, Fifo, children, needs_strace, until, until_all

SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")
PROMPT = "<prompt>"
RETRYING = f"{RETRY} --retry-code 75 --initial-delay-ms 1 --"
SCRIPTS = {"L": f"{SINGLE} --lock lock --", "R": RETRYING, "N": f"{SINGLE} --lock lock -- {RETRYING}"}
CTRL_C, CTRL_Z = "\x03", "\x1a"


class Terminal:
    """A pseudo-terminal, without echo, and the program that it belongs to."""

    def __init__(self, *argv: str):
        self.master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**CLEAN_ENV, "PS1": PROMPT, "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str) -> str:
        """Wait until it is shown after what was expected before; what came in between."""
        while text not in self.shown:
            if not select.select([self.master], [], [], HANG_S)[0]:
                pytest.fail(f"the terminal does not show {text!r} but {self.shown!r}")
            try:
                self.shown += os.read(self.master, 65536).decode()
            except OSError:
                pytest.fail(f"the terminal's program has ended and has not shown {text!r} but {self.shown!r}")
        before, _, self.shown = self.shown.partition(text)
        return before

    def command(self, line: str) -> None:
        self.type(line + "\n")

    def code(self) -> int:
        """The exit code of the command before, once the prompt is back."""
        self.expect(PROMPT)
        self.command("echo code=$?.")
        self.expect("code=")
        return int(self.expect("."))

    def hang_up(self) -> None:
        os.close(self.master)
        self.master = -1

    def close(self) -> None:
        if self.master >= 0:
            self.hang_up()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def terminal(here: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens a terminal with a program, by default an interactive shell that has shown its prompt."""
    opened: list[Terminal] = []

    def open_one(*argv: str) -> Terminal:
        opened.append(Terminal(*(argv or SHELL)))
        if not argv:
            opened[0].expect(PROMPT)
        return opened[0]

    yield open_one
    for one in opened:
        one.close()


def line(script: str, fifo: Fifo, *words: str) -> str:
    return " ".join((SCRIPTS[script], *PROBE, fifo.path, *(f"'{word}'" for word in words)))


def run_of(shell: Terminal) -> list[int]:
    """The processes from the shell's only child down to the job."""
    pids = children(shell.process.pid)
    while below := children(pids[-1]):
        pids += below
    return pids


Open = Callable[..., Terminal]
each_script = pytest.mark.parametrize("script", SCRIPTS)


@each_script
def test_ctrl_c_is_seen_once_and_the_clean_up_finishes(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(line(script, fifo, "echo", "on:USR1=3", "say:{pid}", "wait"))
    job = int(fifo.line())
    shell.type(CTRL_C)
    assert fifo.line() == "got SIGINT"
    os.kill(job, signal.SIGUSR1)  # the end of the clean-up
    assert fifo.until_gone() == ["got SIGUSR1"]
    assert shell.code() == 130


@each_script
def test_ctrl_c_without_a_handler(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(f"{SCRIPTS[script]} bash -c 'echo >{fifo.path}; sleep 600 9>{fifo.path}'")
    fifo.line()
    shell.type(CTRL_C)
    assert shell.code() == 130
    assert fifo.until_gone() == []


@each_script
def test_ctrl_backslash_reaches_the_job_once(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(line(script, fifo, "echo", "on:USR1=3", "say:{pid}", "wait"))
    job = int(fifo.line())
    shell.type("\x1c")
    assert fifo.line() == "got SIGQUIT"
    os.kill(job, signal.SIGUSR1)
    assert fifo.until_gone() == ["got SIGUSR1"]
    assert shell.code() == (3 if script == "L" else 131)


@each_script
@pytest.mark.parametrize("stop", ("ctrl-z", "kill -STOP", "kill -TSTP"))
def test_stop_and_fg(terminal: Open, fifo: Fifo, script: str, stop: str) -> None:
    """Wrapper and job both stop, the prompt is back, and with `fg` both go on: by the keys and by a kill of the job alone."""
    shell = terminal()
    shell.command(line(script, fifo, "on:USR1=3", "say:{pid}", "wait"))
    job = int(fifo.line())
    pids = run_of(shell)
    assert pids[-1] == job
    for _ in range(5):
        if stop == "ctrl-z":
            shell.type(CTRL_Z)
        else:
            os.kill(job, signal.SIGSTOP if stop == "kill -STOP" else signal.SIGTSTP)
        shell.expect("Stopped")
        shell.expect(PROMPT)
        until_all(pids, "T")
        shell.command("fg")
        until_all(pids, "S")
    os.kill(job, signal.SIGUSR1)
    assert shell.code() == 3
    assert fifo.until_gone() == ["got SIGUSR1"]


@each_script
def test_ctrl_z_fg_ctrl_c(terminal: Open, fifo: Fifo, script: str) -> None:
    """After a stop the keys still reach the job."""
    shell = terminal()
    shell.command(line(script, fifo, "on:INT=3", "say:{pid}", "wait"))
    fifo.line()
    pids = run_of(shell)
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    shell.command("fg")
    until_all(pids, "S")
    shell.type(CTRL_C)
    assert shell.code() == 130
    assert fifo.until_gone() == ["got SIGINT"]


@each_script
def test_ctrl_z_bg(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(line(script, fifo, "on:USR1=3", "say:{pid}", "wait"))
    job = int(fifo.line())
    pids = run_of(shell)
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    until_all(pids, "T")
    shell.command("bg")
    shell.expect(PROMPT)
    until_all(pids, "S")
    os.kill(job, signal.SIGUSR1)
    shell.command("wait %1")
    assert shell.code() == 3
    assert fifo.until_gone() == ["got SIGUSR1"]


@each_script
@pytest.mark.parametrize(("on_int", "seen", "code"), (("on:INT=75", ["got SIGINT"], 75), ("default:INT", [], 130)))
def test_the_job_asks_for_a_line(terminal: Open, fifo: Fifo, script: str, on_int: str, seen: list[str], code: int) -> None:
    """It gets it; Ctrl-C then ends the run, which is never retried, and the terminal is the shell's again."""
    shell = terminal()
    shell.command(line(script, fifo, on_int, "say:asks", "tty", "wait"))
    assert fifo.line() == "asks"
    shell.type("hello\n")
    assert fifo.line() == "read hello"
    shell.type(CTRL_C)
    assert fifo.until_gone() == seen
    assert shell.code() == (130 if script == "L" else code)


@each_script
def test_a_job_in_the_background_that_asks_waits_for_fg(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(line(script, fifo, "say:asks", "tty", "exit:3") + " &")
    assert fifo.line() == "asks"
    until_all(run_of(shell), "T")
    shell.command("fg")
    shell.expect("probe.py")
    shell.type("hello\n")
    assert fifo.until_gone() == ["read hello"]
    assert shell.code() == 3


@each_script
def test_the_terminal_goes_away(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(f"{SCRIPTS[script]} bash -c 'exec 9>{fifo.path}; echo >&9; sleep 600; exit 0'")
    fifo.line()
    shell.hang_up()
    assert fifo.until_gone() == []


@each_script
@pytest.mark.parametrize("before", ("", CTRL_Z))
def test_one_command_of_bash_ic(terminal: Open, fifo: Fifo, script: str, before: str) -> None:
    """No shell is left to wait behind it, so its group is orphaned: Ctrl-Z stops nothing for good, Ctrl-C ends it."""
    shell = terminal(*SHELL, "-c", line(script, fifo, "on:INT=3", "say:asks", "tty", "say:more", "wait"))
    assert fifo.line() == "asks"
    shell.type("hello\n")
    assert [fifo.line(), fifo.line()] == ["read hello", "more"]
    shell.type(before + CTRL_C)
    assert fifo.until_gone() == ["got SIGINT"]
    assert shell.process.wait(HANG_S) == (130 if script == "L" else 3)


@each_script
def test_the_keys_reach_a_job_that_has_left_the_group(terminal: Open, fifo: Fifo, script: str) -> None:
    shell = terminal()
    shell.command(f"{SCRIPTS[script]} timeout 600 sh -c 'echo >&9; exec sleep 600' 9>{fifo.path}")
    fifo.line()
    *pids, _ = run_of(shell)  # down to timeout(1)
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    until_all(pids, "T")
    shell.command("fg")
    until_all(pids, "S")
    shell.type(CTRL_C)
    assert fifo.until_gone() == []
    assert shell.code() == 130


@needs_strace
def test_ctrl_c_reaches_a_job_that_is_just_being_started(terminal: Open, fifo: Fifo) -> None:
    """After the last look at what came before, and before the job is there to get it from the terminal."""
    shell = terminal()
    trace = "strace -qq -o trace -e trace=/clone.* -e inject=/clone.*:delay_enter=300000"
    shell.command(f"{trace} {shlex.join(ISOLATED)} {SCRIPTS['L']} sleep 600 9>{fifo.path}")
    until(lambda: Path("trace").exists() and "clone" in Path("trace").read_text())
    shell.type(CTRL_C)
    assert fifo.until_gone() == []
    assert shell.code() == 130


@pytest.mark.parametrize("script", ("R", "N"))
def test_ctrl_z_where_no_shell_could_continue_it(terminal: Open, fifo: Fifo, script: str) -> None:
    """As the terminal's first program, say of `ssh -t`: the job goes on."""
    program = terminal(*shlex.split(line(script, fifo, "on:CONT=3", "say:ready", "wait")))
    assert fifo.line() == "ready"
    program.type(CTRL_Z)
    assert fifo.until_gone() == ["got SIGCONT"]
    assert program.process.wait(HANG_S) == 3


@each_script
def test_a_job_that_asks_where_no_shell_could_lend_the_terminal(terminal: Open, fifo: Fifo, script: str) -> None:
    """In the background of a shell that has gone: it ends and does not wait for ever."""
    terminal().command(f"({line(script, fifo, 'say:asks', 'tty')} 9>{fifo.path} &)")
    assert fifo.until_gone() == ["asks"]


def options(line: str, more: str) -> str:
    return line.replace(" -- ", f" {more} -- ", 1)


def test_a_job_in_the_background_that_is_not_to_be_shown_waits_for_fg(terminal: Open, fifo: Fifo) -> None:
    shell = terminal()
    shell.command("stty tostop")
    assert shell.code() == 0
    shell.command(options(line("R", fifo, "err:shown", "say:ready", "exit:0"), "--stream-stderr") + " &")
    assert fifo.until_gone() == ["ready"]
    until_all(children(shell.process.pid), "T")
    shell.command("fg")
    shell.expect("shown")
    assert shell.code() == 0


@pytest.mark.parametrize("before", ("", "in the background"))
@pytest.mark.parametrize("stdin", ("replay", "inherit"))
def test_the_job_reads_what_is_typed(terminal: Open, here: Path, stdin: str, before: str) -> None:
    shell = terminal()
    command = f"{RETRY} --retry-code 75 --stdin {stdin} -- sh -c 'read line; echo got $line'"
    if before:
        shell.command(f"{command} &")
        shell.expect(PROMPT)
        shell.command("fg")
        shell.expect("got $line")
    else:
        shell.command(command)
    shell.type("hello\n" + "\x04" * (stdin == "replay"))
    shell.expect("got hello")
    assert shell.code() == 0


def test_a_time_out_while_stopped_is_acted_on_after_fg(terminal: Open, fifo: Fifo) -> None:
    shell = terminal()
    shell.command(options(line("R", fifo, "say:ready", "wait"), "--attempt-timeout-ms 3000 --max-attempts 1"))
    assert fifo.line() == "ready"
    shell.type(CTRL_Z)
    shell.expect(PROMPT)
    time.sleep(3)
    assert fifo.silent()
    shell.command("fg")
    assert shell.code() == 124
    assert fifo.until_gone() == []


def test_a_job_stopped_in_the_foreground_ends_at_its_time_out(terminal: Open, fifo: Fifo) -> None:
    shell = terminal()
    shell.command(options(line("R", fifo, "say:ready", "stop", "wait"), "--attempt-timeout-ms 3000 --max-attempts 1"))
    assert fifo.until_gone() == ["ready"]
    assert shell.code() == 124


def test_what_is_shown_while_the_job_has_the_terminal_stops_nobody(terminal: Open, fifo: Fifo) -> None:
    shell = terminal()
    shell.command("stty tostop")
    assert shell.code() == 0
    shell.command(options(line("R", fifo, "say:asks", "tty", "err:shown", "exit:0"), "--stream-stderr --verbose"))
    assert fifo.line() == "asks"
    shell.type("hello\n")
    assert fifo.until_gone() == ["read hello"]
    assert shell.code() == 0
