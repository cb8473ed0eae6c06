"""Writes safetensors files one tensor at a time, with their length and checksum.

Guarantees: the file is complete and on disk (fsync) when `write_tensors` returns; it is a plain safetensors file;
memory beside the caller's is one tensor. The checksum (CRC-32, about 4 GB/s) finds torn, cut and flipped data; it is
no protection against forgery.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from raycp.training.storage import Chunk, write_synced

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_BLOCK = 1 << 24


Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape, dtype)} of a file."""


@dataclass(frozen=True)
class ImageLayout:
    """Where everything lies in a safetensors file, known before a byte of it exists.

    Attributes:
        header: the first bytes of the file.
        places: {name: (start, stop)}, bytes from the start of the file, in the order of the file.
        total: bytes of the whole file.
    """

    header: bytes
    places: Mapping[str, tuple[int, int]]
    total: int


def image_layout(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> ImageLayout:
    """The layout that `tensor_chunks` writes: a pure function of its arguments, every tensor aligned to its items.

    Args:
        tensors: what the file holds.
        metadata: strings for the header.
    """
    order = sorted(tensors, key=lambda n: (-tensors[n][1].itemsize, n))  # wide types first keeps every offset aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    spans: list[tuple[str, int, int]] = []
    for name in order:
        shape, dtype = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        spans.append((name, offset, offset + size))
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return ImageLayout(
        header=len(text).to_bytes(8, "little") + text,
        places={name: (first + start, first + stop) for name, start, stop in spans},
        total=first + offset,
    )


def tensor_chunks(
    tensors: Tensors, load: Callable[[str], torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in order: its header, then one chunk per tensor that has elements.

    Args:
        tensors: what the file holds.
        load: gives the tensor of a name, any device, when its turn comes.
        metadata: strings for the header.

    Raises:
        ValueError: `load` gave another shape or dtype than announced.
    """
    layout = image_layout(tensors, metadata)
    yield layout.header
    for name in layout.places:
        shape, dtype = tensors[name]
        tensor = load(name).detach()
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype}{tuple(tensor.shape)} where {dtype}{tuple(shape)} was announced")
        flat = tensor.to("cpu").contiguous().view(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def write_tensors(
    path: Path, tensors: Tensors, load: Callable[[str], torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Writes `path`, overwriting it if it exists; arguments as those of `tensor_chunks`.

    Returns:
        (bytes, CRC-32) of the whole file.
    """
    checksum = 0

    def summed() -> Iterator[Chunk]:
        nonlocal checksum
        for chunk in tensor_chunks(tensors, load, metadata):
            checksum = zlib.crc32(chunk, checksum)
            yield chunk

    return write_synced(path, summed()), checksum


def checksum_of(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file. Reads all of it, 16 MiB at a time."""
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return size, checksum
