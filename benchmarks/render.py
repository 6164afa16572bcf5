"""Tokens a second of rendering and labelling, against the bare tokenizer on the same text in the same run.

    python -m benchmarks.render PATH... [--repeat N]

PATH: log files or folders of any supported format. One core: the tokenizer's own threads are off.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from artifacts.store import Store
from artifacts.tables import iter_rows, open_table
from schemas.config import ModelConfig, RenderConfig, SourceConfig
from schemas.trajectory import Trajectory
from tasks.ingest import ingest
from tasks.jinja import RenderError
from tasks.model import prepare_model
from tasks.renderer import make_renderer, render_run


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--repeat", type=int, default=3, help="the best of so many passes is reported")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        store = Store(folder)
        renderer = make_renderer(prepare_model(ModelConfig(), store).model)
        table = open_table(ingest(SourceConfig(paths=tuple(arguments.paths)), store).trajectories)
        config, bare = RenderConfig(), renderer.tokens.whole.backend_tokenizer
        n_tokens, n_runs, texts = 0, 0, []
        render_s, bare_s = float("inf"), float("inf")
        for _ in range(arguments.repeat):
            n_tokens, n_runs, texts = 0, 0, []
            spent = 0.0
            for row in iter_rows(table):
                trajectory = Trajectory.model_validate(row)
                start = time.perf_counter()
                try:
                    run = render_run(trajectory, renderer, config)
                except RenderError:
                    continue
                spent += time.perf_counter() - start
                n_tokens, n_runs = n_tokens + len(run.token_ids), n_runs + 1
                texts.append(run.rendering.text)
            render_s = min(render_s, spent)
            start = time.perf_counter()
            for text in texts:
                _ = bare.encode(text, add_special_tokens=False).ids
            bare_s = min(bare_s, time.perf_counter() - start)
    result = {
        "n_runs": n_runs,
        "n_tokens": n_tokens,
        "render_tokens_per_s": round(n_tokens / render_s),
        "tokenizer_tokens_per_s": round(n_tokens / bare_s),
        "ratio": round(bare_s / render_s, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "paths": [Path(path).name for path in arguments.paths],
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
