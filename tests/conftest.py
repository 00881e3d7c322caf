"""What all tests share: the scripts, a clean way to run them, and the far end of the probe's FIFO."""

import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RETRY = ROOT / "retry_command.py"
SINGLE = ROOT / "single_run.py"
DEMO = ROOT / "demo_job.py"
PYTHON = os.path.realpath(sys.executable)  # never a version manager's shim: it adds time and variables
ISOLATED = (PYTHON, "-IS")
PROBE = (*ISOLATED, str(ROOT / "tests/probe.py"))
RETRY_75 = (RETRY, "--retry-code", "75", "--initial-delay-ms", "0")  # three attempts without a wait
# Before a job that uses all the descriptors that POSIX shells have numbers for.
REDIRECTING = ("bash", "-c", 'exec 3>log 4>log 5>log 6>log 7>log 8>log 9>log; exec "$@"', "bash")
HANG_S = 60  # only tells a hang from an end; nothing is measured with it


@pytest.fixture(scope="session", autouse=True)
def python3_is_ours(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`env python3`, which the scripts' first line runs, finds the interpreter that runs the tests."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python3").symlink_to(PYTHON)
    CLEAN_ENV["PATH"] = f"{folder}:{CLEAN_ENV['PATH']}"


@pytest.fixture(scope="session", autouse=True)
def signals_are_those_of_a_terminals_shell() -> None:
    """Also when the tests run by `&`, by nohup or in a service: what they ignore, all that they start would ignore."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # these CPython itself ignores
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


CLEAN_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def started(*argv: Any, **more: Any) -> subprocess.Popen[bytes]:
    """The command, running, with a clean environment, no stdin, and pipes for its output unless told otherwise."""
    more = {"env": CLEAN_ENV, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([os.fspath(word) if not isinstance(word, bytes) else word for word in argv], **more)


def ended(
    process: subprocess.Popen[bytes], code: int | None = None, input: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Its end, with all its output; it must come, and with this exit code where one is given."""
    try:
        out, err = process.communicate(input, timeout=HANG_S)
    except subprocess.TimeoutExpired as e:
        process.kill()
        pytest.fail(f"hangs: {process.args!r}\nstdout: {e.stdout!r}\nstderr: {e.stderr!r}")
    if code is not None and process.returncode != code:
        pytest.fail(f"exit {process.returncode}, not {code}: {process.args!r}\nstdout: {out!r}\nstderr: {err!r}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_cli(*argv: Any, code: int | None = None, input: bytes | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a script by its path (its first line finds the interpreter) or any command, to its end."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    return ended(started(*argv, **more), code, input)


def at_entry(ignored: Iterable[int] = (), blocked: Iterable[int] = ()) -> Callable[[], None]:
    """What a caller does to its signals before it starts the wrapper: a preexec_fn."""

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    return prepare


def single(lock: Any, *command: Any, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """One whole run of the command under the lock."""
    return run_cli(SINGLE, "--lock", lock, "--", *command, **more)


def without(*descriptors: int) -> Callable[[], None]:
    """A preexec_fn: the command starts with these closed."""

    def close() -> None:
        for fd in descriptors:
            os.close(fd)

    return close


def json_line(**fields: Any) -> bytes:
    """A line of JSON as the README promises it: compact, not escaped beyond JSON's need, other bytes than UTF-8 as \\udcXX."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace") + b"\n"


def event(name: str, **fields: Any) -> bytes:
    """A line that retry_command.py writes."""
    return json_line(source="retry_wrapper", event=name, **fields)


def launch_error(kind: str, attempt: int = 1) -> bytes:
    return event("launch_error", attempt=attempt, max_attempts=3, kind=kind, retrying=False)


def failed(returncode: int, attempt: int = 1, next_delay_ms: int | None = None, max_attempts: int = 3) -> bytes:
    """The event of a failed attempt; with a next delay it is one that is retried."""
    again = {} if next_delay_ms is None else {"next_delay_ms": next_delay_ms}
    fields = {"attempt": attempt, "max_attempts": max_attempts, "returncode": returncode, "retrying": bool(again), **again}
    return event("attempt_failed", **fields)


def until(condition: Callable[[], Any]) -> None:
    """Come back when it holds."""
    give_up_at_s = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > give_up_at_s:
            pytest.fail("what the test waits for does not come")
        time.sleep(0.005)


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended by now."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def state(pid: int) -> str:
    """The process's state letter as ps(1) shows it: T is stopped; gone and zombie are both Z."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("X", "Z")
    except OSError:
        return "Z"


def until_all(pids: list[int], letter: str) -> None:
    """T: they are stopped. S: none is, and each has done what it had to do and waits again."""
    until(lambda: {state(pid) for pid in pids} == {letter})


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_backoff(pid: int) -> None:
    """Come back when a retry_command.py whose first attempt has begun waits for the next: it sleeps and has no child."""
    until(lambda: not children(pid) and state(pid) == "S")


IMPATIENT = (  # retry_command.py, which waits no longer than half a second for a lock
    *ISOLATED,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import retry_command; retry_command.LOCK_TAKES_S = 0.5; "
    "sys.exit(retry_command.main(sys.argv[1:]))",
)


def lock_of_another_run(path: str) -> int:
    """Hold the lock that a run takes to write there, until the descriptor is closed."""
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqiq", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0, 0))
    return fd


def users(path: str) -> set[int]:
    """The other processes that have this file open, under whatever name."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(link, path):
                found.add(int(link.parts[2]))
        except OSError:
            pass  # it has just ended, or the file is not there yet
    return found - {os.getpid()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder: a path without a slash is in it, and nothing else is."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()  # root obeys file modes then
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode != 0, reason="needs root and namespaces"
)
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
# Before a command that gets start_new_session: a group of its own beside its parent's, and no terminal, as under supervisord.
IN_ITS_OWN_GROUP = ("bash", "-c", 'set -m; "$@" & exec 2>&-; wait $!', "bash")


def until_stopped(pid: int) -> None:
    """Come back when it is, and who waits for it has had the time to see it and to do wrong."""
    until(lambda: state(pid) == "T")
    time.sleep(0.1)


class Fifo:
    """The reading end of a FIFO that a probe (see probe.py) and all that comes from it write to."""

    def __init__(self, path: Path):
        self.path = str(path)
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.rest = b""

    def _more(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            pytest.fail(f"nothing in the FIFO for {timeout_s} s; had {self.rest!r}")
        data = os.read(self.fd, 65536)
        self.rest += data
        return bool(data)

    def line(self) -> str:
        """The next line; a test fails where none comes, or where all writers are gone."""
        while b"\n" not in self.rest:
            if not self._more(HANG_S):
                pytest.fail(f"end of file instead of a line; had {self.rest!r}")
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()

    def until_gone(self) -> list[str]:
        """The lines up to the end of file: nobody who could write lives any more."""
        while self._more(HANG_S):
            pass
        lines, self.rest = self.rest.decode().splitlines(), b""
        return lines

    def silent(self) -> bool:
        """Whether nothing is there to read: no line and, while somebody writes, no end of file."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return not self.rest and not poller.poll(0)


def opened_fifo(path: Path) -> Iterator[Fifo]:
    channel = Fifo(path)
    yield channel
    for pid in users(channel.path):  # a failed test's jobs end with it
        send(pid, signal.SIGKILL)
    os.close(channel.fd)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    yield from opened_fifo(tmp_path / "fifo")


@pytest.fixture
def fifo_of_next(tmp_path: Path) -> Iterator[Fifo]:
    """For a second job, which opens it only when the first one may have ended."""
    yield from opened_fifo(tmp_path / "next")
