"""Hold the memory of tested steps: a step that takes more than its record fails its test.

The plugin for pytest is light: it reads options, and imports nothing of jointcut until a test weighs a step. It is
installed as `jointcut.ratchet` too, since a module of `jointcut.aot` cannot be imported without JAX, and a
`conftest.py` may have to set variables for JAX first.

Files, in reading order:

    weigh: Weigh a step by compiling it: memory, flops and collectives by XLA's own account.
    records: Keep what steps took in a JSON file, by JAX version and backend or target.
    verdict: Compare a step with its record and its bound, and say what grew.
    environments: Make an environment for each version of JAX, once, and keep it for later runs.
    versions: Run the same tests with several versions of JAX, and say for each step what it takes with each.
    session: Hold the steps that the tests of one run weigh.
    plugin: Serve pytest: the mark and the fixture `peak`, and the options `--peak-record` and `--peak-check`.
"""
