"""The alphabet of byte-level vocabularies (GPT-2's): each byte is a character, itself where that is printable."""

from __future__ import annotations

from tokenizers import Tokenizer as HFTokenizer


def _alphabet() -> dict[str, bytes]:
    """Printable bytes are themselves, the others characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + i): bytes([byte]) for i, byte in enumerate(others)
    }


BYTE_OF = _alphabet()
_CHAR_OF = {byte[0]: char for char, byte in BYTE_OF.items()}


def is_byte_level(backend: HFTokenizer) -> bool:
    """Whether a tokenizer's vocabulary is written so."""
    # What the decoder prints of itself leaves out what follows the first few of its parts.
    return backend.decoder is not None and b'"type":"ByteLevel"' in backend.decoder.__getstate__()


def written(data: bytes) -> str:
    """Bytes as such a vocabulary writes them."""
    return "".join(_CHAR_OF[byte] for byte in data)
