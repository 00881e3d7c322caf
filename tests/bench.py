"""Speed and memory, measured side by side: python3 tests/bench.py [--quick]

What is compared runs in turns (A B A B), so that a busy machine slows all alike, and medians are shown: read the ratios. Of the
peers (flock, timeout, retry, chronic) those that are installed take part. --quick does less of all, and fails where a ratio is
twice its bar.
"""

import argparse
import fcntl
import os
import py_compile
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).resolve().parent.parent
BARE = (os.path.realpath(sys.executable), "-I", "-S")
RETRY = (*BARE, str(ROOT / "retry_command.py"), "--retry-code", "75", "--initial-delay-ms", "0")
SINGLE = (*BARE, str(ROOT / "single_run.py"), "--lock", "lock")
PEERS = {
    "flock": ("flock", "lock"),
    "timeout": ("timeout", "60"),
    "retry (Debian)": ("retry", "--times", "1", "--"),
    "chronic": ("chronic",),
}
OURS = {"retry_command.py": (*RETRY, "--"), "single_run.py": (*SINGLE, "--")}
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
TELL_TERM = """
import os, signal, sys, time
fifo = os.open(sys.argv[1], os.O_WRONLY)
def tell(*_):
    os.write(fifo, b"%d\\n" % time.monotonic_ns())
    os._exit(0)
signal.signal(signal.SIGTERM, tell)
os.write(fifo, b"ready\\n")
while True:
    time.sleep(1)
"""

failures: list[str] = []


def peers(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: PEERS[name] for name in names or PEERS if shutil.which(PEERS[name][0])}


def table(title: str, *columns: str) -> None:
    print(f"\n| {' | '.join((title, *columns))} |\n|{'---|' * (len(columns) + 1)}")


def row(name: str, *cells: str, ratio: float = 0, bar: float = 0) -> None:
    """A line of a table. A bar is what the ratio (or what else is given for one) is to stay under."""
    print(f"| {' | '.join((name, *cells))} |", flush=True)
    if bar and ratio > 2 * bar:
        failures.append(f"{name}: {ratio:.2f}, where the bar is {bar}")


def medians(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Of what each gives, in turns."""
    for measure in contenders.values():
        measure()  # from the disk to the cache
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(*argv: str, expected: int = 0) -> float:
    begin = time.monotonic()
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != expected:
        sys.exit(f"exit code {code}: {argv}")
    return time.monotonic() - begin


def status(pid: int, field: str) -> int:
    """A number of proc_pid_status(5), such as VmRSS in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def flow(size: int, wrapper: tuple[str, ...], to_job: bool) -> tuple[float, float, float]:
    """Bytes through a pipe and a wrapper, out of its job or into it: s, s of CPU with the job, MB at the most without it."""
    source = ("head", "-c", str(size), "/dev/zero")
    sink = ("tail", "-c", "1") if to_job else ("cat",)  # Debian's retry hangs where the job copies more than a pipe holds
    begin = time.monotonic()
    if to_job:
        first = subprocess.Popen(source, stdout=subprocess.PIPE)
        measured = subprocess.Popen((*wrapper, *sink), stdin=first.stdout, stdout=subprocess.DEVNULL)
        other, ours = first, first.stdout
    else:
        measured = subprocess.Popen((*wrapper, *source), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        other, ours = subprocess.Popen(sink, stdin=measured.stdout, stdout=subprocess.DEVNULL), measured.stdout
    assert ours
    ours.close()
    peak_kib = 0

    def watch() -> None:
        nonlocal peak_kib
        while found := status(measured.pid, "VmHWM"):  # ru_maxrss would count ours before the exec, too
            peak_kib = found
            time.sleep(0.005)

    watcher = Thread(target=watch)
    watcher.start()
    os.waitid(os.P_PID, measured.pid, os.WEXITED | os.WNOWAIT)
    watcher.join()  # a zombie has no such field
    _, _, usage = os.wait4(measured.pid, 0)
    measured.returncode = 0
    other.wait()
    return time.monotonic() - begin, usage.ru_utime + usage.ru_stime, peak_kib * 1024 / 1e6


def byte_compiled(wrapper: tuple[str, ...]) -> tuple[str, ...]:
    """The same, without the compilation of the script at every start."""
    words = []
    for word in wrapper:
        if word.endswith(".py"):
            py_compile.compile(word, word := f"{Path(word).name}c", doraise=True)
        words.append(word)
    return tuple(words)


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def fifo() -> Iterator[str]:
    os.mkfifo("fifo")
    yield "fifo"
    os.unlink("fifo")


def start_up(rounds: int) -> None:
    table("start-up, on `/bin/true`", "median, ms", "times `python3 -I -S -c pass`", "times `import argparse, signal`")
    commands: dict[str, tuple[str, ...]] = {
        "python3 -I -S -c pass": (*BARE, "-c", "pass"),
        "import argparse, signal": (*BARE, "-c", "import argparse, signal"),
    }
    compiled = {f"{name}, byte-compiled": byte_compiled(wrapper) for name, wrapper in OURS.items()}
    commands |= {name: (*wrapper, "/bin/true") for name, wrapper in {**OURS, **compiled, **peers()}.items()}
    found = medians(rounds, {name: lambda argv=argv: seconds(*argv) for name, argv in commands.items()})  # type: ignore[misc]
    bare, imports = list(found.values())[:2]
    for name, value in found.items():
        bar = 3.5 if name in OURS else 0
        row(name, f"{1000 * value:.1f}", f"{value / bare:.2f}", f"{value / imports:.2f}", ratio=value / bare, bar=bar)


def bytes_through(rounds: int, most: int) -> None:
    columns = ("median, s", "times `retry`", "CPU, s", "peak, MB")
    for title, to_job in (("out of the job", False), ("into the job (replayed)", True)):
        for size in (64, most):
            table(f"{size} bytes {title}", *columns)
            wrappers = {
                **peers("retry (Debian)", "chronic"),
                "retry_command.py": (*RETRY, *(("--stdin", "replay") * to_job), "--"),
            }
            runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in wrappers}
            for _ in range(rounds):
                for name, wrapper in wrappers.items():
                    runs[name].append(flow(size, wrapper, to_job))
            found = {name: [statistics.median(column) for column in zip(*values, strict=True)] for name, values in runs.items()}
            peer_s = found.get("retry (Debian)", [0.0])[0]
            for name, (elapsed_s, cpu_s, peak_mb) in found.items():
                ratio = elapsed_s / peer_s if peer_s else 0
                ours = name in OURS
                bar = 0.6 if ours and size == most and not to_job else 0
                row(name, f"{elapsed_s:.3f}", f"{ratio:.2f}", f"{cpu_s:.2f}", f"{peak_mb:.1f}", ratio=ratio, bar=bar)
                if ours and peak_mb > 40:
                    failures.append(f"{peak_mb:.0f} MB for {size} bytes {title}")


def memory(wait_s: float) -> None:
    table("while a job runs", "resident, MB", "times the bare interpreter", "context switches a second")
    commands: dict[str, tuple[str, ...]] = {"python3 -I -S": (*BARE, "-c", "import time; time.sleep(600)")}
    compiled = {f"{name}, byte-compiled": byte_compiled(wrapper) for name, wrapper in OURS.items()}
    commands |= {name: (*wrapper, "sleep", "600") for name, wrapper in {**OURS, **compiled}.items()}
    commands |= {"single_run.py --no-fork (sleep itself)": (*SINGLE, "--no-fork", "--", "sleep", "600")}
    bare_kib = 0
    for name, argv in commands.items():
        with running(*argv) as process:
            time.sleep(0.5)
            switches, kib = status(process.pid, "voluntary_ctxt_switches"), status(process.pid, "VmRSS")
            time.sleep(wait_s)
            a_second = (status(process.pid, "voluntary_ctxt_switches") - switches) / wait_s
        bare_kib = bare_kib or kib
        row(name, f"{kib * 1024 / 1e6:.1f}", f"{kib / bare_kib:.2f}", f"{a_second:.1f}", ratio=kib / bare_kib, bar=1.5)
        if a_second > 2:
            failures.append(f"{name} wakes up {a_second:.1f} times a second")


def from_end_to_end(wrapper: tuple[str, ...]) -> float:
    """s from the job's end (that of its input) to the wrapper's."""
    with fifo() as path:
        process = subprocess.Popen((*wrapper, "cat", path), stdout=subprocess.DEVNULL)
        fd = os.open(path, os.O_WRONLY)
        time.sleep(0.02)
        begin = time.monotonic()
        os.close(fd)
        process.wait()
        return time.monotonic() - begin


def from_term_to_term(wrapper: tuple[str, ...]) -> float:
    """s from our SIGTERM to the job's."""
    with fifo() as path:
        process = subprocess.Popen((*wrapper, *BARE, "-c", TELL_TERM, path), stdout=subprocess.DEVNULL)
        with open(path) as lines:
            lines.readline()
            time.sleep(0.02)
            begin_ns = time.monotonic_ns()
            process.send_signal(signal.SIGTERM)
            end_ns = int(lines.readline())
        process.wait()
        return (end_ns - begin_ns) / 1e9


def from_release_to_start() -> float:
    """s from the release of a lock to the start of the command that waits for it."""
    with fifo() as path, open("lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen((*SINGLE, "--wait-ms", "60000", "--", "sh", "-c", f": >{path}"))
        time.sleep(0.2)
        begin = time.monotonic()
        lock.close()
        os.close(os.open(path, os.O_RDONLY))
        elapsed_s = time.monotonic() - begin
        process.wait()
        return elapsed_s


def delays(rounds: int) -> None:
    table("delay", "median, ms", "bar, ms")
    contenders: dict[str, Callable[[], float]] = {}
    for name, wrapper in OURS.items():
        contenders[f"from the job's end to that of {name}"] = lambda wrapper=wrapper: from_end_to_end(wrapper)  # type: ignore[misc]
        contenders[f"from SIGTERM to {name} to the job's"] = lambda wrapper=wrapper: from_term_to_term(wrapper)  # type: ignore[misc]
    contenders["from a lock's release to the waiter's start"] = from_release_to_start
    for name, value in medians(rounds, contenders).items():
        row(name, f"{1000 * value:.1f}", "50" if "release" in name else "5")


def growth(rounds: int, most: int, most_waiters: int) -> None:
    table("growth", "median, s", "times the row before")
    before_s = 0.0

    def grown(name: str, elapsed_s: float, factor: float = 0) -> None:
        nonlocal before_s
        ratio = elapsed_s / before_s if factor else 0
        row(name, f"{elapsed_s:.3f}", f"{ratio:.2f}" if factor else "", ratio=ratio, bar=factor)
        before_s = elapsed_s

    for attempts in (1, 10):
        argv = (*RETRY, "--max-attempts", str(attempts), "--", "sh", "-c", "exit 75")
        quiet = ("sh", "-c", '"$@" 2>&-', "sh", *argv)
        found = medians(rounds, {"": lambda quiet=quiet: seconds(*quiet, expected=75)})  # type: ignore[misc]
        grown(f"{attempts} attempts", found[""], 10 if attempts > 1 else 0)
    sizes = [size for size in (KIB, MIB, 32 * MIB, GIB) if size <= most]
    for size, smaller in zip(sizes, [0, *sizes], strict=False):
        elapsed_s = statistics.median(flow(size, OURS["retry_command.py"], to_job=False)[0] for _ in range(rounds))
        grown(f"{size} bytes of stdout", elapsed_s, size / smaller if smaller else 0)
    for waiters in (1, 20, most_waiters):
        begin = time.monotonic()
        processes = [subprocess.Popen((*SINGLE, "--wait-ms", "600000", "--", "true")) for _ in range(waiters)]
        if any(process.wait() for process in processes):
            sys.exit("a waiter failed")
        grown(f"{waiters} waiters, one after the other", time.monotonic() - begin, {1: 0, 20: 20}.get(waiters, most_waiters / 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute's worth; exit 1 where a ratio is twice its bar")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, {os.uname().machine}, Linux {os.uname().release}")
        start_up(15 if quick else 41)
        bytes_through(3 if quick else 5, 512 * MIB if quick else GIB)
        memory(2 if quick else 10)
        delays(5 if quick else 41)
        growth(1 if quick else 5, 32 * MIB if quick else GIB, 40 if quick else 200)
        os.chdir("/")
    if quick and failures:
        print("\nfar off:", *failures, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
