"""The comparison behind the default policy: what it asks, and that it tells policies apart."""

from blendrag.demo.compare import ASKED, Way, compare, ways


def test_ways_are_full_reuse_and_every_combination() -> None:
    made = ways(["query", "boundary(4)"], ["constant", "linear"], [0.1, 0.2])
    assert made[:2] == (Way("full"), Way("reuse"))
    assert made.count(Way("blend", "boundary(4)")) == 1  # neither ratio nor schedule
    assert len(made) == 2 + 4 + 1
    assert Way("blend", "query", "linear", 0.2) in made


def test_full_and_everything_recomputed_answer_what_reuse_does_not() -> None:
    everything = Way("blend", "query", "constant", 1.0)
    rows = compare([Way("full"), Way("reuse"), everything], n_contexts=2, n_documents=4)
    full, reuse, blend = rows
    assert full.questions == 2 * sum(ASKED.values())
    assert (full.charged_ratio, reuse.charged_ratio, blend.charged_ratio) == (1.0, 0.0, 1.0)
    assert full.coreference >= reuse.coreference + 0.25
    assert blend.coreference >= reuse.coreference + 0.25
