"""What an LLM is before anything is asked of it: made, described, copied."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from pydantic import ValidationError

from llm_standard_tests.base import LLMTests


class LLMUnitTests(LLMTests):
    """Needs no answer of the model. Parameters must be such as can be written down."""

    @property
    def has_tool_calling(self) -> bool:
        return issubclass(self.llm_class, FunctionCallingLLM)

    def test_it_is_an_llm(self, llm: LLM) -> None:
        assert isinstance(llm, LLM)

    def test_it_is_made_without_any_argument_but_its_own(self) -> None:
        assert self.made().callback_manager.handlers == []

    def test_its_class_name_is_the_class(self, llm: LLM) -> None:
        assert llm.class_name() == self.llm_class.__name__

    def test_metadata_is_complete(self, llm: LLM) -> None:
        about = llm.metadata
        assert isinstance(about, LLMMetadata)
        assert about.context_window > 0
        assert about.num_output > 0
        assert about.model_name not in ("", "unknown")

    def test_metadata_says_whether_tools_can_be_called(self, llm: LLM) -> None:
        assert llm.metadata.is_function_calling_model is self.has_tool_calling

    def test_an_argument_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises((ValidationError, TypeError, ValueError)):
            self.made(no_such_argument=1)

    def test_a_callback_manager_is_taken(self) -> None:
        manager = CallbackManager([])
        assert self.made(callback_manager=manager).callback_manager is manager

    def test_max_tokens_are_the_room_for_output(self) -> None:
        assert self.made(**{self.max_tokens_param: 7}).metadata.num_output == 7

    def test_a_dictionary_describes_it(self, llm: LLM) -> None:
        described = llm.to_dict()
        assert described["class_name"] == self.llm_class.__name__
        for name, value in self.llm_params.items():
            assert str(described[name]) == str(value)

    def test_a_dictionary_makes_it_again(self, llm: LLM) -> None:
        assert self.llm_class.from_dict(llm.to_dict()).metadata == llm.metadata

    def test_json_makes_it_again(self, llm: LLM) -> None:
        json.loads(llm.to_json())
        assert self.llm_class.from_json(llm.to_json()).metadata == llm.metadata

    def test_a_dictionary_makes_it_again_with_changes(self, llm: LLM) -> None:
        changes = {self.max_tokens_param: 7}
        assert self.llm_class.from_dict(llm.to_dict(), **changes).metadata.num_output == 7

    def test_it_survives_pickling(self, llm: LLM) -> None:
        assert pickle.loads(pickle.dumps(llm)).to_dict() == llm.to_dict()

    def test_it_can_be_copied(self, llm: LLM) -> None:
        for again in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy(deep=True)):
            assert again is not llm
            assert again.metadata == llm.metadata

    def test_settings_take_it(self, llm: LLM) -> None:
        before = Settings._llm
        try:
            Settings.llm = llm
            assert Settings.llm is llm
        finally:
            Settings._llm = before

    def test_its_description_for_instrumentation_is_json(self, llm: LLM) -> None:
        if not hasattr(llm, "to_payload"):
            pytest.skip("this version of llama-index-core describes LLMs by to_dict")
        json.dumps(llm.to_payload())
