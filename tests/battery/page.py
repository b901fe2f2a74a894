"""`python -m tests.battery.page [word…]` prints what comes of each case whose name or cause holds one of the words."""

from __future__ import annotations

import sys
from collections import Counter

from tests.battery.cases import CASES
from tests.battery.harness import result_of


def is_met(expect: str, verdict: str) -> bool:
    """Whether a verdict is what the case expects."""
    return verdict in expect.split("_or_")


def main(words: list[str]) -> None:
    """Run the cases and print a table by cause."""
    chosen = [case for case in CASES.values() if not words or any(word in (case.name, case.cause) for word in words)]
    counts: Counter[str] = Counter()
    cause, seconds, met = "", 0.0, 0
    for case in chosen:
        if case.cause != cause:
            cause = case.cause
            print(f"\n{cause}", flush=True)
        result = result_of(case.name)
        counts[result.verdict] += 1
        seconds += result.seconds
        good = is_met(case.expect, result.verdict)
        met += good
        shown = "" if result.verdict == "equal" else result.detail
        print(
            f"  {' ' if good else '!'} {case.name:38} {result.verdict:8} {result.seconds:5.1f} s  {shown}", flush=True
        )
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"\n{len(chosen)} cases in {seconds:.0f} s: {total}; {met} as expected (`!` marks the others)")


if __name__ == "__main__":
    main(sys.argv[1:])
