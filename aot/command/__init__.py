"""Serve the command line: `jointcut explain`, `diff`, `largest`, `doctor`, `export`, `show` and `cache`.

Files, in reading order:

    usage: Teach the command line by example.
    named: Import the function and arguments that a command line names.
    facts: Gather the results of each command in a JSON object.
    printed: Print the results of each command as text of at most 100 columns.
    cli: Run a command: read its options, ask jointcut, and print the answer.
"""

from jointcut.aot.command.cli import main as main

__all__ = ["main"]
