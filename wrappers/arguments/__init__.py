"""Flatten the arguments of a call, and rebuild results.

Arguments are trees, and some leaves are not arrays: functions, strings, objects that can be written. `paths` names a
leaf as the user would write it. A program is made for the values of leaves that are not arrays. Objects and array-like
containers are taken apart into arrays, and built again. `tree` does all this for one call. Errors name the path of the
leaf.

Files, in reading order:

    paths: Name the parts of a call as the user reaches them.
    fixed: Keep leaves that are not arrays out of programs: functions, strings, flags, numbers of Equinox modules.
    adapters: Take apart, build, write and refill the writable objects of each library.
    objects: Take writable objects apart into arrays, and write the new arrays back.
    originals: Refuse a function that writes to a copy of an object, or write its changes back.
    containers: Find array-like objects and the arrays that belong to them.
    given_up: Remember which call gave up an array, and refuse a later call that is given it.
    tree: Flatten one call, and build it again.
"""
