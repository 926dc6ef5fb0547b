"""Measure jointcut on real training steps, and show it to a visitor.

Files, in reading order:

- gpt: A byte-level GPT in plain JAX, looped or unrolled.
- corpus: Read real text: the sources of Python's standard library.
- measure: Weigh and time compiled programs.
- programs: List the programs that are measured.
- methods: Build one training step in each of the ways that we compare.
- wire: Read protocol buffers without their schema.
- timeline: Replay how many bytes a compiled program holds at each instruction.
- picture: Draw the loss and the memory of a training run.
- bench: Put programs against methods, print the table, judge the targets.
- demo: Train a GPT with jointcut and show what it saves.
"""
