"""Write a report as a page: one HTML file that needs no network.

Files, in reading order:

    page: Put data, style and scripts into one HTML file.

`assets/` holds the other parts of the page, in this order: vendor.js (libraries, with their licences beside it),
page.css, tables.css and frame.css (colours, type, layout), kit.js (code that the views share), shell.js (header,
sections, theme), cursor.js and timeline.js, pareto.js, tables.js (the views), and the files of the graph in `graph/`.
"""

from jointcut.partition.drawing.page.page import framed as framed
from jointcut.partition.drawing.page.page import page as page

__all__ = ["framed", "page"]
