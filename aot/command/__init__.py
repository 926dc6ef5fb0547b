"""Serve the command line: `jointcut explain`, `export`, `show`, `run` and `cache`.

Files, in reading order:

    usage: Teach the command line by example.
    named: Import what a command line names.
    npz: Read the arrays of a call from an archive of numpy's, by their paths, and write results to one.
    differences: Compare a gradient with differences of its function.
    trial: Run an exported pair on given arrays, and check what comes out.
    facts: Gather what the commands tell, as one JSON object each.
    printed: Write what the commands tell as lines of text, at most 100 columns wide.
    cli: Explain, export, show and run from a command line.
"""

from jointcut.aot.command.cli import main as main

__all__ = ["main"]
