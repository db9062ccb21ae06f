"""`ctxext serve`: an OpenAI-compatible endpoint for a model extended by any method."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ctxext.cli import common, measuring
from ctxext.utils.extras import require


def serve(
    model: common.Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: MODEL as given.")
    ] = None,
    dtype: measuring.Dtype = "auto",
    device: measuring.Device = None,
    revision: common.Revision = None,
) -> None:
    """Serve a checkpoint with transformers' own server, loaded by ctxext.load: for methods that no other engine runs.

    One request at a time, without prefix cache or authentication.
    """
    require("serve")
    import uvicorn

    import ctxext
    from ctxext.core.apply import extension_of
    from ctxext.evals.loading import placement
    from ctxext.evals.targets import known_lengths
    from ctxext.export.serve import make_app
    from ctxext.hub.checkpoint import load_tokenizer, local_folder

    with common.console.status(f"loading {model}"):
        loaded: Any = ctxext.load(model, revision=revision, **placement(dtype, device))
        tokenizer = load_tokenizer(local_folder(model, revision))
    extension = extension_of(loaded)
    limit = known_lengths(loaded.config)[1] if extension is None else extension.plan.target_length
    uvicorn.run(make_app(loaded, tokenizer, served_model_name or model, limit), host=host, port=port)
