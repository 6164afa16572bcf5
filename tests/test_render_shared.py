"""Real agent runs under every template: the scored tokens are exactly what the log says the model emitted."""

from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from emitted import emitted, joined
from render_inputs import FAMILIES, decode, family_tokenizer, make_renderer, qwen_tokenizer

from schemas.config import RenderConfig
from schemas.trajectory import Trajectory
from tasks.renderer import LabelledRun, Renderer, render_run
from tasks.sources import SourceError, parse
from tasks.spans import ACTION, REASONING, THOUGHT, TURN_END

STRADDLED = {
    # The only exceptions: in these files a token straddles an edge, and goes where its first character is.
    "atif/terminus_2__hello-world-invalid-json.trajectory.json": "a call in the text ends inside a token",
    "openhands/llm_log_nonfncall.json": "an answer that begins with a line end, right after the header's",
    "sharegpt-codeact/codeactinstruct_sample_raw.json": "a call in the text ends inside a token",
    "swe-smith-sft/adp_raw_arrow-py__arrow.1d70d009.lm_rewrite__nuzjfyur.json": "an answer that begins with a line end",
    "swe-smith-sft/ft_xml_example.jsonl": "an answer that begins with a line end",
}


@cache
def _runs(folder: Path) -> list[tuple[str, int, Trajectory]]:
    found = []
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = path.relative_to(folder).as_posix()
        try:
            runs = parse(path.read_bytes(), name)
        except SourceError:
            continue  # side files and documents without a run; tested with ingestion
        found += [(name, row, run) for row, run in enumerate(runs)]
    return found


def _check(run: Trajectory, labelled: LabelledRun, renderer: Renderer, family: str, where: str) -> int:
    """Compares every turn, piece by piece; returns how many edges a token straddles.

    A token that straddles an edge belongs to the piece that its first character is in: such an edge may lie later than
    the text says, by less than that one token.
    """
    found: dict[int, list[tuple[int, str]]] = {}
    last_token: dict[tuple[int, int], str] = {}
    last_header_token: dict[int, str] = {}
    for span in labelled.spans:
        if span.kind in (REASONING, THOUGHT, ACTION, TURN_END):
            pieces = found.setdefault(span.message, [])
            if not pieces and span.start:
                last_header_token[span.message] = decode([labelled.token_ids[span.start - 1]], renderer)
            ids = labelled.token_ids[span.start : span.end].tolist()
            pieces[:] = joined([*pieces, (span.kind, decode(ids, renderer))])
            last_token[span.message, len(pieces) - 1] = decode(ids[-1:], renderer)
    n_straddled = 0
    for index, message in enumerate(run.messages):
        pieces = found.get(index, [])
        expected = emitted(message, family) if message.trainable else []
        if pieces == expected:
            continue
        at = f"{where}, message {index}"
        whole, true_whole = ("".join(text for _, text in side) for side in (pieces, expected))
        n_before = len(true_whole) - len(whole)  # taken by a token that begins in the header
        assert true_whole.endswith(whole), at
        assert 0 <= n_before < len(last_header_token[index]), at
        n_straddled += n_before > 0
        while n_before and n_before >= len(expected[0][1]):
            n_before -= len(expected.pop(0)[1])
        expected[0] = (expected[0][0], expected[0][1][n_before:])
        assert [kind for kind, _ in pieces] == [kind for kind, _ in expected], at
        ends, true_ends = (list(accumulate(len(text) for _, text in side)) for side in (pieces, expected))
        for number, (end, true_end) in enumerate(zip(ends, true_ends, strict=True)):
            assert 0 <= end - true_end < len(last_token[index, number]), f"{at}, edge {number}"
            n_straddled += end != true_end
    return n_straddled


@pytest.mark.parametrize(
    "family", [family if family == "qwen3" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_scored_tokens_decode_to_what_the_modelemitted(family: str, shared_dir: Path) -> None:
    renderer = make_renderer(family_tokenizer(family))
    straddled: dict[str, int] = {}
    n_turns = 0
    for name, row, run in _runs(shared_dir):
        labelled = render_run(run, renderer, RenderConfig())
        if n_straddled := _check(run, labelled, renderer, family, f"{name} row {row}"):
            straddled[name] = straddled.get(name, 0) + n_straddled
        n_turns += run.n_turns
        assert decode(labelled.token_ids.tolist(), renderer) == labelled.rendering.text
        starts = [span.start for span in labelled.spans]
        ends = [span.end for span in labelled.spans]
        assert starts == [0, *ends[:-1]], f"{name}: spans leave a gap"
        assert ends[-1] == len(labelled.token_ids)

    assert set(straddled) <= set(STRADDLED), straddled
    assert n_turns > 500  # the corpus was really there: 1,000 turns or so


@pytest.mark.slow
def test_qwens_real_vocabulary(shared_dir: Path) -> None:
    renderer = make_renderer(qwen_tokenizer())
    for name, row, run in _runs(shared_dir):
        if name.startswith(("mini-swe-agent", "openai-chat", "swe-agent/marsh")) and run.messages:
            _check(run, render_run(run, renderer, RenderConfig()), renderer, "qwen3", f"{name} row {row}")
