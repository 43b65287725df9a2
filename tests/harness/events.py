"""Events of a shard as they come out of the frames of a log."""

from embershard.proto.wire import FrameReader
from embershard.ps.events import decode_event, encode_event


def again(event):
    """The event that is read from an event's frame."""
    data = b"".join(bytes(piece) for piece in encode_event(event))
    reader = FrameReader(2**20, lambda header: [memoryview(bytearray(n)) for n in header.lengths], checksum=False)
    reader.buffer()[: len(data)] = data
    (frame,) = reader.received(len(data))
    return decode_event(frame)
