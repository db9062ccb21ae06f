"""`ctxext finetune`: the fine-tune recipe, by the name of its config."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from ctxext.utils.extras import require


def finetune(
    config: Annotated[str, typer.Option(help="A YAML file, or the name of one in recipes/configs.")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config overrides.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure short steps, and stop.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the modelled memory on GPUs, from the config alone, and stop.")
    ] = False,
) -> None:
    """Fine-tune a model at a longer context: `accelerate launch -m ctxext finetune ...` for several processes."""
    require("train")
    recipes = recipes_folder()
    path = Path(config)
    if path.is_dir():
        raise IsADirectoryError(f"{config} is a folder. Pass a YAML file, such as one of {recipes / 'configs'}.")
    if not path.is_file():
        path = recipes / "configs" / f"{config.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        from ctxext.hub.checkpoint import near_path

        known = ", ".join(sorted(file.stem for file in (recipes / "configs").glob("*.yaml")))
        near = near_path(Path(config))
        raise FileNotFoundError(f"{config!r} is neither a file nor a bundled config.{near} Bundled configs: {known}.")
    spec = importlib.util.spec_from_file_location("ctxext_recipe_finetune", recipes / "finetune.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe  # where its dataclasses look up their module
    spec.loader.exec_module(recipe)
    flags = [flag for flag, given in (("--dry-run", dry_run), ("--estimate", estimate)) if given]
    recipe.main(["--config", str(path), *flags, *(changes or [])])


def recipes_folder() -> Path:
    """The folder of the recipes: in the installed package, or beside it in a clone."""
    package = Path(sys.modules["ctxext"].__file__ or "").parent
    return next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())
