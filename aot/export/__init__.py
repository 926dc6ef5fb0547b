"""Write a cut pair to a folder that others can run, and read one back.

An artefact is a folder with StableHLO programs (the function alone, its forward and its backward), a contract in JSON
that describes every array, and a README on how to run them. It is written completely or not at all. `load` refuses an
artefact with a changed file; it runs any other artefact without the source of the model.

Files, in reading order:

    contract: Describe in JSON how an exported pair is called.
    result_tree: Check that the tree of a result still has the outputs of a contract, as its classes may have changed.
    guide: Write the README of an artefact: how to run an exported pair.
    pair: Hold a traced call and its halves for export, and describe their arrays.
    artefact: Write a folder completely or not at all, and read back only unchanged files.
    exported: Read exported programs, and refuse a program that does not match the contract.
    export: Export a cut pair as programs that others can run.
    new_states: Write the new states of a loaded function's objects into the caller's arguments.
    loaded: Run an exported pair without the source of its model.
"""
