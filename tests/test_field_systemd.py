"""The README's unit and timer in a real systemd, booted in namespaces: stops, skipped runs, the journal, a timer beside a run."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CLEAN_ENV, ROOT, Fifo, children, ended, failed, run_cli, started, until
from private_host import BUSY, FIELD, PROBE_THERE, Host, begun_with_a_child, cgroup2

SYSTEMD = "/lib/systemd/systemd"
pytestmark = [*FIELD, pytest.mark.skipif(not os.path.exists(SYSTEMD), reason="needs systemd")]
README = (ROOT / "README.md").read_text()
UNITS: dict[str, str] = dict(re.findall(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", README, re.DOTALL))
# What the machine's own systemd would start at its boot is not started in ours.
STUBS = {f"{name}.target": "[Unit]\nDefaultDependencies=no\n" for name in ("sysinit", "basic", "shutdown", "timers")}
JOURNAL = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")
STUBS["basic.target"] += "".join(f"Wants={unit}\n" for unit in JOURNAL)
BY_HAND = ("setpriv", "--reuid=bill", "--regid=bill", "--clear-groups", "single_run.py", "--lock", "/run/bill/bill.lock", "--")
EACH_SECOND = "*:*:*\nAccuracySec=1ms"
MOUNTS = "umount -R -l /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && mount -t tmpfs tmpfs /run"
BOOT = ("unshare", "--cgroup", "--ipc", "--uts", "sh", "-c", f'{MOUNTS} && exec "$@"', "sh", SYSTEMD, "--unit=basic.target")


class Machine:
    """A host whose first process is systemd."""

    def __init__(self, root: Path, cgroup: Path):
        self.host = Host(root)
        self.units = self.host.folder("units", 0o755)
        self.host.mounts.append((str(self.units), "/etc/systemd/system"))
        for place in ("/var/log", "/var/lib/systemd"):
            self.host.mounts.append((str(self.host.folder(place[1:], 0o755)), place))
        for name in JOURNAL:
            shutil.copy(f"/lib/systemd/system/{name}", self.units)
        for name, text in (STUBS | UNITS).items():
            self.host.write(f"units/{name}", text)
        self.booting = started(
            *self.host.command(*BOOT),
            env={**CLEAN_ENV, "container": "field", "SYSTEMD_UNIT_PATH": "/etc/systemd/system"},
            preexec_fn=lambda: (cgroup / "cgroup.procs").write_text("0"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def command(self, *argv: Any) -> tuple[Any, ...]:
        return ("nsenter", "--target", str(children(self.booting.pid)[0]), "--pid", "--mount", "--cgroup", *argv)

    def run(self, *argv: Any, code: int | None = 0) -> str:
        return run_cli(*self.command(*argv), code=code).stdout.decode()

    def is_up(self) -> bool:
        begun = children(self.booting.pid)
        return bool(begun) and self.run("systemctl", "is-active", "basic.target", code=None) == "active\n"

    def has(self, unit: str, job: str = "", when: str = "2099-01-01") -> None:
        """This unit file, a job that is a probe with these words, and the README's timer, which fires then."""
        self.host.write("units/bill.service", f"{unit}\n[Unit]\nStartLimitIntervalSec=0\n")  # however slow the test
        self.host.write("units/bill.timer", UNITS["bill.timer"].replace("=06:00", f"={when}"))
        self.host.program("opt/bill/job", f"exec {' '.join(PROBE_THERE)} {job}")
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "start", "bill.timer")  # while it lives, systemd does not forget how the unit ended

    def shows(self, *properties: str) -> list[str]:
        """The unit's properties, in their order."""
        shown = dict(line.split("=", 1) for line in self.run("systemctl", "show", "bill.service").splitlines())
        return [shown.get(name, "") for name in properties]

    def journal(self) -> list[str]:
        """What the unit's processes have said since its last start, and what systemd has not."""
        self.run("journalctl", "--sync")
        (run,) = self.shows("InvocationID")
        words = ("--output=cat", f"_SYSTEMD_INVOCATION_ID={run}")
        return self.run("journalctl", "--quiet", "--no-pager", *words).splitlines()


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    mounted = cgroup2()
    if not mounted:
        pytest.skip("needs cgroup2")
    cgroup = Path(mounted[0]) / f"field-{os.getpid()}"
    try:
        cgroup.mkdir()
        machine = Machine(tmp_path_factory.mktemp("machine") / "host", cgroup)
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"needs a cgroup: {e}")
    try:
        try:
            until(machine.is_up)
        except (pytest.fail.Exception, OSError):
            pytest.skip("systemd cannot be booted here")
        yield machine
    finally:
        machine.booting.kill()
        ended(machine.booting)
        until(lambda: "populated 0" in (cgroup / "cgroup.events").read_text())
        for folder, _, _ in os.walk(cgroup, topdown=False):
            os.rmdir(folder)


@pytest.fixture
def machine(booted: Machine) -> Iterator[Machine]:
    yield booted
    booted.run("systemctl", "stop", "bill.timer", "bill.service")
    booted.run("systemctl", "reset-failed")


@pytest.fixture
def fifo(machine: Machine) -> Iterator[Fifo]:
    yield from machine.host.opened_fifo()


def replaced(*pairs: tuple[str, str]) -> str:
    """The README's unit, with changes."""
    unit = UNITS["bill.service"]
    for old, new in pairs:
        assert old in unit
        unit = unit.replace(old, new)
    return unit


def test_verify(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    host.program("opt/bill/job", "")
    host.mounts.append((str(host.folder("units", 0o755)), "/etc/systemd/system"))
    paths = [f"/etc/systemd/system/{name}" for name in UNITS]
    for wrong in ("", "KillMod=mixed\n"):
        for name, text in UNITS.items():
            host.write(f"units/{name}", text + (wrong if name == "bill.service" else ""))
        end = host.run("sh", "-c", 'systemd-analyze verify "$@"; true', "sh", *paths, code=0)  # as process 1 it says nothing
        assert (b"bill" in end.stderr) == bool(wrong)


@pytest.mark.parametrize("mode", ("mixed", "control-group"))
def test_stop(machine: Machine, fifo: Fifo, mode: str) -> None:
    """Both processes of the job clean up, no attempt follows, and nothing is left."""
    machine.has(replaced(("KillMode=mixed", f"KillMode={mode}")), job="fork on:TERM=75 say:begun wait")
    machine.run("systemctl", "start", "--no-block", "bill.service")
    begun_with_a_child(fifo)
    machine.run("systemctl", "stop", "bill.service")
    assert set(fifo.until_gone()) == {"got SIGTERM"}
    assert machine.shows("ActiveState", "Result", "ExecMainStatus", "ControlGroup") == ["inactive", "success", "143", ""]


def test_mixed_reaches_the_job_once(machine: Machine, fifo: Fifo) -> None:
    machine.has(UNITS["bill.service"], job="echo on:USR1=0 say:{pid} wait")
    machine.run("systemctl", "start", "--no-block", "bill.service")
    pid = fifo.line()
    machine.run("systemctl", "stop", "--no-block", "bill.service")
    assert fifo.line() == "got SIGTERM"
    machine.run("sh", "-c", f"kill -USR1 {pid}")
    assert [line for line in fifo.until_gone() if line != "got SIGCONT"] == ["got SIGUSR1"]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    (
        ("--kill-after-ms 20000", "--kill-after-ms 200", ["inactive", "success", "143", ""]),
        ("StopSec=30", "StopSec=1", ["failed", "timeout", "9", ""]),
    ),
    ids=("the wrapper's grace ends first", "systemd's does"),
)
def test_a_job_that_does_not_stop(machine: Machine, fifo: Fifo, old: str, new: str, shown: list[str]) -> None:
    machine.has(replaced((old, new)), job="ignore:TERM fork say:begun wait")
    machine.run("systemctl", "start", "--no-block", "bill.service")
    begun_with_a_child(fifo)
    machine.run("systemctl", "stop", "bill.service")
    assert fifo.until_gone() == []
    assert machine.shows("ActiveState", "Result", "ExecMainStatus", "ControlGroup") == shown


USES_75 = (" -E 99", ""), ("SuccessExitStatus=99", "SuccessExitStatus=75")


@pytest.mark.parametrize(
    ("changes", "skipped", "used_up"),
    (((), "99", "failed"), (USES_75, "75", "inactive")),
    ids=("the README's", "SuccessExitStatus=75, which takes the job's own 75 for a success"),
)
def test_a_timer_that_fires_during_a_run_by_hand(
    machine: Machine, fifo: Fifo, changes: tuple[tuple[str, str], ...], skipped: str, used_up: str
) -> None:
    """The skipped runs are no failures and the lock stays; when it is free the timer's next one runs, and fails."""
    machine.run("install", "-d", "-o", "bill", "-g", "bill", "/run/bill")
    by_hand = started(*machine.command(*BY_HAND, *PROBE_THERE, "say:{pid}", "wait"))
    pid = fifo.line()
    machine.has(replaced(("--retry-code 75", "--retry-code 75 --max-attempts 1"), *changes), when=EACH_SECOND, job="exit:75")
    until(lambda: BUSY.decode().strip() in machine.journal())
    until(lambda: machine.shows("Result", "ExecMainStatus") == ["success", skipped])
    run_cli(*machine.command(*BY_HAND, "true"), code=75)
    assert machine.run("systemctl", "is-active", "bill.timer") == "active\n"
    machine.run("sh", "-c", f"kill {pid}")
    ended(by_hand, 143)
    until(lambda: failed(75, max_attempts=1).decode().strip() in machine.journal())
    until(lambda: machine.shows("ActiveState") == [used_up])


def test_a_unit_that_is_started_during_its_run(machine: Machine, fifo: Fifo) -> None:
    """By its timer or by hand: systemd starts no second one, and what comes by another way is refused."""
    machine.has(UNITS["bill.service"], when=EACH_SECOND, job="on:USR1=0 say:{pid} wait")
    pid, run = fifo.line(), machine.shows("InvocationID")
    machine.run("systemctl", "start", "--no-block", "bill.service")
    assert run_cli(*machine.command(*BY_HAND, "true"), code=75).stderr == BUSY
    assert fifo.silent()
    assert machine.shows("InvocationID") == run
    machine.run("sh", "-c", f"kill -USR1 {pid}")
    assert fifo.line() == "got SIGUSR1"
    until(lambda: machine.shows("InvocationID") != run)  # the timer is not blocked for ever


@pytest.mark.parametrize("preserved", (True, False))
def test_the_folder_of_the_lock(machine: Machine, fifo: Fifo, preserved: bool) -> None:
    """It stays when the unit ends, with the lock of a run by hand; without RuntimeDirectoryPreserve= it is removed beneath it."""
    machine.has(UNITS["bill.service"] if preserved else replaced(("RuntimeDirectoryPreserve=yes\n", "")))
    machine.run("install", "-d", "-o", "bill", "-g", "bill", "/run/bill")
    started(*machine.command(*BY_HAND, *PROBE_THERE, "say:begun", "wait"))
    assert fifo.line() == "begun"
    machine.run("systemctl", "start", "bill.service")
    assert machine.shows("Result", "ExecMainStatus") == ["success", "99"]
    run_cli(*machine.command(*BY_HAND, "true"), code=75 if preserved else 3)


@pytest.mark.parametrize("streamed", (True, False))
def test_the_journal(machine: Machine, fifo: Fifo, streamed: bool) -> None:
    unit = replaced(("--retry-code 75", "--retry-code 75 --initial-delay-ms 0"))
    machine.has(
        unit if streamed else unit.replace("--stream-stderr ", ""), job="'err:no answer\n' only:2 say:{pid} on:USR1=65 wait"
    )
    machine.run("systemctl", "start", "--no-block", "bill.service")
    writer = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    pid = fifo.line()
    os.close(writer)
    history = ["no answer", failed(75, 1, 0).decode().strip(), "no answer"]
    assert machine.journal() == (history if streamed else [])
    machine.run("sh", "-c", f"kill -USR1 {pid}")
    until(lambda: machine.shows("ActiveState") == ["failed"])
    last = failed(65, 2).decode().strip()
    assert machine.journal() == ([*history, last] if streamed else [history[1], history[0], last, history[2]])
