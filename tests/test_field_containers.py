"""README, containers: its image in bare namespaces and by podman, and its CronJob by the schemas of Kubernetes."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CLEAN_ENV, ROOT, Fifo, children, ended, event, failed, run_cli, send, started
from private_host import BILL, BUSY, CRON_PATH, FIELD, PROBE_THERE, Host, begun_with_a_child, cgroup2

pytestmark = FIELD
SECTION = (ROOT / "README.md").read_text().partition("\n## Containers\n")[2].partition("\n## ")[0]
BLOCKS: dict[str, str] = dict(re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL))
ENTRYPOINT, CMD = (json.loads(words) for words in re.findall(r"\[.*?\]", BLOCKS["dockerfile"].replace("\\\n", "")))
RUN = BLOCKS["sh"].strip()
(COMMAND,) = (json.loads(words) for words in re.findall(r"command: (\[.*?\])", BLOCKS["yaml"], re.DOTALL))
# `docker run ...` of the README, as bare namespaces that a test already is in
BARE = f"""
user=$4
shift 7 # run --rm --user USER --volume VOLUME bill
[ $# -gt 0 ] || set -- {shlex.join(CMD)}
exec setpriv "--reuid=${{user%:*}}" "--regid=${{user#*:}}" --clear-groups {shlex.join(ENTRYPOINT)} "$@"
"""
# podman with what it needs in namespaces of ours, and an image that has the programs of this machine.
PODMAN = """
case $1 in
run) shift
    for folder in /usr/bin /usr/lib /usr/lib64 /opt; do set -- "--volume=$folder:$folder" "$@"; done
    set -- run --network=host --cgroups=disabled --ulimit=nofile=1024:1024 --ulimit=nproc=1000:1000 "$@" ;;
esac
exec podman --root=/opt/podman --runroot=/run/podman --tmpdir=/run/libpod --storage-driver=vfs --cgroup-manager=cgroupfs \\
    --runtime=crun --events-backend=none "$@"
"""


def entry(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The image is built, and `docker` is podman."""
    if not shutil.which("podman"):
        pytest.skip("needs podman")
    host = Host(tmp_path_factory.mktemp("podman") / "host")
    host.folder("run/bill", 0o700, BILL)
    host.program("usr/local/bin/docker", PODMAN)
    for mounted in cgroup2()[:1]:
        host.mounts.append((mounted, "/sys/fs/cgroup"))
    with tarfile.open(host.root / "opt/base.tar", "w") as base:
        for name in ("opt", "run", "tmp", "usr/bin", "usr/lib", "usr/lib64", "usr/local/bin"):
            base.addfile(entry(name, type=tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755))
        for name in ("bin", "lib", "lib64"):
            base.addfile(entry(name, type=tarfile.SYMTYPE, linkname=f"usr/{name}"))
    shutil.copytree(host.root / "usr/local/bin", host.root / "opt/context")
    host.program("opt/context/job", 'echo "the job"')
    host.write("opt/context/Dockerfile", BLOCKS["dockerfile"])
    (name,) = re.findall(r"^FROM (\S+)$", BLOCKS["dockerfile"], re.MULTILINE)
    if host.run("sh", "-ec", f"docker import /opt/base.tar {name}; docker run --rm {name} true").returncode:
        pytest.skip("podman cannot run here")
    host.run("docker", "build", "--pull=never", "--tag=bill", "/opt/context", code=0)
    yield host
    shutil.rmtree(host.root)


@pytest.fixture(params=("namespaces", "podman"))
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    if request.param == "podman":
        return request.getfixturevalue("podman")  # type: ignore[no-any-return]
    bare = Host(tmp_path / "host")
    bare.folder("run/bill", 0o700, BILL)
    bare.program("usr/local/bin/docker", BARE)
    bare.program("usr/local/bin/job", 'echo "the job"')
    return bare


@pytest.fixture
def fifo(host: Host) -> Iterator[Fifo]:
    yield from host.opened_fifo()


def running(host: Host, *words: Any) -> subprocess.Popen[bytes]:
    """A container with this command instead of the image's own."""
    env = {**CLEAN_ENV, "PATH": f"/usr/local/bin:{CRON_PATH}"}
    return started(*host.command("sh", "-c", f'exec {RUN} "$@"', "sh", *words), env=env)


def stop(container: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
    """The signal to process 1 of its namespaces: the wrapper, or a podman that passes it on."""
    (first,) = children(container.pid)
    send(first, number)


def test_the_images_own_job(host: Host) -> None:
    assert ended(running(host), 0).stdout == b"the job\n"


@pytest.mark.parametrize(
    ("script", "code", "stderr"),
    (
        ("exit 65", 65, failed(65)),
        ("[ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75", 0, failed(75, 1, 1000)),
        ("kill -KILL $$", 137, failed(-9)),
        ("exec /opt/missing 2>/dev/null", 127, failed(127)),
        ("[ $(cat /proc/1/comm) = python3 ] && [ $(id -u) != 0 ]", 0, b""),
    ),
)
def test_exit_codes(host: Host, script: str, code: int, stderr: bytes) -> None:
    assert ended(running(host, "sh", "-c", script), code).stderr == stderr


def test_stop(host: Host, fifo: Fifo) -> None:
    """Both processes of the job clean up, each is told once, and the next container runs."""
    container = running(host, *PROBE_THERE, "fork", "on:TERM=75", "say:begun", "wait")
    begun_with_a_child(fifo)
    stop(container)
    assert fifo.until_gone() == ["got SIGTERM"] * 2
    assert ended(container, 143).stderr == failed(75) + event("interrupted", kind="sigterm")
    ended(running(host), 0)


def test_orphans_are_reaped(host: Host) -> None:
    """Also of a job whose own parent, the inner wrapper, is not process 1."""
    script = "(true & true &); while cat /proc/[0-9]*/stat 2>/dev/null | grep -q ') Z 1 '; do sleep 0.01; done"
    ended(running(host, "sh", "-c", script), 0)


def test_two_at_once(host: Host, fifo: Fifo) -> None:
    """On one host with one volume; a container that is killed frees the lock, with no process left."""
    first = running(host, *PROBE_THERE, "fork", "ignore:TERM", "say:begun", "wait")
    begun_with_a_child(fifo)
    assert ended(running(host), 75).stderr == BUSY
    stop(first, signal.SIGKILL)
    ended(first)
    assert fifo.until_gone() == []
    ended(running(host), 0)


def test_the_client_is_killed(podman: Host) -> None:
    """The container goes on, and its lock excludes."""
    begun = f"{RUN} sh -c 'echo begun >/run/bill/begun; exec sleep 600' & until [ -s begun ]; do sleep 0.1; done; kill -9 $!"
    end = podman.run("sh", "-c", f"cd /run/bill; {begun}; wait $!; {RUN}", code=75)
    assert end.stderr.endswith(BUSY)


def test_docker_stop(podman: Host) -> None:
    begun = f"{RUN.replace('--rm', '--rm --name bill')} sh -c 'echo begun >&2; exec sleep 600' 2>&1"
    end = podman.run("sh", "-c", f"{{ {begun}; echo $?; }} | {{ read begun; docker stop bill; cat; }}", code=0)
    assert end.stdout == b"bill\n" + failed(-15) + event("interrupted", kind="sigterm") + b"143\n"


def test_without_the_volume(podman: Host) -> None:
    end = podman.run("sh", "-c", RUN.replace("--volume /run/bill:/run/bill ", ""), code=3)
    assert b'"reason":"lock_' in end.stderr


@pytest.mark.parametrize(("more", "code"), (("", 125), ("--tmpfs /tmp", 0)))
def test_read_only(podman: Host, more: str, code: int) -> None:
    read_only = RUN.replace("--rm", f"--rm --read-only --read-only-tmpfs=false {more}")
    end = podman.run("sh", "-c", read_only, code=code)
    assert end.stderr == (event("wrapper_error", kind="OSError") if code else b"")


# Kubernetes


@pytest.mark.parametrize("version", ("1.31", None))
@pytest.mark.parametrize("wrong", (None, "podFailPolicy", "backoffLimits", "concurrencyPolicies", "operators"))
def test_cronjob_schema(tmp_path: Path, version: str | None, wrong: str | None) -> None:
    validator = shutil.which("kubernetes-validate")
    if not validator:
        pytest.skip("needs kubernetes-validate")
    manifest = BLOCKS["yaml"]
    if wrong:
        right = {"podFailPolicy": "podFailurePolicy", "concurrencyPolicies": "concurrencyPolicy"}.get(wrong, wrong[:-1])
        assert right in manifest
        manifest = manifest.replace(right, wrong)
    (tmp_path / "cronjob.yaml").write_text(manifest)
    options = ("--kubernetes-version", version) if version else ()
    end = run_cli(validator, "--strict", *options, tmp_path / "cronjob.yaml")
    assert bool(end.returncode) == bool(wrong), end.stdout


def verdict(code: int) -> str:
    """What Kubernetes does with a pod whose container ended so: the first rule that fits, else it counts for backoffLimit."""
    for action, operator, values in re.findall(
        r"action: (\w+)\n +onExitCodes: {operator: (\w+), values: (\[.*\])}", BLOCKS["yaml"]
    ):
        if code and (code in json.loads(values)) == (operator == "In"):
            return str(action)
    return "Count" if code else "Complete"


@pytest.mark.parametrize(
    ("job", "code", "then"),
    (
        ("exit 0", 0, "Complete"),
        ("exit 75", 75, "Count"),
        ("exit 65", 65, "FailJob"),
        ("kill -KILL $$", 137, "FailJob"),
        ("kill -TERM 1; exec sleep 600", 143, "FailJob"),
        (None, 127, "FailJob"),
    ),
)
def test_pod_failure_policy(tmp_path: Path, job: str | None, code: int, then: str) -> None:
    """The verdict on how the manifest's command really ends; the job sees the name of its Job as the key."""
    host = Host(tmp_path / "host")
    if job:
        host.program("usr/local/bin/job", f"[ $RETRY_WRAPPER_IDEMPOTENCY_KEY = bill-1 ] || exit 99; {job}")
    command = [word.replace("$(JOB_NAME)", "bill-1") for word in COMMAND]
    host.run(*command[:-2], "--initial-delay-ms", "0", *command[-2:], code=code)
    assert verdict(code) == then


def test_rules_of_the_api_that_no_schema_has() -> None:
    """restartPolicy Never; the values of a rule are in order, and none of those of In is 0."""
    assert re.search(r"^ +restartPolicy: Never$", BLOCKS["yaml"], re.MULTILINE)
    for operator, values in re.findall(r"operator: (\w+), values: (\[.*\])", BLOCKS["yaml"]):
        listed = json.loads(values)
        assert listed == sorted(set(listed)) and (operator == "NotIn" or 0 not in listed)
