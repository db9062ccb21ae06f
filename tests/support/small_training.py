"""A small model in training, for tests and the processes that they start."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ctxext.assets import MODEL
from ctxext.training.settings import TrainableSettings
from ctxext.training.trainable import attach_trainable, trained_parameters

BINDING = {"training.seed": 0, "data.length": 64}
LORA = TrainableSettings(rank=4, embeddings=True, norms=True)


def make(settings: TrainableSettings = LORA, seed: int = 0):
    torch.manual_seed(seed)
    model = attach_trainable(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), settings)
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=1e-3)
    return model, optimizer


def train(model, optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
