"""Numbers, each with the command that makes it: `python -m benchmarks.NAME` in the repository's root.

* `balance`: work, tokens and K/V rows of packs; how long planning takes
* `bytes`: what communicators carry is what plans say, and for all-gather what is needed
* `overlap`: delayed messages cost a ring no time
* `attention_speed`: against bare kernels, PyTorch's ring, DeepSpeed Ulysses, and one process
* `scaling`: how cost grows with tokens, documents and ranks
* `end_to_end`: a tiny Llama against DeepSpeed
* `detection`: how long Ray takes to see a dead or frozen node, by its health-check settings
* `auto_regret`: what "auto" chose against the best that could have been chosen
* `recovery`: seconds from a killed, frozen or cut-off rank or node to the next committed step; Ray Train
* `stall`: how long training waits for the copies of its state
* `packing`: how full packs are, and what planning a million documents costs
* `preparing`: 2 GB of text, killed on the way: seconds, and memory of each process
* `data_wait`: how long training waits for data

`report`, `packs`, `meters`, `rounds`, `peers`, `faults` and `ray_train` are shared by them.
"""
