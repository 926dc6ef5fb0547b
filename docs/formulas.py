"""Write formulas as MathML, which browsers draw by themselves.

Sphinx would have pages load MathJax from the network. Docutils can translate LaTeX, so nothing needs to be loaded.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> dict[str, Any]:
    """Offer the renderer that `conf.py` names."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f"<div>{tex2mathml(node.astext(), as_block=True)}</div>\n")
    raise nodes.SkipNode
