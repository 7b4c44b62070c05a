# SPDX-License-Identifier: Apache-2.0
"""The lines a reader copies to load a child do load one."""

from puzzle.reports.data import read
from puzzle.reports.words import load_snippet


def test_the_snippet_continues_the_prompt(run, capsys):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

    data = read(run)
    words = {word: i for i, word in enumerate(sorted({*data.config.sample_prompt.split(), "[UNK]"}))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(data.child_path)
    config = DeciLMConfig(
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 32}},
            {"attention": {"no_op": True}, "ffn": {"intermediate_size": 16}},
        ],
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    DeciLMForCausalLM(config).save_pretrained(data.child_path)
    exec(compile(load_snippet(data), "snippet", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(data.config.sample_prompt)
    assert len(printed) > len(data.config.sample_prompt) + 40
