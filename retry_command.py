#!/usr/bin/env -S python3 -IS
"""Run a command again, but only for the exit codes that you name.

    retry_command.py --retry-code N [OPTIONS] -- COMMAND [ARG ...]

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
    from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
    from time import monotonic
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
    from collections.abc import Callable
    from typing import NoReturn

VERSION = "0.1.0"

EXIT_CODES = (  # code, name, when
    (0, "success", "the job succeeded"),
    (2, "usage", "bad arguments; nothing was started"),
    (125, "error", "the job could not be started, or the wrapper failed: an OS error, undelivered output"),
    (126, "denied", "the program is not executable, a directory or the empty string"),
    (127, "not_found", "there is no such program"),
    (130, "interrupted", "Ctrl-C (SIGINT)"),
    (141, "broken_pipe", "the reader of our output went away; nothing is said"),
    ("other", "job", "the job's own exit code, 128+n when signal n killed it, or 128+n after a stop signal n to us"),
)
SUCCESS, USAGE, ERROR, DENIED, NOT_FOUND, INTERRUPTED, BROKEN_PIPE = (int(code) for code, name, _ in EXIT_CODES if name != "job")

NUMBERS = (  # option, lowest, highest, default, help
    ("--max-attempts", 1, 10, 3, "attempts in all, the first included"),
    ("--initial-delay-ms", 0, 60_000, 1000, "the wait before attempt 2"),
    ("--backoff-factor", 1, 10, 2, "each later wait is the previous one times this"),
    ("--max-delay-ms", 0, 60_000, 30_000, "no wait is longer"),
    ("--kill-after-ms", 0, 604_800_000, 5000, "the grace from a stop signal to SIGKILL"),
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
DEATH_TAKES_S = 10.0  # from SIGKILL to the end of a process with much memory; in vain for one that hangs in the kernel
TICK_S = 0.1
CHUNK = 1 << 20
FOREVER = float("inf")
JSON_ESCAPES = {number: f"\\u{number:04x}" for number in range(32)} | {
    ord(char): f"\\{letter}" for char, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}


class Options(argparse.Namespace):
    retry_code: list[int]
    max_attempts: int
    initial_delay_ms: int
    backoff_factor: int
    max_delay_ms: int
    kill_after_ms: int


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


# ---- policy: no I/O


class RetryPolicy:
    """When to try again, and how long to wait first."""

    def __init__(
        self, retry_codes: frozenset[int], max_attempts: int, initial_delay_ms: int, backoff_factor: int, max_delay_ms: int
    ):
        self.retry_codes, self.max_attempts = retry_codes, max_attempts
        self.initial_delay_ms, self.backoff_factor, self.max_delay_ms = initial_delay_ms, backoff_factor, max_delay_ms

    def retries(self, attempt: int, returncode: int) -> bool:
        """Whether another attempt follows attempt number `attempt` (from 1), which ended so."""
        return attempt < self.max_attempts and returncode in self.retry_codes

    def delay_ms(self, attempt: int) -> int:
        """The wait after attempt number `attempt` (from 1), in ms: capped exponential backoff, without jitter
        (AWS Architecture Blog, "Exponential Backoff and Jitter")."""
        uncapped: int = self.initial_delay_ms * self.backoff_factor ** (attempt - 1)
        return min(uncapped, self.max_delay_ms)


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


# ---- process layer


def fill_standard_descriptors() -> None:
    """Give closed descriptors 0 to 2 a /dev/null that refuses their use, before another file gets these numbers."""
    for fd, contrary in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, contrary), True)  # open(2) takes the lowest free number: fd


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


def start(command: list[str], environment: dict[bytes, bytes], out: int, err: int) -> int:
    """Start the job in a process group of its own, or raise NotStarted. Its process id, which is the group's too."""
    default = [signal.SIGPIPE, signal.SIGXFSZ]  # ignored by CPython
    if hand_terminal(os.getpgrp(), os.getpgrp()):  # it is ours
        default += [signal.SIGTTIN, signal.SIGTTOU]  # how a job asks for the terminal; `bash -ic` has them ignored
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        if not command[0]:
            raise PermissionError  # posix_spawnp raises ValueError for it
        return os.posix_spawnp(
            command[0],
            command,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((null, out, err))],
            setpgroup=0,
            setsigmask=ENTRY_MASK,
            setsigdef=default,
        )
    except OSError as error:
        raise NotStarted(error) from error
    finally:
        os.close(null)


class Spool:
    """One output stream of an attempt: a pipe for the job, emptied into a temporary file."""

    def __init__(self) -> None:
        self.file = temporary_file()
        self.size = 0  # bytes in the file
        self.failure: OSError | None = None  # why the rest was dropped
        self.spliced = True  # inside the kernel, where the file system can
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        try:
            fcntl(self.reader, F_SETPIPE_SZ, CHUNK)
        except OSError:
            pass  # the user's share of pipe memory is used up

    def drain(self) -> int:
        """Take what is in the pipe. The count of bytes, 0 when its writers are gone; BlockingIOError when it is empty.

        A full disk must not break the job: from then on its output is read and dropped.
        """
        try:
            if self.spliced:
                moved = os.splice(self.reader, self.file, CHUNK, flags=os.SPLICE_F_NONBLOCK)
                self.size += moved
                return moved
            data = os.read(self.reader, CHUNK)
            if not self.failure:
                write_all(self.file, data)
                self.size += len(data)
            return len(data)
        except BlockingIOError:
            raise
        except OSError as error:
            if not self.spliced:
                self.failure = error
            self.spliced = False  # whyever it was refused: a plain write tells of a full disk too
            return self.drain()

    def settle(self) -> None:
        """Take what is in the pipe now: all that an ended job wrote. A background process may write without end."""
        left = fcntl(self.reader, F_GETPIPE_SZ)
        try:
            while left > 0:
                left -= self.drain() or left
        except BlockingIOError:
            pass

    def deliver(self, target: int) -> None:
        """Write the file to a descriptor of our caller's, in the fastest way that this takes."""
        offset = 0
        ways = [
            lambda: os.splice(self.file, target, CHUNK, offset_src=offset),  # to a pipe
            lambda: os.sendfile(target, self.file, offset, CHUNK),  # to most others
            lambda: os.write(target, os.pread(self.file, CHUNK, offset)),  # `>>`
        ]
        while offset < self.size:
            try:
                offset += ways[0]()
            except BlockingIOError:  # our caller made it non-blocking
                select.select([], [target], [])
            except OSError:
                if len(ways) == 1:
                    raise
                del ways[0]  # whyever it was refused: the plain way tells what is really wrong
        os.close(os.dup(target))  # a network file system may tell of its failure only at a close

    def ends_line(self) -> bool:
        return not self.size or os.pread(self.file, 1, self.size - 1) == b"\n"


class Supervisor:
    """Runs attempts, each in a process group of its own, and passes signals on to them.

    Signals become bytes in a pipe (signal.set_wakeup_fd), so that one poll(2) sees output, ends, signals and deadlines,
    and none of them can slip in between a look and the wait.
    """

    def __init__(self, kill_after_ms: int, watched: set[int]):
        self.kill_after_s = kill_after_ms / 1000
        self.watched = watched
        self.group = 0  # of the running attempt; its leader is the job, which is not reaped before the group is done with
        self.end: os.waitid_result | None = None  # the job's
        self.spools: dict[int, Spool] = {}  # by the descriptor that is polled
        self.stop = 0  # the first stop signal
        self.stopped_at = self.kill_at = FOREVER
        self.had_terminal = False
        self.bell, ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poll = select.poll()
        self.poll.register(self.bell, select.POLLIN)
        signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
        for number in watched:
            signal.signal(number, noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    def run(self, command: list[str], environment: dict[bytes, bytes], out: Spool, err: Spool) -> int:
        """One attempt, to its end. The return code, or NotStarted. The job is left unreaped: see `finish`."""
        try:
            self.group = start(command, environment, out.writer, err.writer)
        finally:
            os.close(out.writer)
            os.close(err.writer)
        for spool in (out, err):
            self.spools[spool.reader] = spool
            self.poll.register(spool.reader, select.POLLIN)
        try:
            while not self.end:
                self.serve()
        except BaseException:
            self.kill()
            raise
        out.settle()
        err.settle()
        return returncode(self.end)

    def finish(self, out: Spool, err: Spool, leave_rest: bool) -> OSError | None:
        """Done with the attempt: end what else it started, unless that is left alone, reap the job, take the terminal
        back. What went wrong, if its output was not kept whole or something of it could not be ended."""
        failure = out.failure or err.failure
        if failure or not leave_rest:
            try:
                self.clear_group()
            except TimeoutError as error:
                failure = failure or error
        for spool in (out, err):
            spool.settle()
            if self.spools.pop(spool.reader, None):
                self.poll.unregister(spool.reader)
            os.close(spool.reader)
        hand_terminal(self.group, os.getpgrp())
        os.waitid(os.P_PID, self.group, os.WEXITED)
        self.group, self.end, self.kill_at = 0, None, FOREVER
        self.reap()
        return failure or out.failure or err.failure

    def wait(self, delay_ms: int) -> bool:
        """Wait out a delay. False: told to stop."""
        until = monotonic() + delay_ms / 1000
        while True:
            self.serve(until)
            if self.stop or monotonic() >= until:
                return not self.stop

    def serve(self, until: float = FOREVER) -> None:
        """Wait for output, a signal or a deadline, no longer than until then, and act on it."""
        wake_at = min(until, self.kill_at)
        for fd, _ in self.poll.poll(None if wake_at == FOREVER else max(0, wake_at - monotonic()) * 1000):
            if fd == self.bell:
                for number in os.read(self.bell, 4096):
                    self.take(number)
            else:
                self.drain(fd)
        if monotonic() >= self.kill_at:
            self.kill()

    def drain(self, fd: int) -> None:
        try:
            if not self.spools[fd].drain():
                self.poll.unregister(fd)
                del self.spools[fd]
        except BlockingIOError:
            pass

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
        if not self.stop:
            self.stop, self.stopped_at = number, now
            self.kill_at = min(self.kill_at, now + self.kill_after_s)
        if now - self.stopped_at >= STOPS_AGAIN_AFTER_S:
            self.kill()
        else:
            self.send(number)
            if b"T" in group_states(self.group):
                self.send(signal.SIGCONT)  # what is stopped takes no other signal

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
        elif self.stop:
            self.send(signal.SIGCONT)  # to its end
        else:
            hand_terminal(self.group, os.getpgrp())
            if not stop_ourselves(number) and number != signal.SIGSTOP:  # then the job, in our group, had not stopped either
                if number != signal.SIGTSTP:
                    self.send(signal.SIGHUP)  # it would wait for a terminal that it never gets
                self.send(signal.SIGCONT)

    def clear_group(self) -> None:
        """End what the attempt left behind: TERM and CONT, the grace, KILL. TimeoutError: something outlives even that."""
        if group_states(self.group):
            self.kill_at = min(self.kill_at, monotonic() + self.kill_after_s)
            if self.stop != signal.SIGTERM:  # it has got that, and may be cleaning up
                self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)
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

    def write_from_now_on(self) -> None:
        """No job is left. A stop signal now ends us at once, also out of a blocked write(2): see `break_off`.

        The timer is for a signal that comes between the interpreter's last look and the write: the next tick tells of it.
        """
        for number in self.watched & TERMINAL_STOPS:
            signal.signal(number, signal.SIG_DFL)  # with a handler, `stty tostop` would make us spin
        for number in self.watched & STOP_SIGNALS.keys():
            signal.signal(number, self.break_off)
        self.serve(monotonic())  # a signal that came before may still lie in the pipe
        self.kill_at = monotonic() + max(self.kill_after_s, STOPS_AGAIN_AFTER_S) if self.stop else FOREVER
        signal.signal(signal.SIGALRM, self.break_off)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)

    def break_off(self, number: int, _frame: object) -> None:
        """End us, out of a blocked write too: for a new stop signal or one repeated later, or when our caller has not
        taken the output of a stopped run for as long as a job's grace."""
        now = monotonic()
        if now < self.kill_at if number == signal.SIGALRM else self.stop and now < self.stopped_at + STOPS_AGAIN_AFTER_S:
            return
        stop = self.stop or number
        if select.select([], [2], [], 0)[1]:
            say(event("interrupted", kind=STOP_SIGNALS[stop]))
        os._exit(128 + stop)


def noted(_number: int, _frame: object) -> None:
    """The wake-up descriptor has it already."""


# ---- the run


def run(policy: RetryPolicy, command: list[str], supervisor: Supervisor) -> int:
    """All attempts, then the output: of the success, or the history of the failures. The exit code."""
    history: list[bytes | Spool] = []
    try:
        code, output = run_attempts(policy, command, supervisor, history)
    except OSError as error:
        code, output = ERROR, ()
        history.append(event("wrapper_error", kind=type(error).__name__))
    supervisor.write_from_now_on()
    if output and supervisor.stop != signal.SIGINT:
        code = deliver(output)
    else:
        if supervisor.stop:
            code = 128 + supervisor.stop
            history.append(event("interrupted", kind=STOP_SIGNALS[supervisor.stop]))
        tell(history)
    signal.setitimer(signal.ITIMER_REAL, 0)  # no tick while an installed command's Python winds up, with no handler left
    return code


def run_attempts(
    policy: RetryPolicy, command: list[str], supervisor: Supervisor, history: list[bytes | Spool]
) -> tuple[int, tuple[Spool, ...]]:
    """Attempts and waits, up to a success, the last failure or a stop signal. The exit code and a success's output.

    The history gets what is to be told if all fails.
    """
    environment = given_environment()
    environment[b"RETRY_WRAPPER_MAX_ATTEMPTS"] = b"%d" % policy.max_attempts
    attempt = delay_ms = 0
    while supervisor.wait(delay_ms):
        attempt += 1
        environment[b"RETRY_WRAPPER_ATTEMPT"] = b"%d" % attempt
        where = {"attempt": attempt, "max_attempts": policy.max_attempts}
        out, err = Spool(), Spool()
        try:
            result = supervisor.run(command, environment, out, err)
        except NotStarted as error:
            history.append(event("launch_error", **where, kind=error.kind, retrying=False))
            return error.code, ()
        failed = result != 0 or supervisor.stop == signal.SIGINT
        failure = supervisor.finish(out, err, leave_rest=not failed)
        if not failed and not failure:
            return SUCCESS, (out, err)
        os.close(out.file)
        retrying = policy.retries(attempt, result) and not (failure or supervisor.stop or supervisor.had_terminal)
        delay_ms = policy.delay_ms(attempt)
        trouble = [event("wrapper_error", kind=type(failure).__name__)] if failure else []
        if failed:
            more = {"next_delay_ms": delay_ms} if retrying else {}
            history += [event("attempt_failed", **where, returncode=result, retrying=retrying, **more), err, *trouble]
        else:
            history += [*trouble, err]
        if failure:
            return ERROR, ()
        if not retrying:
            return exit_code(result), ()
    return SUCCESS, ()  # told to stop


def deliver(output: tuple[Spool, ...]) -> int:
    """Give our caller a success's stdout and stderr. The exit code: undelivered, it was none."""
    for fd, spool in enumerate(output, 1):
        try:
            spool.deliver(fd)
        except ConnectionError:
            return BROKEN_PIPE
        except OSError as error:
            tell([event("wrapper_error", kind=type(error).__name__), *output[fd:]])
            return ERROR
    return SUCCESS


def tell(history: list[bytes | Spool]) -> None:
    """Write to stderr, ending each last line; an ending keeps its exit code when that is impossible."""
    try:
        for part in history:
            if isinstance(part, bytes):
                write_all(2, part)
            else:
                part.deliver(2)
                write_all(2, b"" if part.ends_line() else b"\n")
    except OSError:
        pass


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


def whole_number(lowest: int, highest: int) -> "Callable[[str], int]":
    def parse_number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest} to {highest}")
        return int(text)

    return parse_number


def parse(words: list[str]) -> tuple[Options, list[str]]:
    """Our options, left of the first `--`, and the command right of it, untouched; raises Ending for bad ones."""
    parser = Parser(usage="%(prog)s --retry-code N [OPTIONS] -- COMMAND [ARG ...]", allow_abbrev=False, add_help=False)
    code = "an exit code that is worth another attempt, 1 to 124; repeatable, required"
    parser.add_argument("--retry-code", required=True, action="append", type=whole_number(1, 124), metavar="N", help=code)
    for name, lowest, highest, default, text in NUMBERS:
        about = f"{text}: {lowest} to {highest} (default {default})"
        parser.add_argument(name, type=whole_number(lowest, highest), default=default, metavar="N", help=about)
    parser.add_argument("-h", "--help", action=Show, nargs=0, help="show this and end")
    parser.add_argument("--version", action=Show, nargs=0, help="show the version and end")
    split = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:split], Options()), words[split + 1 :]
    if options.initial_delay_ms > options.max_delay_ms:
        parser.error("argument --initial-delay-ms: above --max-delay-ms")
    if not command:
        parser.error("-- COMMAND is missing")
    return options, command


def main(argv: list[str] | None = None) -> int:
    """Run the command line given (sys.argv's by default) and return the exit code."""
    watched = take_over_signals()
    try:
        fill_standard_descriptors()
        options, command = parse(sys.argv[1:] if argv is None else argv)
        policy = RetryPolicy(
            frozenset(options.retry_code),
            options.max_attempts,
            options.initial_delay_ms,
            options.backoff_factor,
            options.max_delay_ms,
        )
        return run(policy, command, Supervisor(options.kill_after_ms, watched))
    except Ending as ending:
        last = ending
    except BrokenPipeError:
        last = Ending(BROKEN_PIPE)
    except Exception as error:
        last = Ending(ERROR, event("wrapper_error", kind=type(error).__name__))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a stuck stderr yields to a stop signal
    say(last.text)
    return last.code


if __name__ == "__main__":
    os._exit(main())
