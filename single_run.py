#!/usr/bin/env -S python3 -IS
"""Never run the same command twice at once on this host.

    single_run.py --lock LOCK_FILE [OPTIONS] -- COMMAND [ARG ...]
    single_run.py --lock LOCK_FILE --status

Takes an exclusive flock(2) on LOCK_FILE, by default without waiting, then runs COMMAND, which inherits the lock: it is held
while any process that has it lives, also when this wrapper was killed. The file's presence and content decide nothing.

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
    from fcntl import F_DUPFD, LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, fcntl, flock
    from stat import S_ISREG
    from time import CLOCK_BOOTTIME, clock_gettime, gmtime, monotonic, strftime, time
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
    from collections.abc import Callable
    from typing import Any, NoReturn

VERSION = "0.1.0"
ENTRY_SIGCHLD = signal.getsignal(signal.SIGCHLD)  # main resets it

EXIT_CODES = (  # code, name, when
    (0, "success", "the command succeeded"),
    (2, "usage", "bad arguments; nothing was opened or started"),
    (3, "error", "no lock, or the command could not be started: the reason is on stderr"),
    (75, "busy", "another run holds the lock; nothing was started (-E makes it another code)"),
    (130, "interrupted", "interrupted by SIGINT, whatever the command then returned"),
    ("other", "command", "the command's own exit code, or 128+n: signal n killed it, or stopped us while we waited"),
)
SUCCESS, USAGE, ERROR, BUSY, INTERRUPTED = (int(code) for code, name, _ in EXIT_CODES if name != "command")

OPEN_FAILURES = {FileNotFoundError: "lock_parent_not_found", PermissionError: "lock_permission_denied"}
NO_COMMAND = {FileNotFoundError: "command_not_found", NotADirectoryError: "command_not_found"}
START_FAILURES = {**NO_COMMAND, PermissionError: "command_not_executable"}

NETWORK_FILESYSTEMS = frozenset(  # by their names in proc_pid_mountinfo(5)
    "9p afs beegfs ceph cifs coda davfs glusterfs lustre ncpfs nfs nfs4 orangefs pvfs2 smb3 smbfs fuse.ceph-fuse fuse.curlftpfs "
    "fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.mount-s3 fuse.rclone fuse.s3fs fuse.sshfs".split()
)
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # its inode number, fixed since Linux 3.8 (PROC_PID_INIT_INO)
STATES = {"free": SUCCESS, "held": BUSY, "unknown": ERROR}  # what --status says, and its exit code
TICK_S = 0.1
STOP_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
TERMINAL_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
TERMINAL_SIGNALS = TERMINAL_STOPS | {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
JSON_ESCAPES = {number: f"\\u{number:04x}" for number in range(32)} | {
    ord(char): f"\\{letter}" for char, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)
}
RECORD = '{{"format_version":1,"owner_pid":{},"acquired_at_utc":"{}"}}\n'
UTC = "%Y-%m-%dT%H:%M:%SZ"
RECORD_SHAPE = RECORD.format("0", "0-0-0T0:0:0Z").replace("1", "0").encode()  # each number a 0


class Ending(Exception):
    """An ending of our own: exit code and, unless empty, the fields of its JSON line."""

    def __init__(self, code: int, **fields: "Any"):
        super().__init__(code, fields)
        self.code, self.fields = code, fields


# ---- policy: no I/O


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


def is_record(content: bytes) -> bool:
    """Whether a lock file holds nothing but a record of ours, or its beginning (nothing at all, where we were cut off)."""
    return RECORD_SHAPE.startswith(re.sub(rb"[0-9]{1,20}", b"0", content))


def mount_of(mountinfo: str, mount_id: str) -> tuple[str, str]:
    """The device and the file system type of a mount (proc_pid_mountinfo(5)); empty where it is not in the text."""
    for line in mountinfo.split("\n"):  # not splitlines: the kernel escapes no other control character
        fields = line.split(" ")
        if fields[0] == mount_id and "-" in fields[6:]:
            return fields[2], fields[fields.index("-", 6) + 1]
    return "", ""


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


def failed(reason: str, **about: str) -> Ending:
    return Ending(ERROR, status="error", reason=reason, **about)


def proc_text(name: str) -> str:
    with open(f"/proc/{name}", "rb", buffering=0) as file:
        return file.read().decode("utf-8", "surrogateescape")


def place_of(fd: int) -> tuple[str, str]:
    """An open file's file system type, and its name in /proc/locks (stat(2)'s numbers are others on btrfs and overlay)."""
    try:
        info = dict(line.split(":\t", 1) for line in proc_text(f"self/fdinfo/{fd}").strip().split("\n"))
        device, kind = mount_of(proc_text("self/mountinfo"), info["mnt_id"])
        major, minor = map(int, device.split(":"))
        return kind, f"{major:02x}:{minor:02x}:{info['ino']}" if "ino" in info else ""  # since Linux 5.14
    except (OSError, KeyError, ValueError):
        return "", ""


def open_lock(options: argparse.Namespace) -> int:
    """Open the lock file, or create it; Ending where it cannot be one. --status only looks (O_PATH), and creates nothing.
    Nothing that lies there may hang us, be followed or become our terminal."""
    flags = os.O_NOFOLLOW | (os.O_PATH if options.status else os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    step, reasons = "lock_open_failed", OPEN_FAILURES
    try:
        try:
            fd = os.open(options.lock, flags)  # fs.protected_regular forbids O_CREAT on another's file in a sticky folder
        except FileNotFoundError:
            fd = open_private(options.lock, flags if options.status else flags | os.O_CREAT)
        step, reasons = "lock_stat_failed", {}
        if not S_ISREG(os.fstat(fd).st_mode):
            raise failed("lock_not_regular_file", lock=options.lock)
    except OSError as error:
        raise failed(reasons.get(type(error), step), lock=options.lock) from error
    if not options.allow_network_fs and place_of(fd)[0] in NETWORK_FILESYSTEMS:
        raise failed("lock_on_network_filesystem", lock=options.lock)
    return fd


def take_lock(options: argparse.Namespace, watched: set[int]) -> int:
    """Lock the file by a descriptor of 10 or higher, out of the way of a job's own `exec 3>log`, or raise Ending. A record
    is written by no reader (--shared), nor into a file of another user or with a second name."""
    path, until, step = options.lock, monotonic() + options.wait_ms / 1000, "lock_acquire_failed"
    try:
        while True:
            fd = open_lock(options)
            acquire(fd, options, until, watched)
            status = os.fstat(fd)
            try:
                if os.path.samestat(os.lstat(path), status):
                    break
            except FileNotFoundError:
                pass
            os.close(fd)  # removed or renamed meanwhile; the lock that counts is that of the file under the path
        held = fcntl(fd, F_DUPFD, 10)
        os.close(fd)
        if not is_record(os.pread(held, 4096, 0)):
            raise failed("lock_file_has_foreign_content", lock=path)
        step = "lock_metadata_write_failed"
        if not options.shared and status.st_nlink == 1 and status.st_uid == os.geteuid():
            os.ftruncate(held, 0)
            write_all(held, RECORD.format(os.getpid(), strftime(UTC, gmtime())).encode())
        return held
    except OSError as error:
        raise failed(step, lock=path) from error


def acquire(fd: int, options: argparse.Namespace, until: float, watched: set[int]) -> None:
    """Lock the open file, waiting until then (CLOCK_MONOTONIC, s) at the longest; Ending when that was in vain."""
    operation = LOCK_SH if options.shared else LOCK_EX
    while True:
        too_late = monotonic() >= until
        try:
            return flock(fd, operation | LOCK_NB)
        except BlockingIOError as error:
            about = {"reason": "lock_held", "lock": options.lock} | (holders_of(fd)[1] if options.show_holders else {})
            if too_late:
                raise Ending(options.conflict_exit_code, status="busy", **about) from error
        try:
            return wait_for_lock(fd, operation, until, watched, json_line(status="waiting", **about) * options.show_holders)
        except TimeoutError:
            pass  # one more look: the lock may have come with the last tick


def wait_for_lock(fd: int, operation: int, until: float, watched: set[int], notice: bytes) -> None:
    """Print the notice, then wait in flock(2), woken by the release. TimeoutError: time is up. Ending: a stop signal. The
    timer breaks off what blocks again and again: a signal just before a blocking call is seen at the next tick."""

    def tick(_number: int, _frame: object) -> None:
        told = signal.sigtimedwait(watched & (STOP_SIGNALS | TERMINAL_STOPS), 0)
        if told and told.si_signo in STOP_SIGNALS:
            raise Ending(128 + told.si_signo)
        if told:
            stop_ourselves(told.si_signo)
        if monotonic() >= until:
            raise TimeoutError

    began, left_s = monotonic(), max(until - monotonic(), TICK_S / 100)
    tick_s = left_s / -(-left_s // TICK_S)  # so that the last tick comes when time is up
    handler = signal.signal(signal.SIGALRM, tick)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    callers_s, again_s = signal.getitimer(signal.ITIMER_REAL)  # alarm(2) outlives exec: `perl -e 'alarm 60; exec @ARGV'`
    try:
        signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)
        say(notice)
        flock(fd, operation)
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # the last moment at which a tick can raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.sigtimedwait({signal.SIGALRM}, 0)
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, callers_s and max(callers_s - (monotonic() - began), 1e-6), again_s)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start(command: list[str], options: argparse.Namespace) -> int:
    """Start the command and return its process id; with --no-fork be it from here on. Ending where that fails."""
    null = os.open(os.devnull, os.O_RDONLY)
    stdin = [(os.POSIX_SPAWN_DUP2, null, 0)] if options.stdin == "null" else []
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by CPython
    try:
        if not command[0]:
            raise PermissionError  # posix_spawnp raises ValueError for it
        if options.no_fork:
            become(command, stdin, ignored)
        env = given_environment()
        return os.posix_spawnp(command[0], command, env, file_actions=stdin, setsigmask=ENTRY_MASK, setsigdef=ignored)
    except OSError as error:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)  # again, for our last words
        raise failed(START_FAILURES.get(type(error), "child_start_failed"), command=command[0]) from error


def become(command: list[str], stdin: list[tuple[int, int, int]], ignored: list[signal.Signals]) -> None:
    for _, source, target in stdin:
        os.dup2(source, target)
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, ENTRY_SIGCHLD)
    signal.pthread_sigmask(signal.SIG_SETMASK, ENTRY_MASK)
    os.execvpe(command[0], command, given_environment())


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


def supervise(command: list[str], options: argparse.Namespace, watched: set[int]) -> int:
    """Run the command to its end; its exit code. The signals stay blocked and are taken by sigwaitinfo(2), so that none
    is lost, and passed on, unless the kernel sent it (si_code > 0) to each process of the terminal's group."""
    job, interrupted, early = start(command, options), False, signal.sigpending()  # early: the job may have missed these
    while True:
        info = signal.sigwaitinfo(watched)
        interrupted = interrupted or info.si_signo == signal.SIGINT
        by_terminal = info.si_code > 0 and info.si_signo in TERMINAL_SIGNALS
        if info.si_signo == signal.SIGCHLD:
            end = reap(job)
            if end:
                return INTERRUPTED if interrupted else exit_code(returncode(end))
        elif info.si_signo in early or not (by_terminal and os.getpgid(job) == os.getpgrp()):
            early.discard(info.si_signo)
            try:
                os.kill(job, info.si_signo)
            except PermissionError:
                pass  # it runs as another user now


# ---- holders


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot (proc_pid_stat(5)); with its number that tells who it is."""
    return int(proc_text(f"{pid}/stat").rpartition(")")[2].split()[19])


def holds(pid: int, fd: str, status: os.stat_result) -> bool:
    """Whether a process's open file has a flock on the inode. fdinfo is asked first: it hangs on no dead server."""
    try:
        return "FLOCK" in proc_text(f"{pid}/fdinfo/{fd}") and os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), status)
    except FileNotFoundError:
        return False  # closed meanwhile


def holders_of(file: int) -> tuple[str, dict[str, object]]:
    """The state of the open file's lock and who holds it, as the kernel shows it, and whether those are sure to be all: in
    a pid namespace neither processes nor locks outside are shown, and the processes of others are to root alone."""
    status, owner, holders = os.fstat(file), recorded_owner(file), list[object]()
    kind, name = place_of(file)
    try:
        whole = os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
        locks = [line.split() for _ in range(3) for line in proc_text("locks").splitlines()]  # long, it is read in parts
        pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    except OSError:
        whole, locks, pids = False, [], []
    complete = whole and os.geteuid() == 0 and 1 in pids  # else hidepid, against a root of a user namespace
    booted_at_s = time() - clock_gettime(CLOCK_BOOTTIME)
    for pid in pids:
        try:
            began = start_ticks(pid)
            held = any(holds(pid, fd, status) for fd in os.listdir(f"/proc/{pid}/fd"))
            if held and start_ticks(pid) == began:  # else its number was given to another process meanwhile
                since = strftime(UTC, gmtime(booted_at_s + began / os.sysconf("SC_CLK_TCK")))
                holders.append({"pid": pid, "started_at_utc": since, "recorded_owner": pid == owner})
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended
        except OSError:
            complete = False
    if holders or any(lock[1] == "FLOCK" and lock[5] == name for lock in locks):
        state = "held"
    else:
        state = "free" if (complete or (whole and name)) and kind not in NETWORK_FILESYSTEMS else "unknown"
    return state, {"holders": holders, "holders_complete": complete and bool(holders or state == "free")}


def recorded_owner(file: int) -> int:
    """The process id that the file names, or 0. The file may be open by O_PATH, which does not read."""
    try:
        with open(f"/proc/self/fd/{file}", "rb", buffering=0) as again:
            named = re.match(rb'\{"format_version":1,"owner_pid":([0-9]+),', again.read(4096))
            return int(named[1]) if named else 0
    except OSError:
        return 0


def show_status(options: argparse.Namespace) -> int:
    """Print the --status line; the exit code. It changes nothing and takes no lock, however short."""
    try:
        state, found = holders_of(open_lock(options))
    except Ending as ending:
        if ending.fields["reason"] != "lock_parent_not_found" or not os.path.isdir(os.path.dirname(options.lock) or os.curdir):
            raise
        state, found = "free", {"holders": [], "holders_complete": True}  # no file yet
    write_all(1, json_line(state=state, lock=options.lock, **found))
    return STATES[state]


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


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, left of the first `--`, and the command right of it, untouched; raises Ending for bad ones."""
    usage = "%(prog)s --lock LOCK_FILE [OPTIONS] -- COMMAND [ARG ...]\n       %(prog)s --lock LOCK_FILE --status"
    parser = Parser(usage=usage, formatter_class=formatter, allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("--lock", required=True, metavar="LOCK_FILE", help="the file whose lock decides, in a folder of its users")
    add("--wait-ms", type=whole_number(0, 604_800_000), default=0, metavar="N", help="wait for the lock, 0 to 604800000 ms")
    code = f"exit code when the lock is held by another run: 0 to 255 (default {BUSY})"
    add("-E", "--conflict-exit-code", type=whole_number(0, 255), default=BUSY, metavar="N", help=code)
    add("-s", "--shared", action="store_true", help="a shared lock: many readers, or one writer")
    add("-F", "--no-fork", action="store_true", help="become the command: no wrapper process remains")
    add("--unlock-on-exit", action="store_true", help="release the lock when the command ends, whatever it left behind")
    add("--status", action="store_true", help=f"print who holds the lock, and end: {STATES}; runs and changes nothing")
    add("--show-holders", action="store_true", help="print also who holds the lock, when it is held and when a wait begins")
    add("--stdin", choices=("null", "inherit"), default="null", help="what the command reads (default null)")
    add("--allow-network-fs", action="store_true", help="do not refuse a lock file on NFS, SMB and the like")
    add("-h", "--help", action=Show, nargs=0, help="show this and end")
    add("--version", action=Show, nargs=0, help="show the version and end")
    split = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:split])
    command = words[split + 1 :]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{'' if '--' in words else '; -- COMMAND is missing'}")
    if not options.lock:
        parser.error("argument --lock: LOCK_FILE is empty")
    if options.status == bool(command):
        parser.error("--status takes no command" if command else "-- COMMAND is missing")
    if options.no_fork and options.unlock_on_exit:
        parser.error("--no-fork leaves nobody to do --unlock-on-exit")
    return options, command


def main(argv: list[str] | None = None) -> int:
    """Run the command line given (sys.argv's by default) and return the exit code."""
    watched = take_over_signals()
    try:
        fill_standard_descriptors()
        options, command = parse(sys.argv[1:] if argv is None else argv)
        if options.status:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            return show_status(options)
        held = take_lock(options, watched)
        told = signal.sigtimedwait(STOP_SIGNALS & watched, 0)
        if told:
            return 128 + told.si_signo  # nothing is started any more
        code = supervise(command, options, watched)
        if options.unlock_on_exit:
            flock(held, LOCK_UN)
        return code
    except Ending as ending:
        last = ending
    except OSError:
        last = failed("unexpected_os_error")
    except Exception:
        last = failed("unexpected_error")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a stuck stderr yields to a stop signal
    if last.fields:
        say(json_line(**last.fields))
    return last.code


if __name__ == "__main__":
    os._exit(main())
