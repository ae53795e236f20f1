"""The Hugging Face Trainer on a tiny random BERT; the loops are the Trainer's."""
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
import torch

# use: import rearview

warnings.simplefilter("ignore")
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(0, 30, (count, 5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i, 0] % 2}


class Mine(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        # inner: rearview.log("raw_loss", loss.item())
        return loss


class Look(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        weight = model.classifier.weight
        # outer: rearview.log("classifier", weight.sum().item())


config = BertConfig(
    vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=8,
)
model = BertForSequenceClassification(config)
trainer = Mine(
    model,
    TrainingArguments(
        output_dir="out", num_train_epochs=3, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    ),
    train_dataset=Rows(16),
    callbacks=[Look()],
)
trainer.train()
final = sum(p.double().sum().item() for p in model.parameters())
# after: rearview.log("final", final)
print(final)
