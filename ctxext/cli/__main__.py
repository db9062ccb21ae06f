from ctxext.cli import app

app()
