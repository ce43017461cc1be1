"""Tokens with their places in the text, from a model's tokenizer file: what `anabranch explain` compares.

**See also** `serving.live.tokenizer`, which serves requests and needs no places.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from anabranch.core.errors import MissingExtra, ModelFileError
from anabranch.serving.explain.document import Render
from anabranch.serving.explain.parting import Token, Tokenize

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


def find_prepared(models: Path) -> Path | None:
    """The model prepared last in the folder of prepared models; None if there is none."""
    found = [path.parent for path in models.glob(f"*/{TOKENIZER_FILE}") if not path.parent.name.startswith(".")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def load_offsets(path: Path, now: datetime) -> tuple[Tokenize, Render | None]:
    """From a directory with tokenizer.json (prepared, or of Hugging Face), or from such a file: how to tokenize, and
    the chat template if there is one. `now`: what templates that write the date write, the same for both prompts.
    Raises ModelFileError or MissingExtra."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelFileError(f"{path}: no {TOKENIZER_FILE} there; give the directory of a model that has one")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra("serve", "tokenizers") from error
    try:
        # The library raises bare Exception for files it cannot use.
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelFileError(f"{file}: not a tokenizer: {error}") from error

    def tokenize(text: str) -> Sequence[Token]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return [(token, start, end) for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    return tokenize, _template(file.parent, now)


def _template(directory: Path, now: datetime) -> Render | None:
    if not any((directory / name).is_file() for name in TEMPLATE_FILES):
        return None
    from anabranch.serving.live.tokenizer import PreparedTokenizer

    return PreparedTokenizer(directory, lambda: now).render
