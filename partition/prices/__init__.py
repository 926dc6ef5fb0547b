"""Say what each value and op costs, and what may be saved or computed again.

A value costs bytes, an op seconds. `counts` and `flops` know how much an equation computes and moves, and a `CostModel`
makes seconds of it. `rules` say of each value whether it may be saved and whether it may be computed again, with the
reason in words. `policies` turn the words of a user into demands on single values, which go before the rules of cost.
Nothing is decided here. For a new rule change `rules`; a primitive that is priced wrong has a line in
`program/primitives`.

Files, in reading order:

    counts: Count what a primitive computes on arrays of given shapes.
    flops: Count what one equation computes and moves.
    rules: Decide what may be saved and what may be recomputed, with a reason.
    keys: Find the values that the keys of a policy name.
    policies: Read a policy: make constraints of what it demands of the values that its keys name.
    bounds: Read which parts of a program may keep how many bytes for the backward.
    cost: Price every value in bytes and every op in seconds.
    targets: Know the accelerators that programs are planned for: their memory, and what they do in a second.
"""
