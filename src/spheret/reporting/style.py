"""The look of all figures: one colour and marker per scheme, the legend below the axes, SVG that stands alone."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# Okabe and Ito's palette for all kinds of colour vision, without its yellow (too faint on white); grey is the baseline.
BASELINE_COLOR = "#4d4d4d"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7B4EA3")
MARKERS = "sD^vPXhp"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
WIDTH = 4.8  # inches; text of 9 points stays readable when a phone shrinks the figure
LINE = 0.155  # inches from one line of text to the next
# Characters of a line of text, so that it fits its place at 9 points: beside the axes, below them, in the legend.
BESIDE, BELOW, IN_LEGEND = 25, 34, 50

_RC = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: smaller files, and it can be searched
    "svg.hashsalt": "spheret",  # otherwise element ids are random, and the same figure has other bytes each time
}


@dataclass(frozen=True)
class Look:
    """How a scheme is drawn, the same in every figure."""

    color: str
    marker: str
    dash: Any


@dataclass(frozen=True)
class Plot:
    """A finished figure. `key` is its file name without suffix, `alt` describes it in words."""

    key: str
    title: str
    caption: str
    alt: str
    svg: bytes
    figure: Any = field(repr=False, compare=False)

    @property
    def data_uri(self) -> str:
        """The SVG for the src of an <img>."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")

    def png(self, dpi: int = 200) -> bytes:
        """The figure as PNG, drawn only on request, because a report does not need it."""
        with styled():  # text is set when the figure is written, with the settings of that moment
            return _written(self.figure, format="png", dpi=dpi)


def looks(schemes: Sequence[str]) -> dict[str, Look]:
    """One look per scheme: grey circles for the first (the baseline), then the palette, then the palette in dashes."""
    styles = {}
    for i, scheme in enumerate(dict.fromkeys(schemes)):
        if i == 0:
            styles[scheme] = Look(BASELINE_COLOR, "o", "-")
        else:
            turn, color = divmod(i - 1, len(PALETTE))
            styles[scheme] = Look(PALETTE[color], MARKERS[(i - 1) % len(MARKERS)], DASHES[turn % len(DASHES)])
    return styles


@contextmanager
def styled() -> Iterator[None]:
    """Apply the project's matplotlib settings while a figure is made and written."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context():  # restores what the user had
        # From the defaults of matplotlib and not from the user's matplotlibrc, which may ask for LaTeX or another size.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some defaults are deprecated
            matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def new_figure(height: float = 3.5, *, below: float = 0.0) -> tuple[Any, Any]:
    """A figure of `height` inches and its axes, made without pyplot: no global state changes, no display is needed.

    With `below`, figure.axes[1] is a second pair of axes under the first one, about that many inches high, with the
    same x axis.
    """
    _matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height + below), layout="constrained")
    if not below:
        return figure, figure.add_subplot()
    axes, _ = figure.subplots(2, 1, sharex=True, height_ratios=(height, below))
    return figure, axes


def legend_below(figure: Any, labelled: Sequence[tuple[Any, str]]) -> None:
    """Put a legend below the axes, where it covers no data. The figure grows by the height of the legend."""
    if not labelled:
        return
    labels = [wrapped(label, IN_LEGEND) for _, label in labelled]
    longest = max(len(line) for label in labels for line in label.splitlines())
    # About 60 characters fit the width, and the line sample of each entry takes the room of six.
    columns = max(1, min(4, len(labels), 60 // (longest + 6)))
    lines = -(-len(labels) // columns)
    more = sum(label.count("\n") for label in labels)  # only labels as wide as the legend have further lines
    figure.set_figheight(figure.get_figheight() + 0.21 * lines + LINE * more)
    handles = [handle for handle, _ in labelled]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.2, columnspacing=1.4)


def wrapped(text: str, width: int) -> str:
    """`text` on lines of at most `width` characters, for matplotlib: nothing is left out, so names stay distinct.

    Lines break after spaces, commas and colons, and elsewhere only if there are none.
    """
    lines = [""]
    for part in re.split(r"(?<=[ ,:])", text):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    # A dollar sign would start a formula.
    return "\n".join(line.rstrip() for line in lines).replace("$", r"\$")


def log_scale(axes: Any) -> None:
    """A logarithmic y axis with plain numbers 1, 2, 5, 10: labels such as 3 x 10^0 are long and cover each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Over many decades the locator would leave out powers of ten, and with these subs find no place at all.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def token_formatter() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def render(figure: Any, *, key: str, title: str, caption: str, alt: str) -> Plot:
    """Write a figure as SVG. The same figure always gives the same bytes, so it carries no date."""
    return Plot(key, title, caption, alt, _written(figure, format="svg", metadata={"Date": None}), figure)


def _written(figure: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, facecolor="white", **options)
    return buffer.getvalue()


def _matplotlib() -> Any:
    # Importing matplotlib fails if MPLBACKEND names a backend that is not installed, as that of a notebook may be. No
    # figure here needs a backend.
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib

        if backend is not None:
            with suppress(ValueError):
                matplotlib.rcParams["backend"] = backend  # for plots that the caller makes later
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "spheret[report]"') from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return matplotlib
