"""Trains the model that the offline demo compresses, on stories from ``grammar.py``.

    python benchmarks/demo_model/train.py

writes the tokenizer, the model and the held-out stories to ``tcompress/assets/demo``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from grammar import PLOTS, stories
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

DEFAULT_OUT = Path(__file__).resolve().parents[2] / "tcompress" / "assets" / "demo"
HELDOUT_COUNT = 120
HELDOUT_SEED = 1_000_003
TOKENIZER_STORIES = 5_000
VOCABULARY = 1280
CONTEXT = 256
BATCH = 5
PAIR_EVERY = 8  # one document in so many has two stories, on two lines
PEAK_RATE = 3e-3
WARMUP = 0.04
PROMPTS = (
    "Once upon a time there was",
    "Mina the squirrel was so curious that",
    "Otto had a red kite. Suddenly the wind",
)


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that puts ``<s>`` in front of every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(width: int) -> LlamaForCausalLM:
    """Makes an untrained model whose layers are ``width`` wide."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def fresh(seed: int, plots: int, excluded: Collection[str]) -> Iterator[str]:
    """Yields stories without end, but none of the excluded ones."""
    return (text for text in stories(10**12, seed, plots) if text not in excluded)


def rows(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> Iterator[torch.Tensor]:
    """Makes batches with one story per row."""
    while True:
        batch = [f"{text}</s>" for text in itertools.islice(texts, BATCH)]
        yield tokenizer(batch, padding=True, return_tensors="pt").input_ids


def packs(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> Iterator[torch.Tensor]:
    """Makes batches from the stories one after the other; some pairs share a document."""
    buffer: list[int] = []
    size = BATCH * CONTEXT
    for number in itertools.count():
        lines = 2 if number % PAIR_EVERY == 0 else 1
        buffer += tokenizer("\n".join(itertools.islice(texts, lines)) + "</s>").input_ids
        if len(buffer) >= size:
            yield torch.tensor(buffer[:size]).view(BATCH, CONTEXT)
            del buffer[:size]


def lessons(
    tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, excluded: Collection[str]
) -> Iterator[torch.Tensor]:
    """Yields the batches of a training: few plots first, so that copying names is learned early.

    Args:
        tokenizer: Makes tokens of the stories.
        seed: Where the seeds of the lessons start.
        steps: The number of batches.
        excluded: Stories that must not be used.

    Yields:
        One batch of token numbers for each step.
    """
    for number, (share, plots, make) in enumerate(LESSONS):
        source = make(tokenizer, fresh(seed + number, plots, excluded))
        yield from itertools.islice(source, round(share * steps))
    yield from make(tokenizer, fresh(seed + len(LESSONS), plots, excluded))


LESSONS = ((0.14, 1, rows), (0.1, 4, rows), (0.2, len(PLOTS), rows), (0.56, len(PLOTS), packs))


@torch.no_grad()
def perplexity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Collection[str]
) -> float:
    """Measures the perplexity per token: one text at a time, from ``<s>`` to its last token."""
    model.eval()
    loss, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        count = ids.shape[1] - 1
        loss += model(input_ids=ids, labels=ids).loss.item() * count
        tokens += count
    return math.exp(loss / tokens)


def rate(step: int, steps: int) -> float:
    """Returns the factor of the learning rate: a linear rise, then a linear fall to zero."""
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def train(model: LlamaForCausalLM, source: Iterator[torch.Tensor], steps: int) -> None:
    """Trains the model in place and prints its loss now and then."""
    model.train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    started, total = time.monotonic(), 0.0
    every = min(200, steps)
    for step in range(1, steps + 1):
        batch = next(source)
        labels = batch.masked_fill(batch == model.config.pad_token_id, -100)
        loss = model(input_ids=batch, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.item()
        if step % every == 0:
            minutes = (time.monotonic() - started) / 60
            print(f"step {step:5d}  loss {total / every:.4f}  {minutes:.1f} min", flush=True)
            total = 0.0


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the model, in float16, and the tokenizer."""
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=2, max_length=CONTEXT
    )
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that old versions know, too
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def show_samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Prints sampled continuations of a few prompts."""
    model.eval()
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, do_sample=True, temperature=0.7, max_length=CONTEXT)
        print(f"\n{tokenizer.decode(output[0], skip_special_tokens=True)}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the model of the offline demo.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write to")
    parser.add_argument("--steps", type=int, default=5000, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and stories")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--width", type=int, default=128, help="width of the layers")
    return parser.parse_args()


def main() -> None:
    """Trains, measures and writes everything."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    set_seed(options.seed)
    heldout = list(dict.fromkeys(stories(HELDOUT_COUNT, HELDOUT_SEED)))
    tokenizer = make_tokenizer(stories(TOKENIZER_STORIES, options.seed))
    model = make_model(options.width)
    print(f"{model.num_parameters():,} parameters", flush=True)
    source = lessons(tokenizer, options.seed, options.steps, set(heldout))
    train(model, source, options.steps)
    print(f"held-out perplexity {perplexity(model, tokenizer, heldout):.4f}")
    folder = options.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (options.out / "heldout.txt").write_text("\n".join(heldout) + "\n", encoding="utf-8")
    save(model, tokenizer, folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"as stored, in float16 {perplexity(model, tokenizer, heldout):.4f}")
    show_samples(model, tokenizer)


if __name__ == "__main__":
    main()
