"""A real GRPO training of TRL on the CPU: a tiny random model, a few prompts, some ten steps.

As a program, one rank: `python -m tests.helpers.trl_training OUT LAKE FIELDS` under torchrun's
variables, FIELDS being settings of GRPOConfig as JSON; it prints a digest of the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from trajreplay.capture import Switches

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = [LETTERS[i : i + 3] for i in range(8)]
PLAIN: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 4,
    "learning_rate": 2e-2,
    "temperature": 1.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}


def make_model(folder: Path) -> Path:
    """Save a random model of two layers and a tokenizer of letters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {name: place for place, name in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        eos_token="<eos>",
        model_input_names=["input_ids", "attention_mask"],
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def early_letters(completions: list[str], **_: Any) -> list[float | None]:
    """The share of letters of the first half of the alphabet; nothing for a completion with z."""
    return [
        None if "z" in one else sum(letter < "n" for letter in one) / max(len(one), 1)
        for one in completions
    ]


def length(completions: list[str], **_: Any) -> list[float | None]:
    """A tenth for each letter; nothing for a completion with z or y."""
    return [None if {"z", "y"} & {*one} else 0.1 * len(one) for one in completions]


def make_trainer(model: Path, out: Path, fields: dict[str, Any], **options: Any) -> Any:
    """A trainer of TRL, not yet trained."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            model=str(model),
            reward_funcs=[early_letters, length],
            args=GRPOConfig(
                output_dir=str(out), **{"reward_weights": [1.0, 0.5], **PLAIN, **fields}
            ),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            **options,
        )


def lacking(fields: dict[str, Any]) -> str:
    """What the installed version of TRL has not of what fields ask for, in words, or nothing."""
    import inspect

    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as version

    unknown = [name for name in fields if name not in GRPOConfig.__dataclass_fields__]
    kind = fields.get("loss_type")
    if kind is not None and f'"{kind}"' not in inspect.getsource(GRPOTrainer):
        unknown.append(f"loss_type {kind}")
    batch = fields.get("scale_rewards") in ("batch", "none")
    if batch and "str" not in str(GRPOConfig.__dataclass_fields__["scale_rewards"].type):
        unknown.append(f"scale_rewards {fields['scale_rewards']}")
    return f"TRL {version} has no {', '.join(unknown)}" if unknown else ""


def known_fault(fields: dict[str, Any]) -> str:
    """The verdict of a loss that the installed version of TRL divides by another number than due.

    Until its loss reads `steps_per_generation`, dapo divides what one step consumes by the tokens
    of a whole generation; until those are of the loss's own mask, also by tokens that it masks.
    """
    import inspect

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer)
    accumulated = fields.get("gradient_accumulation_steps", PLAIN["gradient_accumulation_steps"])
    if fields.get("loss_type") != "dapo":
        return ""
    if fields.get("steps_per_generation", accumulated) != accumulated:
        rescaled = "args.steps_per_generation" in inspect.getsource(GRPOTrainer._compute_loss)
        return "" if rescaled else "diverged"
    if fields.get("mask_truncated_completions") and "gather(loss_mask.sum())" not in source:
        return "unverified"
    return ""


def digest(trainer: Any) -> str:
    """The parameters of a trainer's model, bit by bit."""
    found = hashlib.sha256()
    for name, values in sorted(trainer.model.state_dict().items()):
        found.update(name.encode() + values.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(
    model: Path, out: Path, fields: dict[str, Any], switches: Switches | None
) -> tuple[str, Any]:
    """Train, captured where there are switches; returns the digest of the parameters, and all."""
    import torch
    from trl import GRPOTrainer  # noqa: F401 - imported before the seed

    from trajreplay.capture.trl import attach

    torch.manual_seed(0)
    if lacked := lacking(fields):
        pytest.skip(lacked)
    trainer = make_trainer(model, out, fields)
    if switches is not None:
        attach(trainer, switches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return digest(trainer), trainer


def main(model: str, out: str, lake: str, fields: str) -> None:
    """One rank; captured unless the lake is `-`."""
    import torch

    torch.set_num_threads(1)
    switches = None if lake == "-" else Switches(lake=lake, run_id="r", strict=True)
    found, _ = train(Path(model), Path(out), json.loads(fields), switches)
    sys.stdout.write(f"{found}\n")
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # what gloo does at exit may abort, or wait for the other rank without end


if __name__ == "__main__":
    main(*sys.argv[1:])
