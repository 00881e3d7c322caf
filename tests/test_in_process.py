"""In a program of one's own: `retry`, `async_retry` and their policy, with an injected clock, sleep and random source."""

import asyncio
import random
import subprocess
from typing import Any

import pytest
from conftest import ISOLATED, ROOT

from retry_command import RetryPolicy, async_retry, retry


class Flaky:
    """Fails with these errors, one by one, then succeeds."""

    def __init__(self, *errors: Exception):
        self.errors, self.calls = list(errors), 0

    def __call__(self, value: str = "done") -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return value

    async def later(self, value: str = "done") -> str:
        return self(value)


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 100.0, []  # type: float, list[float]

    def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.now_s += delay_s

    async def sleep_later(self, delay_s: float) -> None:
        self.sleep(delay_s)

    def __call__(self) -> float:
        return self.now_s


PLAIN = RetryPolicy(max_attempts=4, initial_delay_ms=500, jitter="none")
CASES: tuple[tuple[Any, ...], ...] = (  # policy, errors, retry_if, calls, delays, what comes
    (PLAIN, [], None, 1, [], "done"),
    (PLAIN, [OSError(), ValueError()], None, 3, [0.5, 1.0], "done"),
    (PLAIN, [OSError()] * 9, None, 4, [0.5, 1.0, 2.0], OSError),
    (PLAIN, [OSError(), ValueError()], lambda error: isinstance(error, OSError), 2, [0.5], ValueError),
    (PLAIN, [ValueError()], lambda error: isinstance(error, OSError), 1, [], ValueError),
    (RetryPolicy(max_attempts=9, jitter="none", max_elapsed_ms=1600), [OSError()] * 9, None, 3, [0.5, 1.0], OSError),
    (RetryPolicy(max_attempts=1), [OSError()], None, 1, [], OSError),
)


@pytest.mark.parametrize("kind", ("plain", "async"))
@pytest.mark.parametrize(("policy", "errors", "retry_if", "calls", "delays", "outcome"), CASES)
def test_calls_and_delays(
    kind: str, policy: RetryPolicy, errors: list[Exception], retry_if: Any, calls: int, delays: list[float], outcome: Any
) -> None:
    flaky, clock = Flaky(*errors), Clock()
    more = {"retry_if": retry_if} if retry_if else {}
    if kind == "plain":
        run: Any = retry(policy, clock=clock, sleep=clock.sleep, **more)(flaky.__call__)
    else:
        later: Any = async_retry(policy, clock=clock, sleep=clock.sleep_later, **more)(flaky.later)

        def run() -> str:
            result: str = asyncio.run(later())
            return result

    if isinstance(outcome, str):
        assert run() == outcome
    else:
        with pytest.raises(outcome) as raised:
            run()
        assert raised.value is errors[calls - 1]
    assert (flaky.calls, clock.slept_s) == (calls, delays)


def test_defaults_are_those_of_the_policy() -> None:
    """3 attempts, 0.5 s base, equal jitter."""
    clock = Clock()
    policy = RetryPolicy(random=random.Random(1).random)
    with pytest.raises(OSError):
        retry(policy, sleep=clock.sleep)(Flaky(*[OSError()] * 9).__call__)()
    first, second = clock.slept_s
    assert 0.25 <= first <= 0.5 <= second <= 1.0
    again = Clock()
    with pytest.raises(OSError):
        retry(sleep=again.sleep)(Flaky(*[OSError()] * 9).__call__)()
    assert len(again.slept_s) == 2


def test_each_call_begins_anew() -> None:
    clock = Clock()
    flaky = Flaky(*[OSError()] * 4)
    call = retry(RetryPolicy(max_attempts=3, jitter="none"), sleep=clock.sleep)(flaky.__call__)
    with pytest.raises(OSError):
        call()
    assert call("second") == "second" and clock.slept_s == [0.5, 1.0, 0.5]


def test_it_looks_like_the_function() -> None:
    @retry()
    def plain(first: int, *, second: str = "x") -> str:
        """What it does."""
        return f"{first}{second}"

    @async_retry()
    async def later(first: int) -> int:
        """What it does later."""
        return first

    assert (plain.__name__, plain.__doc__, plain(1, second="y")) == ("plain", "What it does.", "1y")
    assert asyncio.iscoroutinefunction(later) and later.__doc__ == "What it does later." and asyncio.run(later(3)) == 3


@pytest.mark.parametrize("error", (KeyboardInterrupt, SystemExit))
def test_what_is_no_exception_passes_through(error: type[BaseException]) -> None:
    calls = []

    @retry(sleep=lambda _: None)
    def stopped() -> None:
        calls.append(1)
        raise error

    with pytest.raises(error):
        stopped()
    assert calls == [1]


@pytest.mark.parametrize("where", ("call", "sleep"))
def test_cancellation_passes_through_at_once(where: str) -> None:
    calls = []
    waiting = asyncio.Event()

    async def forever(_: float = 0) -> None:
        waiting.set()
        await asyncio.Event().wait()

    @async_retry(RetryPolicy(max_attempts=9, jitter="none"), sleep=forever)
    async def job() -> None:
        calls.append(1)
        if where == "call":
            await forever()
        raise OSError

    async def main() -> None:
        task = asyncio.ensure_future(job())
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert calls == [1]


def test_asyncios_own_sleep_is_the_default() -> None:
    flaky = Flaky(OSError())
    assert asyncio.run(async_retry(RetryPolicy(initial_delay_ms=1))(flaky.later)()) == "done"  # type: ignore[arg-type]


def test_an_import_does_nothing_else() -> None:
    script = """
import os, signal, sys
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), handlers, os.listdir("/proc/self/fd")
before = state()
import retry_command
assert before == state()
assert not {"sqlite3", "json", "uuid", "asyncio", "random", "tempfile", "subprocess"} & set(sys.modules)
"""
    done = subprocess.run([ISOLATED[0], "-S", "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
