"""zstd as a stream of bounded reads. A cut-off file is an error: the library alone takes its end for the end."""

from __future__ import annotations

from typing import Any, Protocol

from keepstep.core.errors import DataError

_FRAME = 0xFD2FB528
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_LONGEST_HEAD = 14
"""A frame's header, its magic not counted: descriptor, window, dictionary and content size at their longest."""
_RLE = 1


class Stream(Protocol):
    """What bytes come from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""

    def close(self) -> None:
        """Let go of it."""


class Unzstd:
    """Unpacked bytes of one frame or several that follow one another."""

    def __init__(self, file: Stream, path: str) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError("reading .zst needs zstandard", "pip install zstandard") from error
        self._path = path
        self._frames = FrameWatch(file)
        # The window bounds the memory a frame may ask for.
        decompressor: Any = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        self._reader = decompressor.stream_reader(self._frames, read_across_frames=True, closefd=True)

    def __enter__(self) -> Unzstd:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        found: bytes = self._reader.read(size)
        if not found and size and self._frames.inside:
            raise DataError(f"{self._path} ends in the middle", "the file is truncated: copy it again")
        return found


class FrameWatch:
    """Hands a file's bytes on and follows the frames in them by their headers alone, so as to know where one ends."""

    def __init__(self, file: Stream) -> None:
        self._file = file
        self._skip = 0
        """Bytes that need no look: the content of blocks, checksums."""
        self._held = b""
        """The start of a header whose rest has not come yet."""
        self._in_frame = False
        self._has_checksum = False
        self._lost = False
        """What came is no zstd: the decoder will say so."""

    @property
    def inside(self) -> bool:
        """Whether what was read ends in the middle of a frame."""
        return not self._lost and bool(self._skip or self._held or self._in_frame)

    def read(self, size: int = -1) -> bytes:
        """Bytes of the file as they are."""
        block = self._file.read(size)
        if not self._lost:
            self._follow(block)
        return block

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _follow(self, block: bytes) -> None:
        at = 0
        while at < len(block) and not self._lost:
            if self._skip:
                step = min(self._skip, len(block) - at)
                self._skip -= step
                at += step
                continue
            before = len(self._held)
            # No header is longer than a frame's.
            self._held += block[at : at + 4 + _LONGEST_HEAD - before]
            used = self._block_head() if self._in_frame else self._frame_head()
            if not used:
                return
            at += used - before
            self._held = b""

    def _frame_head(self) -> int:
        """Bytes of the header that a frame starts with, once they have all come."""
        head = self._held
        if len(head) < 5:
            return 0
        magic = int.from_bytes(head[:4], "little")
        if magic in _SKIPPABLE:
            if len(head) < 8:
                return 0
            self._skip = int.from_bytes(head[4:8], "little")
            return 8
        self._lost = magic != _FRAME
        descriptor = head[4]
        single = descriptor >> 5 & 1
        size = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
        if len(head) < size:
            return 0
        self._in_frame, self._has_checksum = True, bool(descriptor >> 2 & 1)
        return size

    def _block_head(self) -> int:
        """Three bytes: is it the last, of which type, how long."""
        if len(self._held) < 3:
            return 0
        value = int.from_bytes(self._held[:3], "little")
        is_last, kind, size = value & 1, value >> 1 & 3, value >> 3
        self._skip = 1 if kind == _RLE else size
        if is_last:
            self._in_frame = False
            self._skip += 4 * self._has_checksum
        return 3
