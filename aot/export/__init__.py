"""Write a cut pair to a folder that others can run, and read one back.

The pair is two StableHLO programs and a contract in JSON, which says of every array what it is. A guide tells a
stranger how to run them. A folder is written whole or not at all. `load` refuses what does not fit together, and runs
the rest without the source of the model.

Files, in reading order:

    descriptors: Describe every array that enters or leaves an exported pair.
    contract: Say in JSON how an exported pair is called.
    agreement: Check that all that a contract says goes together.
    guide: Tell a stranger how to run an exported pair.
    pair: Hold what is exported: a traced call, its halves, and what each of their arrays is.
    artefact: Write a folder whole or not at all, and read back only what was written.
    programs: Read exported programs, and refuse one that is not what the contract says.
    export: Export a cut pair as programs that others can run.
    written: Write what an exported function wrote to its objects into what stands for them in a call.
    loaded: Run an exported pair without the source of its model.
"""
