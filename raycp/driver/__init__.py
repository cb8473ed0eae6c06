"""The Ray side of a run: everything that happens in the driver process.

* cluster: connect to Ray or start it; what nodes there are; where the output folder is; how our code reaches the nodes.
* placement: which node gets how many ranks, one placement group per node, the order of ranks.
* probe: what each worker process reports before it joins anything; shared folder, packages, accelerators.
* membership: who is alive, and who is to blame when something fails.
* controller: the state machine of a run: place, connect, restore, run, finish or fail.
* record: run.json, config.json, the lock, and what may not change between two starts of a run.
* keepers: the keepers of a run: found or started, collected, committed, asked for the newest step, ended.
* keeper_calls: Ray calls to them; a step on its way to storage.
* copies: which node keeps whose replicas, which step is held whole, what it costs; pure.
* display: the one progress bar and the loss picture.
"""
