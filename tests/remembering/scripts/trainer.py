"""transformers' Trainer, which trains, evaluates and predicts."""

import os
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import aotc


def main():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = [
        {"input_ids": torch.randint(0, 50, (12,)), "attention_mask": torch.ones(12, dtype=torch.int64), "labels": n % 3}
        for n in range(16)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=os.environ.get("AOTC_TEST_BF16") == "1",
        )
        model = aotc.compile(BertForSequenceClassification(config), train=True)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        for step in trainer.state.log_history:
            if "loss" in step:
                print(f"{step['loss']:.4f}")
        print(f"{trainer.evaluate()['eval_loss']:.4f}")
        print(f"{float(trainer.predict(rows).predictions.sum()):.3f}")


if __name__ == "__main__":
    main()
