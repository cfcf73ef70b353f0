"""Models that are made in a moment: a folder that transformers loads, and a run of `train`."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cli.commands import run

WORDS = "The quick brown fox jumps over the lazy dog, again and again; été 日本 🙂.\n" * 40


def huggingface_folder(path, **changes):
    """A Llama of random parameters and a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([WORDS], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=300, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
        **(sizes | changes),
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # of a size that lets attention matter
        parameter.data.mul_(3.0)
    model.save_pretrained(path)
    return path


def longnet_run(path):
    text = path.with_suffix(".txt")
    text.write_text(WORDS)
    shape = "--steps 2 --seq-len 32 --batch 2 --dim 16 --layers 2 --heads 2 --segment-lengths 8,32 --dilation-rates 1,2"
    code, _, err = run("train", str(text), "--out", str(path), "--device", "cpu", *shape.split())
    assert code == 0, err
    return path
