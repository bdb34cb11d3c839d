"""The chart of an advice as a PNG: the sizes as a heat map, the buckets over it, and the waste by bucket."""

from __future__ import annotations

import io

from aotc.errors import TraceError
from aotc.tools.advise.advice import Advice
from aotc.tools.advise.advice_page import draw
from aotc.tools.advise.trace import Trace

WIDTH = 1200  # pixels, as all below
LEFT, RIGHT, TOP, CHART, BELOW = 110, 40, 92, 640, 90
ROW, LABELS, MOST_ROWS = 30, 330, 24

PAPER, INK, MUTED, GRID = (255, 255, 255), (27, 31, 36), (90, 98, 108), (222, 226, 231)
HEAT, ADVISED = (9, 105, 218), (179, 38, 30)


def render_png(trace: Trace, advice: Advice, title: str) -> bytes:
    """The bytes of a PNG, 1200 pixels wide. Raises TraceError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise TraceError("a PNG needs Pillow, which is not installed", hint="pip install 'aotc[png]'") from None
    chart = draw(trace, advice)
    uses = sorted(advice.plan.buckets, key=lambda use: -use.lost)[:MOST_ROWS]
    image = Image.new("RGB", (WIDTH, TOP + CHART + BELOW + 50 + ROW * len(uses) + 30), PAPER)
    pen = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(26), ImageFont.load_default(18)
    pen.text((LEFT, 18), title, INK, large)
    waste = f"{len(advice.plan.buckets)} advised buckets (red) waste {advice.plan.waste:.1%}"
    today = f"; {len(advice.today.buckets)} of today (black) waste {advice.today.waste:.1%}" if advice.today else ""
    pen.text((LEFT, 54), waste + today, MUTED, small)

    def across(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(share: float) -> float:
        return TOP + share * CHART

    pen.rectangle((across(0), down(0), across(1), down(1)), outline=GRID)
    for tick in chart.x_ticks:
        pen.line((across(tick.at), down(0), across(tick.at), down(1)), GRID)
        pen.text((across(tick.at), down(1) + 8), tick.text, MUTED, small, anchor="ma")
    for tick in chart.y_ticks:
        pen.line((across(0), down(tick.at), across(1), down(tick.at)), GRID)
        pen.text((LEFT - 10, down(tick.at)), tick.text, MUTED, small, anchor="rm")
    for cell in chart.cells:
        shade = tuple(round(255 + (part - 255) * cell.strength) for part in HEAT)
        corner = across(cell.x + cell.width), down(cell.y + cell.height)
        pen.rectangle((across(cell.x), down(cell.y), *corner), (shade[0], shade[1], shade[2]))
    for box in sorted(chart.boxes, key=lambda box: box.today):  # today's are thinner: they go over the others
        color, width = (INK, 2) if box.today else (ADVISED, 3)
        right, top = across(box.x + box.width), down(box.y)
        if chart.y:
            pen.rectangle((across(box.x), top, right, down(box.y + box.height)), outline=color, width=width)
        else:
            pen.line((right, down(0), right, down(1)), color, width)
    pen.text((across(0.5), down(1) + 40), chart.caption.replace("×", "x"), MUTED, small, anchor="ma")
    below = TOP + CHART + BELOW
    pen.text((LEFT, below), "Of all waste, by bucket", INK, small)
    most = max([use.lost for use in uses]) or 1.0
    for n, use in enumerate(uses):
        y = below + 40 + n * ROW
        pen.text((LEFT, y), use.name, INK, small)
        end = LEFT + LABELS + use.lost / most * (WIDTH - LEFT - RIGHT - LABELS - 90)
        pen.rectangle((LEFT + LABELS, y + 3, max(end, LEFT + LABELS + 1), y + 19), HEAT)
        pen.text((max(end, LEFT + LABELS) + 10, y), f"{use.lost:.1%}", MUTED, small)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()
