"""What a server's /metrics page has gained between two readings. Knows the text format, and no metric by name."""

import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Page = dict[tuple[str, str], float]
"""(name of a sample, its bound `le` or "") -> value, summed over all other labels."""

REPORT_S = 1.0
"""After the last step its engine's figures are on the page: engines report twice a second."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram of seconds."""

    bounds_s: tuple[float, ...]
    """Upper bounds, ascending; the last is infinite."""
    counts: tuple[float, ...]
    """At most the bound, and more than the one before."""

    @property
    def num_values(self) -> int:
        return int(sum(self.counts))

    def quantile_s(self, share: float) -> float | None:
        """As Prometheus' histogram_quantile: values lie evenly in their bucket; None where there are none.

        What lies beyond the last finite bound counts as that bound, so the true figure may be longer.
        """
        rank = share * self.num_values
        if not rank:
            return None
        below = 0.0
        for (lower_s, upper_s), count in zip(pairwise((0.0, *self.bounds_s)), self.counts, strict=True):
            if below + count >= rank:
                return lower_s if upper_s == float("inf") else lower_s + (upper_s - lower_s) * (rank - below) / count
            below += count
        return self.bounds_s[-2]


def read_page(url: str) -> Page:
    """The page of the server at `url`. Raises OSError, if it does not answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    page: Page = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page[sample.name, sample.labels.get("le", "")] += sample.value
    return dict(page)


@dataclass(frozen=True, slots=True)
class Gain:
    """What lies between two readings of a page, over all engines; names are without the prefix `twinjet_`."""

    before: Page
    after: Page

    def total(self, name: str) -> float:
        """Of a counter, or of a histogram's `_sum` or `_count`. Raises KeyError, if the later page has none."""
        key = (f"twinjet_{name}", "")
        return self.after[key] - self.before.get(key, 0.0)

    def buckets(self, name: str) -> Buckets | None:
        """Of a histogram; None if the later page has none of that name."""
        reached = sorted(
            (float(bound), value - self.before.get((sample, bound), 0.0))
            for (sample, bound), value in self.after.items()
            if sample == f"twinjet_{name}_bucket"
        )
        if not reached:
            return None
        bounds_s, values = zip(*reached, strict=True)
        return Buckets(bounds_s, tuple(later - earlier for earlier, later in pairwise((0.0, *values))))

    @property
    def duty_percent(self) -> float:
        """The device's time in steps over that plus its gaps while there was work."""
        busy_s, gap_s = self.total("busy_seconds_total"), self.total("step_gap_seconds_sum")
        return 100 * busy_s / (busy_s + gap_s)

    @property
    def wasted_rows_percent(self) -> float:
        """Rows computed for sequences that had ended, of all rows."""
        return 100 * self.total("wasted_rows_total") / self.total("rows_total")
