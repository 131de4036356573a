"""An application in which only the LLM was replaced reuses its nodes from the third request on."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode

import tiny
from llama_index.llms.blendrag import BlendLLM, BlendPrecompute

#: Each asks for one document in particular, so that the nodes come in different orders.
QUESTIONS = [
    f"What did the company of Place{7 * (100 * n + 1)} near the town?" for n in (0, 1, 2, 1)
]


class OwnEmbedding(BaseEmbedding):
    """Counts words."""

    def _get_text_embedding(self, text):
        return [float(x) + 1e-3 for x in tiny.WordEmbedder().embed_query(text)]

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


def page(number):
    """Four paragraphs of two sentences."""
    sentences = [tiny.sentence(100 * number + i) for i in range(8)]
    return "\n\n".join(" ".join(sentences[i : i + 2]) for i in range(0, 8, 2))


def index_of(*steps):
    pages = [Document(text=page(n), metadata={"file_name": f"page{n}.txt"}) for n in range(3)]
    splitter = SentenceSplitter(chunk_size=128, chunk_overlap=0)
    return VectorStoreIndex.from_documents(
        pages, transformations=[splitter, *steps], embed_model=OwnEmbedding()
    )


def test_nine_tenths_of_the_context_are_reused_from_the_third_request_on(seen, tmp_path):
    with tiny.engine(tiny.llama(num_hidden_layers=2), tmp_path / "kv", learn=True) as engine:
        query_engine = index_of().as_query_engine(llm=BlendLLM(engine=engine), similarity_top_k=20)
        shares, orders = [], []
        for question in QUESTIONS:
            nodes = query_engine.query(question).source_nodes
            texts = [node.node.get_content(MetadataMode.LLM) for node in nodes]
            context = sum(len(engine.kv_namespace.model.text_ids(text)) for text in texts)
            chunks = seen.metrics[-1]["chunks"]
            found = sum(c["tokens"] for c in chunks if c["outcome"] != "computed")
            shares.append(found / context)
            orders.append(texts)
        assert all(sorted(texts) == sorted(orders[0]) for texts in orders)
        assert len({tuple(texts) for texts in orders}) > 1
        assert len(orders[0]) > 5
    assert min(shares[2:]) >= 0.9


def test_with_precompute_as_a_step_the_first_request_reuses_them(seen, tmp_path):
    with tiny.engine(tiny.llama(num_hidden_layers=2), tmp_path / "kv") as engine:
        index = index_of(BlendPrecompute(engine=engine))
        index.as_query_engine(llm=BlendLLM(engine=engine)).query(QUESTIONS[0])
        assert [c["outcome"] for c in seen.metrics[0]["chunks"]] == ["blended"] * 2
