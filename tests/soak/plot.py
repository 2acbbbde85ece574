"""The samples of a soak as one SVG, a panel per figure. It is written by hand, so that it needs no library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from tests.soak.samples import Sample

WIDTH, HEIGHT, LEFT, TOP, GAP = (
    720,
    110,
    130,
    34,
    26,
)  # pixels: of a panel's curve, left of it, above it, between
INK, FAINT, CURVES = "#333333", "#dddddd", ("#1f77b4", "#ff7f0e", "#2ca02c")
Curve = tuple[str, Callable[[Sample], float]]
PANELS: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    (
        "memory, MiB",
        (("server", lambda one: one.rss_mib), ("its children", lambda one: one.children_mib)),
    ),
    ("descriptors", (("open", lambda one: one.n_files),)),
    ("threads", (("threads", lambda one: one.n_threads),)),
    (
        "pages",
        (
            ("held", lambda one: one.n_pages_held),
            ("cached", lambda one: one.n_pages_cached),
            ("free", lambda one: one.n_pages_free),
        ),
    ),
    ("requests", (("waiting", lambda one: one.n_waiting), ("in slots", lambda one: one.n_busy))),
)


def svg(samples: Sequence[Sample], title: str) -> str:
    """A picture of the samples over time, in minutes."""
    height = TOP + len(PANELS) * (HEIGHT + GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="18" fill="{INK}">{escape(title)}</text>',
    ]
    for place, (name, curves) in enumerate(PANELS):
        parts += _panel(samples, name, curves, TOP + place * (HEIGHT + GAP))
    end = samples[-1].at_s
    for sixth in range(7):
        x, minutes = LEFT + WIDTH * sixth / 6, end * sixth / 360
        parts.append(f'<text x="{x:.0f}" y="{height - 18}" text-anchor="middle">{minutes:.3g} min</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(samples: Sequence[Sample], name: str, curves: Sequence[Curve], top: int) -> list[str]:
    """Axes from 0 to the greatest value, and a line per curve with its name."""
    most = max(1.0, *(value(one) for _, value in curves for one in samples))
    end = max(1e-9, samples[-1].at_s)
    bottom = top + HEIGHT
    parts = [
        f'<path d="M{LEFT} {top}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="{FAINT}"/>',
        f'<text x="{LEFT - 8}" y="{top + 10}" text-anchor="end">{most:.0f}</text>',
        f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="8" y="{top + 10}" fill="{INK}">{escape(name)}</text>',
    ]
    for place, ((label, value), colour) in enumerate(zip(curves, CURVES, strict=False)):
        points = " ".join(
            f"{LEFT + WIDTH * one.at_s / end:.1f},{bottom - HEIGHT * value(one) / most:.1f}"
            for one in samples
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="8" y="{top + 26 + 14 * place}" fill="{colour}">{escape(label)}</text>')
    return parts
