"""Imported before vLLM by its worker: settings, and what torchvision, which is put beside it, lacks."""

import os

import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip

# torchvision's wheel is for CUDA, and its operators do not load here: reading text needs none of them.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
