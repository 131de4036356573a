"""Exact KV of prompt prefixes, in memory once for all requests (ChunkAttention §3.1).

A forest: the prompts of each family (for example, of one tenant) have a tree over token ids. A node is a run
of blocks, which its children continue. Nodes begin at multiples of 64 tokens and only leaves end between
them, so each block belongs to one node. Prompts that part within a block each have that block.

A request joins with the longest beginning of its prompt that is there, and leaves by closing its reader. What
no request uses is evicted, least recently used first.

Only the KV of a plain prefill from position 0 may be inserted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import torch

from blendrag.serving.block_pool import BLOCK_TOKENS, BlockPool, Run, blocks_of
from blendrag.serving.shared_attention import SharedChunk
from blendrag.text.matches import common_prefix

Ids = tuple[int, ...]
#: Of nodes, in all trees: a running request may still hold a node of the tree before the weights changed.
_numbers = count()


@dataclass(eq=False)
class Node:
    """Tokens that follow those of ``parent``, and their KV. The root of a tree has none."""

    parent: Node | None
    ids: Ids
    start: int
    """Position of its first token."""
    run: Run | None
    number: int
    users: int = 0
    """Readers that end in it or below it."""
    used_at: int = 0
    children: dict[Ids, Node] = field(default_factory=dict)
    """By the ids of their first block."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def key(self) -> Ids:
        """Its ids in its first block."""
        return self.ids[:BLOCK_TOKENS]

    @cached_property
    def chunk(self) -> SharedChunk:
        """Its KV as a chunk at the same position of every prompt: views of the pool."""
        assert self.run is not None
        layers = range(len(self.run.slab.layers))
        return SharedChunk([self.run.view(i, 0, len(self.ids)) for i in layers], self.start)

    def become(self, ids: Ids, start: int, run: Run | None) -> None:
        """Hold other tokens."""
        self.ids, self.start, self.run = ids, start, run
        self.__dict__.pop("chunk", None)

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """All nodes below this one, each after its parent."""
        nodes = [self]
        for node in nodes:
            nodes += node.children.values()
        yield from nodes[1:]


class PrefixReader:
    """The KV of the first ``tokens`` of a prompt; stays in the tree until it is closed."""

    tier = "memory"

    def __init__(self, tree: PrefixTree, node: Node, tokens: int) -> None:
        self.key = f"{node.number:064x}"
        self.tokens = tokens
        self._tree = tree
        self._node: Node | None = node

    def parts(self) -> list[tuple[str, SharedChunk]]:
        """The nodes that hold it, in order, by names that change when a node does. The last may hold more."""
        assert self._node is not None, "the reader is closed"
        path = [node for node in self._node.path() if node.start < self.tokens]
        return [(f"{n.number}:{n.start}-{n.end}", n.chunk) for n in reversed(path)]

    def copy_layer(self, layer: int, out: torch.Tensor) -> None:
        """Copy K and V of the first tokens to ``out`` ``[2, Hkv, n, D]``."""
        tokens = min(self.tokens, out.shape[2])
        for chunk in (chunk for _, chunk in self.parts() if chunk.start < tokens):
            end = min(tokens, chunk.start + chunk.tokens)
            out[:, :, chunk.start : end] = chunk.layers[layer][:, :, : end - chunk.start]

    read_layer = copy_layer

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the tree. Idempotent."""
        node, self._node = self._node, None
        if node is not None:
            self._tree.leave(node)


class PrefixTree:
    """Exact prefixes of one model's prompts. Used on one thread."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._clock = count(1)

    def match(self, family: Hashable, ids: Ids) -> int:
        """How many tokens at the beginning of ``ids`` are there."""
        root = self._roots.get(family)
        return self._found(root, ids)[1] if root else 0

    def join(self, family: Hashable, ids: Ids) -> PrefixReader | None:
        """The KV of the longest beginning of ``ids`` that is there; ``None`` if it has no token."""
        root = self._roots.get(family)
        if root is None:
            return None
        node, tokens = self._found(root, ids)
        if not tokens:
            return None
        self._use(node)
        self._hold(node)
        return PrefixReader(self, node, tokens)

    def leave(self, node: Node) -> None:
        """A request that joined there has ended."""
        for each in node.path():
            each.users -= 1

    def insert(self, family: Hashable, ids: Ids, layers: Sequence[torch.Tensor]) -> int:
        """Keep the KV of ``ids``, ``[2, Hkv, N, D]`` per layer. Returns how many of its tokens are there now:
        fewer if there is no room, because what requests use is not evicted."""
        root = self._roots.get(family) or self._new_node(None, (), 0, None)
        node, at = self._found(root, ids)
        if at < len(ids):
            node, at = self._fork(node, at)
            at = self._append(node, ids, at, layers)
        while at < len(ids) and (child := self._grown(node, ids, at, layers)) is not None:
            node, at = child, child.end
        self._use(node)
        if root.children:
            self._roots[family] = root
        return self._found(root, ids)[1]

    def shrink(self, size_bytes: int) -> None:
        """Drop what no request uses until the pool takes at most ``size_bytes``."""
        while self.pool.size_bytes > size_bytes and self._evict_one():
            pass

    def check_integrity(self) -> None:
        """Every block is free or in one node, nodes and their keys are in order, users are counted."""
        runs = []
        for root in self._roots.values():
            assert root.children
            assert root.parent is None
            assert root.ids == ()
            for node in root.below():
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
                assert node.chunk.tokens == len(node.ids)
                runs.append(node.run)
        self.pool.check_integrity(runs)

    # -- finding --------------------------------------------------------------------------------------

    def _found(self, root: Node, ids: Ids) -> tuple[Node, int]:
        """The node in which the longest match of ``ids`` ends, and its length."""
        node, at = root, 0
        while True:
            block = ids[at : at + BLOCK_TOKENS]
            child, shared = node.children.get(block), len(block)
            if child is None:
                for other in node.children.values():
                    if (n := common_prefix(other.key, block)) and (child is None or n > shared):
                        child, shared = other, n
            if child is None or not block:
                return node, at
            if shared == len(child.key):
                shared = common_prefix(child.ids, ids[at:])
            node, at = child, at + shared
            if shared < len(child.ids):
                return node, at

    def _hold(self, node: Node) -> None:
        for each in node.path():
            each.users += 1

    def _use(self, node: Node) -> None:
        now = next(self._clock)
        for each in node.path():
            each.used_at = now

    # -- changing -------------------------------------------------------------------------------------

    def _new_node(self, parent: Node | None, ids: Ids, start: int, run: Run | None) -> Node:
        node = Node(parent, ids, start, run, next(_numbers))
        if parent is not None:
            parent.children[node.key] = node
        return node

    def _fork(self, node: Node, at: int) -> tuple[Node, int]:
        """A node whose children can begin at ``at`` or less than a block before, and where they begin."""
        if at == node.end:
            return node, at
        assert node.parent is not None
        assert node.run is not None
        blocks = (at - node.start) // BLOCK_TOKENS
        if not blocks:
            return node.parent, node.start
        tokens = blocks * BLOCK_TOKENS
        first, rest = node.run.split(blocks)
        head = self._new_node(node.parent, node.ids[:tokens], node.start, first)
        head.users, head.used_at = node.users, node.used_at
        node.become(node.ids[tokens:], node.start + tokens, rest)
        node.parent, head.children[node.key] = head, node
        return head, head.end

    def _append(self, node: Node, ids: Ids, at: int, layers: Sequence[torch.Tensor]) -> int:
        """Fill the last block of a leaf, where ``ids`` go on at ``at``; returns how far."""
        if node.run is None or node.parent is None or not len(node.ids) % BLOCK_TOKENS:
            return at
        end = min(len(ids), node.start + node.run.blocks * BLOCK_TOKENS)
        self._write(node.run, at - node.start, layers, at, end)
        del node.parent.children[node.key]
        node.become(node.ids + ids[at:end], node.start, node.run)
        node.parent.children[node.key] = node
        return end

    def _grown(
        self, parent: Node, ids: Ids, at: int, layers: Sequence[torch.Tensor]
    ) -> Node | None:
        """A new child for as many of ``ids`` from ``at`` on as a run has room for."""
        blocks = blocks_of(len(ids) - at)
        self._hold(parent)
        while self.pool.free < blocks and self._evict_one():
            pass
        self.leave(parent)
        run = self.pool.take(blocks)
        if run is None:
            return None
        end = min(len(ids), at + run.blocks * BLOCK_TOKENS)
        self._write(run, 0, layers, at, end)
        return self._new_node(parent, ids[at:end], at, run)

    def _write(
        self, run: Run, to: int, layers: Sequence[torch.Tensor], start: int, end: int
    ) -> None:
        for i, layer in enumerate(layers):
            run.view(i, to, to + end - start).copy_(layer[:, :, start:end])

    def _evict_one(self) -> bool:
        """Drop the leaf that was not used for the longest time; whether there was one that is not in use."""
        leaves = [
            (node.used_at, family, node)
            for family, root in self._roots.items()
            for node in root.below()
            if not node.children and not node.users
        ]
        if not leaves:
            return False
        _, family, leaf = min(leaves, key=lambda one: one[0])
        assert leaf.parent is not None
        assert leaf.run is not None
        del leaf.parent.children[leaf.key]
        self.pool.give(leaf.run)
        if not self._roots[family].children:
            del self._roots[family]
        return True
