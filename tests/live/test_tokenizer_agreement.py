"""The default model's tokenizer and chat template, token for token as transformers has them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from anabranch.serving.live.tokenizer import PreparedTokenizer

TURNS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12345 + 67890?"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": " leading space, trailing newline \n"}],
    [
        {"role": "user", "content": "été 你好 😀 नमस्ते"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "c"},
    ],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nx"}],
]


@pytest.mark.model
def test_the_default_model_agrees_with_transformers(prepared_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(prepared_model))
    ours = PreparedTokenizer(prepared_model, datetime.now)
    for messages in TURNS:
        text = ours.render(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = ours.encode(text, special=False)
        assert tokens == theirs(text, add_special_tokens=False)["input_ids"]
        detokenizer = ours.detokenizer()
        said = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
        assert said == theirs.decode(tokens, skip_special_tokens=True)
