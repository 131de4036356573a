"""What malloc does with the blocks that a layer frees.

glibc maps a large block by itself and unmaps it when it is freed, and gives free memory at the end of its
heap back to the system. What was given back is mapped again one page fault at a time, which is dear in a
virtual machine. It learns, though: once a large block was freed, blocks up to its size come from the
heap, of which twice that size stays (mallopt(3), ``M_MMAP_THRESHOLD``). A stock prefill teaches it that by
its way; the blocks of a blended one are too small to teach enough.
"""

from __future__ import annotations

import torch

#: What glibc learns at most from, ``4 MiB · sizeof(long)``, less the page that it adds to a block.
LARGEST_LESSON = (32 << 20) - (64 << 10)


def keep_freed_blocks() -> None:
    """Free one large block, so that what layers free is kept for the next layer.

    Up to 64 MiB then stay with each thread's heap. Does nothing under another malloc, or where ``mallopt``
    or the environment fixed the thresholds.
    """
    torch.empty(LARGEST_LESSON, dtype=torch.uint8)
