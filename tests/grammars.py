"""For tests of structured output: tokenizers, a loop that draws under masks, hostile drafts, random schemas."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from oxidize.runtime.grammar import GrammarSpec, GrammarState
from oxidize.runtime.text import Tokenizer

END, START, STOP = 0, 1, 2  # <|endoftext|> and <|im_end|> both end an answer
EOS = (END, STOP)
PADDING = 13  # rows of the logits that have no token
CORPUS = (
    'The quick brown fox. {"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true, "none": null}\n'
    '<think>\nHmm, let me see.\n</think>\n{"name":"Bob","age":-12.5e3,"ok":false}</think>{"a":1}\n\n12345 67890\n'
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(PERSON)),
    "object": GrammarSpec("json_object", ""),
    "regex": GrammarSpec("regex", r"(\d{2,4}-)+[a-c]*(yes|no)?"),
    "lark": GrammarSpec(
        "lark", 'start: sum\nsum: NUMBER | sum OP NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/\nOP: "+" | "*"'
    ),
    "after": GrammarSpec("json_schema", json.dumps(PERSON), after="</think>"),
    "after_special": GrammarSpec("regex", "[0-9]+!", after="<|im_start|>"),
}


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(re.findall(r"[^ ]+ ?|.", CORPUS, re.DOTALL) * 3, trainer)
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text in ('>"', '>x"', ">{", ">\n", ">\n{", '>{"', ">12", "<tool>")]
    )
    return backend


def sentencepiece() -> Backend:
    """Begins every text with a space, spells line breaks twice, as such a vocabulary may."""
    mark = "\u2581"
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), mark, *map(chr, range(33, 127)), "\n"]
    words += [f"{mark}a", "na", "me", "name", '":', f"{mark}{{", "nam"]
    vocab = {word: token for token, word in enumerate(words)}
    merges = [(mark, "a"), ("n", "a"), ("m", "e"), ("na", "me"), ('"', ":"), (mark, "{")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(mark, "always", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


class Walk:
    """Draws tokens under the masks as a loop would; noise is a function of seed and position alone."""

    def __init__(self, tokenizer: Tokenizer, state: GrammarState, seed: int) -> None:
        self.state, self.seed, self.tokens = state, seed, list[int]()
        self._closing = closing(tokenizer, state.masks([]).shape[1])

    def draw(self, row: np.ndarray, position: int) -> int:
        noise = np.random.default_rng([self.seed, position]).gumbel(size=len(row))
        haste = min(8.0, position / 8)
        return int(np.argmax(np.where(row, noise + haste * self._closing, -np.inf)))

    def round(self, drafted: list[int]) -> None:
        """Keep drafted tokens while they are the drawn ones."""
        rows = self.state.masks(drafted)
        assert rows.any(axis=1).all()
        taken = []
        for index, row in enumerate(rows):
            taken.append(self.draw(row, len(self.tokens) + index))
            if taken[-1] in EOS or taken[-1] != [*drafted, None][index]:
                break
        self.state.commit(taken)
        self.tokens += taken

    def run(self, propose: Callable[["Walk"], list[int]], limit: int = 400) -> list[int]:
        while not self.tokens or self.tokens[-1] not in EOS:
            assert len(self.tokens) < limit
            self.round(propose(self))
        return self.tokens


def closing(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Prefers tokens that bring an answer to its end."""
    text = [tokenizer.token_bytes(token) for token in range(size)]
    scores = np.array([-0.3 * len(spelled) - 2.0 * (spelled[-1:] in (b",", b"\\", b"[", b"{")) for spelled in text])
    scores[[i for i, spelled in enumerate(text) if spelled[:1] in (b'"', b"]", b"}")]] += 1.0
    scores[list(EOS)] = 2.0
    return scores


def nothing(walk: Walk) -> list[int]:
    return []


def hostile(choice: random.Random, size: int) -> Callable[[Walk], list[int]]:
    """Proposes what would be drawn, forced tokens and nonsense, and spoils some of it."""

    def propose(walk: Walk) -> list[int]:
        ahead = Walk.__new__(Walk)
        ahead.__dict__.update(walk.__dict__, state=walk.state.fork(), tokens=walk.tokens.copy())
        while len(ahead.tokens) - len(walk.tokens) < choice.randrange(6) and ahead.tokens[-1:] not in ([END], [STOP]):
            ahead.round([])
        drafted = ahead.tokens[len(walk.tokens) :] if choice.random() < 0.7 else walk.state.forced()
        for _ in range(choice.randrange(3)):
            token = choice.choice([choice.randrange(size), END, STOP, START, -1, size + 7])
            drafted.insert(choice.randrange(len(drafted) + 1), token)
        return drafted

    return propose


def answer(tokenizer: Tokenizer, tokens: list[int]) -> str:
    assert tokens[-1] in EOS and not set(tokens[:-1]) & set(EOS)
    return b"".join(map(tokenizer.token_bytes, tokens[:-1])).decode()


def both_ways(tokenizer: Tokenizer, state: GrammarState, seed: int) -> list[int]:
    """The tokens of plain and of drafted decoding, which are equal."""
    plain = Walk(tokenizer, state.fork(), seed).run(nothing)
    size = state.masks([]).shape[1]
    assert Walk(tokenizer, state.fork(), seed).run(hostile(random.Random(seed), size)) == plain
    return plain


def compact(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))


def random_schema(choice: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that can be satisfied, of the kinds people write."""
    makers = [_string, _integer, _number, _enum, lambda _: {"type": choice.choice(["boolean", "null"])}]
    if depth < 3:
        makers += [_object, _object, _array, _union, _union]
    maker = choice.choice(makers if depth else [_object, _object, _object, _array, _union])
    return maker(choice, depth) if maker in (_object, _array, _union) else maker(choice)


def _string(choice: random.Random) -> dict[str, Any]:
    return choice.choice(
        [
            {"type": "string"},
            {"type": "string", "maxLength": choice.randrange(6)},
            {"type": "string", "minLength": 2, "maxLength": 2 + choice.randrange(9)},
            {"type": "string", "pattern": choice.choice(["^[a-c]{1,4}$", r"^\d+(-\d+)?$", "^(é|✓|ab)*$", '^x"[0-9]$'])},
            {"type": "string", "format": choice.choice(["date", "ipv4", "uuid"])},
        ]
    )


def _integer(choice: random.Random) -> dict[str, Any]:
    low = choice.randrange(-300, 300)
    bounds = [{}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": low + choice.randrange(40)}]
    return {"type": "integer", **choice.choice(bounds)}


def _number(choice: random.Random) -> dict[str, Any]:
    low = choice.randrange(-40, 40) / 4
    return {"type": "number", **choice.choice([{}, {"minimum": low, "exclusiveMaximum": low + 1.5}])}


def _enum(choice: random.Random) -> dict[str, Any]:
    values = ["red", "gréen", 'a"b\\', "<|im_end|>", 3, -1.5, None, True, {"k": [1]}, ""]
    return {"enum": choice.sample(values, choice.randrange(1, 5))} if choice.random() < 0.8 else {"const": values[2]}


def _object(choice: random.Random, depth: int) -> dict[str, Any]:
    names = choice.sample(["name", "a b", "x", "naïve", "list", 'q"'], choice.randrange(5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(choice, depth + 1) for name in names},
        "required": [name for name in names if choice.random() < 0.6],
    }
    if choice.random() < 0.7:
        schema["additionalProperties"] = False
    elif choice.random() < 0.5:
        schema["additionalProperties"] = random_schema(choice, depth + 1)
    return schema


def _array(choice: random.Random, depth: int) -> dict[str, Any]:
    low = choice.randrange(3)
    schema: dict[str, Any] = {"type": "array", "items": random_schema(choice, depth + 1), "minItems": low}
    if choice.random() < 0.6:
        schema["maxItems"] = low + choice.randrange(3)
    if choice.random() < 0.3:
        schema["prefixItems"] = [random_schema(choice, depth + 1)]
        schema["maxItems"] = schema.get("maxItems", low) + 1
    return schema


def _union(choice: random.Random, depth: int) -> dict[str, Any]:
    if choice.random() < 0.4:
        return {"anyOf": [random_schema(choice, depth + 1) for _ in range(choice.randrange(1, 4))]}
    disjoint = [_string(choice), _integer(choice), {"type": "null"}, _object(choice, depth + 1), {"type": "boolean"}]
    return {"oneOf": choice.sample(disjoint, choice.randrange(1, 4))}


def schemas(count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((seed, random_schema(random.Random(seed))) for seed in range(count))
