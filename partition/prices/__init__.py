"""Give each value and op a price, and say which values may be saved or computed again.

A value costs bytes, an op seconds. `counts` and `flops` know how much an equation computes and moves, and a `CostModel`
turns this into seconds. `rules` say of each value whether it may be saved and whether it may be computed again, with
the reason in words. `constraints` turns a user's policy into demands on single values, which go before the rules of
cost. Nothing is decided here. For a new rule change `rules`; if a primitive is priced wrong, change its line in
`program/primitives`.

Files, in reading order:

    counts: Count the operations of a primitive on arrays of given shapes.
    flops: Count the operations and the bytes of one equation.
    rules: Decide which values may be saved and which may be recomputed, with a reason.
    keys: Find the values that the keys of a policy name.
    constraints: Read a policy: make constraints from its demands on the values that its keys name.
    allowances: Read which parts of a program may keep how many bytes for the backward.
    cost: Price every value in bytes and every op in seconds.
    targets: Know the accelerators that programs are planned for: their memory and their rates.
"""
