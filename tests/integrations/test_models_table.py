"""A slice of what `make models-table` tries: the page says what becomes of a pattern in these classes."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dilated_attention_pytorch import GlobalTokens, SlidingWindow  # noqa: E402
from tests import models_table, tiny_models  # noqa: E402

PAGE = models_table.read()

# Every third of those that generate, which are small, and every twentieth of all.
GENERATING = {"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"}
TRIED = [key for key, said in PAGE.items() if said.status != "not tried"]
SLICE = sorted({*[key for key in TRIED if key[1].endswith(tuple(GENERATING))][::3], *TRIED[::20]})


@pytest.mark.parametrize(("kind", "name"), SLICE, ids=[name for _, name in SLICE])
def test_what_the_page_says(kind, name):
    transformers.logging.set_verbosity_error()
    said = models_table.outcome(kind, name)
    assert said.status not in models_table.BAD, said.note
    assert said == PAGE[kind, name]


def test_every_class_is_on_the_page():
    """Made again when transformers is another: `make models-table`."""
    assert f"that transformers {transformers.__version__} lists" in models_table.PAGE.read_text()
    assert set(PAGE) == {(kind, name) for kind, names in tiny_models.classes().items() for name in names}
    assert models_table.page(PAGE) == models_table.PAGE.read_text()


class TestOracle:
    """It says so where something is wrong."""

    def test_another_pattern(self, monkeypatch):
        monkeypatch.setattr(models_table, "SPARSE", SlidingWindow(4, 2) | GlobalTokens(1))
        assert models_table.outcome("llama", "LlamaModel").status == "wrong"

    def test_a_model_that_bypasses_us(self, monkeypatch):
        monkeypatch.setattr(models_table.hf_models, "_bypass", lambda model: ([], None))
        with pytest.warns(UserWarning, match="DebertaModel ended a forward without a call"):
            assert models_table.outcome("deberta", "DebertaModel").status == "silent"

    def test_cross_attention(self):
        """Of the calls of a BART with two layers, those of the encoder and the first of the decoder are none."""
        crossed = []

        class LookingOn(models_table.Oracle):
            @classmethod
            def attend(cls, *args, **kwargs):
                cls.crossed = models_table.is_crossing(sys._getframe(1))
                crossed.append(cls.crossed)
                return super().attend(*args, **kwargs)

        models_table.AttentionInterface.register("oracle", LookingOn.attend)
        models_table.AttentionMaskInterface.register("oracle", LookingOn.mask)
        ids = torch.arange(10, 34)[None]
        model = models_table.build("bart", "BartModel", "oracle")
        models_table.run(model, {"input_ids": ids, "decoder_input_ids": ids}, sparse=False)
        assert crossed == [False, False, False, True, False, True]
