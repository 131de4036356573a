"""What a LlamaIndex LLM must do, as classes to subclass: what ``langchain-tests`` is for LangChain.

Knows LlamaIndex and pytest alone. A package that has an LLM says how it is made, what it can do, and that
is all::

    class TestMyLLM(LLMUnitTests, LLMAnswerTests, LLMToolTests):
        @property
        def llm_class(self): return MyLLM

        @property
        def llm_params(self): return {"model": "tiny"}

A model that calls no tools takes ``LLMWithoutToolsTests`` instead of ``LLMToolTests``: that it says so, and
that what does without them works.
"""

from llm_standard_tests.answers import LLMAnswerTests
from llm_standard_tests.conduct import LLMConductTests
from llm_standard_tests.instrumentation import LLMInstrumentationTests
from llm_standard_tests.structured import LLMStructuredStreamTests, LLMStructuredTests
from llm_standard_tests.tools import LLMToolTests
from llm_standard_tests.unit import LLMUnitTests
from llm_standard_tests.without_tools import LLMWithoutToolsTests

__all__ = [
    "LLMAnswerTests",
    "LLMConductTests",
    "LLMInstrumentationTests",
    "LLMStructuredStreamTests",
    "LLMStructuredTests",
    "LLMToolTests",
    "LLMUnitTests",
    "LLMWithoutToolsTests",
]
