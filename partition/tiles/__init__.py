"""Run equations of a program block by block, so that their arrays are never whole.

Where one array is the peak, no choice of residuals helps. If the rows of the array do not meet, it is made and read in
blocks of rows. This is a rewrite of the joint program: afterwards a loop over blocks is planned like any other loop.

Files, in reading order:

    apart: Say along which axis each value of a graph keeps rows apart, and which ops mix rows.
    layouts: Follow how arrays are laid over a mesh through a program.
    linearity: Say which equations are linear in some of their operands, programs inside included.
    inside: Follow rows into the programs that an equation holds.
    blocks: Write equations again for fewer rows.
    grow: Find equations of a joint program whose rows do not meet.
    scan: Write the scan over blocks of rows that takes the place of some equations.
    passing: Decide what passes from one loop over blocks to a later one.
    devices: Write loops over blocks in which each device of a mesh runs over rows of its own.
    pieces: Add large products of matrices to a sum over blocks, piece by piece.
    hoist: Move the backward of some equations to the forward, for a cotangent of one.
    tile: Run equations of a joint program block by block.
"""
