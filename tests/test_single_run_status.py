"""single_run.py --status and --show-holders: who holds the lock, as the kernel shows it; nothing is changed or locked."""

import calendar
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_S, PROBE, SINGLE, Fifo, ended, needs_namespaces, run_cli, send, single, started

CODES = {"free": 0, "held": 75, "unknown": 3}


def status(*before: str, lock: str = "lock") -> dict[str, Any]:
    end = run_cli(*before, SINGLE, "--lock", lock, "--status", "-E", "9")
    line: dict[str, Any] = json.loads(end.stdout)
    assert end.stdout.count(b"\n") == 1 and end.stderr == b"" and end.returncode == CODES[line["state"]]
    assert list(line) == ["state", "lock", "holders", "holders_complete"] and line["lock"] == lock
    return line


def pids(line: dict[str, Any]) -> list[int]:
    return [one["pid"] for one in line["holders"]]


def running(fifo: Fifo, *command: Any) -> tuple[Any, int]:
    """A run of the command with a probe under it, and the probe's pid."""
    run = started(*command, *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait")
    return run, int(fifo.line())


def test_free(here: Path) -> None:
    assert status() == {"state": "free", "lock": "lock", "holders": [], "holders_complete": True}
    assert not os.listdir()
    single("lock", "true", code=0)
    before = os.stat("lock"), Path("lock").read_bytes()
    assert status()["state"] == "free"
    assert (os.stat("lock").st_mtime_ns, Path("lock").read_bytes()) == (before[0].st_mtime_ns, before[1])


def test_wrapper_and_job(here: Path, fifo: Fifo) -> None:
    began = time.time()
    run, job = running(fifo, SINGLE, "--lock", "lock", "--")
    line = status()
    assert line["state"] == "held" and pids(line) == sorted((run.pid, job))
    assert [one["recorded_owner"] for one in line["holders"]] == [one["pid"] == run.pid for one in line["holders"]]
    for one in line["holders"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one["started_at_utc"])
        since = time.strptime(one["started_at_utc"], "%Y-%m-%dT%H:%M:%SZ")
        assert began - 2 <= calendar.timegm(since) <= time.time() + 2
    busy = json.loads(run_cli(SINGLE, "--lock", "lock", "--show-holders", "-E", "9", "--", "true", code=9).stderr)
    assert busy == {
        "status": "busy",
        "reason": "lock_held",
        **{name: line[name] for name in ("lock", "holders", "holders_complete")},
    }
    run.kill()
    run.wait(HANG_S)
    assert pids(status()) == [job]
    send(job, signal.SIGUSR1)
    fifo.until_gone()
    assert status()["state"] == "free"


def test_a_peer_and_a_shared_group(here: Path, fifo: Fifo) -> None:
    run, job = running(fifo, "flock", "-s", "lock")
    assert pids(status()) == sorted((run.pid, job))
    other, second = running(fifo, SINGLE, "--lock", "lock", "--shared", "--")
    assert pids(status()) == sorted((run.pid, job, other.pid, second))
    for one in (job, second):
        send(one, signal.SIGUSR1)
    ended(run, 0)
    ended(other, 0)


def test_a_waiter_or_an_open_file_is_no_holder(here: Path, fifo: Fifo) -> None:
    run, job = running(fifo, SINGLE, "--lock", "lock", "--")
    waiting = started(SINGLE, "--lock", "lock", "--wait-ms", "600000", "--show-holders", "--", "true")
    assert waiting.stderr
    assert pids(json.loads(waiting.stderr.readline())) == sorted((run.pid, job))
    with open("lock"):
        assert pids(status()) == sorted((run.pid, job))
    send(job, signal.SIGUSR1)
    ended(waiting, 0)
    ended(run, 0)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("/usr/bin/python3"), reason="needs root and a Python for all")
def test_a_user_sees_less_but_nothing_wrong(here: Path, fifo: Fifo) -> None:
    """/proc/locks is open to all, the descriptors of others' processes are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own, and the checkout, may be closed to others
        os.chmod(folder, 0o755)
        lock = f"{folder}/lock"
        shutil.copy(SINGLE, folder)
        nobody = ("setpriv", "--reuid", "65534", "--clear-groups", "/usr/bin/python3", "-IS", f"{folder}/single_run.py")
        run, job = running(fifo, SINGLE, "--lock", lock, "--")
        line = json.loads(run_cli(*nobody, "--lock", lock, "--status", code=75).stdout)
        assert line == {"state": "held", "lock": lock, "holders": [], "holders_complete": False}
        send(job, signal.SIGUSR1)
        ended(run, 0)
        line = json.loads(run_cli(*nobody, "--lock", lock, "--status", code=0).stdout)
        assert (line["state"], line["holders_complete"]) == ("free", False)
        os.mkdir(f"{folder}/closed", 0o700)
        line = json.loads(run_cli(*nobody, "--lock", f"{folder}/closed/lock", "--status", code=3).stderr)
        assert line["reason"] == "lock_permission_denied"  # and not free: who knows


@needs_namespaces
def test_in_a_pid_namespace_an_outside_lock_is_not_called_free(here: Path, fifo: Fifo) -> None:
    run, job = running(fifo, SINGLE, "--lock", "lock", "--")
    for namespace in (("unshare", "--pid", "--fork", "--mount-proc"), ("unshare", "--pid", "--fork")):
        line = status(*namespace)
        assert line["state"] in ("unknown", "held") and not line["holders_complete"]
    assert status("unshare", "--pid", "--fork", "--mount-proc")["state"] == "unknown"
    send(job, signal.SIGUSR1)
    ended(run, 0)
    inside = f"{SINGLE} --lock lock -- sh -c '{SINGLE} --lock lock --status; true'"
    line = json.loads(run_cli("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inside, code=0).stdout)
    assert line["state"] == "held" and len(line["holders"]) >= 2 and not line["holders_complete"]


@needs_namespaces
@pytest.mark.parametrize("options", ("hidepid=2", "subset=pid"))
def test_with_a_proc_that_hides_it_is_not_called_free(here: Path, fifo: Fifo, options: str) -> None:
    run, job = running(fifo, SINGLE, "--lock", "lock", "--")
    script = f"mount -t proc -o {options} proc /proc && exec {SINGLE} --lock lock --status"
    end = run_cli("unshare", "--mount", "sh", "-c", script)
    assert json.loads(end.stdout)["state"] != "free" and end.returncode in (75, 3)
    send(job, signal.SIGUSR1)
    ended(run, 0)


@needs_namespaces
def test_without_proc_it_is_unknown(here: Path) -> None:
    single("lock", "true", code=0)
    end = run_cli("unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /proc && exec {SINGLE} --lock lock --status")
    assert json.loads(end.stdout)["state"] == "unknown" and end.returncode == 3


@needs_namespaces
def test_on_an_overlay(here: Path) -> None:
    """There the numbers that stat(2) shows are not those of /proc/locks."""
    script = f"""mount -t tmpfs none . && cd . && cd "$PWD" && mkdir low up work all && : >low/lock || exit
        mount -t overlay -o lowerdir=low,upperdir=up,workdir=work none all || {{ echo none; exit; }}
        {SINGLE} --lock all/lock -- {SINGLE} --lock all/lock --status; {SINGLE} --lock all/lock --status"""
    lines = run_cli("unshare", "--mount", "sh", "-c", script).stdout.splitlines()
    if lines == [b"none"]:
        pytest.skip("no overlay here")
    assert [json.loads(line)["state"] for line in lines] == ["held", "free"]


@pytest.mark.parametrize(
    ("lock", "reason"),
    (
        ("fifo", "lock_not_regular_file"), ("folder", "lock_not_regular_file"), ("link", "lock_not_regular_file"),
        ("socket", "lock_not_regular_file"), ("/dev/null", "lock_not_regular_file"), ("missing/lock", "lock_parent_not_found"),
        ("file/lock", "lock_open_failed"), ("x" * 300, "lock_open_failed"),
    ),
)  # fmt: skip
def test_what_is_no_lock_file(here: Path, lock: str, reason: str) -> None:
    os.mkfifo("fifo")
    os.mkdir("folder")
    os.symlink("file", "link")
    Path("file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        end = run_cli(SINGLE, "--lock", lock, "--status", code=3)
    assert (end.stdout, json.loads(end.stderr)) == (b"", {"status": "error", "reason": reason, "lock": lock})


def test_it_takes_no_command(here: Path) -> None:
    end = run_cli(SINGLE, "--lock", "lock", "--status", "--", "true", code=2)
    assert b'"reason":"invalid_arguments"' in end.stderr


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_it_takes_no_lock_however_short(here: Path) -> None:
    single("lock", "true", code=0)
    run_cli("strace", "-f", "-o", "trace", "-e", "trace=flock,fcntl,openat", SINGLE, "--lock", "lock", "--status", code=0)
    trace = Path("trace").read_text()
    assert "flock(" not in trace and "F_SETLK" not in trace
    assert re.findall(r'"lock", (\S+)', trace) == ["O_RDONLY|O_NOFOLLOW|O_CLOEXEC|O_PATH)"]
