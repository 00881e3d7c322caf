#!/usr/bin/env -S python3 -IS
"""Never run the same command twice at once on this host.

    single_run.py --lock LOCK_FILE -- COMMAND [ARG ...]

Takes an exclusive flock(2) on LOCK_FILE without waiting, then runs COMMAND, which inherits the lock: while any process
that has it lives, the lock is held, also when this wrapper was killed. The file is created where it is missing and
never deleted; its presence and content decide nothing.

Example: single_run.py --lock /run/bill/bill.lock -- /opt/bill/job --month 2026-10
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("single_run.py: needs Python 3.10 or newer")
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
    import os
    import re
    import select
    from fcntl import F_DUPFD, LOCK_EX, LOCK_NB, fcntl, flock
    from stat import S_ISREG
    from time import gmtime, strftime
except KeyboardInterrupt:
    if __name__ != "__main__":
        raise
    sys.exit(130)
except Exception:  # out of memory or descriptors
    if __name__ != "__main__" or sys.stderr is None:
        raise
    sys.stderr.write('{"status":"error","reason":"unexpected_error"}\n')
    sys.exit(3)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

VERSION = "0.1.0"

EXIT_CODES = (  # code, name, when
    (0, "success", "the command succeeded"),
    (2, "usage", "bad arguments; nothing was opened or started"),
    (3, "error", "no lock, or the command could not be started: the reason is on stderr"),
    (75, "busy", "another run holds the lock; nothing was started"),
    (130, "interrupted", "interrupted by SIGINT, whatever the command then returned"),
    ("other", "command", "the command's own exit code, or 128+n when signal n killed it"),
)
SUCCESS, USAGE, ERROR, BUSY, INTERRUPTED = (int(code) for code, name, _ in EXIT_CODES if name != "command")

REASONS = (  # of exit code 3, and when
    ("lock_parent_not_found", "the lock file's folder does not exist"),
    ("lock_permission_denied", "the lock file may not be opened or created"),
    ("lock_open_failed", "it cannot be opened: a directory, a symlink, a socket, a name too long"),
    ("lock_stat_failed", "its type cannot be read"),
    ("lock_not_regular_file", "it is a FIFO or a device"),
    ("lock_acquire_failed", "flock(2) failed, for another reason than a holder"),
    ("lock_file_has_foreign_content", "it holds something else than our record, and was left as it is"),
    ("lock_metadata_write_failed", "the record could not be written"),
    ("command_not_found", "there is no such program"),
    ("command_not_executable", "the program may not be executed, or is a directory"),
    ("child_start_failed", "the program could not be started for another reason"),
    ("unexpected_os_error", "an operating system error elsewhere"),
    ("unexpected_error", "a defect of this program"),
)

OPEN_FAILURES = {FileNotFoundError: "lock_parent_not_found", PermissionError: "lock_permission_denied"}
START_FAILURES = {
    FileNotFoundError: "command_not_found",
    NotADirectoryError: "command_not_found",
    PermissionError: "command_not_executable",
}

STOP_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
TERMINAL_SIGNALS = {  # what the kernel sends to the terminal's whole foreground or reading process group
    signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH,
}  # fmt: skip
JSON_ESCAPES = {number: f"\\u{number:04x}" for number in range(32)} | {
    ord(char): f"\\{letter}" for char, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}
RECORD = '{{"format_version":1,"owner_pid":{},"acquired_at_utc":"{}"}}\n'
RECORD_SHAPE = RECORD.format("0", "0-0-0T0:0:0Z").replace("1", "0").encode()  # each number a 0


class Options(argparse.Namespace):
    lock: str


class Ending(Exception):
    """An ending of our own: exit code and, unless empty, the fields of its JSON line."""

    def __init__(self, code: int, **fields: str):
        super().__init__(code, fields)
        self.code, self.fields = code, fields


# ---- policy: no I/O


def returncode(end: os.waitid_result) -> int:
    """How a process ended: its exit code, or -n for death by signal n."""
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def exit_code(returncode: int) -> int:
    """The shell's number for it: 128+n for death by signal n (POSIX, Shell Command Language, 2.8.2), at most 255."""
    return returncode if returncode >= 0 else min(128 - returncode, 255)


def json_value(value: str | int) -> str:
    if isinstance(value, int):
        return str(value).lower()  # True is an int too
    return '"' + os.fsencode(value).decode("utf-8", "surrogateescape").translate(JSON_ESCAPES) + '"'


def json_line(**fields: str | int) -> bytes:
    """One line as json.dumps(fields, ensure_ascii=False) writes it; bytes that are not UTF-8 as \\udcXX.

    Importing json costs as much as a bare interpreter's start, and could fail where descriptors have run out.
    """
    pairs = ",".join(f'"{name}":{json_value(value)}' for name, value in fields.items())
    return f"{{{pairs}}}\n".encode("utf-8", "backslashreplace")


def is_record(content: bytes) -> bool:
    """Whether a lock file holds nothing but a record of ours, or its beginning (nothing at all, where we were cut off)."""
    return RECORD_SHAPE.startswith(re.sub(rb"[0-9]{1,20}", b"0", content))


def is_from_terminal(info: signal.struct_siginfo) -> bool:
    """Whether the kernel (si_code > 0) has sent it to each process of our group."""
    return info.si_code > 0 and info.si_signo in TERMINAL_SIGNALS


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
    """Block every signal that the job is to be told of, and return them: all but those ignored when we were started.

    An ignored one must not be blocked: sigtimedwait(2) would return it. SIGPIPE and SIGXFSZ are never in, as CPython
    itself ignores them; SIGCHLD always is, as the kernel throws exit statuses away where it is ignored.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    watched = {int(number) for number in catchable if signal.getsignal(number) != signal.SIG_IGN}
    if signal.SIGINT in watched:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt
    signal.pthread_sigmask(signal.SIG_SETMASK, watched)
    return watched


def stop_ourselves(number: int) -> bool:
    """Stop as the job has, until SIGCONT: by the signal's default action, so that the kernel's rule holds. False: our group
    is one that no shell could continue (POSIX: orphaned), which goes on.

    SIGSTOP knows no such rule, so SIGTSTP stands in, and only where there is a terminal: elsewhere nobody's `fg` would
    wake us, and SIGTERM must not find us stopped.
    """
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


def write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # our caller made it non-blocking
            select.select([], [fd], [])


def say(text: bytes) -> None:
    """Write last words to stderr, or not at all: an ending keeps its exit code. A stuck stderr yields to a stop signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        write_all(2, text)
    except OSError:
        pass


def failed(reason: str, **about: str) -> Ending:
    return Ending(ERROR, status="error", reason=reason, **about)


def open_lock(path: str) -> int:
    """Open or create the file. Nothing that lies there may hang us, be followed or become our terminal."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_CREAT, 0o600)
    except PermissionError as error:
        try:
            return os.open(path, flags)  # fs.protected_regular forbids O_CREAT on another's file in a sticky folder
        except FileNotFoundError:
            raise error from None


def take_lock(path: str) -> None:
    """Lock the file and write our record into it, or raise Ending. The lock lives as long as its descriptor.

    That is 10 or higher, out of the way of a job's own `exec 3>log`, and inheritable. Into a file of another user or
    with a second name no record is written.
    """
    step = "lock_open_failed"
    try:
        fd = open_lock(path)
        step = "lock_stat_failed"
        status = os.fstat(fd)
        if not S_ISREG(status.st_mode):
            raise failed("lock_not_regular_file", lock=path)
        step = "lock_acquire_failed"
        flock(fd, LOCK_EX | LOCK_NB)
        held = fcntl(fd, F_DUPFD, 10)
        os.close(fd)
        if not is_record(os.pread(held, 4096, 0)):
            raise failed("lock_file_has_foreign_content", lock=path)
        step = "lock_metadata_write_failed"
        if status.st_nlink == 1 and status.st_uid == os.geteuid():
            os.ftruncate(held, 0)
            write_all(held, RECORD.format(os.getpid(), strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())).encode())
    except OSError as error:
        if step == "lock_acquire_failed" and isinstance(error, BlockingIOError):
            raise Ending(BUSY, status="busy", reason="lock_held", lock=path) from error
        reason = OPEN_FAILURES.get(type(error), step) if step == "lock_open_failed" else step
        raise failed(reason, lock=path) from error


def start(command: list[str]) -> int:
    """Start the command and return its process id, or raise Ending."""
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        if not command[0]:
            raise PermissionError  # posix_spawnp raises ValueError for it
        return os.posix_spawnp(
            command[0],
            command,
            given_environment(),
            file_actions=[(os.POSIX_SPAWN_DUP2, null, 0)],
            setsigmask=ENTRY_MASK,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # ignored by CPython
        )
    except OSError as error:
        raise failed(START_FAILURES.get(type(error), "child_start_failed"), command=command[0]) from error


def reap(job: int) -> os.waitid_result | None:
    """Collect every child that ended (as PID 1: orphans too). The job's end, when it is among them."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return None
        if info is None or (info.si_pid == job and info.si_code != os.CLD_STOPPED):
            return info
        if info.si_pid == job:
            stop_ourselves(info.si_status)


def supervise(command: list[str], watched: set[int]) -> int:
    """Run the command to its end, passing signals on. The exit code.

    The signals stay blocked and are taken by sigwaitinfo(2), so that none is lost or doubled, at whatever moment.
    """
    told = signal.sigtimedwait(STOP_SIGNALS & watched, 0)
    if told:
        return 128 + told.si_signo  # nothing is started any more
    job = start(command)
    early = signal.sigpending()  # of what the terminal sent, the job may have missed these
    interrupted = False
    while True:
        info = signal.sigwaitinfo(watched)
        interrupted = interrupted or info.si_signo == signal.SIGINT
        if info.si_signo == signal.SIGCHLD:
            end = reap(job)
            if end:
                return INTERRUPTED if interrupted else exit_code(returncode(end))
        elif info.si_signo in early or not is_from_terminal(info) or os.getpgid(job) != os.getpgrp():
            early.discard(info.si_signo)
            try:
                os.kill(job, info.si_signo)
            except PermissionError:
                pass  # it runs as another user now


# ---- command line


class Show(argparse.Action):
    """--help and --version: write the text and end, whatever else is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> "NoReturn":
        write_all(1, (parser.format_help() if self.dest == "help" else f"single_run.py {VERSION}\n").encode())
        raise Ending(SUCCESS)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> "NoReturn":
        raise Ending(USAGE, status="error", reason="invalid_arguments", message=message)

    def format_help(self) -> str:
        codes = [f"  {code!s:<7} {when}" for code, _, when in EXIT_CODES]
        reasons = [f"  {reason:<30} {when}" for reason, when in REASONS]
        return "\n".join([__doc__ or "", super().format_help(), "exit codes:", *codes, "\nreasons of exit code 3:", *reasons, ""])


def parse(words: list[str]) -> tuple[Options, list[str]]:
    """Our options, left of the first `--`, and the command right of it, untouched; raises Ending for bad ones."""
    parser = Parser(usage="%(prog)s --lock LOCK_FILE -- COMMAND [ARG ...]", allow_abbrev=False, add_help=False)
    parser.add_argument(
        "--lock", required=True, metavar="LOCK_FILE", help="the file whose lock decides; in a folder of its users"
    )
    parser.add_argument("-h", "--help", action=Show, nargs=0, help="show this and end")
    parser.add_argument("--version", action=Show, nargs=0, help="show the version and end")
    split = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:split], Options()), words[split + 1 :]
    if not options.lock:
        parser.error("argument --lock: LOCK_FILE is empty")
    if not command:
        parser.error("-- COMMAND is missing")
    return options, command


def main(argv: list[str] | None = None) -> int:
    """Run the command line given (sys.argv's by default) and return the exit code."""
    watched = take_over_signals()
    try:
        fill_standard_descriptors()
        options, command = parse(sys.argv[1:] if argv is None else argv)
        take_lock(options.lock)
        return supervise(command, watched)
    except Ending as ending:
        last = ending
    except OSError:
        last = failed("unexpected_os_error")
    except Exception:
        last = failed("unexpected_error")
    if last.fields:
        say(json_line(**last.fields))
    return last.code


if __name__ == "__main__":
    os._exit(main())
