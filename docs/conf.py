"""How Sphinx builds these pages (make docs)."""

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

project = "embershard"
html_title = "embershard"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "literal"  # a word in backticks is code
copybutton_exclude = ".linenos, .gp, .go"
nitpicky = False


def setup(app: Sphinx) -> None:
    """Write the generated pages before they are read."""
    import generate  # beside this file

    app.add_lexer("hex", TextLexer)
    app.connect("builder-inited", lambda _: generate.write_pages(HERE / "reference"))
