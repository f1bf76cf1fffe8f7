"""Made-up documents of the eight tasks, in the columns of the public data sets."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("water", "stone", "runs", "green", "under", "small", "house", "seven", "music", "slow")


def write_documents(root: Path, count: int = 6, seed: int = 0) -> Path:
    """Write `count` documents of every task below `root`, as JSON lines; return it."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    def options(n: int) -> dict[str, list[str]]:
        return {"text": [words(4) for _ in range(n)], "label": list("ABCDE"[:n])}

    makers: dict[str, Callable[[int], dict[str, Any]]] = {
        "arc_easy/test": lambda i: {
            "id": str(i), "question": words(8) + "?", "choices": options(4), "answerKey": draw.choice("ABCD"),
        },
        "boolq_super_glue/validation": lambda i: {
            "question": words(5), "passage": words(12), "idx": i, "label": draw.randint(0, 1),
        },
        "hellaswag/validation": lambda i: {
            "ind": i, "activity_label": "Made up", "ctx_a": words(6) + ".", "ctx_b": words(2),
            "ctx": "", "endings": [words(6) for _ in range(4)], "source_id": "none", "split": "val",
            "split_type": "indomain", "label": str(draw.randint(0, 3)),
        },
        "lambada_openai/test": lambda i: {"text": words(12) + " " + draw.choice(WORDS)},
        "openbookqa/test": lambda i: {
            "id": str(i), "question_stem": words(7), "choices": options(4), "answerKey": draw.choice("ABCD"),
        },
        "piqa/validation": lambda i: {
            "goal": words(6), "sol1": words(5), "sol2": words(5), "label": draw.randint(0, 1),
        },
        "social_i_qa/validation": lambda i: {
            "context": words(7) + ".", "question": words(4) + "?", "answerA": words(3), "answerB": words(3),
            "answerC": words(3), "label": str(draw.randint(1, 3)),
        },
        "winogrande/validation": lambda i: {
            "sentence": f"{words(4)} _ {words(4)}.", "option1": "Ann", "option2": "Bo",
            "answer": str(draw.randint(1, 2)),
        },
    }  # fmt: skip
    for name, make in makers.items():
        path = root / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(count)), encoding="utf-8")
    return root
