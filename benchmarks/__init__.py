"""Measure jointcut on real training steps, and show it to a visitor.

Files, in reading order:

- programs: The programs that are measured: what people train with JAX, as they write it.
- measure: Weigh and time compiled programs.
- methods: Build one training step in each of the ways that we compare.
- scaling: Time what jointcut itself costs: tracing and cutting large graphs, and the call of a compiled step.
- report: Lay out what was measured: tables for the terminal, targets, JSON.
- wire: Read protocol buffers without their schema.
- timeline: Replay how many bytes a compiled program holds at each instruction.
- picture: Draw a training run, and the suite.
- bench: Put programs against methods, print the tables, judge the targets.
- demo: Train a GPT with jointcut and show what it saves.
"""
