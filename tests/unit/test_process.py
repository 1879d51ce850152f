"""Messages between processes."""

from __future__ import annotations

import os

import pytest
from helpers import open_files, wait_until
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.process import Channel


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_messages_keep_their_boundaries_and_bytes_however_long_they_are(ends):
    ours, other = ends
    before = open_files()
    with pytest.raises(BlockingIOError):
        ours.receive()
    lengths = (0, 10, 40_000, 3_000_000)
    for length in lengths:
        other.send({"text": "x" * length})
        other.send({"text": ""}, os.urandom(1) * length)
    for length in lengths:
        assert ours.receive() == {"text": "x" * length}
        assert len(ours.receive().get("data", b"")) == length
    wait_until(lambda: open_files() <= before, "its descriptors to end")


def test_the_end_of_the_other_process_is_the_end_of_messages(ends):
    ours, other = ends
    other.send({"last": True})
    other.close()
    assert ours.receive() == {"last": True}
    assert ours.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send({})


def test_what_a_process_said_before_it_died_with_messages_unread_is_heard(ends):
    """It was taken for its end, and the error that it had told was lost."""
    ours, other = ends
    ours.send({"unread": True})
    other.send({"last": True})
    other.close()
    assert ours.receive() == {"last": True}
    assert ours.receive() is None


def test_an_end_that_never_reads_blocks_nobody(ends):
    ours, _ = ends

    def send_many():
        for _ in range(100_000):
            ours.send({"do": "drop"})

    with pytest.raises(BlockingIOError):
        send_many()


@given(st.binary(min_size=1, max_size=200))
def test_what_is_no_message_is_a_value_error(garbage):
    ours, theirs = Channel.pair()
    theirs.send(garbage)
    try:
        message = ours.receive()
    except ValueError:
        pass
    else:
        assert isinstance(message, dict)
    ours.close()
    theirs.close()
