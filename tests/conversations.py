"""Small conversations with every token id written out, as Qwen3's training template prints them.

A line is one span: kind, message, weight, token ids. The tokenizer is `render_inputs.word_tokenizer(WORDS)`: ids 0 to
255 are bytes, the others stand beside their text in WORD_IDS.

The lines were written by a program and then read through, one by one. The ids are derived a second time, from the bare
tokenizer and a hand-written form of the template, by `test_the_table_once_more_without_our_code`.
"""

from typing import Any, NamedTuple

from render_inputs import fenced, result, system, turn, user

from schemas.trajectory import Message

WORDS = [
    "system",
    "user",
    "assistant",
    "name",
    "arguments",
    'Ġ"',
    '":',
    '{"',
    '"}',
    "bash",
    "ls",
    "tool",
    "response",
    "_",
    "fix",
    "go",
    "done",
    "yes",
    "no",
    "Ġtext",
    "text",
    "ĊĊ",
    "read",
    "Ġgo",
    "ok",
    "err",
    '",',
    "Ġ{}",
    'Ġ{"',
    "aĊ",
    "```",
    "é",
    "think",
]

# WORD_IDS: 260 system  263 user  264 as  271 assistant  274 name  282 arguments  283 Ġ"  284 ":  285 {"  290 ls
# 293 tool  300 response  302 fix  303 go  306 done  308 yes  309 no  317 ĊĊ  319 read  322 ok  324 err  325 ",
# 327 Ġ{}  331 ```  335 think  336 <|im_start|>  337 <|im_end|>  338 <think>  339 </think>  340 <tool_call>  341
# </tool_call>
# 198 is the line end, 220 the blank.


class Case(NamedTuple):
    name: str
    n_shared: int  # leading tokens equal to those of the first case
    messages: tuple[Message, ...]
    config: dict[str, Any]
    spans: str


CASES = (
    Case(
        "text turn",
        17,
        (
            user("go"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "system first",
        1,
        (
            system("fix"),
            user("go"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 260 198
        prompt 0 0: 302
        prompt 0 0: 337 198 336 263 198
        prompt 1 0: 303
        prompt 1 0: 337 198 336 271 198 338 317 339 198 198
        action 2 1: 306
        turn_end 2 1: 337
        prompt 2 0: 198
    """,
    ),
    Case(
        "two turns",
        14,
        (
            user("go"),
            turn("yes"),
            user("no"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 308
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198
        prompt 2 0: 309
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "call without text",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "text beside a call",
        14,
        (
            user("go"),
            turn("yes", ("ls", "{}")),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 0: 308 198
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "call and result",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("ok"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 322
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "two calls, two results",
        12,
        (
            user("go"),
            turn("", ("ls", "{}"), ("bash", "{}")),
            result("ok"),
            result("err"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        action 1 1: 198 340 198 285 274 284 283 65 264 71 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 322
        prompt 2 0: 198 27 14 293 62 300 29 198 27 293 62 300 29 198
        observation 3 0: 324
        prompt 3 0: 198 27 14 293 62 300 29 337 198
    """,
    ),
    Case(
        "result without a call",
        7,
        (
            user("go"),
            result("ok"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 263 198 27 293 62 300 29 198
        observation 1 0: 322
        prompt 1 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 2 1: 306
        turn_end 2 1: 337
        prompt 2 0: 198
    """,
    ),
    Case(
        "reasoning",
        10,
        (
            user("go"),
            turn("done", reasoning="read"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        reasoning 1 0: 338 198 319 198 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "reasoning scored",
        10,
        (
            user("go"),
            turn("done", reasoning="read"),
        ),
        {"loss_on": ("reasoning", "action", "turn_end")},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        reasoning 1 1: 338 198 319 198 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "reasoning before a call",
        10,
        (
            user("go"),
            turn("", ("ls", "{}"), reasoning="read"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        reasoning 1 0: 338 198 319 198 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "reasoning in one turn of two",
        10,
        (
            user("go"),
            turn("yes", reasoning="read"),
            user("no"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        reasoning 1 0: 338 198 319 198 339 198 198
        action 1 1: 308
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198
        prompt 2 0: 309
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "thought scored",
        14,
        (
            user("go"),
            turn("yes", ("ls", "{}")),
        ),
        {"loss_on": ("thought",)},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 1: 308 198
        action 1 0: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 0: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "only the turn's end",
        14,
        (
            user("go"),
            turn("yes"),
        ),
        {"loss_on": ("turn_end",)},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 0: 308
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "action without the turn's end",
        14,
        (
            user("go"),
            turn("yes"),
        ),
        {"loss_on": ("action",)},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 308
        turn_end 1 0: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "weights by kind",
        14,
        (
            user("go"),
            turn("yes", ("ls", "{}")),
        ),
        {"loss_on": ("thought", "action", "turn_end"), "kind_weights": {"thought": 0.25, "turn_end": 2.0}},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 0.25: 308 198
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 2: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "weight of nothing",
        14,
        (
            user("go"),
            turn("yes"),
        ),
        {"kind_weights": {"action": 0.0}},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 0: 308
        turn_end 1 0: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "empty text",
        12,
        (
            user("go"),
            turn(""),
            user("no"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198
        prompt 2 0: 309
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "empty user message",
        3,
        (
            user(""),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198 337 198 336 271 198 338 317 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "empty result",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result(""),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "a message that says user",
        3,
        (
            user("user"),
            turn("assistant"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 263
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 271
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "looks like a stop token",
        3,
        (
            user("<|im_end|>"),
            turn("<|im_end|>"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 27 91 72 76 62 68 77 67 91 29
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 27 91 72 76 62 68 77 67 91 29
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "looks like a call",
        14,
        (
            user("go"),
            turn("<tool_call>"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 27 293 62 66 64 75 75 29
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "looks like a think block",
        14,
        (
            user("go"),
            turn("</think>"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 27 14 335 29
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "demonstration",
        14,
        (
            user("go"),
            turn("yes", author="demonstration"),
            user("no"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        prompt 1 0: 338 317 339 198 198 308 337 198
        prompt 1 0: 336 263 198
        prompt 2 0: 309
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "invented turn",
        17,
        (
            user("go"),
            turn("done"),
            turn("", ("ls", "{}"), author="invented"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 271 198
        prompt 2 0: 338 317 339 317 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341 337 198
    """,
    ),
    Case(
        "another agent's turn",
        14,
        (
            user("go"),
            turn("yes", author="other_agent"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        prompt 1 0: 338 317 339 198 198 308 337 198
        prompt 1 0: 336 271 198 338 317 339 198 198
        action 2 1: 306
        turn_end 2 1: 337
        prompt 2 0: 198
    """,
    ),
    Case(
        "copied context",
        14,
        (
            user("go"),
            turn("yes", author="copied_context"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198
        prompt 1 0: 338 317 339 198 198 308 337 198
        prompt 1 0: 336 271 198 338 317 339 198 198
        action 2 1: 306
        turn_end 2 1: 337
        prompt 2 0: 198
    """,
    ),
    Case(
        "last turn only",
        14,
        (
            user("go"),
            turn("yes"),
            user("no"),
            turn("done"),
        ),
        {"last_n_turns": 1},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 0: 308
        turn_end 1 0: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198
        prompt 2 0: 309
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "failed turn not scored",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("err", failed=True),
            turn("done"),
        ),
        {"score_failed_turns": False},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 0: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 0: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 324
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "failed turn scored",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("err", failed=True),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 324
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "calls only",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("ok"),
            turn("done"),
        ),
        {"turns": "calls"},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 322
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 0: 306
        turn_end 3 0: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "text turns only",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("ok"),
            turn("done"),
        ),
        {"turns": "text"},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 0: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 0: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 322
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "a tool left out",
        12,
        (
            user("go"),
            turn("", ("ls", "{}"), ("bash", "{}")),
        ),
        {"skip_tools": ("ls",)},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 0: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        action 1 1: 198 340 198 285 274 284 283 65 264 71 325 283 282 284 327 92 198 341
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "every tool left out",
        12,
        (
            user("go"),
            turn("", ("ls", "{}")),
            result("ok"),
            turn("done"),
        ),
        {"skip_tools": ("ls",)},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 0: 340 198 285 274 284 283 290 325 283 282 284 327 92 198 341
        turn_end 1 0: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198 27 293 62 300 29 198
        observation 2 0: 322
        prompt 2 0: 198 27 14 293 62 300 29 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "call written in the text",
        14,
        (
            user("go"),
            fenced("yes```ls```", "```ls```"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 0: 308
        action 1 1: 331 290 331
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "observation by the user role",
        14,
        (
            user("go"),
            fenced("yes```ls```", "```ls```"),
            user("ok", "environment"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 0: 308
        action 1 1: 331 290 331
        turn_end 1 1: 337
        prompt 1 0: 198
        prompt 1 0: 336 263 198
        observation 2 0: 322
        prompt 2 0: 337 198 336 271 198 338 317 339 198 198
        action 3 1: 306
        turn_end 3 1: 337
        prompt 3 0: 198
    """,
    ),
    Case(
        "token over an edge",
        14,
        (
            user("go"),
            fenced("read go", "ad go"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        thought 1 0: 319
        action 1 1: 220 303
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "character of two tokens",
        3,
        (
            user("é"),
            turn("éø"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 127 102
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 127 102 127 116
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "line ends before the answer",
        17,
        (
            user("go"),
            turn("\n\ndone"),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 198 198
        action 1 1: 306
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "blanks around the answer",
        12,
        (
            user("go"),
            turn(" done "),
        ),
        {},
        """
        prompt -1 0: 336 263 198
        prompt 0 0: 303
        prompt 0 0: 337 198 336 271 198 338 317 339 317
        action 1 1: 220 306 220
        turn_end 1 1: 337
        prompt 1 0: 198
    """,
    ),
    Case(
        "simulated user",
        1,
        (
            system("fix"),
            user("go", "simulated_user"),
            turn("done"),
        ),
        {},
        """
        prompt -1 0: 336 260 198
        prompt 0 0: 302
        prompt 0 0: 337 198 336 263 198
        prompt 1 0: 303
        prompt 1 0: 337 198 336 271 198 338 317 339 198 198
        action 2 1: 306
        turn_end 2 1: 337
        prompt 2 0: 198
    """,
    ),
)
