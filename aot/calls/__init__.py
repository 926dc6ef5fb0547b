"""Answer a call of a decorated function.

A call whose function has no gradient to give runs forward only (`alone`). One that another process compiled is looked
up (`cached`), as an `Entry`. Otherwise the stages make its programs. `flow` answers whether a gradient can flow at all.
`method` binds a function to an instance.

Files, in reading order:

    alone: Run a function alone, forward only: nothing is differentiated and nothing cut.
    entry: Run a call by programs that another process compiled.
    cached: Look up what another process compiled, and compile what none did.
    flow: Ask whether a gradient can flow through a function, and where it stops.
    method: Bind a function of ours to an instance.
"""
