"""Whether a prefix tree and the pool of its blocks are in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from blendrag.serving.block_pool import BLOCK_TOKENS, BlockPool, Run, blocks_of
from blendrag.serving.prefix_tree import PrefixTree


def check_tree(tree: PrefixTree) -> None:
    """Every block is free or in one node, nodes and their keys are in order, users are counted."""
    runs, states_bytes = [], 0
    for root in tree.roots.values():
        assert root.children
        assert root.parent is None
        assert root.ids == ()
    for _, node in tree.nodes():
        parent = node.parent
        assert parent is not None
        assert parent.children[node.key] is node
        assert node.start == parent.end
        assert node.start % BLOCK_TOKENS == 0
        assert node.ids
        assert node.run is not None
        assert node.run.blocks == blocks_of(len(node.ids))
        assert not node.children or len(node.ids) % BLOCK_TOKENS == 0
        assert node.users >= sum(child.users for child in node.children.values())
        assert node.used_at >= max((c.used_at for c in node.children.values()), default=0)
        assert not tree.pool.layout.layers or node.chunk.tokens == len(node.ids)
        assert all(node.start < at <= node.end for at in node.states)
        if tree.has_states:
            assert node.states or node.children or node.users
        runs.append(node.run)
        states_bytes += sum(kept.state.size_bytes for kept in node.states.values())
    assert tree.pool.other_bytes == states_bytes
    check_pool(tree.pool, runs)


def check_pool(pool: BlockPool, runs: Sequence[Run]) -> None:
    """``runs`` are those that are taken: every block is in one of them or free, and none is in two."""
    parts: dict[int, list[tuple[int, int]]] = {id(slab): list(slab.free) for slab in pool.slabs}
    for run in runs:
        parts[id(run.slab)].append((run.first, run.blocks))
    for slab in pool.slabs:
        end = 0
        for first, length in sorted(parts[id(slab)]):
            assert first == end
            assert length > 0
            end += length
        assert end == slab.blocks
        assert slab.free == sorted(slab.free)
        assert all(a + n < b for (a, n), (b, _) in pairwise(slab.free))
        assert slab.free != [(0, slab.blocks)]
    assert pool.used == sum(run.blocks for run in runs)
    assert sum(slab.blocks for slab in pool.slabs) <= pool.limit
