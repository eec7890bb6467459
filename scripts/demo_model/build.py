"""Make the embedded demo model: tokenizer, a Qwen2 of about a million parameters, a few minutes of training.

    python scripts/demo_model/build.py --out DIR [--seed 0] [--minutes 10] [--text FILE]

The result depends on the seed, the amount of training and the Python release (its documentation is the text), not on
how fast the machine is: ``--minutes`` is turned into a fixed number of steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from card import model_card
from corpus import END_OF_TEXT, IM_END, IM_START, Corpus, load_corpus
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 2048
CONTEXT_TOKENS = 32768
STEPS_PER_MINUTE = 180  # measured on one CPU core; converts --minutes into a number of steps
BATCH_TOKENS = 2048
SEQUENCE_TOKENS = (128, 256, 512, 1024)
LEARNING_RATE = 5e-3
WARMUP_STEPS = 100
THREADS = 1  # on a busy machine a second one costs more than it gives; the weights depend on the number

# Pattern and normalizer are those of Qwen2's own tokenizer: some loaders put that one in the place of ours, and it
# has to split text the same way.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    steps: int
    tokens: int
    loss: float  # mean of the last 100 steps, nats per token
    elapsed_s: float


def build_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*corpus.documents, *corpus.chats], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Three wide layers rather than four narrow ones: on a CPU the attention of long prompts dominates."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(IM_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def token_stream(texts: list[str], tokenizer: PreTrainedTokenizerFast, *, separator: bool) -> torch.Tensor:
    """All texts after each other, [tokens] int64; documents are followed by the end-of-text token, chats are not."""
    end = [tokenizer.convert_tokens_to_ids(END_OF_TEXT)] if separator else []
    ids: list[int] = []
    for encoded in tokenizer.backend_tokenizer.encode_batch(texts):
        ids += encoded.ids + end
    return torch.tensor(ids, dtype=torch.long)


def spread_positions(length: int, rng: random.Random) -> torch.Tensor:
    """Positions with gaps, so that a short sequence shows the model distances of the whole context ("PoSE")."""
    positions = torch.arange(length)
    if rng.random() < 0.5:
        return positions
    for _ in range(rng.randint(1, 3)):
        room = CONTEXT_TOKENS - 1 - int(positions[-1])
        # Most gaps are short: the exponent makes every order of magnitude about equally likely.
        gap = int(room ** rng.random())
        positions[rng.randrange(1, length) :] += gap
    return positions


def train(
    model: Qwen2ForCausalLM,
    streams: list[torch.Tensor],
    *,
    steps: int,
    rng: random.Random,
) -> TrainResult:
    """Next-token training; ``streams`` are drawn from in turn. Warm-up, then linear decay to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))
    )
    started_s = time.monotonic()
    losses: list[float] = []
    model.train()
    with tqdm(range(steps), desc="training", unit="step", mininterval=1.0) as bar:
        for step in bar:
            length = rng.choice(SEQUENCE_TOKENS)
            stream = streams[step % len(streams)]
            starts = [rng.randrange(len(stream) - length) for _ in range(BATCH_TOKENS // length)]
            batch = torch.stack([stream[start : start + length] for start in starts])
            positions = torch.stack([spread_positions(length, rng) for _ in starts])
            loss = model(input_ids=batch, labels=batch, position_ids=positions).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            if step % 20 == 0:
                bar.set_postfix(loss=f"{sum(losses[-100:]) / len(losses[-100:]):.3f}")
    tail = losses[-100:]
    return TrainResult(steps, steps * BATCH_TOKENS, sum(tail) / len(tail), time.monotonic() - started_s)


def save(out: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
    """Write the folder atomically, so that a failed run never leaves an incomplete model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch)
        model.generation_config = GenerationConfig(
            eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END_OF_TEXT)],
            pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
        out.mkdir(exist_ok=True)
        for path in sorted(folder.iterdir()):
            path.replace(out / path.name)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python scripts/demo_model/build.py", description="Make the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="training time on one CPU core (default: 10)")
    parser.add_argument("--text", type=Path, help="a UTF-8 file of free prose to train on as well")
    args = parser.parse_args(argv)
    if not 0 < args.minutes <= 600:
        parser.error(f"--minutes {args.minutes:g} is out of range; allowed: more than 0, at most 600")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text {args.text} is not a file")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(THREADS)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    corpus = load_corpus(rng, args.text)
    tokenizer = build_tokenizer(corpus)
    model = build_model(tokenizer)
    streams = [
        token_stream(corpus.documents, tokenizer, separator=True),
        token_stream(corpus.chats, tokenizer, separator=False),
    ]
    print(
        f"{model.num_parameters():,} parameters; {len(streams[0]):,} tokens of prose, {len(streams[1]):,} of chat",
        file=sys.stderr,
    )
    steps = max(WARMUP_STEPS + 1, round(args.minutes * STEPS_PER_MINUTE))
    result = train(model, streams, steps=steps, rng=rng)
    model.eval()
    facts = {
        "parameters": model.num_parameters(),
        "corpus_tokens": sum(map(len, streams)),
        "trained_tokens": result.tokens,
        "steps": result.steps,
        "loss": result.loss,
        "seed": args.seed,
        "minutes": args.minutes,
        "extra_text": args.text is not None,
    }
    save(args.out, model, tokenizer, model_card(facts))
    print(
        f"wrote {args.out}: loss {result.loss:.3f} after {result.steps} steps in {result.elapsed_s:.0f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
