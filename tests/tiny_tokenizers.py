"""Small tokenizers of the kinds that matter, made in memory."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = "The cat sat. Καλημέρα 你好 👩🏽‍💻 naïve 12345\n\tend  "
MARK = "\u2581"


def byte_level(tags: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE with `<s>` 0 and `</s>` 1; `tags` become special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE] * 4, trainer)
    if tags:
        backend.add_special_tokens([AddedToken(tag, normalized=False) for tag in tags])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("  ", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    return backend


def sentencepiece(prefix: bool = True, metaspace: bool = False) -> Tokenizer:
    """SentencePiece BPE with byte fallback, spelled as for Llama 2 (`prefix`) or Gemma."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        MARK,
        *"abcdet",
        f"{MARK}a",
        "at",
    ]
    merges = [(MARK, "a"), ("a", "t")]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), mark]) if prefix else mark
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    if metaspace:
        steps = [decoders.ByteFallback(), decoders.Metaspace(MARK, "always", False)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend
