"""Describe each input and output of a function.

A `ViewAndMutationMeta` holds facts from the trace of a function: the inputs that are written, the outputs that are
inputs or views of inputs, the outputs with a tangent. It is a record with a JSON form. `signatures` describe the
programs by name and position, `descriptors` array by array. `convention` describes the flat arrays that pass between
wrappers. Names follow PyTorch's AOTAutograd where it has them.

Files, in reading order:

    view_meta: List the operations that only move elements.
    schemas: Define the records of a function's inputs and outputs.
    signatures: Describe the inputs and outputs of programs by name and position.
    descriptors: Describe every array that enters or leaves a program.
    convention: Describe the flat arrays that enter and leave a program.
"""
