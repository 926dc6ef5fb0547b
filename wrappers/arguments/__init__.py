"""Take the arguments of a call apart, and put results together.

Arguments are trees, and some of their leaves are no arrays: functions, strings, objects that can be written. `paths`
name a leaf as the user would write it. Leaves that are no arrays are fixed for a program; objects and array-like
containers are opened into arrays and closed again. `tree` does all this for one call. What cannot be done is refused
with the path of the leaf.

Files, in reading order:

    paths: Say how the user reaches each part of a call.
    fixed: Keep leaves that are no arrays out of programs: functions, strings, flags, the numbers of an Equinox module.
    objects: Take objects that can be written apart into their arrays, and write back what became of them.
    copies: Refuse a function that writes to an object of which it got a copy.
    containers: Open array-like objects into arrays, and close them again.
    tree: Flatten nested arguments and results, and build them again.
"""
