"""Say what each input and output of a function is.

One look at the function fills a `ViewAndMutationMeta`: which inputs are written, which outputs are inputs or views of
them, what has a tangent. It is a record, and is written to JSON and read back equal. `signatures` say the same of the
programs, by name and position. `convention` says it to the wrappers, for each flat array. The names are those of
PyTorch's AOTAutograd, where it has them.

Files, in reading order:

    views: Name the operations that only move elements, and do them again on another array.
    schemas: Say what one look at the function taught us of its inputs and outputs.
    signatures: Say by names and positions which input and output of a program is which.
    convention: Say what each flat input and output means to the caller.
"""
