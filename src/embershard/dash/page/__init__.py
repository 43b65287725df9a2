"""The page of the panel: one HTML file with all that it needs, and the policy that lets it have nothing else."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class PanelPage:
    """The page, and its Content-Security-Policy."""

    html: bytes
    policy: str


def build_page() -> PanelPage:
    """Put the page together from the files beside this one."""
    folder = files(__name__)

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    licence = f"/*! uPlot\n{read('uPlot.LICENSE')}*/\n"
    styles = [licence + read("uPlot.min.css"), read("panel.css")]
    plot = licence + read("uPlot.iife.min.js")
    panel = "\n".join(read(name) for name in ("track.js", "charts.js", "rows.js", "panel.js"))
    html = read("panel.html")
    html = html.replace("<!--styles-->", "".join(f"<style>{style}</style>" for style in styles))
    html = html.replace("<!--scripts-->", f'<script>{plot}</script><script type="module">{panel}</script>')
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes([plot, panel])}",
            f"style-src {_hashes(styles)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return PanelPage(html.encode(), policy)


def _hashes(texts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
