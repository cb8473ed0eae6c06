"""What runs inside a Ray actor: one rank with its accelerator, or the keeper of a node.

* messages: the frozen values that travel between driver and workers; each request carries the generation.
* sockets: which TCP sockets of this process belong to gloo, and how they are shut.
* ahead: packs and attention plans of the next micro-batches, made while the current one computes.
* batch: from pack ids to the tensors of one rank.
* process_groups: the life cycle of a rank's process groups: create, warm, abort, rebuild, destroy.
* storage: what a file system that fails means, in words.
* progress: counters that move from inside the step.
* step: one optimizer step, or one evaluation, as a function of (state, pack ids).
* plain: torch without torch_npu, in a process that has no NPU.
* actor: TrainWorker, the thin shell that Ray calls.

State in memory:

* wire: authenticated sockets between ranks and keepers; where a keeper listens.
* slots: the images that a keeper holds, and when one may be written again.
* exchange: a keeper's conversations: slots for ranks, replicas for the next node, rows for readers.
* flush: from a keeper's memory to storage, with a driver's order or alone.
* processes: kills a process of the node by id and start.
* keeper: Keeper, the detached actor of a node.
* snapshot: copies a rank's state into the keeper's memory beside the next step.
* memory_reader: reads rows of a step back out of keepers, into any world.
"""
