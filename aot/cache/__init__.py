"""Keep compiled programs on disk for other processes.

Files, in reading order:

    known: Decide which objects every process knows by name.
    encode: Write values as bytes, the same in every process.
    environment: List everything outside a program that could change how it compiles.
    fingerprint: Compute the key of a compilation from everything that could change it.
    sketch: Compute the key of a program within one process, even if it holds functions without identity.
    folder: Share a folder with other processes, which may be killed at any moment.
    store: Keep entries on disk, and remove them safely.
    location: Find the folder that keeps compiled programs.
"""
