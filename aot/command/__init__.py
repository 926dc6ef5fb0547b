"""Serve the command line: `jointcut explain`, `export`, `show`, `run` and `cache`.

Files, in reading order:

    usage: Teach the command line by example.
    named: Import the function and arguments that a command line names.
    npz: Read the arrays of a call from an .npz file, by their paths, and write results to one.
    differences: Compare a gradient with differences of its function.
    trial: Run an exported pair on given arrays, and check the results.
    facts: Gather the results of each command in a JSON object.
    printed: Print the results of each command as text of at most 100 columns.
    cli: Explain, export, show and run from a command line.
"""

from jointcut.aot.command.cli import main as main

__all__ = ["main"]
