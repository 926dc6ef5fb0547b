"""Steps as people write them, which `benchmarks.ratchet` changes by text: some changes take memory, some take none.

Files, in reading order:

- transformer: Train a transformer: scanned blocks under `jax.checkpoint`, momentum, donation.
- convnet: Train a small convolutional network in bfloat16.
- perceptron: Cut a perceptron with jointcut, with dropout.
"""
