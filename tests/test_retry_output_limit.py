"""--max-output-bytes: an attempt that writes more is stopped, whatever its end would have been, and never retried."""

import pytest
from conftest import PROBE, RETRY, Fifo, event, failed, run_cli

LIMIT = event("output_limit", attempt=1, max_attempts=3, retrying=False)
PIPE = 1 << 20  # what a pipe holds


def limited(limit: int, *more: str) -> tuple[object, ...]:
    return (RETRY, "--retry-code", "1-124", "--initial-delay-ms", "0", "--max-output-bytes", str(limit), *more, "--")


WITHIN = (
    (0, ":", b"", b""),
    (3, "echo ab", b"ab\n", b""),
    (3, "printf a; printf bc >&2", b"a", b"bc"),
    (300, "echo ab; exit $((RETRY_WRAPPER_ATTEMPT == 1))", b"ab\n", b""),
    (3, "echo ab; exit $((RETRY_WRAPPER_ATTEMPT == 1))", b"ab\n", b""),  # each attempt has its own
)


@pytest.mark.parametrize("more", ((), ("--stream-stderr",)))
@pytest.mark.parametrize(("limit", "job", "stdout", "stderr"), WITHIN)
def test_within_the_limit(limit: int, job: str, stdout: bytes, stderr: bytes, more: tuple[str, ...]) -> None:
    done = run_cli(*limited(limit, *more), "sh", "-c", job, code=0)
    assert done.stdout == stdout and done.stderr.endswith(stderr)


BEYOND = (
    (0, "printf x", b""),
    (0, "printf x >&2", b"x\n"),
    (2, "echo ab", b""),
    (2, "echo ab; exit 75", b""),
    (2, "echo ab; kill -KILL $$", b""),
    (2, "printf ab; printf c >&2", b"c\n"),
    (1000, "yes", b""),
    (1000, "trap '' TERM; yes", b""),
    (1000, "trap 'exit 0' TERM; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", b""),
)


@pytest.mark.parametrize(("limit", "job", "shown"), BEYOND)
def test_beyond_the_limit(limit: int, job: str, shown: bytes) -> None:
    done = run_cli(*limited(limit, "--kill-after-ms", "100"), "sh", "-c", job, code=125)
    assert (done.stdout, done.stderr) == (b"", LIMIT + shown)


def test_as_it_is_shown() -> None:
    done = run_cli(*limited(2, "--stream-stderr"), "sh", "-c", "printf abc >&2; exit 75", code=125)
    assert done.stderr == b"abc\n" + LIMIT


@pytest.mark.parametrize("more", ((), ("--stream-stderr",)))
@pytest.mark.parametrize("limit", (1, 5_000_000))
def test_no_more_than_a_pipe_is_kept(limit: int, more: tuple[str, ...]) -> None:
    done = run_cli(*limited(limit, *more), "sh", "-c", "yes >&2", code=125)
    assert LIMIT in done.stderr
    assert limit < len(done.stderr) - len(LIMIT) - done.stderr.endswith(b"\n") <= limit + PIPE


def test_the_whole_tree_is_stopped(fifo: Fifo) -> None:
    words = ("ignore:TERM", "fork", "say:{pid}", "out:xx", "wait")
    run_cli(*limited(1, "--kill-after-ms", "100"), *PROBE, fifo.path, *words, code=125)
    assert len(fifo.until_gone()) == 3


def test_what_a_background_child_writes_counts(fifo: Fifo) -> None:
    run_cli(*limited(1, "--kill-after-ms", "100"), *PROBE, fifo.path, "fork", "say:{pid}", "out:x", "wait", code=125)
    fifo.until_gone()


def test_a_failure_before_it_is_told_too() -> None:
    done = run_cli(*limited(2), "sh", "-c", "[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exit 75; echo abc", code=125)
    assert done.stderr == failed(75, 1, 0) + event("output_limit", attempt=2, max_attempts=3, retrying=False)


@pytest.mark.parametrize("value", ("-1", "1k", "", "9223372036854775808"))
def test_refused(value: str) -> None:
    assert b"--max-output-bytes" in run_cli(RETRY, "--retry-code", "75", "--max-output-bytes", value, "--", "true", code=2).stderr
