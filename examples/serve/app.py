"""A trained ranker behind HTTP: the folder of `embershard export`, FastAPI and uvicorn; see README.md beside it.

python app.py OUT --port 8000
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio.to_thread
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import embershard as es


class ScoreRequest(BaseModel):
    """Columns of the rows to be scored: {"user": ["u1", "u1"], "item": [7, 8], "age": [31, null]}."""

    rows: dict[str, list[Any]]  # score() checks names and values


Dense = Literal["torch", "onnx", "int8"]


def make_app(folder: str, *, dense: Dense = "torch", threads: int = 2, max_rows: int = 10_000) -> FastAPI:
    """An app that scores by the model in this folder, in so many threads."""
    model = es.load_exported(folder, dense=dense)
    torch.set_num_threads(1)  # each request is computed by one of `threads`

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = threads
        yield

    app = FastAPI(title="embershard", lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"status": "ok", "model": model.job.model.name, "features": model.features}

    @app.post("/score")
    def score(request: ScoreRequest) -> JSONResponse:
        rows = max(map(len, request.rows.values()), default=0)
        if rows > max_rows:
            return JSONResponse({"detail": f"{rows} rows in one request, at most {max_rows}"}, 413)
        scores = model.score(request.rows)
        if not np.isfinite(scores).all():
            row = int(np.argwhere(~np.isfinite(scores))[0, 0])
            return JSONResponse({"detail": f"row {row}: the model has no finite score of it", "row": row}, 422)
        return JSONResponse({"scores": scores.tolist()})

    @app.exception_handler(es.errors.BadRows)
    async def bad_request(_: Request, error: es.errors.BadRows) -> JSONResponse:
        return JSONResponse({"detail": str(error), **error.fields}, 422)

    return app


def main() -> None:
    """Load an export and answer requests for scores over HTTP until Ctrl-C, by the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="what `embershard export` wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dense", choices=("torch", "onnx", "int8"), default="torch")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    try:
        app = make_app(given.folder, dense=given.dense, threads=given.threads)
    except (es.errors.BadExport, es.errors.CannotServe) as error:
        parser.exit(1, f"error: {error}\n")
    gc.freeze()  # else now and then a request waits while all that torch has loaded is looked through
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
