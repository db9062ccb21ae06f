"""Set up model, data and optimiser for each engine (one process, DDP, FSDP, DeepSpeed)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from ctxext.core.apply import transformers_model
from ctxext.data.collators import Collator, check_positions
from ctxext.data.packing import Packed, lengths_of, pack
from ctxext.data.sources import read_source
from ctxext.hub.adapters import check_all_saved
from ctxext.hub.checkpoint import extended_as_saved, load_model, read_config, saved_extension
from ctxext.models.context import has_rope, read_context
from ctxext.models.text_config import text_config_of
from ctxext.training.checkpoints import latest_checkpoint
from ctxext.training.distillation import use_distillation
from ctxext.training.documents import use_document_attention
from ctxext.training.estimate import Estimate, PeakMemory, estimate
from ctxext.training.launch import data_parallel, engine_of
from ctxext.training.loss import use_chunked_loss
from ctxext.training.mixed_window import check_mixture, use_mixed_window
from ctxext.training.settings import Settings
from ctxext.training.tiled import use_tiled_mlp
from ctxext.training.trainable import attach_trainable, check_no_dropout, trained_parameters
from ctxext.utils.values import one_line


def micro_batches_of(settings: Settings, accelerator: Accelerator) -> int:
    """The micro-batches per step of this process.

    Raises:
        ValueError: the batch cannot be divided evenly.
    """
    training, (_, world) = settings.training, data_parallel(accelerator)
    share = training.micro_batch_size * world
    if training.batch_size % share:
        raise ValueError(
            f"training.batch_size is {training.batch_size}, which {world} processes cannot split into micro-batches of "
            f"{training.micro_batch_size}. Make it a multiple of {share}, or lower training.micro_batch_size."
        )
    return training.batch_size // share


def check_attention(folder: Path, name: str) -> None:
    """Raise ValueError unless the model in `folder` has the attention implementation `name` on this machine."""
    config = read_config(folder)
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=name, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        said = one_line(error).partition(". ")[0]
        if "attention" in said.lower():  # other errors come when it is loaded
            other = "eager" if name == "sdpa" else "sdpa"
            raise ValueError(f"training.attention={name}: {said}. Set training.attention to {other}.") from error


def packed_sources(settings: Settings, folder: Path, tokenizer: Any, length: int, model: Path) -> list[Packed]:
    """The sources of the settings, relative to `folder`, as rows of `length` tokens from the vocabulary of `model`.

    Raises:
        ValueError: a source cannot be packed, or there are no documents of the lengths that the settings need.
    """
    config = AutoConfig.from_pretrained(model)
    options: dict[str, Any] = {"vocab_size": text_config_of(config).vocab_size, "num_proc": settings.data.processes}
    options["seed"] = settings.training.seed
    packed = [
        pack(source, read_source(source, folder), tokenizer, length, settings.data.documents, **options)
        for source in settings.data.sources
    ]
    with_rope = has_rope(text_config_of(config))
    trained = read_context(config).lengths.start if with_rope else length
    if settings.training.distillation:
        check_mixture(packed, trained, "training.distillation", {True})
    if settings.training.mixed_window:
        check_mixture(packed, trained, "training.mixed_window", {True, False})
    elif settings.data.positions == "plain" and with_rope and all(n <= trained for n in lengths_of(packed)):
        what, remedy = "document", "Add longer documents, or set data.documents: joined."
        if length <= trained:
            what, remedy = "row", "Raise data.length, or set data.positions: pose and data.documents: joined."
        warnings.warn(
            f"no {what} has more than the trained {trained:,} tokens, so no longer distance is trained. {remedy}",
            stacklevel=2,
        )
    return packed


def model_to_train(folder: Path, settings: Settings, accelerator: Accelerator, collator: Collator, length: int) -> Any:
    """Load the model of an extended checkpoint, and set up and check its trained parameters, loss and attention.

    Args:
        length: tokens per row.

    Raises:
        ValueError, RuntimeError: the settings do not fit this model.
    """
    training, quantization, device = settings.training, settings.trainable.quantization, accelerator.device
    exact = settings.trainable.kind == "full" or training.precision == "fp32" or device.type == "cpu"
    loading: dict[str, Any] = {"dtype": torch.float32 if exact else "auto"}
    if quantization:
        loading["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=torch.bfloat16
        )
        loading["device_map"] = {"": device}
    torch.manual_seed(training.seed)  # LoRA's first values
    model = load_model(folder, AutoModelForCausalLM, attn_implementation=training.attention, **loading)
    model = extended_as_saved(model, saved_extension(folder))
    vocab_size = text_config_of(model.config).vocab_size
    model = attach_trainable(model, settings.trainable).to(device)
    check_all_saved(model)
    split = engine_of(accelerator).group_size > 1  # rows are, between processes that attend by an engine's own function
    if split:
        check_no_dropout(model)
    if training.mixed_window:
        use_mixed_window(model)
    with accelerator.autocast():  # as in training: trained parameters are float32, the base may not be
        if training.mlp_tokens:
            use_tiled_mlp(model, training.mlp_tokens)
        if not split and text_config_of(transformers_model(model).config)._attn_implementation == "sdpa":
            try:
                use_document_attention(model)
            except RuntimeError as error:
                warnings.warn(f"{error} A mask takes 3 × {length:,}² bytes for each row in 16 bits.", stacklevel=2)
        if training.loss == "chunked":
            use_chunked_loss(model)
        if training.distillation:
            use_distillation(model, training.distillation, alone=engine_of(accelerator).kind in ("single", "ddp"))
        check_positions(model, collator, length, vocab_size, batch_size=training.micro_batch_size)
    if training.gradient_checkpointing != "none":
        transformers_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    return model


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any, settings: Settings) -> tuple[nn.Module, Any]:
    """`accelerator.prepare`, with DeepSpeed's extra requirements."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return accelerator.prepare(model, optimizer)
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "gradient_clipping": settings.training.max_grad_norm,
        "train_micro_batch_size_per_gpu": settings.training.micro_batch_size,
    }
    modules: Iterable[Any] = model.modules()
    rotary = {module: module.inv_freq.clone() for module in modules if hasattr(module, "inv_freq")}
    prepared = accelerator.prepare(model, optimizer)
    for module, table in rotary.items():
        module.inv_freq = table.to(accelerator.device)  # some versions of DeepSpeed cast it
    return prepared


def start_trackers(accelerator: Accelerator, settings: Settings) -> None:
    """Start the trackers of a run, and finish those of the stage before."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers.clear()  # a finished one would open its files again
    accelerator.project_configuration = ProjectConfiguration(settings.output)
    output = Path(settings.output)
    name = "/".join(output.absolute().parts[-2:])  # of a stage, with the folder of all stages
    resume = "allow" if latest_checkpoint(output / "checkpoints") else "never"
    accelerator.init_trackers(
        "ctxext",
        {key: value if isinstance(value, (int, float)) else str(value) for key, value in settings.binding().items()},
        {"wandb": {"name": name, "dir": settings.output}, "trackio": {"name": name, "resume": resume}},
    )


def estimated(
    probe: Callable[[int], object], accelerator: Accelerator, model: nn.Module, length: int, micro_batches: int
) -> Estimate | None:
    """Time and memory of so many micro-batches of this process; None under DeepSpeed, whose engine cannot take back a
    step.

    Args:
        probe, length: see `ctxext.training.estimate.estimate`.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in trained_parameters(model).values())
    return estimate(
        probe,
        length=length,
        micro_batches=micro_batches,
        trained=sum(part.numel() for part in parts),  # on this process
        memory=PeakMemory(accelerator.device),
        multiple=engine_of(accelerator).pieces,
    )
