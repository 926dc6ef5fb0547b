"""Measure jointcut on real training steps, and show it to a visitor.

Files, in reading order:

- programs: The programs that are measured: what people train with JAX, as they write it.
- outside: Models of libraries that are no part of the suite, and that nothing was tuned for: one of each library.
- measure: Weigh and time compiled programs.
- methods: Build one training step in each of the ways that we compare.
- nesting: Nest `jax.checkpoint` by square roots, as by hand: blocks in groups, scans of scans.
- alive: Count the bytes of temporaries alive at each instruction that a compiled program executes.
- scaling: Time what jointcut itself costs: tracing, cutting and planning large graphs, and the call of a compiled step.
- report: Lay out what was measured: tables for the terminal, targets, JSON.
- picture: Draw a training run, and the suite.
- bench: Put programs against methods, print the tables, judge the targets.
- budgets: Put budgets on the suite: does each hold, what does it cost, and which `jax.checkpoint` does it beat.
- floors: Compare the least peak that a budget finds with the least of `jax.checkpoint`, once and nested.
- firststep: Time the first step under a budget, search included, beside plain JAX's, and count compilations.
- predicted: Compare the predicted peak of temporaries with XLA's, for each program and plans across its menu.
- house_plans: Weigh the plans of one program at fixed budgets, and print the figures as JSON.
- house: Compare what the house costs with a baseline: memory of its plans, seconds, calls, lines of code.
- polish: Look for a cut that is better than the front's by an integer program.
- optima: Compare the cuts of small graphs with the optimum of an integer program that knows nothing of the front.
- fronts: Measure the search: how near to the certified bound its cuts come, and how long it takes.
- pytorch_models: Write a transformer and a residual network in JAX and in PyTorch, and cut the latter as PyTorch does.
- meaning: Check that two halves together mean the same as the joint program, bit for bit.
- pytorch: Compare with PyTorch's memory budget: bytes saved for equal recomputed products.
- smaller: What smaller forms of residuals do: to bytes, to gradients, and to the losses of a training.
- offloads: What offloading does: to losses over a hundred steps, to both memories, and by the model on an H100.
- policies: Hold plans to policies, over the suite, and say the default plans in the words of `jax.checkpoint`.
- steps: Weigh a long loop at several lengths, run plain, with `jax.checkpoint`, and by jointcut's smallest plans.
- branches: Weigh what the branches of a `lax.switch` keep for the backward, beside JAX and the largest branch alone.
- buffers: Weigh the gradient of a loop that fills an array row by row, beside plain JAX, for more and more rows.
- loops_rivals: Weigh and time the gradient of one loop, by ours and by Equinox's, at equal checkpoints.
- loops_plain: Weigh and time our loop beside a masked scan, and beside `lax.while_loop` with nothing differentiated.
- loops_ode: Differentiate adaptive ODE solves in a plain `lax.while_loop`, beside finite differences and Diffrax.
- loops_libraries: Differentiate functions of libraries that JAX refuses to differentiate, for a loop inside them.
- loops: Measure loops that run backwards: the four above, branches and buffers, in one command.
- tape: Measure tapes: how much faster a captured backward is than JAX's eager pullback, captures, hits, and release.
- tape_hooks: Compare the order of a tape's hooks with that of eager PyTorch, all kinds at once.
- convnets: Write three published convolutional networks so that each op bears the name of its layer.
- instances: Schedule the training steps of three published networks within less than their peak.
- artefacts: Time export, load and the first step of a process, with the compiled cache and without.
- pages: Measure the saved report: how large its file is, and how soon a browser shows it.
- wounds: Wound an artefact: the mutants of `mutants`, each the same for the same seed and number.
- mutants: Damage artefacts in every way, and see that each is refused or proves equal.
- derivatives: Compare derivatives with PyTorch's and JAX's, at random and at singular points.
- storm_worker: Put and get entries of a store until killed, and write down what the store said.
- storm: Kill the writers of a store again and again, and see that nothing it reported as written is lost or wrong.
- demo: Train a GPT with jointcut and show what it saves.
"""
