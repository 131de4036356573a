"""The prefix tree returns the KV that was put for exactly these tokens, or less of it, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import DynamicCache

from blendrag.model.continuation import State
from blendrag.serving import block_pool
from blendrag.serving.block_pool import BLOCK_TOKENS, BlockPool
from blendrag.serving.prefix_tree import PrefixReader, PrefixTree
from blendrag.store.kv import KVLayout, LayerShape
from integrity import check_pool, check_tree

LAYOUT = KVLayout((LayerShape(1, 2), LayerShape(2, 4)), "float32")
BLOCK_BYTES = LAYOUT.size_bytes(BLOCK_TOKENS)
Ids = tuple[int, ...]


def kv_of(family: str, ids: Ids) -> list[torch.Tensor]:
    """K and V that depend on the family and on all tokens so far."""
    state, values = sum(map(ord, family)), []
    for token in ids:
        state = (state * 31 + token + 7) % 100_003
        values.append(float(state))
    row = torch.tensor(values)
    return [
        (row[None, None, :, None] + 0.25 * i).expand(LAYOUT.layer_shape(i, len(ids))).clone()
        for i in range(len(LAYOUT.layers))
    ]


def read(reader: PrefixReader) -> list[torch.Tensor]:
    layers = [torch.empty(LAYOUT.layer_shape(i, reader.tokens)) for i in range(len(LAYOUT.layers))]
    for i, layer in enumerate(layers):
        reader.read_layer(i, layer)
    return layers


def check_content(reader: PrefixReader, family: str, ids: Ids) -> None:
    assert reader.tokens <= len(ids)
    for ours, theirs in zip(read(reader), kv_of(family, ids[: reader.tokens]), strict=True):
        assert torch.equal(ours, theirs)


def tree(blocks: int = 1000) -> PrefixTree:
    return PrefixTree(BlockPool(LAYOUT, blocks * BLOCK_BYTES))


def insert(made: PrefixTree, ids: Ids, family: str = "") -> int:
    there = made.insert(family, ids, kv_of(family, ids))
    check_tree(made)
    return there


@contextmanager
def joined(made: PrefixTree, ids: Ids, family: str = "") -> Iterator[PrefixReader]:
    reader = made.join(family, ids)
    assert reader is not None
    check_content(reader, family, ids)
    yield reader
    reader.close()


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "SLAB_BYTES", 4 * BLOCK_BYTES)


def common(a: Ids, b: Ids) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


#: Sequences that often begin alike and part within blocks and between them.
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 5, 30, 63, 64, 65, 130])),
    min_size=1,
    max_size=4,
).map(lambda parts: tuple(token for token, times in parts for _ in range(times)))
FAMILIES = st.sampled_from(["", "tenant"])


class TreeMachine(RuleBasedStateMachine):
    """Against a plain model: the sequences that were inserted."""

    @initialize(blocks=st.sampled_from([3, 8, 1000]))
    def start(self, blocks: int) -> None:
        self.tree = tree(blocks)
        self.is_large = blocks == 1000
        self.put: set[tuple[str, Ids]] = set()
        self.readers: list[tuple[PrefixReader, str, Ids]] = []

    def longest(self, family: str, ids: Ids) -> int:
        return max((common(ids, there) for name, there in self.put if name == family), default=0)

    @rule(family=FAMILIES, ids=SEQUENCES)
    def insert(self, family: str, ids: Ids) -> None:
        there = self.tree.insert(family, ids, kv_of(family, ids))
        self.put.add((family, ids))
        assert self.tree.match(family, ids) == there
        assert there == len(ids) or not self.is_large

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), more=SEQUENCES)
    def append(self, data: st.DataObject, more: Ids) -> None:
        """A request goes on where another one still reads."""
        _, family, ids = data.draw(st.sampled_from(self.readers))
        self.insert(family, ids + more)

    @rule(family=FAMILIES, ids=SEQUENCES)
    def join(self, family: str, ids: Ids) -> None:
        reader = self.tree.join(family, ids)
        tokens = reader.tokens if reader else 0
        assert tokens <= self.longest(family, ids)
        if self.is_large:
            assert tokens == self.longest(family, ids)
        if reader is not None:
            self.readers.append((reader, family, ids))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sampled_from(self.readers))
        self.readers.remove(leaving)
        leaving[0].close()
        leaving[0].close()

    @rule()
    def shrink(self) -> None:
        self.tree.shrink(0)
        self.is_large = False
        if not self.readers:
            assert not self.tree.pool.slabs
            self.put.clear()

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        check_tree(self.tree)
        for reader, family, ids in self.readers:
            check_content(reader, family, ids)
            assert self.tree.match(family, ids) >= reader.tokens


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_sequence_of_changes = TreeMachine.TestCase


def test_prompts_that_part_within_a_block_share_the_blocks_before_it():
    made, begin = tree(), tuple(range(200))
    insert(made, begin + (7,) * 100)
    blocks = made.pool.used
    insert(made, begin + (8,) * 100)
    assert made.pool.used == blocks + 2  # of 300 tokens, 192 are shared
    with joined(made, begin + (8,) * 50) as reader:
        assert reader.tokens == 250
        parts = reader.parts()
        assert [(chunk.start, chunk.tokens) for _, chunk in parts] == [(0, 192), (192, 108)]
        with joined(made, begin + (7,) * 20) as other:
            assert other.parts()[0] == parts[0]  # one chunk for both
    with joined(made, (*begin, 9)) as reader:  # within a block, for reading
        assert reader.tokens == 200


def test_the_kv_of_a_node_is_a_view_of_the_pool():
    made = tree()
    insert(made, tuple(range(300)))
    with joined(made, tuple(range(300))) as reader:
        ((_, chunk),) = reader.parts()
        slab = made.pool.slabs[0]
        assert chunk.layers[1].data_ptr() == slab.layers[1].data_ptr()
        assert chunk.layers[1].shape == (2, 2, 300, 4)


def test_a_sequence_that_grows_wastes_less_than_a_block():
    made, ids = tree(), tuple(range(1000))
    for end in range(10, 1000, 30):
        assert insert(made, ids[:end]) == end
        assert made.pool.used == -(-end // BLOCK_TOKENS)


def test_what_was_used_last_and_what_is_in_use_stays():
    made = tree(blocks=6)
    a, b, c, d = ((token,) * 128 for token in range(4))
    for ids in (a, b, c):
        insert(made, ids)
    with joined(made, a):
        pass
    with joined(made, b):  # in use, though a was used later before
        with joined(made, a):
            pass
        insert(made, d)
        assert [made.match("", ids) for ids in (a, b, c, d)] == [128, 128, 0, 128]
        assert insert(made, (5,) * 640) == 256  # all but what is in use
        assert made.match("", b) == 128


def test_memory_is_returned_to_the_system():
    made = tree()
    for token in range(5):
        insert(made, (token,) * 200)
    assert made.pool.size_bytes >= 20 * BLOCK_BYTES
    with joined(made, (3,) * 200):
        made.shrink(0)
        assert 4 * BLOCK_BYTES <= made.pool.size_bytes <= 8 * BLOCK_BYTES
        check_tree(made)
    made.shrink(0)
    assert not made.pool.size_bytes


def test_families_share_nothing():
    made, ids = tree(), tuple(range(100))
    insert(made, ids, "one")
    assert made.join("other", ids) is None
    insert(made, ids, "other")
    with joined(made, ids, "one"), joined(made, ids, "other"):
        assert made.pool.used == 4


def test_nodes_of_a_new_tree_have_other_names():
    """Else what requests hold of the tree before would be taken for its KV."""
    names, readers = set(), []
    for family in ("before", "after"):
        tree = PrefixTree(BlockPool(LAYOUT, 4 * BLOCK_BYTES))
        ids = tuple(range(BLOCK_TOKENS))
        tree.insert(family, ids, kv_of(family, ids))
        readers.append(tree.join(family, ids))
        names |= {name for name, _ in readers[-1].parts()}
    assert len(names) == 2


def test_without_room_nothing_is_kept():
    made = tree(blocks=0)
    assert insert(made, (1,) * 100) == 0
    assert made.join("", (1,) * 100) is None


# -- states of layers without KV ------------------------------------------------------------------

STATE_BYTES = BLOCK_BYTES // 2


def state(size_bytes: int = STATE_BYTES) -> State:
    return State(DynamicCache(), size_bytes)


def stateful(blocks: int = 1000) -> PrefixTree:
    return PrefixTree(BlockPool(LAYOUT, blocks * BLOCK_BYTES), has_states=True)


def keep(made: PrefixTree, ids: Ids, family: str = "") -> State:
    kept = state()
    made.insert(family, ids, kv_of(family, ids), kept)
    check_tree(made)
    return kept


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 200])
def test_a_prompt_joins_at_its_longest_beginning_with_a_state(length):
    made, ids = stateful(), tuple(range(300))
    first = keep(made, ids[:length])
    last = keep(made, ids[:250])
    for prompt, tokens, expected in (
        (ids, 250, last),
        (ids[:249], length, first),
        ((*ids[:249], 999), length, first),
        ((*ids[:length], 999), length, first),
        (ids[: length - 1], 0, None),
        ((999, *ids), 0, None),
    ):
        assert made.match("", prompt) == tokens
        if expected is None:
            assert made.join("", prompt) is None
            continue
        with joined(made, prompt) as reader:
            assert reader.tokens == tokens
            assert reader.state is expected
    check_tree(made)


def test_a_state_is_found_when_another_prompt_repeats_its_part_of_a_block():
    """Prompts that part within a block each have that block, but a state is kept at one of them."""
    made, head = stateful(), tuple(range(100))
    kept = keep(made, head)
    branches = [(*head, *[500 + i] * 90) for i in range(4)]
    ends = [keep(made, branch) for branch in branches]
    for branch, end in zip(branches, ends, strict=True):
        with joined(made, branch) as reader:
            assert reader.state is end
        with joined(made, (*branch[:150], 999)) as reader:
            assert reader.state is kept
            assert reader.tokens == 100
        assert made.known("", (*branch[:150], 999)) == 150


def test_states_stay_with_their_tokens_when_a_node_is_divided():
    made, ids = stateful(), tuple(range(300))
    kept = {end: keep(made, ids[:end]) for end in (64, 70, 128, 190, 300)}
    keep(made, (*ids[:130], *[999] * 40))  # divides what they are in
    for end, each in kept.items():
        with joined(made, (*ids[:end], 998)) as reader:
            assert reader.state is each


def test_memory_of_states_is_counted_and_the_least_recently_used_goes_first():
    made = stateful(blocks=8)
    prompts = [tuple(range(1000 * i, 1000 * i + 64)) for i in range(20)]
    for ids in prompts[:3]:
        keep(made, ids)
    made.join("", prompts[0]).close()
    for number, ids in enumerate(prompts[3:]):
        keep(made, ids)
        assert made.size_bytes <= 8 * BLOCK_BYTES
        assert made.match("", ids) == 64
        made.join("", prompts[0]).close()
        assert made.match("", prompts[1]) == 0 or number < 2
    assert made.match("", prompts[0]) == 64
    made.shrink(0)
    check_tree(made)
    assert made.size_bytes == 0
    assert made.match("", prompts[0]) == 0


def test_kv_without_a_state_behind_it_is_given_back():
    made, ids = stateful(), tuple(range(300))
    keep(made, ids[:64])
    keep(made, ids)
    made.join("", ids[:100]).close()  # the first is used again, so the other goes first
    made.shrink(made.size_bytes - 1)
    check_tree(made)
    assert made.match("", ids) == made.known("", ids) == 64
    assert made.pool.used == 1


def test_a_state_in_use_is_not_evicted_and_one_that_is_too_large_is_not_kept():
    made, ids = stateful(blocks=8), tuple(range(64))
    keep(made, ids)
    reader = made.join("", ids)
    made.shrink(0)
    assert made.match("", ids) == 64
    reader.close()
    other = tuple(range(900, 964))
    made.insert("", other, kv_of("", other), state(100 * BLOCK_BYTES))
    check_tree(made)
    assert made.match("", other) == 0


def test_kv_takes_only_what_states_leave_of_the_limit():
    pool = BlockPool(LAYOUT, 8 * BLOCK_BYTES)
    pool.other_bytes = 3 * BLOCK_BYTES
    run = pool.take(8)
    assert run.blocks == 5
    assert pool.take(1) is None
    check_pool(pool, [run])


def test_another_state_goes_for_one_that_needs_no_more_kv():
    made, first, other = stateful(blocks=8), tuple(range(64)), tuple(range(900, 964))
    for ids in (first, other):
        made.insert("", ids, kv_of("", ids), state(3 * BLOCK_BYTES))
    made.insert("", first[:40], kv_of("", first[:40]), state(3 * BLOCK_BYTES))
    assert made.match("", first[:40]) == 40
    assert made.match("", first) == 64
    assert made.match("", other) == 0
    check_tree(made)


def test_other_families_have_other_states():
    made, ids = stateful(), tuple(range(64))
    kept = keep(made, ids, "a")
    assert made.join("b", ids) is None
    with joined(made, ids, "a") as reader:
        assert reader.state is kept
