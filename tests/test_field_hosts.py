"""README, several hosts: etcd's lock around the scripts, one job at a time on two hosts, and what a lost lease means."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, HANG_S, PROBE, RETRY, ROOT, Fifo, children, ended, run_cli, send, started, state, until

pytestmark = [
    pytest.mark.field,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    *(pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}") for name in ("etcd", "etcdctl", "ip")),
]
SECTION = (ROOT / "README.md").read_text().partition("\n## Several hosts\n")[2].partition("\n## ")[0]
ETCD, A, B = HOSTS = [f"field-{os.getpid()}-{name}" for name in ("etcd", "a", "b")]
URLS = dict.fromkeys(("ETCDCTL_ENDPOINTS", "ETCD_LISTEN_CLIENT_URLS", "ETCD_ADVERTISE_CLIENT_URLS"), "http://10.0.0.1:2379")
LINKS = {
    ETCD: f"""link set lo up
link add bridge type bridge
link set bridge up
address add 10.0.0.1/24 dev bridge
link add veth2 master bridge up type veth peer name eth0 netns {A}
link add veth3 master bridge up type veth peer name eth0 netns {B}""",
    A: "address add 10.0.0.2/24 dev eth0\nlink set eth0 up",
    B: "address add 10.0.0.3/24 dev eth0\nlink set eth0 up",
}


def on(host: str, *command: object, **more: str) -> subprocess.Popen[bytes]:
    """The command, running on that host, in a process group of its own."""
    return started(
        "ip", "netns", "exec", host, *command, env={**CLEAN_ENV, "ETCDCTL_API": "3", **URLS, **more}, start_new_session=True
    )


def ip(host: str, commands: str) -> None:
    run_cli("ip", "-n", host, "-batch", "-", input=commands.encode(), code=0)


@pytest.fixture(scope="module", autouse=True)
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hosts are network namespaces: one with etcd, two beside it. Nothing of this machine's own network is touched."""
    made: list[str] = []
    try:
        for host in HOSTS:
            if run_cli("ip", "netns", "add", host).returncode:
                pytest.skip("needs network namespaces")
            made.append(host)
        for host, commands in LINKS.items():
            ip(host, commands)
        data = tmp_path_factory.mktemp("etcd")
        on(ETCD, "sh", "-c", f"exec etcd >{data}/log 2>&1", ETCD_DATA_DIR=f"{data}/data")
        until(lambda: on(ETCD, "etcdctl", "endpoint", "health").wait(HANG_S) == 0)
        yield
    finally:
        for host in made:
            for pid in run_cli("ip", "netns", "pids", host).stdout.split():
                send(int(pid), signal.SIGKILL)
            run_cli("ip", "netns", "delete", host, code=0)


@pytest.fixture
def all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's recipe, a program; its temporary folder is beside it."""
    monkeypatch.setitem(CLEAN_ENV, "TMPDIR", str(tmp_path))
    (recipe,) = re.findall(r"```sh\n(#!/bin/sh\n# all_hosts.*?)```", SECTION, re.DOTALL)
    (tmp_path / "all_hosts").write_text(recipe)
    (tmp_path / "all_hosts").chmod(0o755)
    return tmp_path / "all_hosts"


def job(name: str, fifo: Fifo, *words: str, options: tuple[str, ...] = ()) -> tuple[object, ...]:
    """A retried job that fails once and then says its name, its fencing token and its pid, and waits for SIGUSR1."""
    retry = (RETRY, "--retry-code", "75", "--initial-delay-ms", "0", "--kill-after-ms", "60000", *options, "--")
    script = f'[ "$RETRY_WRAPPER_ATTEMPT" = 2 ] || exit 75; exec "$@" "say:{name} $ETCD_LOCK_REV {{pid}}" wait'
    return (*retry, "sh", "-c", script, "sh", *PROBE, fifo.path, "on:USR1=0", *words)


def begun(fifo: Fifo, name: str) -> tuple[int, int]:
    """That this job begins next: its token and pid."""
    said, token, pid = fifo.line().split()
    assert said == name
    return int(token), int(pid)


def queue(lock: str) -> int:
    """How many have the lock or wait for it."""
    return len(ended(on(ETCD, "etcdctl", "get", "--prefix", f"{lock}/", "--keys-only"), 0).stdout.split())


def etcdctl_of(recipe: subprocess.Popen[bytes]) -> int:
    return children(children(recipe.pid)[0])[0]  # under timeout(1)


def test_one_at_a_time_and_each_has_a_higher_token(all_hosts: Path, fifo: Fifo, fifo_of_next: Fifo) -> None:
    first = on(A, all_hosts, "bill", *job("a", fifo))
    token, pid = begun(fifo, "a")
    second = on(B, all_hosts, "bill", *job("b", fifo_of_next))
    until(lambda: queue("bill") == 2)
    assert fifo_of_next.silent() and state(pid) != "Z"
    send(pid, signal.SIGUSR1)
    assert fifo.line() == "got SIGUSR1"
    higher, pid = begun(fifo_of_next, "b")
    assert higher > token
    send(pid, signal.SIGUSR1)
    for run in (first, second):
        assert ended(run, 0).stderr == b""


@pytest.mark.parametrize(("ends", "code"), (("exit 0", 0), ("exit 65", 65), ("exit 75", 75), ("kill -9 $$", 137)))
def test_etcdctl_hides_exit_codes_and_the_recipe_keeps_them(all_hosts: Path, ends: str, code: int) -> None:
    retried = (RETRY, "--retry-code", "75", "--initial-delay-ms", "0", "--", "sh", "-c", ends)
    ended(on(A, "etcdctl", "lock", "codes", "--", *retried), 1 if code else 0)
    ended(on(A, all_hosts, "codes", *retried), code)
    assert os.listdir(all_hosts.parent) == ["all_hosts"]


def test_etcd_does_not_answer(all_hosts: Path) -> None:
    """Without a word of "busy"; with the command's time-out of 5 s."""
    run = on(A, all_hosts, "bill", "touch", all_hosts.with_name("ran"), ETCDCTL_ENDPOINTS="http://10.0.0.1:9")
    assert ended(run, 69).stderr and os.listdir(all_hosts.parent) == ["all_hosts"]


def test_no_lock_is_75_and_nothing_starts(all_hosts: Path, fifo: Fifo, fifo_of_next: Fifo) -> None:
    holder = on(A, all_hosts, "busy", *job("a", fifo))
    _, pid = begun(fifo, "a")
    waiter = on(B, all_hosts, "busy", *job("b", fifo_of_next))
    until(lambda: queue("busy") == 2)
    send(etcdctl_of(waiter), signal.SIGTERM)  # what its time limit does to one that waits
    ended(waiter, 75)
    send(etcdctl_of(holder), signal.SIGTERM)  # and to one that has the lock
    limited = re.sub(r"(timeout.*) 60 ", r"\1 0.2 ", all_hosts.read_text())
    assert limited != all_hosts.read_text()
    ended(on(B, "sh", "-c", limited, "all_hosts", "busy", *job("b", fifo_of_next)), 75)
    send(pid, signal.SIGUSR1)
    assert fifo.until_gone() == ["got SIGUSR1"]
    ended(holder, 0)


def test_a_signal_reaches_the_job_through_the_process_group_alone(all_hosts: Path, fifo: Fifo, fifo_of_next: Fifo) -> None:
    run = on(A, all_hosts, "stop", *job("a", fifo, "echo", "on:USR1=0"))
    _, pid = begun(fifo, "a")
    waiter = on(B, all_hosts, "stop", *job("b", fifo_of_next))
    until(lambda: queue("stop") == 2)
    send(etcdctl_of(run), signal.SIGTERM)
    send(run.pid, signal.SIGHUP)
    os.killpg(run.pid, signal.SIGTERM)
    assert fifo.line() == "got SIGTERM"
    until(lambda: state(etcdctl_of(run)) == "S")
    assert queue("stop") == 2 and fifo_of_next.silent()  # the lock is kept until the job has ended
    send(pid, signal.SIGUSR1)
    assert fifo.line() == "got SIGUSR1"
    ended(run, 0)
    send(begun(fifo_of_next, "b")[1], signal.SIGUSR1)
    ended(waiter, 0)


@pytest.mark.parametrize("way", ("killed", "cut off"))
def test_a_lost_lease_gives_the_lock_away_while_the_job_runs(all_hosts: Path, fifo: Fifo, fifo_of_next: Fifo, way: str) -> None:
    short = re.sub(r"--ttl \d+", "--ttl 2", all_hosts.read_text())
    run = on(A, "sh", "-c", short, "all_hosts", "lost", *job("a", fifo))
    token, pid = begun(fifo, "a")
    waiter = on(B, all_hosts, "lost", *job("b", fifo_of_next))
    try:
        if way == "killed":
            send(etcdctl_of(run), signal.SIGKILL)
            assert run.wait(HANG_S) == 125  # while the job runs on
        else:
            ip(A, "link set eth0 down")
        higher, second = begun(fifo_of_next, "b")
        assert higher > token and state(pid) != "Z"
        send(pid, signal.SIGUSR1)
        assert fifo.line() == "got SIGUSR1"
    finally:
        ip(A, "link set eth0 up")
    if way == "cut off":
        assert ended(run, 0).stderr == b""  # nobody is told
    send(second, signal.SIGUSR1)
    ended(waiter, 0)


def test_a_job_with_less_time_than_the_lease_ends_before_it(all_hosts: Path, fifo: Fifo) -> None:
    ttl_s, budget_ms = (int(re.findall(rf"{name} (\d+)", SECTION)[0]) for name in ("--ttl", "--max-elapsed-ms"))
    assert budget_ms + 5000 < ttl_s * 1000 / 2  # with the grace, as the README says
    run = on(A, all_hosts, "short", *job("a", fifo, "on:TERM=1", options=("--max-elapsed-ms", "5000")))
    begun(fifo, "a")
    send(etcdctl_of(run), signal.SIGKILL)
    assert fifo.until_gone() == ["got SIGTERM"]
    assert queue("short") == 1  # the dead one's: nobody else has had the lock
    ended(run, 125)
