"""What an import and its workers tell each other: JSON, and entries as the bytes of their files."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

from trajreplay.capture.importers.report import ImportedSource
from trajreplay.capture.importers.source import Source
from trajreplay.capture.importers.writing import EntryFile, Written, WrittenSource
from trajreplay.schema.identity import CaptureKey

_SIZES = struct.Struct("<QQ")


def send(stream: BinaryIO, message: Any, content: bytes = b"") -> None:
    """Send a message and bytes that belong to it."""
    text = json.dumps(message).encode()
    stream.write(_SIZES.pack(len(text), len(content)) + text + content)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[Any, bytes] | None:
    """The next message and its bytes; None once the other end is gone, in the midst of one too."""
    head = stream.read(_SIZES.size)
    if len(head) < _SIZES.size:
        return None
    sizes = _SIZES.unpack(head)
    text, content = (stream.read(size) for size in sizes)
    if (len(text), len(content)) != sizes:
        return None
    return json.loads(text), content


def packed(written: Written) -> tuple[Any, bytes]:
    """Written sources as a message."""
    sources = [
        {
            "result": vars(one.source.result),
            "counts": [[*key, *counts] for key, counts in one.source.counts.items()],
            "known": [list(key) for key in one.known],
            "entries": [[list(each.key), each.paths, len(each.content)] for each in one.entries],
        }
        for one in written.sources
    ]
    contents = [each.content for one in written.sources for each in one.entries]
    return {"sources": sources, "files": written.files}, b"".join(contents)


def unpacked(message: Any, content: bytes) -> Written:
    """The sources of such a message."""
    sources, at = [], 0
    for tree in message["sources"]:
        tree["result"]["captures"] = [tuple(one) for one in tree["result"]["captures"]]
        counts = {CaptureKey(*key): (samples, tokens) for *key, samples, tokens in tree["counts"]}
        one = WrittenSource(Source(ImportedSource(**tree["result"]), counts))
        one.known = {CaptureKey(*key) for key in tree["known"]}
        for key, paths, size in tree["entries"]:
            one.entries.append(EntryFile(CaptureKey(*key), tuple(paths), content[at : at + size]))
            at += size
        sources.append(one)
    return Written(sources, [(temporary, path) for temporary, path in message["files"]])
