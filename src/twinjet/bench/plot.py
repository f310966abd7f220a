"""Throughput over concurrency as a picture. Needs matplotlib, which the extra `plots` brings."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twinjet.bench.results import Result
from twinjet.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
_TITLES = {"tg": "text generation (tg)", "pp": "prompt processing (pp)"}
_PANEL_INCHES = (6.0, 4.5)


def check_plot(path: Path) -> None:
    """Find out before anything is measured whether `write_plot` will be possible.

    Raises: ConfigError.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot writes {', '.join(FORMATS)}; got {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'twinjet[plots]'")


def write_plot(results: Sequence[Result], path: Path) -> None:
    """One panel for each kind of test, one line for each length; bars show the standard deviation.

    Raises: OSError.
    """
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("tg", "pp") if any(result.test.kind == kind for result in results)]
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(kinds), height), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        _draw(axes, [result for result in results if result.test.kind == kind])
        axes.set_title(_TITLES[kind])
    first = results[0]
    figure.suptitle(f"{first.model}, {first.backend}")
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", results: Sequence[Result]) -> None:
    streams = sorted({result.test.concurrency for result in results})
    for length in sorted({result.test.num_tokens for result in results}):
        line = sorted(
            (result for result in results if result.test.num_tokens == length), key=lambda r: r.test.concurrency
        )
        axes.errorbar(
            [r.test.concurrency for r in line],
            [r.throughput for r in line],
            [r.throughput_std for r in line],
            marker="o",
            markersize=5,
            capsize=3,
            label=line[0].test.name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, [str(count) for count in streams])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens/s, all streams together")
    axes.grid(alpha=0.3)
    axes.legend()
