"""RetryPolicy decides without a clock or a process: what is retried, and how long the wait is."""

import random

import pytest

from retry_command import RetryPolicy, hint_ms, plan

LAST_BELOW_1 = 1 - 2**-53
BASE_MS = (  # initial, factor, maximum, the waits after attempts 1, 2, ...
    (1000, 2, 30_000, (1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000, 30_000)),
    (1, 10, 60_000, (1, 10, 100, 1000, 10_000, 60_000, 60_000)),
    (60_000, 10, 60_000, (60_000, 60_000)),
    (7, 1, 7, (7, 7, 7)),
    (0, 10, 60_000, (0, 0, 0)),
    (0, 1, 0, (0, 0)),
)


def policy(jitter: str = "none", **more: object) -> RetryPolicy:
    return RetryPolicy({75, -9}, max_attempts=10, jitter=jitter, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("initial_ms", "factor", "maximum_ms", "waits_ms"), BASE_MS)
def test_without_jitter_it_is_the_base_schedule(initial_ms: int, factor: int, maximum_ms: int, waits_ms: tuple[int, ...]) -> None:
    base = policy(initial_delay_ms=initial_ms, backoff_factor=factor, max_delay_ms=maximum_ms)
    assert tuple(base.delay_ms(attempt) for attempt in range(1, len(waits_ms) + 1)) == waits_ms


@pytest.mark.parametrize(
    ("jitter", "base_ms", "shortest_ms"),
    [("full", base, 0) for base in (0, 1, 7, 1000, 60_000)]
    + [("equal", base, half) for base, half in ((0, 0), (1, 1), (2, 1), (7, 4), (1000, 500), (60_000, 30_000))],
)
def test_jitter_is_uniform_between_its_bounds(jitter: str, base_ms: int, shortest_ms: int) -> None:
    """Of the articles' formulas: full, random_between(0, d); equal, d/2 + random_between(0, d/2)."""

    def delay_ms(value: float) -> int | None:
        chosen = policy(jitter, initial_delay_ms=base_ms, max_delay_ms=60_000, backoff_factor=1, random=lambda: value)
        return chosen.delay_ms(1)

    assert (delay_ms(0.0), delay_ms(LAST_BELOW_1)) == (shortest_ms, base_ms)
    steps = [delay_ms((step + 0.5) / (base_ms - shortest_ms + 1)) for step in range(base_ms - shortest_ms + 1)]
    assert steps == list(range(shortest_ms, base_ms + 1))  # each whole millisecond is as likely as the others


@pytest.mark.parametrize("jitter", ("none", "full", "equal"))
@pytest.mark.parametrize("seed", range(20))
def test_delays_are_whole_and_within_range_and_cap(jitter: str, seed: int) -> None:
    rng = random.Random(seed)
    maximum_ms = rng.choice((0, 1, 999, 60_000))
    chosen = policy(
        jitter, initial_delay_ms=rng.randint(0, maximum_ms), backoff_factor=rng.randint(1, 10), max_delay_ms=maximum_ms,
        random=rng.random,
    )  # fmt: skip
    for attempt in range(1, 10):
        shortest_ms, longest_ms = chosen.delay_range_ms(attempt)
        delay_ms = chosen.delay_ms(attempt)
        assert isinstance(delay_ms, int) and 0 <= shortest_ms <= delay_ms <= longest_ms <= maximum_ms


def test_the_same_source_gives_the_same_delays() -> None:
    first, second, other = (policy("full", random=random.Random(seed).random) for seed in (1, 1, 2))
    delays = [[chosen.delay_ms(attempt) for attempt in range(1, 9)] for chosen in (first, second, other)]
    assert delays[0] == delays[1] != delays[2]


def test_defaults() -> None:
    chosen = RetryPolicy({75})
    assert [chosen.delay_range_ms(attempt) for attempt in (1, 2, 6)] == [(250, 500), (500, 1000), (5000, 10_000)]
    assert chosen.delay_ms(2) in range(500, 1001) and chosen.delay_ms(3) is None


def test_what_is_retried() -> None:
    assert [code for code in range(-64, 256) if policy().retries(code)] == [-9, 75]


def test_no_such_jitter() -> None:
    with pytest.raises(ValueError, match="decorrelated"):
        policy("decorrelated")


@pytest.mark.parametrize(
    ("attempt", "elapsed_ms", "hint_ms", "delay_ms"),
    (
        (1, 0, 0, 100),
        (1, 899.9, 0, 100),
        (1, 900, 0, None),  # it would begin when no time is left
        (1, 5000, 0, None),
        (2, 0, 0, 200),
        (1, 0, 150, 150),
        (1, 0, 50, 100),  # a hint never shortens
        (1, 0, 10**9, 300),
        (1, 750, 250, None),
        (10, 0, 0, None),
    ),
)
def test_attempts_budget_and_hints(attempt: int, elapsed_ms: float, hint_ms: int, delay_ms: int | None) -> None:
    chosen = policy(initial_delay_ms=100, max_delay_ms=300, max_elapsed_ms=1000)
    assert chosen.delay_ms(attempt, elapsed_ms, hint_ms) == delay_ms


HINTS = (
    *((text, ms) for text, ms in ((b"5", 5000), (b" 5\n", 5000), (b"0.25", 250), (b"1.1\n", 1100), (b"007", 7000), (b".5", 500))),
    (b"5.", 5000),
    (b"0", 0),
    (b"9" * 999, 604_800_000_000),
    *((junk, 0) for junk in (b"", b"\n", b".", b"-1", b"+1", b"1e3", b"nan", b"inf", b"1_0", b"1.2.3", b"0x5", b"5 s", b"5 5")),
    *((junk, 0) for junk in (b"Wed, 21 Oct 2026 07:28:00 GMT", b"\xff", b"\0", "٣".encode(), b"5,5", b"5\x005")),
)


@pytest.mark.parametrize(("text", "ms"), HINTS)
def test_hints(text: bytes, ms: int) -> None:
    assert hint_ms(text) == ms


PLANS: tuple[
    tuple[dict[str, int], int | None, int, tuple[str, ...], str], ...
] = (  # options of the policy, time-out, grace, what the last column and the total are
    ({}, None, 5000, ("0", "no limit", "no limit"), "no limit, with Retry-After hints no limit"),
    ({}, 1000, 500, ("0", "1600", "3300"), "4800, with Retry-After hints 5100"),
    ({"max_elapsed_ms": 2000}, 1000, 500, ("0", "1600", "2000"), "2500, with Retry-After hints 2500"),
    ({"max_elapsed_ms": 2000}, None, 500, ("0", "2000", "2000"), "2500, with Retry-After hints 2500"),
)


@pytest.mark.parametrize(("more", "timeout_ms", "grace_ms", "latest", "total"), PLANS)
def test_the_plan(more: dict[str, int], timeout_ms: int | None, grace_ms: int, latest: tuple[str, ...], total: str) -> None:
    chosen = RetryPolicy({75}, jitter="none", initial_delay_ms=100, max_delay_ms=300, **more)  # type: ignore[arg-type]
    heading, *rows, last = plan(chosen, timeout_ms, grace_ms).splitlines()
    assert heading.split(maxsplit=1)[0] == "attempt"
    assert [" ".join(line.split()[1:3]) for line in rows] == ["0 0", "100 100", "200 300"]
    assert [" ".join(line.split()[3:]) for line in rows] == list(latest)
    assert last == f"longest total, ms: {total}"


def test_the_plan_ends_with_the_budget() -> None:
    chosen = policy(initial_delay_ms=100, max_elapsed_ms=300)
    rows = plan(chosen, None, 5000).splitlines()[1:-1]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"] and rows[-1].endswith("never: no time is left")
