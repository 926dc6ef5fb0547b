"""Keep compiled programs for other processes: what names them, and the folder that holds them.

Files, in reading order:

    known: Tell what every process knows by name.
    encode: Write values as bytes that every process writes alike.
    environment: List what stands outside of a program and could change what it compiles to.
    fingerprint: Name a compilation by everything that could change it.
    sketch: Name a program within one process, also where it holds what no other process would know by name.
    folder: Share a folder with other processes, each of which may be killed at any moment.
    store: Keep entries on disk, and forget them safely.
    location: Say where compiled programs are kept.
"""
