"""Configure Sphinx. `build.py` lays the sources out and starts it; by itself it would find no pages."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "jointcut"
author = copyright = "The jointcut authors"
version = release = installed_version("jointcut")

_own = ["docstrings", "formulas", "navigation", "reachable"]
extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_nb", *_own]
default_role = "py:obj"  # a name in backticks is a link where there is something to link to

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 110
toc_object_entries_show_parents = "hide"
nb_execution_mode = "off"  # the notebooks are kept with what they printed
suppress_warnings = ["misc.highlighting_failure"]  # an error of ours with a × in it, which is no traceback
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
highlight_language = "none"  # examples after >>> and fences that name a language are coloured all the same
pygments_dark_style = "github-dark"

html_theme = "furo"
html_math_renderer = "mathml"
html_show_search_summary = False  # summaries are fetched, which a browser refuses to a page that it reads from a disk
html_title = f"jointcut {release}"
html_static_path = ["static"]
html_css_files = ["house.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
