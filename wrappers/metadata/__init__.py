"""Describe each input and output of a function.

A `ViewAndMutationMeta` holds what the trace of a function shows: which inputs are written, which outputs are inputs or
views of inputs, which outputs have a tangent. It is a record with a JSON form. `signatures` describe the programs by
name and position. `convention` describes the flat arrays that pass between wrappers. Names are those of PyTorch's
AOTAutograd where it has them.

Files, in reading order:

    views: List the operations that only move elements.
    schemas: Define the records of a function's inputs and outputs.
    signatures: Describe the inputs and outputs of programs by name and position.
    convention: Describe the flat arrays that enter and leave a program.
"""
