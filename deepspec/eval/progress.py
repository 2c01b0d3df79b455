"""Progress of an evaluation on stderr."""

import sys
import time
from collections import Counter

from deepspec.eval.records import Record
from deepspec.eval.summary import Variant


class Progress:
    """A bar on stderr over all variants: answers, the tokens per second and τ of the one whose turn it is.

    tqdm adds the time left.
    """

    def __init__(self, total: int, pending: int, quiet: bool) -> None:
        from tqdm import tqdm

        # a log file gets a line now and then, a terminal a living bar
        interval = 0.2 if sys.stderr.isatty() else 15.0
        self._bar = tqdm(mininterval=interval, total=total, initial=total - pending, unit="answer", disable=quiet)
        self._started = time.perf_counter()
        self._tokens = 0
        self._rounds: Counter[str] = Counter()
        self._committed: Counter[str] = Counter()
        self._variant = ""

    def turn_of(self, variant: Variant) -> None:
        """The coming tokens are this variant's."""
        self._variant = variant.id
        self._started = time.perf_counter()
        self._tokens = 0
        title = variant.label if not variant.block else f"{variant.label} k={variant.block}"
        self._bar.set_description_str(f"{title} b={variant.batch}", refresh=False)

    def tokens(self, count: int) -> None:
        """New tokens of a round, over all rows."""
        self._tokens += count
        rate = self._tokens / max(time.perf_counter() - self._started, 1e-9)
        text = f"{rate:.1f} tok/s"
        if rounds := self._rounds[self._variant]:
            text += f", τ {self._committed[self._variant] / rounds:.2f}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(0)

    def finished(self, record: Record) -> None:
        """An answer is done."""
        self._rounds[self._variant] += len(record.rounds)
        self._committed[self._variant] += sum(committed for _, _, committed in record.rounds)
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
