"""single_run.py: what the command gets (streams, environment, descriptors, signals) and what reaches it while it runs."""

import ctypes
import importlib.util
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CLEAN_ENV,
    HANG_S,
    IN_ITS_OWN_GROUP,
    PROBE,
    PYTHON,
    SINGLE,
    UNSHARE,
    Fifo,
    children,
    ended,
    needs_namespaces,
    run_cli,
    single,
    started,
    until,
    until_all,
    until_stopped,
    without,
)
from probe import signal_name

STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
NOT_PASSED_ON = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}
FORWARDED = sorted(signal.valid_signals() - NOT_PASSED_ON - STOPS)
AT_ENTRY: tuple[tuple[set[int], set[int]], ...] = (  # blocked and ignored when the wrapper starts
    (set(), set()),
    ({signal.SIGTERM}, set()),
    ({signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP, 40}, set()),
    (set(FORWARDED), set()),
    (set(), {signal.SIGHUP}),
    (set(), {signal.SIGINT, signal.SIGQUIT}),
    (set(), {signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP, signal.SIGWINCH, 40}),
    ({signal.SIGHUP, signal.SIGUSR2}, {signal.SIGHUP, signal.SIGUSR1}),
)


def probe(fifo: Fifo, *words: str, **more: Any) -> tuple[subprocess.Popen[bytes], int]:
    """The wrapper with a probe under it that is ready and waits, and the probe's pid."""
    run = started(SINGLE, "--lock", "lock", "--", *PROBE, fifo.path, *words, "say:{pid}", "wait", **more)
    return run, int(fifo.line())


# Streams and descriptors


def test_stdin_is_empty_and_ours_is_not_eaten(here: Path) -> None:
    assert single("lock", "readlink", "/proc/self/fd/0", input=b"x" * 10_000_000, code=0).stdout == b"/dev/null\n"
    loop = f"while read line; do {SINGLE} --lock lock -- cat && echo $line; done"
    assert run_cli("bash", "-c", loop, input=b"a\nb\nc\n", code=0).stdout == b"a\nb\nc\n"


def test_stdout_and_stderr_are_the_callers(here: Path) -> None:
    """The very same open files: what goes to both keeps its order, and nothing is added."""
    with open("output", "ab") as output:
        single("lock", "bash", "-c", r"printf '\xff\0 a'; printf b >&2; echo c; echo d >&2", stdout=output, stderr=output, code=0)
        assert Path("output").read_bytes() == b"\xff\0 abc\nd\n"
        shown = single("lock", "stat", "-Lc", "%i", "/dev/fd/1", "/dev/fd/2", stderr=output, code=0)
    assert shown.stdout.split()[1] == b"%d" % os.stat("output").st_ino


def test_other_descriptors_pass_through(here: Path) -> None:
    reader, writer = os.pipe()
    single("lock", "bash", "-c", f"echo through >&{writer}", pass_fds=[writer], code=0)
    os.close(writer)
    assert os.read(reader, 99) == b"through\n"
    os.close(reader)


@pytest.mark.parametrize("closed", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
def test_closed_standard_descriptors(here: Path, closed: tuple[int, ...]) -> None:
    """Nothing lands in a wrong file; stdin is empty, and to write to what the caller had closed is an error."""
    script = "cat; echo out; a=$?; echo err >&2; exit $((40 + a + 2 * $?))"
    code = 40 + (1 in closed) + 2 * (2 in closed)
    end = single("lock", "bash", "-c", script, preexec_fn=without(*closed), code=code)
    assert end.stdout == (b"" if 1 in closed else b"out\n")
    assert 2 in closed or end.stderr.endswith(b"err\n")
    assert re.fullmatch(rb'\{"format_version":1,[^\n]*\}\n', Path("lock").read_bytes()) and os.listdir() == ["lock"]


def test_busy_with_closed_descriptors_leaves_the_record(here: Path) -> None:
    inner = f"{SINGLE} --lock lock -- echo started <&- >&- 2>&-; [ $? = 75 ] && cmp lock before"
    single("lock", "bash", "-c", f"cp lock before; {inner}", code=0)


# Environment and start


@pytest.mark.parametrize("env", ({"A": "1", "LANG": "C"}, {"LC_CTYPE": "C"}, {"PYTHONPATH": "/x", "PYTHONUTF8": "0", "E": ""}))
@pytest.mark.parametrize("start", ((SINGLE,), (PYTHON, SINGLE)))
def test_the_environment_is_the_callers(here: Path, env: dict[str, str], start: tuple[str | Path, ...]) -> None:
    env = {**env, "PATH": CLEAN_ENV["PATH"]}
    shown = run_cli(*start, "--lock", "lock", "--", "env", env=env, code=0).stdout.decode()
    assert sorted(shown.splitlines()) == sorted(f"{name}={value}" for name, value in env.items())


def test_a_strange_environment(here: Path) -> None:
    """Bytes pass; an entry without a name, which no shell can make, breaks nothing."""
    words = [os.fsencode(word) for word in (SINGLE, "--lock", "lock", "--", "env", "-0")]
    entries = [b"A=\xff\n=", b"=nameless", b"bare", b"PATH=" + CLEAN_ENV["PATH"].encode(), b"LAST=1"]

    def become() -> None:
        vectors = [(ctypes.c_char_p * (len(v) + 1))(*v, None) for v in (words, entries)]
        ctypes.CDLL(None).execve(words[0], *vectors)

    shown = run_cli("false", preexec_fn=become, code=0).stdout.split(b"\0")
    assert shown[0] == entries[0] and {entries[3], entries[4]} <= set(shown)


def test_temporary_folders_do_not_matter(here: Path) -> None:
    for folder in ("/missing", "/dev/null", "/proc"):
        single("lock", "true", env={**CLEAN_ENV, "TMPDIR": folder}, code=0)


@pytest.fixture
def hijack(here: Path) -> Path:
    """The script in a folder with a false copy of each standard module that is not in use before a script's first line."""
    used = run_cli(PYTHON, "-c", "import sys; print(*sys.modules)").stdout.decode().split()
    for name in filter(importlib.util.find_spec, sys.stdlib_module_names - set(used)):
        (here / f"{name}.py").write_text("raise SystemExit('hijacked')")
    shutil.copy(SINGLE, here)
    return here


@pytest.mark.parametrize("start", (("./single_run.py",), (PYTHON, "single_run.py"), (PYTHON, "{here}/single_run.py")))
@pytest.mark.parametrize("python_path", (None, "{here}", "."))
def test_no_module_from_elsewhere(hijack: Path, start: tuple[str, ...], python_path: str | None) -> None:
    env = CLEAN_ENV if python_path is None else {**CLEAN_ENV, "PYTHONPATH": python_path.format(here=hijack)}
    start = tuple(word.format(here=hijack) for word in start)
    shown = run_cli(*start, "--lock", "lock", "--", "sh", "-c", 'echo "$PYTHONPATH"', env=env, code=0).stdout.decode()
    assert shown == env.get("PYTHONPATH", "") + "\n"
    for words, code in ((("--lock", "/dev/null", "--", "true"), 3), (("--lock", "lock", "--", ""), 3), ((), 2), (("--help",), 0)):
        assert b"hijacked" not in run_cli(*start, *words, env=env, code=code).stderr


# Signals


@pytest.mark.parametrize("code", (0, 7))
def test_sigchld_ignored_at_entry(here: Path, code: int) -> None:
    single("lock", "sh", "-c", f"exit {code}", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), code=code)


@pytest.mark.parametrize(("blocked", "ignored"), AT_ENTRY)
def test_the_job_gets_the_original_mask_and_dispositions(here: Path, blocked: set[int], ignored: set[int]) -> None:
    def at_entry() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def signals(shown: subprocess.CompletedProcess[bytes]) -> list[int]:
        return [int(line.split()[1], 16) & ~(3 << 31) for line in shown.stdout.splitlines()]  # 32 and 33 are the C library's own

    grep = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")  # no shell: dash changes the mask
    bare = run_cli(*grep, preexec_fn=at_entry, code=0)
    assert signals(single("lock", *grep, preexec_fn=at_entry, code=0)) == signals(bare)


def test_every_signal_to_the_wrapper_reaches_the_job_once(here: Path, fifo: Fifo) -> None:
    run, job = probe(fifo, "echo")
    for number in FORWARDED:
        run.send_signal(number)
        assert fifo.line() == f"got {signal_name(number)}"
    os.kill(job, signal.SIGKILL)
    ended(run, 130)  # SIGINT was among them
    assert fifo.until_gone() == []


def test_a_signal_ignored_at_entry_is_not_forwarded(here: Path, fifo: Fifo) -> None:
    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    run, job = probe(fifo, "echo", preexec_fn=ignore)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1):
        run.send_signal(number)
    assert fifo.line() == "got SIGUSR1"
    os.kill(job, signal.SIGKILL)
    ended(run, 137)
    assert fifo.until_gone() == []


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
@pytest.mark.parametrize(("plan", "code"), (("on:{}=0", 0), ("on:{}=7", 7), ("on:{}=75", 75), ("say:", None)))
def test_a_stop_signal_ends_as_the_job_does(here: Path, fifo: Fifo, number: signal.Signals, plan: str, code: int | None) -> None:
    run, _ = probe(fifo, plan.format(number.name[3:])) if code is not None else probe(fifo)
    run.send_signal(number)
    end = ended(run, 128 + number if code is None else code)
    assert (end.stdout, end.stderr) == (b"", b"")
    assert fifo.until_gone() == ([] if code is None else [f"got {number.name}"])


def test_the_wrapper_waits_for_a_job_that_ignores_term(here: Path, fifo: Fifo) -> None:
    run, _ = probe(fifo, "ignore:TERM", "on:USR1=5")
    for _ in range(3):
        run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGUSR1)
    ended(run, 5)
    assert fifo.until_gone() == ["got SIGUSR1"]


def test_term_blocked_at_entry(here: Path, fifo: Fifo) -> None:
    """The wrapper passes it on all the same; the job keeps the mask, so it stays pending there until it is let in."""
    run, job = probe(fifo, "on:TERM=9", preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))
    run.send_signal(signal.SIGTERM)
    until(lambda: re.search(r"ShdPnd:\t0*4000$", Path(f"/proc/{job}/status").read_text(), re.MULTILINE))
    assert run.poll() is None
    os.kill(job, signal.SIGKILL)
    ended(run, 137)


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_stop_in_the_first_moments_leaves_no_survivor(here: Path, number: signal.Signals) -> None:
    """A pipe that wrapper and job inherit is at its end when the wrapper has ended, or somebody still lives."""
    for moment in range(30):
        reader, writer = os.pipe()
        run = started(SINGLE, "--lock", "lock", "--", "sleep", "600", pass_fds=[writer])
        os.close(writer)
        time.sleep(moment * 0.1 / 30)
        run.send_signal(number)
        assert run.stderr
        while select.select([run.stderr], [], [], HANG_S)[0] and os.read(run.stderr.fileno(), 9999):
            run.send_signal(number)  # CPython says that it has swallowed a KeyboardInterrupt, and goes on
        assert ended(run).returncode != 0
        ready, _, _ = select.select([reader], [], [], 0)
        assert ready and os.read(reader, 1) == b""
        os.close(reader)


def test_the_job_stays_in_the_callers_group(here: Path, fifo: Fifo) -> None:
    run, job = probe(fifo, "on:TERM=0", preexec_fn=os.setpgrp)
    assert os.getpgid(job) == os.getpgid(run.pid) == run.pid
    run.terminate()
    ended(run, 0)


@pytest.mark.parametrize("number", sorted(STOPS))
@pytest.mark.parametrize("target", ("wrapper", "job", "group"))
def test_stopping_and_continuing_acts_on_both(here: Path, fifo: Fifo, number: signal.Signals, target: str) -> None:
    """In a group that a shell controls (the kernel stops no orphaned group by these signals)."""
    run, job = probe(fifo, "on:USR1=5", preexec_fn=os.setpgrp)
    pid = {"wrapper": run.pid, "job": job, "group": -run.pid}[target]
    for _ in range(10):
        os.kill(pid, number)
        until_all([run.pid, job], "T")
        os.kill(pid if pid < 0 else run.pid, signal.SIGCONT)
        until_all([run.pid, job], "S")
    run.send_signal(signal.SIGUSR1)
    ended(run, 5)
    assert fifo.until_gone() == ["got SIGUSR1"]


@pytest.mark.parametrize("parent", ((), IN_ITS_OWN_GROUP), ids=("orphaned", "own group"))
def test_a_stopped_job_goes_on_where_no_terminal_is(here: Path, fifo: Fifo, parent: tuple[str, ...]) -> None:
    """With the SIGCONT that it gets alone: nobody would continue us, so we must not stop with it."""
    job = (*PROBE, fifo.path, "say:{pid}", "stop", "exit:7")
    run = started(*parent, SINGLE, "--lock", "lock", "--", *job, start_new_session=True)
    pid = int(fifo.line())
    until_stopped(pid)
    os.kill(pid, signal.SIGCONT)
    ended(run, 7)


# PID 1 of a container


@needs_namespaces
@pytest.mark.parametrize(("command", "code"), (("true", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("exec ./missing", 127)))
def test_pid_1_ends_as_its_job(here: Path, command: str, code: int) -> None:
    run_cli(*UNSHARE, SINGLE, "--lock", "lock", "--", "sh", "-c", command, code=code)


@needs_namespaces
@pytest.mark.parametrize(("number", "code"), ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)))
def test_pid_1_stops_on_a_signal(here: Path, fifo: Fifo, number: signal.Signals, code: int) -> None:
    run = started(*UNSHARE, SINGLE, "--lock", "lock", "--", "bash", "-c", 'echo >"$0"; exec sleep 600', fifo.path)
    assert fifo.line() == ""
    (wrapper,) = children(run.pid)
    os.kill(wrapper, number)
    ended(run, code)


@needs_namespaces
def test_pid_1_reaps_orphans(here: Path) -> None:
    """The job ends when no zombie is left of the orphans that it makes."""
    script = """
        for i in 1 2 3; do (true & true & exec true); done
        while cat /proc/[0-9]*/stat 2>/dev/null | grep -q ') Z 1 '; do sleep 0.01; done
        exit 7"""
    run_cli(*UNSHARE, SINGLE, "--lock", "lock", "--", "bash", "-c", script, code=7)
