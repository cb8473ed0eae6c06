"""Context-parallel attention of packs: the executors of `raycp.plan`, and the Hugging Face seam. No Ray.

* `kernels`: one seam to the device; fp64 reference, PyTorch flash on CPU
* `merge`: online softmax over parts
* `communicator`, `in_memory`: how rows travel; process groups, or threads for tests
* `groups`: `build_groups`, the process groups of a grid
* `warm`: first messages between the ranks of a group
* `call`: one call without its tensors, and the counts of what it did
* `exchange`: rows on their way
* `ring`, `gather`: the schedules, one loop each
* `function`: the autograd function around them
* `ulysses`: the trade of tokens for heads around it
* `api`: `cp_attention`, checked entry
* `agreement`: the same plan on every rank
* `register`: `attn_implementation="raycp"` and its `Carrier`
"""

from raycp.attention.api import cp_attention
from raycp.attention.call import AttentionStats
from raycp.attention.groups import Groups, build_groups
from raycp.attention.in_memory import InMemoryWorld
from raycp.attention.register import ATTENTION_NAME, Carrier, attention_forward, register_attention

__all__ = [
    "ATTENTION_NAME",
    "AttentionStats",
    "Carrier",
    "Groups",
    "InMemoryWorld",
    "attention_forward",
    "build_groups",
    "cp_attention",
    "register_attention",
]
