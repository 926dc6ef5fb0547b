"""Draw graphs and plans as pages and pictures.

`page` writes one HTML file that needs no network. `picture` turns a graph and its plan into the numbers that the page
draws. `displays` registers how a notebook shows a graph, a plan, and the differences between two plans. The earlier
files know nothing of pages. A class that shows itself is `Shown` (`program/notebook`).

Files, in reading order:

    perfetto: Write the memory of a step over its time as a trace that Perfetto shows: https://ui.perfetto.dev.
    pprof: Write the arrays of a step as a profile that pprof reads: bytes by the user's functions and lines.
    page: Write a report as a page: one HTML file that needs no network.
    picture: Give a notebook the numbers and shapes to draw.
    displays: Show graphs, plans and the differences between two plans in a notebook.
"""
