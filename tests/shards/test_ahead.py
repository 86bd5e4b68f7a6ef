"""How long before it is handed out a batch is drawn, and how many at once."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.cluster.learner import BatchesAhead, Drawing, Request, together
from holdall.delivery.loader import Loader


class Numbers:
    """Draws batches that are numbers, and remembers how many had been handed out by then."""

    def __init__(self) -> None:
        self.handed_out = 0
        self.calls: list[int] = []
        self.drawn_after: list[int] = []

    def draw(self, count: int) -> list[Request]:
        self.calls.append(count)
        first = len(self.drawn_after)
        self.drawn_after += [self.handed_out] * count
        return [Request(number) for number in range(first, first + count)]

    def finish(self, request: Request) -> Any:
        return request.count


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4, 9])
def test_no_batch_is_drawn_earlier_than_prefetch_says(prefetch: int, shards: int) -> None:
    numbers, batches = Numbers(), together(prefetch, shards)
    ahead = BatchesAhead(cast("Drawing", numbers), numbers.draw, batches)
    with Loader(ahead, max(0, prefetch - batches + 1)) as loader:
        for expected in range(30):
            assert cast("Any", next(loader)) == expected
            assert len(numbers.drawn_after) <= expected + 1 + prefetch
            numbers.handed_out += 1
    before = [number - after for number, after in enumerate(numbers.drawn_after)]
    assert max(before) == prefetch
    if shards < 4:
        assert set(numbers.calls) == {1}
        assert set(before[prefetch:]) == {prefetch}  # as a local memory draws them
    if shards >= 4 and prefetch >= 2:
        assert set(numbers.calls) == {min(prefetch, shards)}
        assert min(before[prefetch:]) >= 1  # there is always one on its way
