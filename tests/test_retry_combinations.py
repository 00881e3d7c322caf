"""All options together, in a few hundred generated runs, and what must come of each, worked out beside the wrapper."""

import os
import random
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import RETRY, ended, event, started, state

RUNS, GROUPS = 300, 10
LIMIT = 5000  # bytes, where there is one


class Attempt:
    """What the job does in one attempt."""

    def __init__(self, rng: random.Random, timeout: bool):
        ends = ["exit 0"] * 2 + ["exit 75"] * 5 + ["exit 69", "exit 65", "kill -KILL $$", "kill -USR2 $$", "exit 124"]
        self.end = rng.choice(ends + ["hang"] * 3 if timeout else ends)
        self.out = rng.choice(("", "out\n", "o" * 100, "x" * LIMIT))
        self.err = rng.choice(("", "err\n", "no end", "{}\n", "y" * 3000))
        self.child = rng.random() < 0.3
        self.stopped = rng.random() < 0.3
        self.hint_ms = rng.choice((None, None, None, 30, 60_000))
        self.deaf = rng.random() < 0.3

    def script(self) -> str:
        lines = ["cat >got.$RETRY_WRAPPER_ATTEMPT", "echo $$ >>pids"]
        if self.deaf:
            lines.append("trap '' TERM")
        if self.child:
            lines.append("sleep 600 >/dev/null 2>&1 & echo $! >>pids")
        lines.append(f"printf %s {shlex.quote(self.out)}; printf %s {shlex.quote(self.err)} >&2")
        if self.hint_ms is not None:
            lines.append(f'echo {self.hint_ms / 1000} >"$RETRY_WRAPPER_RETRY_AFTER_FILE"')
        hang = ("kill -STOP $$; " if self.stopped else "") + "exec sleep 600"
        return "\n".join([*lines, hang if self.end == "hang" else self.end])

    def returncode(self) -> int:
        signals = {"kill -KILL $$": -9, "kill -USR2 $$": -12, "hang": 124}
        return signals[self.end] if self.end in signals else int(self.end.split()[1])


class Run:
    """Options and a job, by a seed, and what has to come of them."""

    def __init__(self, seed: int):
        rng = self.rng = random.Random(seed)
        self.max_attempts = rng.randint(1, 4)
        self.timeout = rng.random() < 0.5
        self.stream, self.verbose = rng.random() < 0.4, rng.random() < 0.3
        self.limit = rng.random() < 0.4
        self.stdin = rng.choice(("null", "replay", "inherit"))
        self.jitter = rng.choice(("none", "full", "equal"))
        self.codes, self.signals = rng.choice(((75,), (75, 124), (69, 70, 71, 75))), rng.choice(((), (-9,), (-9, -12)))
        self.initial_ms, self.factor = rng.choice((0, 5, 20)), rng.randint(1, 3)
        self.maximum_ms = rng.choice((20, 50))
        self.attempts = [Attempt(rng, self.timeout) for _ in range(self.max_attempts)]

    def options(self) -> list[str]:
        values: dict[str, Any] = {
            "max-attempts": self.max_attempts,
            "initial-delay-ms": self.initial_ms,
            "backoff-factor": self.factor,
            "max-delay-ms": self.maximum_ms,
            "kill-after-ms": 100,
            "stdin": self.stdin,
            "jitter": self.jitter,
            "retry-code": ",".join(map(str, self.codes)).replace("69,70,71", "69-71").replace("75", "TEMPFAIL"),
        }
        if self.timeout:
            values["attempt-timeout-ms"] = 2000
        if self.limit:
            values["max-output-bytes"] = LIMIT
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        for number in self.signals:
            words += ["--retry-signal", {-9: "KILL", -12: "SIGUSR2"}[number]]
        if self.rng.random() < 0.3:
            words += ["--max-elapsed-ms", "600000"]
        words += ["--stream-stderr"] * self.stream + ["--verbose"] * self.verbose
        return words

    def expected(self) -> tuple[int, int, list[dict[str, Any]], str]:
        """How many attempts run, the exit code, the events without their delays, stdout."""
        events: list[dict[str, Any]] = []
        for number, attempt in enumerate(self.attempts, 1):
            where = {"attempt": number, "max_attempts": self.max_attempts}
            result = attempt.returncode()
            if self.limit and len(attempt.out) + len(attempt.err) > LIMIT:
                return number, 125, [*events, {"name": "output_limit", **where, "retrying": False}], ""
            if result == 0:
                return number, 0, events if self.stream else [], attempt.out
            again = number < self.max_attempts and result in (*self.codes, *self.signals)
            late = {"timed_out": True} if attempt.end == "hang" else {}
            events.append({"name": "attempt_failed", **where, "returncode": result, **late, "retrying": again})
            if not again:
                return number, result if result >= 0 else 128 - result, events, ""
        raise AssertionError

    def stderr(self, count: int, code: int, events: list[dict[str, Any]], delays: list[int]) -> str:
        waits = iter(delays)
        lines = [event(**{**line, **({"next_delay_ms": next(waits)} if line["retrying"] else {})}) for line in events]
        texts = [attempt.err + "\n" * (attempt.err[-1:] not in ("", "\n")) for attempt in self.attempts[:count]]
        pairs = zip(texts, (line.decode() for line in lines), strict=False)
        shown = "".join(text + line if self.stream else line + text for text, line in pairs)
        if code:
            return shown
        return shown + (texts[-1] if self.stream and self.verbose else self.attempts[count - 1].err)  # a note begins a line

    def delays_hold(self, delays: list[int]) -> bool:
        base_ms = self.initial_ms
        for attempt, delay_ms in zip(self.attempts, delays, strict=False):
            longest = min(base_ms, self.maximum_ms)
            lowest = {"none": longest, "full": 0, "equal": longest / 2}[self.jitter]
            hint_ms = min(attempt.hint_ms or 0, self.maximum_ms)
            if not max(lowest, hint_ms) <= delay_ms <= max(longest, hint_ms):
                return False
            base_ms *= self.factor
        return True


def check(seed: int, folder: Path) -> None:
    run = Run(seed)
    folder.mkdir()
    scripts = "\n".join(f"{number})\n{attempt.script()}\n;;" for number, attempt in enumerate(run.attempts, 1))
    job = ("sh", "-c", f"case $RETRY_WRAPPER_ATTEMPT in\n{scripts}\nesac")
    done = ended(started(RETRY, *run.options(), "--", *job, stdin=-1, cwd=folder), input=b"input")
    count, code, events, stdout = run.expected()
    assert (done.returncode, done.stdout.decode()) == (code, stdout), done.stderr
    assert len(list(folder.glob("got.*"))) == count
    inputs = {"null": [b""] * count, "replay": [b"input"] * count, "inherit": [b"input"] + [b""] * (count - 1)}[run.stdin]
    assert [(folder / f"got.{number}").read_bytes() for number in range(1, count + 1)] == inputs
    left = [pid for pid in map(int, (folder / "pids").read_text().split()) if state(pid) != "Z"]
    kept = run.attempts[count - 1].child and code == 0  # a success's background is left alone
    for pid in left:
        os.kill(pid, 9)
    assert len(left) == kept
    stderr = re.sub(r"(?m)^retry_command\.py: .*\n", "", done.stderr.decode())
    delays = [int(delay) for delay in re.findall(r'"next_delay_ms":(\d+)}', stderr)]
    assert run.delays_hold(delays)
    assert stderr == run.stderr(count, code, events, delays)


@pytest.mark.parametrize("group", range(GROUPS))
def test_what_always_holds(tmp_path: Path, group: int) -> None:
    seeds = range(group, RUNS, GROUPS)
    with ThreadPoolExecutor(4) as pool:
        results = {seed: pool.submit(check, seed, tmp_path / str(seed)) for seed in seeds}
    failures = {seed: result.exception() for seed, result in results.items() if result.exception()}
    for seed, failure in failures.items():
        raise AssertionError(f"seed {seed}: {shlex.join(Run(seed).options())}") from failure
