"""`ctxext serve`: an OpenAI-compatible endpoint for a model extended by any method."""

from __future__ import annotations

import asyncio
import errno
from typing import Annotated, Any

import typer

from ctxext.cli import common, measuring
from ctxext.utils.extras import require


def serve(
    model: common.Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on, up to 65535; 0 for a free one.")] = 8000,
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
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {port}.")
    _check_address(host, port)
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


def _check_address(host: str, port: int) -> None:
    """Raise OSError, before the model is loaded, if nothing can listen there."""

    async def listen() -> None:  # as uvicorn does
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
        server.close()
        await server.wait_closed()

    try:
        asyncio.run(listen())
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            remedy = (
                f"port {port} of {host} is in use. Stop what listens there, or pass another --port; 0 is a free one."
            )
        elif number == errno.EACCES:
            remedy = f"port {port} needs administrator rights. Pass a --port from 1024 on."
        else:
            remedy = (
                f"--host {host} is not an address of this machine. Pass 127.0.0.1, or 0.0.0.0 for every network "
                "interface."
            )
        raise OSError(remedy) from error
