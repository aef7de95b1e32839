"""OpenAI's GPT-2 vocabulary (50,257 ids), from a local folder or through tiktoken's file cache."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from spheret.data.tokenization.bpe import ByteLevelBPE, byte_level_engine

EOT = "<|endoftext|>"
# Vocabulary, separator, and the ids of "Hello world", which also depend on the order of the merges.
GPT2_FACTS = (50257, 50256, [15496, 995])
FOLDER_VARIABLE = "SPHERET_GPT2_DIR"
# (merges, vocabulary): OpenAI's names, then Hugging Face's for the same files.
FILE_PAIRS = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))
_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def load_gpt2(folder: str | os.PathLike[str] | None = None) -> ByteLevelBPE:
    """The GPT-2 tokenizer from ``folder``, else from ``$SPHERET_GPT2_DIR``, else from tiktoken (which may download).

    Raises FileNotFoundError that names the missing files and where they should be; ValueError for another vocabulary.
    """
    folder = folder or os.environ.get(FOLDER_VARIABLE) or None
    merges, vocab, where = _from_folder(Path(folder).expanduser()) if folder else _from_tiktoken()
    try:
        ids: dict[str, int] = json.loads(vocab)
        lines = [line.split() for line in merges.decode("utf-8").split("\n") if not line.startswith("#version")]
        pairs = [(first, second) for first, second in filter(None, lines)]
        tokenizer = ByteLevelBPE(byte_level_engine(ids, pairs), "gpt2", ids[EOT])
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ValueError(f"no byte-level BPE in {where} ({error!r}): copy GPT-2's own files there") from error
    found = tokenizer.vocab_size, tokenizer.eot_id, tokenizer.encode("Hello world")
    if found != GPT2_FACTS:
        raise ValueError(
            f"the vocabulary in {where} is not GPT-2's ({found}, not {GPT2_FACTS}): copy GPT-2's own there"
        )
    return tokenizer


def _from_folder(folder: Path) -> tuple[bytes, bytes, str]:
    for merges, vocab in FILE_PAIRS:
        if (folder / merges).is_file() and (folder / vocab).is_file():
            return (folder / merges).read_bytes(), (folder / vocab).read_bytes(), str(folder)
    raise FileNotFoundError(f"no GPT-2 vocabulary in {folder}: it must hold {_names()}")


def _from_tiktoken() -> tuple[bytes, bytes, str]:
    # The folder in which tiktoken keeps its files: the variable's, else tiktoken's default.
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "data-gym-cache")
    advice = f"put {_names()} into a folder and name it as tokenizer 'gpt2:<folder>' or in ${FOLDER_VARIABLE}"
    try:
        from tiktoken.load import read_file_cached
    except ImportError as error:
        raise FileNotFoundError(f'no GPT-2 vocabulary: {advice}; or pip install "spheret[data]" to get it') from error
    try:
        merges, vocab = (read_file_cached(_ADDRESS + name, _SHA256[name]) for name in FILE_PAIRS[0])
    except Exception as error:  # a download fails in many ways, and the errors share no type
        reason = type(error).__name__
        raise FileNotFoundError(f"no GPT-2 vocabulary in {cache} and no download ({reason}): {advice}") from error
    return merges, vocab, cache


def _names() -> str:
    return " or ".join(f"{merges} and {vocab}" for merges, vocab in FILE_PAIRS)
