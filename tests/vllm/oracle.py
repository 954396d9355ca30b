"""Makes the tiny models the engine serves, and says what they must answer: run with the engine's interpreter.

    python oracle.py make DIRECTORY      writes the models `DIRECTORY/a` and `DIRECTORY/b`
    python oracle.py serve DIRECTORY     one JSON question a line on standard input, one JSON answer a line

A question is `{"model": "a", "prompt": [ids], "ids": [ids], "temperature": 1.0, "cached": null}`; `cached` names the
model whose keys and values stand for all of `prompt` but its last token. For each of `ids` the answer has

- `logprobs`: of the softmax of the logits over the temperature;
- `behind`: by how much the likeliest token is likelier, in logprob: 0 where the token is the greedy choice.

Both are read off one `transformers` forward over the sequence in float32: none of the engine's code takes part.

Invariant: a seed is a model: whoever makes it gets the same weights, so two seeds are two weight versions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 512
CONTEXT: Final = 4096
END: Final = 0
"""The end-of-text token."""
SEEDS: Final = {"a": 0, "b": 1}
SPREAD: Final = 0.3  # deviation of the random weights: wide enough that greedy choices are no near ties


def make(directory: Path) -> None:
    """Write each model once, with a byte-level tokenizer beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: no CPU kernel has a head of 16
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=END,
        eos_token_id=END,
    )
    for name, seed in SEEDS.items():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory / name)
        write_tokenizer(directory / name)


def write_tokenizer(directory: Path) -> None:
    """The 256 bytes, the end, and words nobody merges: as many entries as the model has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<|end|>"
    entries = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += [f"<|unused{n}|>" for n in range(VOCABULARY - len(entries))]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end).save_pretrained(directory)


def serve(directory: Path) -> None:
    """Answer questions until the input ends."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    models = {name: LlamaForCausalLM.from_pretrained(directory / name).eval() for name in SEEDS}
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            sys.stdout.write(json.dumps(answer(models, asked)) + "\n")
            sys.stdout.flush()


def answer(models: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Read everything off one forward."""
    import torch

    prompt, ids = asked["prompt"], asked["ids"]
    known, cache = 0, None
    if asked["cached"] is not None:
        known = len(prompt) - 1
        cache = models[asked["cached"]](torch.tensor([prompt[:known]]), use_cache=True).past_key_values
    rest = torch.tensor([[*prompt, *ids][known:]])
    logits = models[asked["model"]](rest, past_key_values=cache).logits[0, len(prompt) - 1 - known : -1]
    logprobs = torch.log_softmax(logits.float() / asked["temperature"], dim=-1)
    chosen = logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    return {"logprobs": chosen.tolist(), "behind": (logprobs.max(dim=-1).values - chosen).tolist()}


def main() -> None:
    """Do what the command line says."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    if what == "make":
        make(directory)
    else:
        serve(directory)


if __name__ == "__main__":
    main()
