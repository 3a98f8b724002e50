"""Hugging Face's Trainer on a small language model from a configuration."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["llama", "bert"], default="llama")
parser.add_argument("--mask", choices=["none", "ones", "padded"], default="none")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()


class Sentences(Dataset):
    def __init__(self, n, length=24):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 99, (n, length), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        tokens = self.tokens[i]
        item = {"input_ids": tokens, "labels": tokens if args.model == "llama" else tokens[0] % 3}
        if args.mask != "none":
            item["attention_mask"] = torch.ones_like(tokens)
            if args.mask == "padded" and i % 2:
                item["attention_mask"][-5:] = 0
        return item


sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
if args.model == "llama":
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
else:
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=3, max_position_embeddings=64))
if args.lora:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"] if args.model == "llama" else ["query", "value"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=targets))

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        num_train_epochs=1,
        learning_rate=1e-4,
        bf16=args.bf16,
        gradient_checkpointing=args.checkpointing,
        eval_strategy="epoch" if args.evaluate else "no",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Sentences(12 * args.accumulate),
    eval_dataset=Sentences(8),
)
trainer.train()
print(trainer.state.log_history[-1])
