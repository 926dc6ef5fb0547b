"""Borrow from JAX's internals here, and nowhere else.

No other room imports `jax._src`, `jax.extend`, `jax.interpreters` or `jaxlib`, or asks for JAX's version. It supports
JAX 0.10.2 to 0.12: 0.11 merged `ClosedJaxpr` into `Jaxpr` and replaced scan's `num_consts` and `num_carry` by flat
trees; 0.12 keeps optimisation barriers on CPU until scheduling.

Files, in reading order:

    jaxprs: Read and write jaxprs and equations, as every version of JAX has them.
    callers: Find the arguments of the `jax.jit` around a trace, to know how they lie on a mesh.
    meshes: Tell how arrays lie on meshes, and over which axes they vary.
    devices: Run a program on each device of a mesh, for the rows that it has.
    abstract: Read and make the types of values, and arrays of a type.
    side_effects: Tell the effects of equations, and take them out.
    user_source: Find the names and lines of the user's code under which equations were traced.
    random_rows: Make some rows of an array of random bits, the same bits as in the whole array.
    runtime: Ask JAX what it is doing, and run jaxprs.
    jitting: Find the jitted function that runs, and jit another function as it is jitted.
    processes: Tell which processes hold the arrays of a program, and send texts between these processes.
    barriers: Write barriers, copies between memories, and calls that stay apart.
    own_primitives: Make primitives of our own, with rules for JAX's transformations.
    eager: Run ops one at a time, on tracers that hold numbers.
"""
