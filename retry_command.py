#!/usr/bin/env -S python3 -IS
"""Run a command again, but only for the exit codes that you name.

    retry_command.py --retry-code CODES [OPTIONS] -- COMMAND [ARG ...]

Each attempt's output is kept until it is known how it ended. Success: the output of the successful attempt alone.
Final failure: nothing on stdout; on stderr, attempt by attempt, one JSON line and what the attempt wrote there.

Example: retry_command.py --retry-code 75 --max-attempts 5 -- /opt/bill/job --month 2026-10
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("retry_command.py: needs Python 3.10 or newer")
if __name__ == "__main__" and not sys.flags.isolated:  # `python3 FILE`: no code from the script's folder or PYTHONPATH
    LIBRARY = "{}/{}/python{}.{}{}".format(
        sys.base_prefix, sys.platlibdir, *sys.version_info[:2], "t" if "t" in sys.abiflags else ""
    )
    sys.path[:] = [LIBRARY, f"{LIBRARY}/lib-dynload"]

# Python prints a Ctrl-C at some moments of its start, or in a callback of an import, and goes on. That one counts too.
SWALLOWED = [type(getattr(sys, "last_value", None))]
try:
    if __name__ == "__main__":
        sys.unraisablehook = lambda error: SWALLOWED.append(error.exc_type)
    import signal

    # From here on no signal ends us before the job can be told of it. A mere import blocks nothing.
    ENTRY_MASK = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() if __name__ == "__main__" else ())
    if __name__ == "__main__":
        sys.unraisablehook = sys.__unraisablehook__
        if KeyboardInterrupt in SWALLOWED:
            raise KeyboardInterrupt
    import argparse
    import errno
    import os
    import select
    import stat
    from fcntl import F_DUPFD_CLOEXEC, F_GETFL, F_GETPIPE_SZ, F_OFD_SETLK, F_SETPIPE_SZ, F_UNLCK, F_WRLCK, fcntl
    from time import CLOCK_BOOTTIME, clock_gettime, gmtime, monotonic, sleep, strftime, time
except KeyboardInterrupt:
    if __name__ != "__main__":
        raise
    sys.exit(130)
except Exception as error:  # out of memory or descriptors
    if __name__ != "__main__" or sys.stderr is None:
        raise
    sys.stderr.write(f'{{"source":"retry_wrapper","event":"wrapper_error","kind":"{type(error).__name__}"}}\n')
    sys.exit(125)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from typing import NoReturn, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

VERSION = "0.1.0"

EXIT_CODES = (  # code, name, when
    (0, "success", "the job succeeded"),
    (2, "usage", "bad arguments; nothing was started"),
    (69, "breaker_open", "the circuit breaker is open (--breaker); nothing was started"),
    (75, "in_progress", "another live run works on the idempotency key; nothing was started"),
    (124, "timed_out", "the last attempt ran out of time: --attempt-timeout-ms, --max-elapsed-ms"),
    (125, "error", "the job could not be started, wrote too much, or the wrapper failed: an OS error, undelivered output"),
    (126, "denied", "the program is not executable, a directory or the empty string"),
    (127, "not_found", "there is no such program"),
    (130, "interrupted", "Ctrl-C (SIGINT)"),
    (141, "broken_pipe", "the reader of our output went away; nothing is said"),
    ("other", "job", "the job's own exit code, 128+n when signal n killed it, or 128+n after a stop signal n to us"),
)
SUCCESS, USAGE, BREAKER_OPEN, IN_PROGRESS, TIMED_OUT, ERROR, DENIED, NOT_FOUND, INTERRUPTED, BROKEN_PIPE = (
    int(code) for code, name, _ in EXIT_CODES if name != "job"
)

APPLICATION_ID = 0x52455452  # RETR
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, state TEXT NOT NULL, changed_at_utc TEXT,"
    " exit_code INTEGER, stdout_bytes INTEGER)",
    "CREATE TABLE chunks (run INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (run, number))",
)
SQLITE = b"SQLite format 3\0"
STORED_BYTES = 16 << 20
METRICS = (  # name, type, help
    ("retry_command_runs_total", "counter", "Runs that ended, by result: success, failure, refused."),
    ("retry_command_attempts_total", "counter", "Attempts that were started."),
    ("retry_command_retries_total", "counter", "Attempts that were not the first of their run."),
    ("retry_command_last_success_timestamp_seconds", "gauge", "When a run last succeeded, 0 for never."),
    ("retry_command_last_run_timestamp_seconds", "gauge", "When a run last ended."),
    ("retry_command_last_run_duration_seconds", "gauge", "How long the last run took."),
    ("retry_command_last_exit_code", "gauge", "The exit code of the last run."),
    ("retry_command_breaker_open", "gauge", "1 while the circuit breaker was not closed at the end of the last run, else 0."),
)

WEEK_MS = 604_800_000
NUMBERS = (  # option, lowest, highest, default, help
    ("--max-attempts", 1, 10, 3, "attempts in all, the first included"),
    ("--initial-delay-ms", 0, 60_000, 1000, "the wait before attempt 2"),
    ("--backoff-factor", 1, 10, 2, "each later wait is the previous one times this"),
    ("--max-delay-ms", 0, 60_000, 30_000, "no wait is longer"),
    ("--max-elapsed-ms", 1, WEEK_MS, None, "a budget for all attempts and waits together"),
    ("--attempt-timeout-ms", 1, WEEK_MS, None, "stop an attempt then; it counts as exit code 124"),
    ("--kill-after-ms", 0, WEEK_MS, 5000, "the grace from a stop signal or a time-out to SIGKILL"),
    ("--breaker-failures", 1, 1000, 5, "so many listed failures in a row open it"),
    ("--breaker-reset-ms", 0, WEEK_MS, 30_000, "so long after that one probe may go"),
    ("--max-output-bytes", 0, 2**63 - 1, None, "stop an attempt that writes more, stdout and stderr together; exit 125"),
)
CHOICES = (  # option, values, help; the first value is the default
    ("--jitter", ("none", "full", "equal"), "each wait d at random: full in 0 to d, equal in d/2 to d"),
    (
        "--stdin",
        ("null", "replay", "inherit"),
        "what the job reads: nothing, our stdin from its start each time, or our stdin itself",
    ),
)
TEXTS = (  # option, metavar, help
    ("--event-log", "FILE", "append every event of every run, successes too, as JSON lines"),
    ("--metrics-file", "FILE", "keep counters in the Prometheus text format"),
    ("--task", "NAME", "the metrics' label (default: the command's name)"),
    ("--idempotency-key", "KEY", "the job sees it, the same in all attempts; auto makes one for this run"),
    ("--idempotency-store", "FILE", "a key that succeeded is not run again: its stdout is returned"),
    ("--breaker", "FILE", "a circuit breaker shared by all runs that name the file"),
)
REFUSALS = {  # what the store says of a key, the event, the exit code
    "running": ("in_progress", IN_PROGRESS),
    "unknown": ("outcome_unknown", ERROR),
    "not_stored": ("output_not_stored", ERROR),
}
FLAGS = (  # option, help
    ("--rerun-unknown", "run a key again of which nobody knows whether its last run did its work"),
    ("--stream-stderr", "show the job's stderr and our events as they happen"),
    ("--verbose", "tell people on stderr what happens"),
    ("--plan", "print the schedule of attempts and waits, and run nothing"),
)

START_FAILURES = {
    FileNotFoundError: (NOT_FOUND, "not_found"),
    NotADirectoryError: (NOT_FOUND, "not_found"),
    PermissionError: (DENIED, "permission_denied"),
}

STOP_SIGNALS: dict[int, str] = {
    signal.SIGTERM: "sigterm",
    signal.SIGHUP: "sighup",
    signal.SIGINT: "keyboard_interrupt",
    signal.SIGQUIT: "sigquit",
}
TERMINAL_STOPS: set[int] = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
STOPS_AGAIN_AFTER_S = 1.0  # a supervisor that signals a whole tree makes one stop arrive more than once
LOCK_TAKES_S, HURRY_S = 30.0, 0.5  # many runs at once; in vain where one is stopped in the moment that it holds it
DELIVERY_S = 5.0  # for a caller to take the output of a run that was told to stop
DEATH_TAKES_S = 10.0  # from SIGKILL to the end of a process with much memory; in vain for one that hangs in the kernel
CHUNK, BACKLOG = 1 << 20, 16 << 20  # bytes at a time; bytes of a shown stream that wait for a slow reader
PIPE_SIZE = 1 << 18  # bytes; a quarter takes twice the time, and a user may have 64 MiB of them
PTMX = os.makedev(5, 2)  # a pseudo-terminal's master: to open it again makes another one
FOREVER = float("inf")
JSON_ESCAPES = {number: f"\\u{number:04x}" for number in range(32)} | {
    ord(char): f"\\{letter}" for char, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}


class Ending(Exception):
    """An ending of our own: exit code and last words."""

    def __init__(self, code: int, text: bytes = b""):
        super().__init__(code, text)
        self.code, self.text = code, text


class NotStarted(Exception):
    """The job could not be started: exit code and the event's kind."""

    def __init__(self, cause: OSError):
        super().__init__(cause)
        self.code, self.kind = START_FAILURES.get(type(cause), (ERROR, "os_error"))


class RecordFailed(Exception):
    """A file that outlives a run is of no use, or could not be read or written."""

    def __init__(self, cause: Exception, file: str):
        super().__init__(cause, file)
        self.cause, self.file = cause, file


# ---- policy: no I/O


class RetryPolicy:
    """What is retried, how often, and how long to wait first.

    `retry_codes` has exit codes, and -n for death by signal n. Times are in ms. `random` is uniform in [0, 1), by default
    random.random. ValueError: no such jitter.
    """

    def __init__(
        self,
        retry_codes: "Iterable[int]" = (),
        *,
        max_attempts: int = 3,
        initial_delay_ms: int = 500,
        backoff_factor: int = 2,
        max_delay_ms: int = 10_000,
        max_elapsed_ms: float | None = None,
        jitter: str = "equal",
        random: "Callable[[], float] | None" = None,
    ):
        if jitter not in ("none", "full", "equal"):
            raise ValueError(f"no such jitter: {jitter}")
        if jitter != "none" and random is None:
            from random import random
        self.retry_codes, self.max_attempts, self.max_elapsed_ms = frozenset(retry_codes), max_attempts, max_elapsed_ms
        self.initial_delay_ms, self.backoff_factor, self.max_delay_ms = initial_delay_ms, backoff_factor, max_delay_ms
        self.jitter, self.random = jitter, random

    def retries(self, returncode: int) -> bool:
        """Whether an attempt that ended so is worth another one."""
        return returncode in self.retry_codes

    def delay_range_ms(self, attempt: int) -> tuple[int, int]:
        """The shortest and the longest wait after attempt number `attempt` (from 1): capped exponential backoff, with jitter
        as in the AWS Architecture Blog's "Exponential Backoff and Jitter"."""
        longest = min(self.initial_delay_ms * self.backoff_factor ** (attempt - 1), self.max_delay_ms)
        return {"none": longest, "full": 0, "equal": longest - longest // 2}[self.jitter], longest

    def delay_ms(self, attempt: int, elapsed_ms: float = 0, hint_ms: int = 0) -> int | None:
        """The wait after attempt number `attempt` (from 1), raised by a hint of the job's up to the maximum. None: no other
        attempt, as all are used up or none could begin within the budget, of which `elapsed_ms` are over."""
        shortest, longest = self.delay_range_ms(attempt)
        random = self.random or float  # without jitter there is nothing to choose
        delay_ms = shortest + int((longest - shortest + 1) * random())
        delay_ms = min(max(delay_ms, hint_ms), self.max_delay_ms)
        late = self.max_elapsed_ms is not None and elapsed_ms + delay_ms >= self.max_elapsed_ms
        return None if late or attempt >= self.max_attempts else delay_ms


class CircuitBreaker:
    """Closed; open after `failures` failures in a row; half-open `reset_ms` later, when one probe may go and its result closes
    or opens it again (M. Nygard, "Release It!"). `clock` gives ms, by default of the monotonic clock."""

    def __init__(self, failures: int = 5, reset_ms: float = 30_000, clock: "Callable[[], float] | None" = None):
        self.most, self.reset_ms = failures, reset_ms
        self.clock = clock or (lambda: 1000 * monotonic())
        self.failures, self.probing = 0, False
        self.opened_at_ms: float | None = None

    def state(self) -> str:
        if self.opened_at_ms is None:
            return "closed"
        return "open" if self.retry_after_ms() else "half-open"

    def retry_after_ms(self) -> int:
        """How long it stays open."""
        if self.opened_at_ms is None:
            return 0
        return max(0, -int((self.clock() - self.opened_at_ms - self.reset_ms) // 1))

    def allow(self) -> bool:
        """Whether a call may go. Half-open, one may, until its result is recorded."""
        if self.state() == "half-open" and not self.probing:
            self.probing = True
            return True
        return self.state() == "closed"

    def record_success(self) -> None:
        self.failures, self.opened_at_ms, self.probing = 0, None, False

    def record_failure(self) -> None:
        self.failures += 1
        if self.probing or (self.opened_at_ms is None and self.failures >= self.most):
            self.opened_at_ms = self.clock()
        self.probing = False


def plan(policy: RetryPolicy, timeout_ms: int | None, grace_ms: int) -> str:
    """The schedule of attempts and waits, for people; an attempt's time-out may be followed by its grace."""

    def span(low: float, high: float) -> str:
        return "no limit" if high == FOREVER else f"{low:.0f} to {high:.0f}" if low < high else f"{low:.0f}"

    budget_ms = FOREVER if policy.max_elapsed_ms is None else policy.max_elapsed_ms
    attempt_ms = FOREVER if timeout_ms is None else timeout_ms + grace_ms
    rows = [("attempt", "wait before, ms", "waits so far, ms", "at the latest with time-outs, ms")]
    soonest = waited = latest = longest = 0.0
    for attempt in range(1, policy.max_attempts + 1):
        low, high = policy.delay_range_ms(attempt - 1) if attempt > 1 else (0, 0)
        soonest, waited, latest = soonest + low, waited + high, min(latest + high, budget_ms)
        if soonest >= budget_ms:
            rows.append((f"{attempt}", "never: no time is left", "", ""))
            break
        rows.append((f"{attempt}", span(low, high), span(soonest, waited), span(latest, latest)))
        latest += attempt_ms
        longest = min(latest, budget_ms + grace_ms)
    hinted = min(policy.max_attempts * attempt_ms + (policy.max_attempts - 1) * policy.max_delay_ms, budget_ms + grace_ms)
    lines = ["{:>7}  {:>22}  {:>16}  {:>32}".format(*row).rstrip() for row in rows]
    return "\n".join([*lines, f"longest total, ms: {span(longest, longest)}, with Retry-After hints {span(hinted, hinted)}", ""])


def hint_ms(text: bytes) -> int:
    """A hint of the job's, in ms: whole or decimal seconds (RFC 9110, Retry-After). 0 for anything else."""
    seconds = text.strip()
    return round(1000 * min(float(seconds), WEEK_MS)) if seconds.replace(b".", b"", 1).isdigit() else 0


def returncode(end: os.waitid_result) -> int:
    """How a process ended: its exit code, or -n for death by signal n."""
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def exit_code(returncode: int) -> int:
    """The shell's number for it: 128+n for death by signal n (POSIX, Shell Command Language, 2.8.2), at most 255."""
    return returncode if returncode >= 0 else min(128 - returncode, 255)


def json_value(value: object) -> str:
    """As json.dumps(value, ensure_ascii=False), compact; to import that costs a whole start, and a descriptor we may lack."""
    if isinstance(value, str):
        return '"' + os.fsencode(value).decode("utf-8", "surrogateescape").translate(JSON_ESCAPES) + '"'
    if isinstance(value, dict):
        return "{" + ",".join(f'"{name}":{json_value(part)}' for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_value, value)) + "]"
    return str(value).lower()  # a bool or an int


def json_line(**fields: object) -> bytes:
    """One line of JSON; bytes that are not UTF-8 as \\udcXX."""
    return (json_value(fields) + "\n").encode("utf-8", "backslashreplace")


def event(name: str, **fields: str | int) -> bytes:
    return json_line(source="retry_wrapper", event=name, **fields)


def wrapper_error(error: Exception) -> dict[str, int | str]:
    """The fields of the event."""
    if isinstance(error, RecordFailed):
        return {"kind": type(error.cause).__name__, "file": error.file}
    return {"kind": type(error).__name__}


def attempt_events(cut: int, result: int, failure: OSError | None, next_ms: int | None) -> list[tuple[str, dict[str, int | str]]]:
    """What is told of an attempt that did not succeed: names and fields of events."""
    again: dict[str, int | str] = {"retrying": False} if next_ms is None else {"retrying": True, "next_delay_ms": next_ms}
    timed_out = {"timed_out": True} if cut == TIMED_OUT else {}
    events: list[tuple[str, dict[str, int | str]]] = []
    if cut == ERROR:
        events.append(("output_limit", again))
    elif result or not failure:
        events.append(("attempt_failed", {"returncode": result, **timed_out, **again}))
    return [*events, ("wrapper_error", wrapper_error(failure))] if failure else events


# ---- process layer


def fill_standard_descriptors() -> None:
    """Give closed descriptors 0 to 2 a /dev/null that refuses their use, before another file gets these numbers."""
    for fd, contrary in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, contrary), True)  # open(2) takes the lowest free number: fd


def open_private(path: str, flags: int) -> int:
    """Open it, or create it with mode 0600 whatever the umask: one like 0277 would lock out every later run."""
    mask = os.umask(0o077)
    try:
        return os.open(path, flags, 0o600)
    finally:
        os.umask(mask)


def given_environment() -> dict[bytes, bytes]:
    """The environment as the kernel shows it: CPython may have added LC_CTYPE to its own (PEP 538)."""
    try:
        with open("/proc/self/environ", "rb", buffering=0) as file:
            entries = file.read().split(b"\0")
    except OSError:  # no /proc
        return dict(os.environb)
    environment: dict[bytes, bytes] = {}
    for entry in entries:
        name, equals, value = entry.partition(b"=")
        if name and equals:
            environment.setdefault(name, value)  # of two of one name getenv(3) sees the first
    return environment


def take_over_signals() -> set[int]:
    """Block every signal that the job is to be told of, and return them: all but those ignored when we were started, which
    sigtimedwait(2) would return. SIGPIPE and SIGXFSZ are never in, as CPython itself ignores them; SIGCHLD always is, as
    the kernel throws exit statuses away where it is ignored."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    watched = {int(number) for number in catchable if signal.getsignal(number) != signal.SIG_IGN}
    if signal.SIGINT in watched:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    return watched


def stop_ourselves(number: int) -> bool:
    """Stop as the job has, until SIGCONT, by the signal's default action. False: the kernel lets our group go on, as no
    shell could continue it (POSIX: orphaned). SIGSTOP knows no such rule: SIGTSTP stands in, and only where there is a
    terminal; elsewhere nobody's `fg` would wake us, and SIGTERM must not find us stopped."""
    if number == signal.SIGSTOP:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        except OSError:
            return True
        number = signal.SIGTSTP
    handler = signal.getsignal(number)
    if handler == signal.SIG_IGN:
        return True
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number, signal.SIGCONT})
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # one with the terminal's own, which may be pending: they stop us once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    stopped = signal.SIGCONT in signal.sigpending()
    signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return stopped


def hand_terminal(owner: int, heir: int) -> bool:
    """Make heir the terminal's foreground group, if owner is that now."""
    try:
        tty = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # blocked, the background may do it
    try:
        if os.tcgetpgrp(tty) != owner:
            return False
        os.tcsetpgrp(tty, heir)
        return True
    except OSError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(tty)


def stoppable(fd: int, transfer: "Callable[[], object]", lent: bool) -> None:
    """Read or write as one whom the terminal stops in the background: with a handler CPython tries again, for ever (PEP 475).
    While the terminal is lent to the job we are in the background for its sake, and write."""
    if not os.isatty(fd):
        transfer()
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTTIN, signal.SIGTTOU)}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, signal.SIG_IGN if lent and number == signal.SIGTTOU else signal.SIG_DFL)
        transfer()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # our caller made it non-blocking
            select.select([], [fd], [])


def say(text: bytes) -> None:
    """Write to stderr, or not at all: an ending keeps its exit code."""
    try:
        write_all(2, text)
    except OSError:
        pass


def temporary_file() -> int:
    """A file without a name, in the first usual folder where one takes a byte: on a full disk it would be of no use."""
    failure = OSError()
    for folder in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.curdir)):
        try:
            fd = nameless_file(folder)
        except OSError as error:
            failure = error
            continue
        try:
            os.pwrite(fd, b"\0", 0)
            os.ftruncate(fd, 0)
            return fd
        except OSError as error:
            failure = error
            os.close(fd)
    raise failure


def nameless_file(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    import tempfile  # costs more than all else at start; only a file system without O_TMPFILE needs it

    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno())


def group_states(group: int) -> set[bytes]:
    """The states (proc_pid_stat(5)) of a process group's living members, as far as /proc shows them.

    Zombies do not live: a careless PID 1 keeps them. One with several threads does: only its first thread has ended.
    """
    states: set[bytes] = set()
    try:
        ours = os.readlink("/proc/self") == str(os.getpid())  # not the /proc of another pid namespace
        pids = [name for name in os.listdir("/proc") if ours and name.isdigit()]
    except OSError:
        return states
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # gone meanwhile
        state, pgrp, threads = fields[0], int(fields[2]), int(fields[17])
        if pgrp == group and (state not in b"ZX" or threads > 1):
            states.add(state)
    return states


def start(command: list[str], environment: dict[bytes, bytes], stdin: str, out: int, err: int) -> int:
    """Start the job in a process group of its own, or raise NotStarted. Its process id, which is the group's too.

    It reads a file of that name, opened anew, or our own stdin.
    """
    default = [signal.SIGPIPE, signal.SIGXFSZ]  # ignored by CPython
    if hand_terminal(os.getpgrp(), os.getpgrp()):  # it is ours
        default += [signal.SIGTTIN, signal.SIGTTOU]  # how a job asks for the terminal; `bash -ic` has them ignored
    source = os.open(stdin, os.O_RDONLY) if stdin else os.dup(0)
    try:
        if not command[0]:
            raise PermissionError  # posix_spawnp raises ValueError for it
        return os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((source, out, err))],
            setpgroup=0,
            setsigmask=ENTRY_MASK,
            setsigdef=default,
        )
    except OSError as error:
        raise NotStarted(error) from error
    finally:
        os.close(source)


def pipe() -> tuple[int, int]:
    """One whose reading end does not block."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    return reader, writer


def enlarge(fd: int) -> None:
    """A pipe for stdin or stdout: every time that one is full or empty costs two switches of context."""
    try:
        if fcntl(fd, F_GETPIPE_SZ) < PIPE_SIZE:
            fcntl(fd, F_SETPIPE_SZ, PIPE_SIZE)
    except OSError:
        pass  # no pipe, or the user's share of pipe memory is used up


class Spool:
    """The bytes of one stream, in a temporary file from when they are taken to when they are sent."""

    def __init__(self) -> None:
        self.file = temporary_file()
        self.size = self.sent = 0  # bytes in the file, and how many of them have been sent
        self.taken = 0  # bytes in all
        self.dropping = False  # keep no more
        self.whole = True  # nothing was dropped
        self.failure: OSError | None = None  # of the file
        self.spliced = True  # inside the kernel, where the file system can
        self.ways: list[Callable[[int, int], int]] = [
            lambda target, _: os.splice(self.file, target, CHUNK, offset_src=self.sent, flags=os.SPLICE_F_NONBLOCK),  # a pipe
            lambda target, most: os.sendfile(target, self.file, self.sent, most),  # most others
            lambda target, most: os.write(target, os.pread(self.file, most, self.sent)),  # `>>`
        ]

    def take(self, source: int) -> int:
        """Take what is there. The count of bytes, 0 at its end; BlockingIOError when there is nothing yet.

        A full disk must not break the job: from then on its output is read and dropped.
        """
        if self.spliced and not self.dropping:
            try:
                moved = os.splice(source, self.file, CHUNK, flags=os.SPLICE_F_NONBLOCK)
                self.size += moved
                self.taken += moved
                return moved
            except BlockingIOError:
                raise
            except OSError:
                self.spliced = False  # whyever it was refused: a plain write tells of a full disk too
        data = os.read(source, CHUNK)
        self.taken += len(data)
        if not self.dropping:
            try:
                write_all(self.file, data)
                self.size += len(data)
            except OSError as error:
                self.failure, self.dropping = error, True
        self.whole = self.whole and not (self.dropping and data)
        return len(data)

    def send(self, target: int, most: int) -> bytes:
        """Give a part to a descriptor of our caller's, in the fastest way that this takes; the last byte of it."""
        try:
            self.sent += self.ways[0](target, most)
        except BlockingIOError:
            raise
        except OSError:
            if len(self.ways) == 1:
                raise
            del self.ways[0]  # whyever it was refused: the plain way tells what is really wrong
            return self.send(target, most)
        last = os.pread(self.file, 1, self.sent - 1)
        if self.sent == self.size:  # what is shown for weeks must not fill the disk
            os.ftruncate(self.file, os.lseek(self.file, 0, os.SEEK_SET))
            self.sent = self.size = 0
        return last


class Outlet:
    """Our stdout or stderr, and what is on its way there.

    It is written to only when poll(2) finds it ready, and then no more than it takes without blocking: a caller that does
    not read must not keep us from signals and deadlines.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.queue: list[bytes | Spool] = []  # lines of our own, and streams that are complete
        self.stream: Spool | None = None  # of the running attempt, sent as it grows
        self.in_line = False  # what was sent last did not end its line
        self.failure: OSError | None = None  # since then nothing is sent
        status = os.fstat(fd)
        self.most = CHUNK
        if stat.S_ISSOCK(status.st_mode) or status.st_rdev == PTMX:
            self.most = select.PIPE_BUF
        elif stat.S_ISFIFO(status.st_mode) or os.isatty(fd):
            self.most = select.PIPE_BUF
            try:
                if fcntl(fd, F_GETFL) & os.O_ACCMODE != os.O_RDONLY:  # non-blocking, but only for us
                    self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            except OSError:
                pass  # not ours to open, or no /proc: it may block, seldom and for a moment

    def busy(self) -> bool:
        return not self.failure and bool(self.queue or (self.stream and self.stream.size))

    def send(self) -> None:
        """Send a part of what is next. A line of our own begins a line, also after a stream that has not ended its last."""
        part = self.queue[0] if self.queue else self.stream
        try:
            if isinstance(part, Spool):
                self.in_line = part.send(self.fd, self.most) != b"\n" if part.size else self.in_line
                part = b"more" if part.size else b""
            elif part is not None:
                part = b"\n" + part if self.in_line else part
                self.queue[0] = part = part[os.write(self.fd, part[: select.PIPE_BUF]) :]
                self.in_line = False
            if self.queue and not part:
                del self.queue[0]
        except BlockingIOError:
            pass
        except OSError as error:
            self.failure = error
            if self.stream:
                self.stream.dropping = True


class Supervisor:
    """Runs attempts, each in a process group of its own, passes signals on to them, and keeps time.

    Signals become bytes in a pipe (signal.set_wakeup_fd), so that one poll(2) sees streams, ends, signals and deadlines,
    and none of them can slip in between a look and the wait.
    """

    def __init__(self, options: argparse.Namespace, watched: set[int]):
        self.kill_after_s = options.kill_after_ms / 1000
        self.most_output = FOREVER if options.max_output_bytes is None else options.max_output_bytes
        self.verbose, self.streams = options.verbose, options.stream_stderr
        self.outlets = Outlet(1), Outlet(2)
        enlarge(1)
        self.one_file = os.path.samestat(os.fstat(1), os.fstat(2))
        self.sources: dict[int, Spool] = {}  # by the descriptor that is read
        self.group = 0  # of the running attempt; its leader is the job, which is not reaped before the group is done with
        self.end: os.waitid_result | None = None  # the job's
        self.output = 0  # bytes of the attempt
        self.cut = 0  # the attempt was cut short: TIMED_OUT, or ERROR for too much output
        self.has_term = False  # the group has got SIGTERM
        self.stop = self.stops = 0  # the first stop signal, and how many came a while after the one before
        self.stopped_at = self.kill_at = self.deadline = FOREVER
        self.had_terminal = False
        self.failed = True  # the last attempt was no success
        self.bell, ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poll = select.poll()
        self.poll.register(self.bell, select.POLLIN)
        signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
        for number in watched:
            signal.signal(number, noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    def note(self, text: str) -> None:
        if self.verbose:
            self.outlets[1].queue.append(f"retry_command.py: {text}\n".encode())

    def read_input(self) -> Spool:
        """Our stdin, up to its end or a stop signal."""
        enlarge(0)
        spool = self.sources[0] = Spool()
        self.poll.register(0, select.POLLIN)
        try:
            while self.sources and not self.stop and not spool.failure:
                self.serve()
        finally:
            self.forget(0)
        os.fchmod(spool.file, 0o400)  # a job that opens its /dev/stdin for writing would write into that of the next attempts
        if spool.failure:
            raise spool.failure
        return spool

    def attempt(
        self, command: list[str], environment: dict[bytes, bytes], stdin: str, out: Spool, err: Spool, limit_s: float
    ) -> tuple[int, OSError | None]:
        """One attempt, to its end and, if it did not succeed, that of all it started. Its return code, and what went wrong
        if its output was not kept whole or something of it could not be ended. Raises NotStarted."""
        pipes, stderr = (pipe(), pipe()), self.outlets[1]
        enlarge(pipes[0][0])
        if self.streams:
            stderr.stream, err.dropping = err, stderr.failure is not None
        self.end, self.output, self.cut, self.has_term, self.failed = None, 0, 0, False, True
        try:
            self.group = start(command, environment, stdin, *(writer for _, writer in pipes))
        finally:
            for _, writer in pipes:
                os.close(writer)
        self.deadline = monotonic() + limit_s
        for (reader, _), spool in zip(pipes, (out, err), strict=True):
            self.sources[reader] = spool
            self.poll.register(reader, select.POLLIN)
        try:
            while not self.end:
                self.serve()
        except BaseException:
            self.kill()
            raise
        self.deadline = FOREVER
        self.settle()
        failure: OSError | None = None
        self.failed = bool(self.cut or returncode(self.end) or out.failure or err.failure or self.stop == signal.SIGINT)
        if self.failed:
            try:
                self.clear_group()
            except OSError as error:
                failure = error
            self.settle()
        result = self.cut or returncode(self.end)
        for reader, _ in pipes:
            self.forget(reader)
            os.close(reader)
        hand_terminal(self.group, os.getpgrp())
        os.waitid(os.P_PID, self.group, os.WEXITED)
        self.group, self.end, self.kill_at = 0, None, FOREVER
        self.reap()
        return result, out.failure or err.failure or failure

    def wait(self, delay_ms: int) -> bool:
        """Wait out a delay. False: told to stop."""
        until = monotonic() + delay_ms / 1000
        while True:
            self.serve(until)
            if self.stop or monotonic() >= until:
                return not self.stop

    def flush(self, limit_s: float = FOREVER) -> None:
        """Give our caller all that is on its way. Ending: a stop signal, or a later one after that of a stopped run, or its
        caller that does not take the output for that long; of a stopped run, for as long as a job's grace, or DELIVERY_S."""
        stops = self.stops
        if stops:
            limit_s = max(min(self.kill_after_s, DELIVERY_S), STOPS_AGAIN_AFTER_S)
        until = monotonic() + limit_s
        while any(outlet.busy() for outlet in self.outlets):
            self.serve(until)
            if self.stops != stops or monotonic() >= until:
                heard = select.select([], [2], [], 0)[1]
                raise Ending(128 + self.stop, b"\n" * self.outlets[1].in_line + self.interrupted() if heard else b"")

    def interrupted(self) -> bytes:
        return event("interrupted", kind=STOP_SIGNALS[self.stop])

    def settle(self) -> None:
        """Take what is in the pipes now: all that an ended job wrote. A background process may write without end."""
        for reader in list(self.sources):
            left = fcntl(reader, F_GETPIPE_SZ)
            while left > 0 and reader in self.sources:
                left -= self.drain(reader) or left

    def forget(self, fd: int) -> None:
        if self.sources.pop(fd, None):
            self.poll.unregister(fd)

    def serve(self, until: float = FOREVER) -> None:
        """Wait for streams, signals and deadlines, no longer than until then, and act on what comes."""
        outlets = {outlet.fd: outlet for outlet in self.outlets if outlet.busy()}
        if len(outlets) == 2 and self.one_file:
            del outlets[self.outlets[0].fd]  # `2>&1`: one after the other
        for fd in outlets:
            self.poll.register(fd, select.POLLOUT)
        for fd, spool in self.sources.items():  # a reader that is slower than the job slows the job down
            full = spool is self.outlets[1].stream and spool.size >= BACKLOG and not spool.dropping
            self.poll.modify(fd, 0 if full else select.POLLIN)
        wake_at = min(until, self.kill_at, self.deadline)
        ready = [fd for fd, _ in self.poll.poll(None if wake_at == FOREVER else max(0, wake_at - monotonic()) * 1000)]
        for fd in outlets:
            self.poll.unregister(fd)
        if self.bell in ready:
            for number in os.read(self.bell, 4096):
                self.take(number)
            ready = []  # the rest comes again, if a signal has not made it void
        for fd in ready:
            lent = bool(self.had_terminal and self.group)
            stoppable(fd, lambda fd=fd: outlets[fd].send() if fd in outlets else self.drain(fd), lent)  # type: ignore[misc]
        now = monotonic()
        if now >= self.kill_at:
            self.note("the grace is over: SIGKILL")
            self.kill()
        if now >= self.deadline and not self.end:
            self.cut_short(TIMED_OUT)

    def drain(self, fd: int) -> int:
        """Take what a source holds. The count of bytes."""
        try:
            taken = self.sources[fd].take(fd)
        except BlockingIOError:
            return 0
        if not taken:
            self.forget(fd)
        self.output += taken
        if self.group and self.output > self.most_output and not self.cut:
            for spool in self.sources.values():
                spool.dropping = True
            self.cut_short(ERROR)
        return taken

    def take(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self.reap()
        elif number in STOP_SIGNALS:
            self.told_to_stop(number)
        elif number in TERMINAL_STOPS and (self.end or not self.group):
            stop_ourselves(number)
        else:
            self.send(number)

    def told_to_stop(self, number: int) -> None:
        now = monotonic()
        self.note(f"told to stop by {signal.Signals(number).name}: no further attempt")
        if not self.stop:
            self.stop, self.stops, self.stopped_at, self.deadline = number, 1, now, FOREVER
            self.kill_at = min(self.kill_at, now + self.kill_after_s)
        if now - self.stopped_at >= STOPS_AGAIN_AFTER_S:
            self.stops += 1
            self.kill()
        else:
            self.send(number)
            self.has_term = self.has_term or number == signal.SIGTERM
            if self.group and b"T" in group_states(self.group):
                self.send(signal.SIGCONT)  # what is stopped takes no other signal

    def cut_short(self, why: int = 0) -> None:
        """Tell the group to end: TERM, and CONT as what is stopped takes no other signal. After the grace it is killed."""
        self.cut, self.deadline = self.cut or why, FOREVER
        self.kill_at = min(self.kill_at, monotonic() + self.kill_after_s)
        if not self.has_term:  # who has got it may be cleaning up
            self.note("SIGTERM to what runs of the attempt")
            self.send(signal.SIGTERM)
        self.has_term = True
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.kill_at = FOREVER

    def send(self, number: int) -> None:
        if self.group:
            try:
                if not self.end and os.getpgid(self.group) != self.group:
                    os.kill(self.group, number)  # the job has joined another group
                os.killpg(self.group, number)
            except (ProcessLookupError, PermissionError):
                pass  # none left, or all of other users

    def reap(self) -> None:
        """Collect every child that ended (as PID 1: orphans too), but only look at the job."""
        while not self.end:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            stopped, is_job = info.si_code == os.CLD_STOPPED, info.si_pid == self.group
            if is_job and not stopped:
                self.end = info
                return
            os.waitid(os.P_PID, info.si_pid, (os.WSTOPPED if stopped else os.WEXITED) | os.WNOHANG)
            if is_job:
                self.job_stopped(info.si_status)

    def job_stopped(self, number: int) -> None:
        """It wants the terminal: lend it, if it is ours to lend. Else stop as the job did; a shell's `fg` wakes both."""
        if number in (signal.SIGTTIN, signal.SIGTTOU) and hand_terminal(os.getpgrp(), self.group):
            self.had_terminal = True
            self.send(signal.SIGCONT)
            return
        if self.stop or self.has_term:
            self.send(signal.SIGCONT)  # to its end
            return
        in_front = hand_terminal(self.group, os.getpgrp()) or hand_terminal(os.getpgrp(), os.getpgrp())
        if self.deadline < FOREVER and (number == signal.SIGSTOP or not in_front):
            return  # nobody may wake us in time
        if not stop_ourselves(number) and number != signal.SIGSTOP:  # then the job, in our group, had not stopped either
            if number != signal.SIGTSTP:
                self.send(signal.SIGHUP)  # it would wait for a terminal that it never gets
            self.send(signal.SIGCONT)

    def clear_group(self) -> None:
        """End what the attempt left behind: TERM and CONT, the grace, KILL. TimeoutError: something outlives even that."""
        if group_states(self.group):
            self.cut_short()
            self.until_group_is_gone(lambda: self.kill_at == FOREVER)
        self.kill()  # also what forked between two looks or is hidden from us; what is killed forks no more
        until = monotonic() + DEATH_TAKES_S
        if not self.until_group_is_gone(lambda: monotonic() >= until):
            raise TimeoutError

    def until_group_is_gone(self, too_late: "Callable[[], bool]") -> bool:
        pause_s = 0.001
        while group_states(self.group):
            if too_late():
                return False
            self.serve(monotonic() + pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return True


def noted(_number: int, _frame: object) -> None:
    """The wake-up descriptor has it already."""


# ---- records: files that outlive a run


def own_file(path: str, flags: int) -> int:
    """Open or create a file that outlives us; PermissionError unless it is a regular one of ours, by its only name (or none, as
    another run has just replaced it)."""
    fd = open_private(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a regular file of ours alone", path)
    return fd


def inherited_file(path: str, flags: int) -> int:
    """own_file at 10 or higher, for a lock that a job may inherit: POSIX shells redirect 0 to 9 (`exec 3>log` would close it)."""
    fd = own_file(path, flags)
    try:
        return fcntl(fd, F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)


def lock_byte(fd: int, number: int, kind: int = F_WRLCK) -> bool:
    """An open-file-description lock (fcntl(2)) on one byte: who inherits the descriptor holds it too, and the end of its last
    holder frees it, whatever that dies of. False: another has it."""
    import struct

    try:
        fcntl(fd, F_OFD_SETLK, struct.pack("hhqqiq", kind, os.SEEK_SET, number, 1, 0, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def alone(fd: int, action: "Callable[[], T]", pause: "Callable[[float], bool]") -> "T":
    """Do it while no other run does; `pause` waits some s and says whether to hurry. TimeoutError: another did for too long."""
    began = monotonic()
    while not lock_byte(fd, 0):
        if monotonic() - began >= (HURRY_S if pause(0.005) else LOCK_TAKES_S):
            raise TimeoutError(errno.ETIMEDOUT, "another run holds the lock")
    try:
        return action()
    finally:
        lock_byte(fd, 0, F_UNLCK)


def utc(seconds: float) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(seconds)) + f".{int(seconds % 1 * 1000):03}Z"


class EventLog:
    """JSON lines that many runs append to. While another run writes, ours wait: a run does not, before it ends."""

    def __init__(self, path: str, pause: "Callable[[float], bool]"):
        self.fd, self.pause = own_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), pause
        self.lines: list[bytes] = []

    def add(self, line: bytes, last: bool) -> None:
        self.lines.append(line)
        if last or lock_byte(self.fd, 0):
            alone(self.fd, self.append, self.pause)

    def append(self) -> None:
        """A line by one write, which is taken back where the disk could not take it whole."""
        while self.lines:
            size = os.fstat(self.fd).st_size
            torn = size and os.pread(self.fd, 1, size - 1) != b"\n"  # by a loss of power
            data = b"\n" + self.lines[0] if torn else self.lines[0]
            if os.write(self.fd, data) != len(data):
                os.ftruncate(self.fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            del self.lines[0]


class SharedFile:
    """A small file that many runs read and replace, each under the lock of another file beside it, which stays."""

    def __init__(self, path: str, mode: int, pause: "Callable[[float], bool]"):
        self.path, self.mode, self.pause = path, mode, pause
        self.lock = own_file(f"{path}.lock", os.O_RDWR | os.O_CREAT)
        self.alone(self.check)

    def alone(self, action: "Callable[[], None]") -> None:
        alone(self.lock, action, self.pause)

    def check(self) -> None:
        """Whether it can be replaced, but for a full disk, which must not stop every job."""
        os.close(own_file(f"{self.path}.new", os.O_WRONLY | os.O_CREAT))
        os.unlink(f"{self.path}.new")

    def read(self) -> bytes | None:
        try:
            fd = own_file(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return file.read()

    def update(self, change: "Callable[[bytes | None], bytes]") -> None:
        def replace() -> None:
            old = self.read()
            new = change(old)
            if new != old:
                self.replace(new)

        self.alone(replace)

    def replace(self, data: bytes) -> None:
        """By rename(2): who reads it sees all of the old or of the new. A run that is killed leaves a .new for the next. No
        fsync(2): what a loss of power takes is little, and many runs wait for the lock."""
        with open(own_file(f"{self.path}.new", os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()  # not before it is known to be ours
            file.write(data)
            os.fchmod(file.fileno(), self.mode)
        os.rename(f"{self.path}.new", self.path)


class BreakerFile:
    """The circuit breaker of all runs that name the file. Its clock is that of the boot, which nobody sets."""

    def __init__(self, path: str, pause: "Callable[[float], bool]", failures: int, reset_ms: int):
        self.file, self.failures, self.reset_ms = SharedFile(path, 0o600, pause), failures, reset_ms
        self.probe = inherited_file(f"{path}.lock", os.O_RDWR)  # apart from the other lock, as the job inherits it
        self.probing = self.damaged = False
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                self.boot_id = file.read().strip()
        except FileNotFoundError:  # as under systemd's ProcSubset=pid
            self.boot_id = ""
        self.load(self.file.read())

    def load(self, data: bytes | None) -> CircuitBreaker:
        import json

        breaker = CircuitBreaker(self.failures, self.reset_ms, lambda: 1000 * clock_gettime(CLOCK_BOOTTIME))
        begin = b'{"failures":'
        if data and data.strip(b"\0") and not data.startswith(begin[: len(data)]):
            raise ValueError("not a breaker's file")
        try:
            state = json.loads('{"failures": 0, "opened_at_ms": null}' if data is None else data)
            breaker.failures, opened_at_ms = int(state["failures"]), state["opened_at_ms"]
            if opened_at_ms is not None and len({state["boot_id"], self.boot_id} - {""}) < 2:
                breaker.opened_at_ms = min(int(opened_at_ms), breaker.clock())
            elif opened_at_ms is not None:
                breaker.opened_at_ms = breaker.clock() - self.reset_ms  # before the boot, for who knows how long
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.damaged = True  # a loss of power must not stop every job: closed
        return breaker

    def allow(self) -> bool:
        """Whether an attempt may go. Half-open, it has the probe right, as its job has."""

        def ask() -> None:
            breaker = self.load(self.file.read())
            self.probing = breaker.state() == "half-open" and lock_byte(self.probe, 1)
            breaker.probing = not self.probing
            self.allowed, self.retry_after_ms = breaker.allow(), breaker.retry_after_ms()

        self.file.alone(ask)
        os.set_inheritable(self.probe, self.probing)
        return self.allowed

    def record(self, success: bool | None) -> bool:
        """None: of no meaning for the breaker. Whether attempts may go on."""

        def change(data: bytes | None) -> bytes:
            breaker = self.load(data)
            breaker.probing = self.probing
            if success is not None:
                breaker.record_success() if success else breaker.record_failure()
            self.is_closed, self.retry_after_ms = breaker.state() == "closed", breaker.retry_after_ms()
            opened_at_ms = "null" if breaker.opened_at_ms is None else int(breaker.opened_at_ms)
            return f'{{"failures":{breaker.failures},"opened_at_ms":{opened_at_ms},"boot_id":"{self.boot_id}"}}\n'.encode()

        try:
            self.file.update(change)
            return self.is_closed
        finally:  # a daemon of the job's must not keep the right
            self.probing = False
            os.set_inheritable(self.probe, False)
            lock_byte(self.probe, 1, F_UNLCK)

    def closed(self) -> bool:
        """By a look without the lock: a run does not wait for others between its attempts."""
        breaker = self.load(self.file.read())
        self.retry_after_ms = breaker.retry_after_ms()
        return breaker.state() == "closed"


class Metrics:
    """Counters and gauges of a task, in a file that node_exporter's textfile collector reads (Prometheus text format)."""

    def __init__(self, path: str, pause: "Callable[[float], bool]", task: str):
        escaped = task.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.label = f'task="{os.fsencode(escaped).decode("utf-8", "replace")}"'
        self.file = SharedFile(path, 0o644, pause)
        self.load(self.file.read())

    def load(self, data: bytes | None) -> dict[str, float]:
        """The samples; ValueError if the file has others than ours."""
        samples: dict[str, float] = {}
        for line in filter(None, (data or b"").decode().split("\n")):
            comment = line.startswith(("# HELP ", "# TYPE "))
            if (line.split(" ")[2] if comment else line.partition("{")[0]) not in {name for name, *_ in METRICS}:
                raise ValueError("not a metrics file of ours")
            if not comment:
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def update(self, values: dict[str, float | None]) -> None:
        """Add to the counters, set the gauges: {'name' or 'name,label="value"': value}. None: as it is, which is 0 at first."""

        def change(data: bytes | None) -> bytes:
            samples = self.load(data)
            for name, value in values.items():
                metric, _, labels = name.partition(",")
                sample = f"{metric}{{{self.label}{labels and ',' + labels}}}"
                before = samples.get(sample, 0) if value is None or metric.endswith("_total") else 0
                samples[sample] = before + (value or 0)
            lines: list[str] = []
            for metric, kind, about in METRICS:
                lines += [f"# HELP {metric} {about}", f"# TYPE {metric} {kind}"]
                lines += [f"{name} {value:.15g}" for name, value in sorted(samples.items()) if name.startswith(metric + "{")]
            return "".join(line + "\n" for line in lines).encode()

        self.file.update(change)


class IdempotencyStore:
    """What came of the runs of each key, in SQLite. Its journal is the rollback one: nothing but the one file stays behind.

    A run that lives, or whose job does, holds the byte with its row's number of the lock file beside it.
    """

    def __init__(self, path: str, key: str):
        import sqlite3

        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)  # SQLite takes `link/..` for another one than the kernel does
        path = os.path.join(folder, name)
        if os.stat(folder).st_mode & 0o002:
            raise PermissionError(errno.EPERM, "others can write to its folder", path)  # and plant a journal
        fd = own_file(path, os.O_RDWR | os.O_CREAT)  # SQLite would follow a symlink, and create it for all to read
        begin = os.pread(fd, len(SQLITE), 0)
        os.close(fd)  # before SQLite has it: a later close would free its locks (POSIX)
        if begin not in (b"", SQLITE):
            raise ValueError("no SQLite database")  # a short one would be overwritten
        for name in (f"{path}-journal", f"{path}-wal"):  # SQLite would wait for a FIFO
            try:
                os.close(own_file(name, os.O_RDONLY))
            except FileNotFoundError:
                pass
        self.path, self.key, self.row, self.state = path, key, 0, "new"
        self.claimed = self.live = False  # the key is ours; its job may have been started
        self.lock = inherited_file(f"{path}.lock", os.O_RDWR | os.O_CREAT)
        self.busy = sqlite3.OperationalError
        self.db = sqlite3.connect(path, timeout=0.1, isolation_level=None)

    def alone(self, action: "Callable[[], T]") -> "T":
        """Do it in a transaction that excludes all others."""
        self.db.execute("PRAGMA synchronous=EXTRA")
        self.db.execute("BEGIN IMMEDIATE")
        try:
            result = action()
            self.db.execute("COMMIT")
            return result
        except BaseException:
            if not self.claimed:  # the row may be another key's next
                self.hold(F_UNLCK)
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise

    def hold(self, kind: int = F_WRLCK) -> bool:
        return lock_byte(self.lock, self.row, kind)

    def claim(self, rerun_unknown: bool) -> "tuple[str, Spool | None]":
        """Take the key: "claimed", or why it may not run: succeeded (and its stdout), not_stored, running, unknown."""
        if not os.stat(self.path).st_size:
            for statement in SCHEMA:
                self.db.execute(statement)
        elif self.db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise ValueError("a database of another application")
        find = "SELECT id, state, stdout_bytes FROM runs WHERE key = ?"
        if not self.db.execute(find, (self.key,)).fetchone():
            self.db.execute("INSERT INTO runs (key, state) VALUES (?, 'new')", (self.key,))
        self.row, self.state, size = self.db.execute(find, (self.key,)).fetchone()
        if self.state == "succeeded":
            stdout = self.output()
            return (self.state, stdout) if stdout.size == size else ("not_stored", None)
        if not self.hold():
            return "running", None
        if self.state == "running":
            self.state = "unknown"
        if self.state == "unknown" and not rerun_unknown:
            self.hold(F_UNLCK)
            return self.state, None
        return "claimed", None

    def set_state(self, state: str, code: int | None = None, stdout: "Spool | None" = None) -> None:
        size = stdout.size if stdout else None
        values = state, utc(time()), code, size, self.row
        self.db.execute("UPDATE runs SET state = ?, changed_at_utc = ?, exit_code = ?, stdout_bytes = ? WHERE id = ?", values)
        self.db.execute("DELETE FROM chunks WHERE run = ?", (self.row,))
        if stdout and stdout.size <= STORED_BYTES:
            for number, offset in enumerate(range(0, stdout.size, CHUNK)):
                data = os.pread(stdout.file, min(CHUNK, stdout.size - offset), offset)
                self.db.execute("INSERT INTO chunks VALUES (?, ?, ?)", (self.row, number, data))

    def output(self) -> "Spool":
        """What is stored of the stdout of the run that succeeded."""
        spool = Spool()
        for (data,) in self.db.execute("SELECT data FROM chunks WHERE run = ? ORDER BY number", (self.row,)):
            write_all(spool.file, data)
            spool.size += len(data)
        return spool


# ---- the run


class Run:
    """A command's attempts and waits, up to a success, the last failure or a stop signal, and what is told of them."""

    def __init__(self, options: argparse.Namespace, policy: RetryPolicy, command: list[str], supervisor: Supervisor):
        self.options, self.policy, self.command, self.supervisor = options, policy, command, supervisor
        self.told = supervisor.outlets[1].queue
        self.history = self.told if options.stream_stderr else []  # of failures, for the end
        self.hint = os.memfd_create("retry_after")
        try:
            pid = os.readlink("/proc/self")  # as this /proc counts
        except OSError:
            pid = str(os.getpid())
        self.id, self.key, self.state = os.urandom(16).hex(), options.idempotency_key, "new"
        self.began, self.attempts_made = monotonic(), 0
        self.refused = self.breaker_open = False
        self.measures: dict[str, object] = {}  # what the log gets with the next event
        self.silenced: set[str] = set()  # files that failed
        self.environment = {
            **given_environment(),
            b"RETRY_WRAPPER_MAX_ATTEMPTS": b"%d" % policy.max_attempts,
            b"RETRY_WRAPPER_RETRY_AFTER_FILE": f"/proc/{pid}/fd/{self.hint}".encode(),
        }
        if self.key == "auto":
            from uuid import uuid4

            self.key = str(uuid4())
        if self.key is not None:
            self.environment[b"RETRY_WRAPPER_IDEMPOTENCY_KEY"] = os.fsencode(self.key)
        task = os.path.basename(command[0]) if options.task is None else options.task
        self.log = self.opened(EventLog, options.event_log, self.pause)
        self.metrics = self.opened(Metrics, options.metrics_file, self.pause, task)
        self.breaker = self.opened(BreakerFile, options.breaker, self.pause, options.breaker_failures, options.breaker_reset_ms)
        self.store = self.opened(IdempotencyStore, options.idempotency_store, self.key)

    def opened(self, record: "Callable[..., T]", path: str | None, *more: object) -> "T | None":
        """Nothing without a path. Ending: it is of no use, which is found before the job starts; or we are told to stop."""
        try:
            return None if path is None else self.using(path, lambda: record(path, *more))
        except RecordFailed as error:
            if self.supervisor.stop:
                raise Ending(128 + self.supervisor.stop, self.supervisor.interrupted()) from error
            raise Ending(ERROR, event("wrapper_error", **wrapper_error(error))) from error

    def using(self, path: str, action: "Callable[[], T]") -> "T":
        try:
            return action()
        except Exception as error:
            raise RecordFailed(error, path) from error

    def run(self) -> int:
        """All of it, then the output: of the success, or the history of the failures. The exit code."""
        try:
            code = self.outcome()
        except Ending as ending:
            self.ended(ending.code)
            raise
        self.ended(code)
        try:
            self.supervisor.flush(DELIVERY_S)  # what could not be recorded
        except Ending:
            pass  # nobody reads it; the run has ended
        return code

    def outcome(self) -> int:
        output = None
        try:
            code, output = self.admitted() or self.attempts()
        except Exception as error:
            code = ERROR
            self.tell("wrapper_error", **wrapper_error(error))
        try:
            self.settle_key(code)
        except Exception as error:  # the next run of the key finds it unknown
            code, output = ERROR, None
            self.tell("wrapper_error", **wrapper_error(error))
        self.supervisor.serve(monotonic())  # a stop signal may have come just now
        if output and self.supervisor.stop != signal.SIGINT:
            return self.deliver(output)
        if self.supervisor.stop:
            code = 128 + self.supervisor.stop
            self.tell("interrupted", kind=STOP_SIGNALS[self.supervisor.stop])
        if self.history is not self.told:
            self.told += self.history
        self.told.append(b"")
        self.supervisor.flush()
        return code

    def ended(self, code: int) -> None:
        """For the records. They never change what comes of the run."""
        result = "refused" if self.refused else "failure" if code else "success"
        values: dict[str, float | None] = {
            f'retry_command_runs_total,result="{name}"': float(name == result) for name in ("success", "failure", "refused")
        }
        values["retry_command_attempts_total"] = self.attempts_made
        values["retry_command_retries_total"] = max(0, self.attempts_made - 1)
        values["retry_command_last_run_timestamp_seconds"] = round(time(), 3)
        values["retry_command_last_run_duration_seconds"] = round(monotonic() - self.began, 3)
        values["retry_command_last_exit_code"] = code
        values["retry_command_breaker_open"] = self.breaker_open
        values["retry_command_last_success_timestamp_seconds"] = round(time(), 3) if result == "success" else None
        if self.metrics:
            metrics = self.metrics
            self.keep(self.options.metrics_file, lambda: metrics.update(values))
        duration_ms = round(1000 * (monotonic() - self.began))
        self.note_in_log("run_ended", exit_code=code, attempts=self.attempts_made, duration_ms=duration_ms)

    def keep(self, path: str, action: "Callable[[], object]") -> None:
        """Write a record. A failure is told and changes nothing; what held one up is not tried again."""
        try:
            if path not in self.silenced:
                self.using(path, action)
        except RecordFailed as error:
            self.silenced.add(path)
            self.told.append(event("wrapper_error", **wrapper_error(error)))

    def pause(self, seconds: float) -> bool:
        """Wait, and whether we are told to stop."""
        self.supervisor.serve(monotonic() + seconds)
        return self.supervisor.stop != 0

    def note_in_log(self, name: str, **fields: object) -> None:
        if self.log:
            key = {} if self.key is None else {"key": self.key}
            line = json_line(time=utc(time()), run=self.id, **key, event=name, **fields)
            log = self.log
            self.keep(self.options.event_log, lambda: log.add(line, name == "run_ended"))

    def tell(self, name: str, **fields: str | int) -> None:
        self.history.append(event(name, **fields))
        self.note_in_log(name, **fields, **self.measures)
        self.measures = {}

    def in_store(self, action: "Callable[[], T]") -> "T":
        """In a transaction, as soon as no other run is in one. After a stop signal a live key has DELIVERY_S to be settled."""
        assert self.store
        alone, began, stops = self.store.alone, monotonic(), self.supervisor.stops
        while True:
            try:
                return self.using(self.options.idempotency_store, lambda: alone(action))
            except RecordFailed as error:
                if not isinstance(error.cause, self.store.busy) or "locked" not in str(error.cause):
                    raise
                since, patience_s = began, LOCK_TAKES_S
                if self.supervisor.stop:
                    in_vain = not self.store.live or self.supervisor.stops > max(stops, 1)
                    since, patience_s = max(began, self.supervisor.stopped_at), 0 if in_vain else DELIVERY_S
                if monotonic() - since >= patience_s:
                    raise
            self.supervisor.serve(monotonic() + 0.02)

    def admitted(self) -> tuple[int, tuple[Spool, Spool] | None] | None:
        """None: attempts may be made. Else what the store has for the key."""
        if not self.store:
            return None
        store = self.store
        answer, stdout = self.in_store(lambda: store.claim(self.options.rerun_unknown))
        self.state, store.claimed = store.state, answer == "claimed"
        if store.claimed:
            return None
        self.refused = stdout is None
        self.supervisor.note(f"the key's earlier run: {answer}; nothing is started")
        if stdout:
            self.note_in_log("returned_from_store")
            return SUCCESS, (stdout, Spool())
        name, code = REFUSALS[answer]
        self.tell(name)
        return code, None

    def mark_key_running(self) -> None:
        """From here on a run that ends without a word leaves the key unknown."""
        if self.store and not self.store.live:
            store = self.store
            self.in_store(lambda: store.set_state("running"))
            store.live = True
            os.set_inheritable(store.lock, True)

    def settle_key(self, code: int, stdout: Spool | None = None) -> None:
        """Write what is known of the key, once, and let it go: a daemon of the job's must not keep it."""
        if self.store and self.store.live:
            store = self.store
            try:
                self.in_store(lambda: store.set_state(self.state, code, stdout))
                store.hold(F_UNLCK)
            finally:
                store.live = False

    def attempts(self) -> tuple[int, tuple[Spool, Spool] | None]:
        """The exit code, and a success's output."""
        stdin = os.devnull if self.options.stdin == "null" else ""
        if self.options.stdin == "replay":
            stdin = f"/proc/self/fd/{self.supervisor.read_input().file}"
        code, delay_ms = SUCCESS, 0
        for attempt in range(1, self.policy.max_attempts + 1):
            if not self.supervisor.wait(delay_ms) or (attempt > 1 and self.remaining_s() <= 0):
                break  # told to stop, or stopped for longer than the wait
            if not self.breaker_allows():
                return BREAKER_OPEN if attempt == 1 else code, None
            output = Spool(), Spool()
            self.mark_key_running()
            if self.supervisor.stop:
                return 128 + self.supervisor.stop, None  # it came while we waited for another run: the job would not hear of it
            if attempt == 1:
                self.budget_from = monotonic()
            code, next_ms = self.attempt(attempt, stdin, *output)
            if not self.supervisor.failed:
                return code, output
            if next_ms is None:
                break
            delay_ms = next_ms
        return code, None

    def breaker_allows(self) -> bool:
        """Whether an attempt may go. Only the first one waits for other runs."""
        if not self.breaker:
            return True
        if self.attempts_made:
            self.ask_breaker(BreakerFile.closed)
        else:
            self.breaker_open = not self.using(self.options.breaker, self.breaker.allow)
        if self.breaker.damaged:
            self.tell("breaker_damaged")
            self.breaker.damaged = False
        if self.breaker_open:
            after_ms = self.breaker.retry_after_ms
            self.supervisor.note(f"the circuit breaker is open: a probe may go in {after_ms} ms")
            if not self.attempts_made:
                self.refused = True
                self.tell("circuit_open", retry_after_ms=after_ms)
        return not self.breaker_open

    def ask_breaker(self, question: "Callable[[BreakerFile], bool]") -> bool:
        """Whether it is closed; as it was, if that cannot be known."""
        if self.breaker:
            breaker = self.breaker

            def ask() -> None:
                self.breaker_open = not question(breaker)

            self.keep(self.options.breaker, ask)
        return not self.breaker_open

    def remaining_s(self) -> float:
        """What is left of the budget."""
        budget_ms = self.policy.max_elapsed_ms
        return FOREVER if budget_ms is None else self.budget_from + budget_ms / 1000 - monotonic()

    def attempt(self, attempt: int, stdin: str, out: Spool, err: Spool) -> tuple[int, int | None]:
        """One attempt. The exit code that comes of it, and the wait before the next, if there is to be one."""
        where: dict[str, int | str] = {"attempt": attempt, "max_attempts": self.policy.max_attempts}
        limit_s = self.prepare(attempt)
        self.note(attempt, "begins")
        started_at, began = utc(time()), monotonic()
        before, self.state = self.state, "unknown"
        try:
            result, failure = self.supervisor.attempt(self.command, self.environment, stdin, out, err, limit_s)
        except (NotStarted, OSError) as error:
            if not self.supervisor.group:
                self.state = before
                for spool in (out, err):
                    os.close(spool.file)  # the store may lack descriptors now
            if isinstance(error, OSError):
                raise
            self.record_in_breaker(None)
            self.tell("launch_error", **where, kind=error.kind, retrying=False)
            return error.code, None
        self.attempts_made, self.state = attempt, self.state_after(result, failure)
        if self.options.stream_stderr:
            self.history.append(err)
        self.measures = {"started_at_utc": started_at, "duration_ms": round(1000 * (monotonic() - began))}
        self.measures |= {"stdout_bytes": out.taken, "stderr_bytes": err.taken}
        if self.supervisor.failed:
            os.close(out.file)
            return self.failed(where, result, failure, err)
        try:
            self.settle_key(SUCCESS, out)  # first: of a run that is killed from here on it is known
        finally:
            self.record_in_breaker(True)
            self.note(attempt, "succeeded")
            self.note_in_log("attempt_succeeded", **where, returncode=0, **self.measures)
            self.measures = {}
        return SUCCESS, None

    def failed(self, where: dict[str, int | str], result: int, failure: OSError | None, err: Spool) -> tuple[int, int | None]:
        """Tell of an attempt, and decide what follows."""
        attempt = int(where["attempt"])
        code = ERROR if failure else exit_code(result)
        worth = code != ERROR and not self.supervisor.stop and self.policy.retries(result)
        goes_on = self.record_in_breaker(False if worth else None)
        next_ms = self.next_ms(attempt) if worth and goes_on else None
        (first, fields), *others = attempt_events(self.supervisor.cut, result, failure, next_ms)
        self.tell(first, **(where if first != "wrapper_error" else {}), **fields)
        if not self.options.stream_stderr:
            self.history.append(err)
        for name, fields in others:
            self.tell(name, **fields)
        how = {TIMED_OUT: "out of time", ERROR: "too much output"}.get(self.supervisor.cut, f"exit code {code}")
        self.note(attempt, f"{how}; {'no other attempt' if next_ms is None else f'the next one in {next_ms} ms'}")
        return code, next_ms

    def prepare(self, attempt: int) -> float:
        """What the job is told. How long it may run, in s."""
        limit_s = self.remaining_s()
        self.environment[b"RETRY_WRAPPER_ATTEMPT"] = b"%d" % attempt
        if limit_s < FOREVER:
            self.environment[b"RETRY_WRAPPER_REMAINING_MS"] = b"%d" % max(0, limit_s * 1000)
        os.ftruncate(self.hint, 0)
        timeout_ms = self.options.attempt_timeout_ms
        return limit_s if timeout_ms is None else min(limit_s, timeout_ms / 1000)

    def state_after(self, result: int, failure: OSError | None) -> str:
        """Of the key: what is known of a job's work. Of one that was cut off, nothing."""
        if not self.supervisor.failed:
            return "succeeded"
        cut_off = self.supervisor.cut or self.supervisor.stop or failure
        return "unknown" if cut_off or (result < 0 and not self.policy.retries(result)) else "failed"

    def record_in_breaker(self, success: bool | None) -> bool:
        """Whether attempts may go on."""
        return self.ask_breaker(lambda breaker: breaker.record(success))

    def next_ms(self, attempt: int) -> int | None:
        """The wait before another attempt, if it is to follow."""
        if self.supervisor.had_terminal:
            return None
        elapsed_ms = 1000 * (monotonic() - self.budget_from)
        return self.policy.delay_ms(attempt, elapsed_ms, hint_ms(os.pread(self.hint, 1000, 0)))

    def note(self, attempt: int, text: str) -> None:
        self.supervisor.note(f"attempt {attempt} of {self.policy.max_attempts}: {text}")

    def deliver(self, output: tuple[Spool, Spool]) -> int:
        """Give our caller a success's stdout, then its stderr. The exit code: undelivered, it was none."""
        for outlet, spool in zip(self.supervisor.outlets, output, strict=True):
            outlet.queue += [spool] if spool.size else []
            self.supervisor.flush()
            failure = None if spool.whole and spool.sent == spool.size else outlet.failure
            try:
                os.close(os.dup(outlet.fd))  # a network file system may tell of its failure only at a close
            except OSError as error:
                failure = failure or error
            if isinstance(failure, ConnectionError):
                return BROKEN_PIPE
            if failure:
                self.told += [event("wrapper_error", **wrapper_error(failure)), output[1]]
                self.supervisor.flush()
                return ERROR
        return SUCCESS


# ---- in-process use


def pauses(
    policy: RetryPolicy, retry_if: "Callable[[Exception], bool]", clock: "Callable[[], float]"
) -> "Callable[[Exception], float]":
    """For one call: after an error, how long to wait in s before the next attempt; raises the error if there is to be none."""
    began, attempts = clock(), iter(range(1, policy.max_attempts + 1))

    def pause_s(error: Exception) -> float:
        delay_ms = policy.delay_ms(next(attempts), 1000 * (clock() - began)) if retry_if(error) else None
        if delay_ms is None:
            raise error
        return delay_ms / 1000

    return pause_s


def retry(
    policy: RetryPolicy | None = None,
    *,
    retry_if: "Callable[[Exception], bool]" = lambda error: True,
    clock: "Callable[[], float]" = monotonic,
    sleep: "Callable[[float], object]" = sleep,
) -> "Callable[[Callable[P, T]], Callable[P, T]]":
    """Decorate a function: it is called again after an exception that is worth it; the last one is raised. Times in s."""
    from functools import wraps

    def decorate(function: "Callable[P, T]") -> "Callable[P, T]":
        @wraps(function)
        def call(*args: "P.args", **kwargs: "P.kwargs") -> "T":
            pause_s = pauses(policy or RetryPolicy(), retry_if, clock)
            while True:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    sleep(pause_s(error))

        return call

    return decorate


def async_retry(
    policy: RetryPolicy | None = None,
    *,
    retry_if: "Callable[[Exception], bool]" = lambda error: True,
    clock: "Callable[[], float]" = monotonic,
    sleep: "Callable[[float], Awaitable[object]] | None" = None,
) -> "Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]":
    """As retry, for a coroutine function. Cancellation is no Exception: it passes through at once, out of a wait too."""
    from functools import wraps

    def decorate(function: "Callable[P, Awaitable[T]]") -> "Callable[P, Awaitable[T]]":
        @wraps(function)
        async def call(*args: "P.args", **kwargs: "P.kwargs") -> "T":
            from asyncio import sleep as asyncio_sleep

            pause_s = pauses(policy or RetryPolicy(), retry_if, clock)
            while True:
                try:
                    return await function(*args, **kwargs)
                except Exception as error:
                    delay_s = pause_s(error)
                await (sleep or asyncio_sleep)(delay_s)

        return call

    return decorate


# ---- command line


class Show(argparse.Action):
    """--help and --version: write the text and end, whatever else is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> "NoReturn":
        write_all(1, (parser.format_help() if self.dest == "help" else f"retry_command.py {VERSION}\n").encode())
        raise Ending(SUCCESS)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> "NoReturn":
        raise Ending(USAGE, f"{self.format_usage()}{self.prog}: error: {message}\n".encode("utf-8", "backslashreplace"))

    def format_help(self) -> str:
        codes = [f"  {code!s:<7} {when}" for code, _, when in EXIT_CODES]
        return "\n".join([__doc__ or "", super().format_help(), "exit codes:", *codes, ""])


def formatter(prog: str) -> argparse.HelpFormatter:
    """Of a fixed width: to ask for the terminal's, argparse imports more than all else together, at each start."""
    return argparse.HelpFormatter(prog, width=80)


def whole_number(lowest: int, highest: int) -> "Callable[[str], int]":
    def parse_number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest} to {highest}")
        return int(text)

    return parse_number


def codes(text: str) -> list[int]:
    """Exit codes as numbers, ranges and names of sysexits.h, with commas between."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = str(getattr(os, f"EX_{part.removeprefix('EX_')}", part)).partition("-")
        ends = [first, last if dash else first]
        if not (all(end.isascii() and end.isdigit() for end in ends) and 1 <= int(ends[0]) <= int(ends[1]) <= 124):
            raise argparse.ArgumentTypeError(f"{part!r} is no exit code from 1 to 124, range of them or name of sysexits.h")
        found += range(int(ends[0]), int(ends[1]) + 1)
    return found


def signals(text: str) -> list[int]:
    """The return codes of jobs that die of the signals named, with commas between."""
    found: list[int] = []
    for part in text.split(","):
        number = signal.Signals.__members__.get(f"SIG{part.removeprefix('SIG')}")
        if number is None:
            raise argparse.ArgumentTypeError(f"{part!r} is no name of a signal")
        found.append(-number)
    return found


def check_key(parser: Parser, options: argparse.Namespace) -> None:
    key, store = options.idempotency_key, options.idempotency_store
    if key is not None and (not key or not key.isprintable()):
        parser.error("argument --idempotency-key: empty, or not printable text")
    if store is not None and key in (None, "auto"):
        parser.error("argument --idempotency-store: needs an --idempotency-key, and not auto")
    if options.rerun_unknown and store is None:
        parser.error("argument --rerun-unknown: needs an --idempotency-store")


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, left of the first `--`, and the command right of it, untouched; raises Ending for bad ones."""
    usage = "%(prog)s --retry-code CODES [OPTIONS] -- COMMAND [ARG ...]"
    parser = Parser(usage=usage, formatter_class=formatter, allow_abbrev=False, add_help=False)
    about = "exit codes worth another attempt, 1 to 124: 75, 69-71, TEMPFAIL (sysexits), or a list of these; repeatable, required"
    parser.add_argument("--retry-code", required=True, action="extend", type=codes, metavar="CODES", help=about)
    about = "signals whose death of the job is worth another attempt: KILL, or a list; repeatable"
    parser.add_argument("--retry-signal", default=[], action="extend", type=signals, metavar="NAMES", help=about)
    for name, lowest, highest, default, text in NUMBERS:
        about = f"{text}: {lowest} to {highest} (default {'off' if default is None else default})"
        parser.add_argument(name, type=whole_number(lowest, highest), default=default, metavar="N", help=about)
    for name, values, text in CHOICES:
        parser.add_argument(name, choices=values, default=values[0], help=f"{text} (default {values[0]})")
    for name, metavar, text in TEXTS:
        parser.add_argument(name, metavar=metavar, help=text)
    for name, text in FLAGS:
        parser.add_argument(name, action="store_true", help=text)
    parser.add_argument("-h", "--help", action=Show, nargs=0, help="show this and end")
    parser.add_argument("--version", action=Show, nargs=0, help="show the version and end")
    split = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:split])
    command = words[split + 1 :]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{'' if '--' in words else '; -- COMMAND is missing'}")
    if options.initial_delay_ms > options.max_delay_ms:
        parser.error("argument --initial-delay-ms: above --max-delay-ms")
    check_key(parser, options)
    if not command and not options.plan:
        parser.error("-- COMMAND is missing")
    return options, command


def main(argv: list[str] | None = None) -> int:
    """Run the command line given (sys.argv's by default) and return the exit code."""
    watched = take_over_signals()
    try:
        fill_standard_descriptors()
        options, command = parse(sys.argv[1:] if argv is None else argv)
        policy = RetryPolicy(
            [*options.retry_code, *options.retry_signal],
            max_attempts=options.max_attempts,
            initial_delay_ms=options.initial_delay_ms,
            backoff_factor=options.backoff_factor,
            max_delay_ms=options.max_delay_ms,
            max_elapsed_ms=options.max_elapsed_ms,
            jitter=options.jitter,
        )
        if options.plan:
            write_all(1, plan(policy, options.attempt_timeout_ms, options.kill_after_ms).encode())
            return SUCCESS
        return Run(options, policy, command, Supervisor(options, watched)).run()
    except Ending as ending:
        last = ending
    except BrokenPipeError:
        last = Ending(BROKEN_PIPE)
    except Exception as error:
        last = Ending(ERROR, event("wrapper_error", **wrapper_error(error)))
    for number in watched & STOP_SIGNALS.keys():
        signal.signal(number, signal.SIG_DFL)  # a stuck stderr yields to a stop signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    say(last.text)
    return last.code


if __name__ == "__main__":
    os._exit(main())
