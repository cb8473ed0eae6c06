"""What runs inside a Ray actor that owns one accelerator and one rank.

* messages: the frozen values that travel between driver and workers; each request carries the generation.
* sockets: which TCP sockets of this process belong to gloo, and how they are shut.
* ahead: packs and attention plans of the next micro-batches, made while the current one computes.
* batch: from pack ids to the tensors of one rank.
* process_groups: the life cycle of a rank's process groups: create, warm, abort, rebuild, destroy.
* storage: what a file system that fails means, in words.
* progress: counters that move from inside the step.
* step: one optimizer step, or one evaluation, as a function of (state, pack ids).
* actor: TrainWorker, the thin shell that Ray calls.
"""
