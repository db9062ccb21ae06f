"""Part 4 on a GPU: every method, further factors, a second model, needles, RULER, a fit and a LoRA fine-tune.

SmolLM2 at ×2, ×4 and ×8 of 8,192 tokens, and Gemma-3-270M at ×4 of 32,768. Each is a part of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from at_scale import gemma
from at_scale.cells import Cell
from at_scale.models import GEMMA_CONFIG, forward_cost, loaded
from at_scale.quality import DEPTHS, IN_ATTENTION, STATIC, Quality
from texts import SECOND_HALF, halves
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext import extend_context
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import read_results
from ctxext.evals.ruler import RULER
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.samples import make_task
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant, compared_variants
from ctxext.extension.method_file import read_saved
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import GradientSettings
from ctxext.training.loss import restore_loss, use_chunked_loss
from ctxext.training.tiled import use_tiled_mlp

NEEDLES = ("passkey", "needle", "needles", "needle_distractors")
NO_DATA = ("qa_1", "qa_2")  # ask for the files of SQuAD and HotpotQA
POSSIBLE = 0.5  # of RULER a model is asked beyond its length what it finds this often within it
FITTED, TUNED = "fitted", "tuned by LoRA"


@dataclass
class Wider(Quality):
    """As Quality, for every method. Texts are second halves: the first ones fit the factors and train LoRA.

    Attributes:
        steps: of LoRA, each on one row of the target length.
    """

    factor: ClassVar[int]
    trained: ClassVar[int] = 8192
    methods: ClassVar[tuple[str, ...]] = STATIC + IN_ATTENTION
    fitted: ClassVar[bool] = True
    steps: ClassVar[int] = 200

    @property
    def missing(self) -> str | None:
        return None if self.tiny or self.device == "cuda" else "no GPU"

    @property
    def names(self) -> tuple[str, ...]:
        """The texts whose second halves hold the target, with a quarter more for other tokenizers."""
        return tuple(name for name in super().names if self.tiny or SECOND_HALF[name] >= 1.25 * self.target)

    @property
    def target(self) -> int:
        return self.factor * (512 if self.tiny else self.trained)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.target * 3 // 4, self.target

    def measured_text(self, name: str) -> str:
        return halves(self.text(name))[1]

    @cached_property
    def learnt(self) -> str:
        return "\n\n".join(halves(self.text(name))[0] for name in self.names)

    @cached_property
    def variants(self) -> list[Variant]:
        methods = ("yarn",) if self.tiny else self.methods
        found = compared_variants(self.config, methods, self.factor)
        return [*found, *(Variant(name) for name in self.learned)]

    @property
    def learned(self) -> tuple[str, ...]:
        """Variants that are made by a cell of their own."""
        if not self.whole:
            return ()
        made = {FITTED: self.fitted, TUNED: not self.lacking("peft")}
        return tuple(name for name, possible in made.items() if possible)

    @property
    def whole(self) -> bool:
        """Tiny, one part rehearses what all have in common."""
        return not self.tiny or (self.factor == 4 and self.trained == 8192)

    def cells(self) -> Sequence[Cell]:
        once = forward_cost(self.config, self.target)
        cells = [Cell(f"make {FITTED}", (3 if self.tiny else 300) * once, self.fit)] if FITTED in self.learned else []
        if TUNED in self.learned:
            cells.append(Cell(f"make {TUNED}", 3 * (2 if self.tiny else self.steps) * once, self.tune))
        depths = DEPTHS[::2] if self.tiny else DEPTHS
        names = ("passkey",) if self.tiny else NEEDLES
        common: dict[str, Any] = {"depths": depths, "trials": self.rounds, "windows": 2 * self.rounds}
        tasks = tuple(make_task(name) for name in names)
        for text in self.names:
            passes = {
                "near": (Grid(retrieval=tasks, lengths=(self.near,), **common), self.near, 3 * len(tasks)),
                "short": (Grid(lengths=(self.near,), gate=(self.near,), **common), self.near, 2),
                "text": (Grid(texts=(Perplexity(),), lengths=(self.near, *self.lengths), **common), self.target, 2),
                **{
                    str(n): (Grid(retrieval=tasks, lengths=(n,), **common), n, 3 * len(tasks)) for n in self.lengths
                },
            }  # fmt: skip
            for kind, (grid, length, n_passes) in passes.items():
                cells += [
                    self._cell(
                        f"{text} {kind} {variant.name}",
                        n_passes * self.rounds * forward_cost(self.config, length),
                        *(text, grid, variant),
                    )
                    for variant in self.variants
                ]
        cells += self._ruler_cells() if self.whole else []
        # All by one process: most of them use what the first ones make.
        return [replace(cell, settings=f"rounds {self.rounds}", file="") for cell in cells]

    def _ruler_cells(self) -> list[Cell]:
        """The baseline within the trained length, then every variant on the tasks that it can do, at the target."""
        names = tuple(name for name in RULER if name not in NO_DATA)[: 2 if self.tiny else None]
        text, trials = self.names[0], 2 if self.tiny else 30 * self.rounds
        near = 448 if self.tiny else self.near

        def grid(names: Sequence[str], length: int) -> Grid:
            return Grid(retrieval=tuple(map(make_task, names)), lengths=(length,), depths=(0.5,), trials=trials)

        def far(variant: Variant) -> list[str]:
            able = self.able(names, near)
            if able:
                self._run(text, grid(able, self.target), variant, "ruler")()
            return able

        cost = 1.5 * trials * len(names)
        return [
            self._cell(
                "ruler near none",
                cost * forward_cost(self.config, near),
                *(text, grid(names, near), self.variants[0], "ruler"),
            ),
            *(
                Cell(
                    f"ruler {self.target} {variant.name}",
                    cost * forward_cost(self.config, self.target) / 2,
                    lambda variant=variant: far(variant),
                    there=self.file(text, "ruler").is_file,
                )
                for variant in self.variants
            ),
        ]

    def able(self, names: Sequence[str], near: int) -> list[str]:
        """The tasks of which the baseline scores POSSIBLE or more at `near` tokens; tiny, all."""
        if self.tiny:
            return list(names)
        summary = Summary(read_results(self.file(self.names[0], "ruler")))
        return [name for name in names if summary.by_length("none", name)[near].value >= POSSIBLE]

    def _run(self, text: str, grid: Grid, variant: Variant, kind: str = "") -> Callable[[], None]:
        def run() -> None:
            target, haystack = self.asked(text)
            asked = variant
            if variant.name == FITTED:
                asked = Variant(FITTED, {"method": read_saved(self.folder / "fitted.json").method})
            elif variant.name == TUNED:
                target = self.tuned(target)
            Runner(target, haystack, grid, beyond=True).run(self.file(text, kind), [asked])

        return run

    # -------------------------------------------------------------------------------- what is learned

    def fit(self) -> dict[str, Any]:
        """Rescale factors fitted to the first halves."""
        model, tokenizer = self.model
        settings = GradientSettings(evaluations=2, rows=1) if self.tiny else GradientSettings()
        saved = fit(
            model, Prompter(tokenizer), self.learnt, self.factor, settings=settings, names=(self.label, "first halves")
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        saved.save(self.folder / "fitted.json")
        return {"method": saved.method.to_dict(), "losses": saved.about["losses"]}

    def tune(self) -> dict[str, Any]:
        """LoRA of rank 16 under YaRN on rows of the first halves, merged and saved."""
        from peft import LoraConfig, get_peft_model

        tokenizer = self.model[1]
        length, steps = self.target, 2 if self.tiny else self.steps
        base = AutoModelForCausalLM.from_pretrained(self.model[0].config._name_or_path, dtype=self.model[0].dtype)
        extended = extend_context(base.to(self.device), self.factor, "yarn")
        torch.manual_seed(0)
        lora = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(extended, lora)
        use_chunked_loss(model)
        tiled = use_tiled_mlp(model)
        extended.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        ids = tokenizer(self.learnt, add_special_tokens=False, return_tensors="pt").input_ids[0]
        starts = torch.randint(max(1, len(ids) - length), (steps,), generator=torch.Generator().manual_seed(0))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
        losses = []
        half = torch.autocast(self.device, torch.bfloat16) if base.dtype == torch.bfloat16 else nullcontext()
        model.train()
        for step, start in enumerate(starts.tolist()):
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 * min(1.0, (step + 1) / 20)
            row = ids[None, start : start + length].to(self.device)
            with half:
                loss = model(input_ids=row, labels=row).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        tiled.undo()
        restore_loss(model)
        model.merge_and_unload().save_pretrained(self.folder / "tuned")
        tokenizer.save_pretrained(self.folder / "tuned")
        return {"steps": steps, "tokens": steps * length, "losses": losses}

    def tuned(self, like: LiveModel) -> LiveModel:
        """The merged model, asked as the baseline is."""
        if not hasattr(self, "_tuned"):
            self._tuned = loaded(self.folder / "tuned", self.device, self.model[0].dtype)[0]
        target = LiveModel(self._tuned, like.prompter, self.label, like.about["trained_length"])
        target.about = {**like.about, **target.about, "reach": like.about["reach"]}
        return target

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        path = self.file(self.names[0], "ruler")
        ruler = Summary(read_results(path)).to_dict()["figures"] if path.is_file() else {}
        return {
            **super().record(kept),
            "ruler": {variant: figures["retrieval"] for variant, figures in ruler.items()},
            "ruler not run": {name: "asks for a file of questions" for name in NO_DATA},
            "not made": [] if TUNED in self.learned or not self.whole else [f"{TUNED}: peft is not installed"],
            "made": {name: value for name, value in kept.items() if name.startswith("make ")},
        }


@dataclass
class Double(Wider):
    name, title, factor = "quality-x2", "SmolLM2 at ×2, every method, RULER, fit, LoRA", 2


@dataclass
class Quadruple(Wider):
    name, title, factor = "quality-x4", "SmolLM2 at ×4, every method, RULER, fit, LoRA", 4


@dataclass
class Octuple(Wider):
    name, title, factor = "quality-x8", "SmolLM2 at ×8, every method, RULER, fit, LoRA", 8


@dataclass
class Gemma(Wider):
    """Its windows of 512 leave one layer in six to extend; in-attention RoPE and fits refuse tables by layer type."""

    name, title, factor = "quality-gemma", "Gemma-3-270M at ×4, every static method, RULER, LoRA", 4
    trained = 32_768
    methods = STATIC
    fitted = False

    @property
    def label(self) -> str:
        return "austen-4m" if self.tiny else "gemma-3-270m (Q4_K_M, dequantised)"

    @cached_property
    def model(self) -> tuple[Any, Any]:
        if self.tiny:
            return super().model
        gemma.fetch()
        return loaded(gemma.GEMMA, self.device, torch.bfloat16)

    @cached_property
    def config(self) -> Any:
        if self.tiny:
            return super().config
        if self.planned:
            return GEMMA_CONFIG
        gemma.fetch()
        return AutoConfig.from_pretrained(gemma.GEMMA)
