"""Do something on one rank or on all, and have all ranks come to the same end: a result, or the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_main(look: Callable[[], T]) -> T:
    """Look on rank 0 and tell the others, errors too."""
    if not dist.is_initialized():
        return look()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = look()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]


def on_all(act: Callable[[], T]) -> T:
    """Act on every rank and return this rank's result; where one fails, all raise its error."""
    result = None

    def work() -> None:
        nonlocal result
        result = act()

    from_all(work)
    return result  # type: ignore[return-value]


def from_all(act: Callable[[], T]) -> list[T]:
    """Act on every rank and return all results, by rank; where one fails, all raise its error."""
    if not dist.is_initialized():
        return [act()]
    mine: tuple[Any, Exception | None]
    try:
        mine = act(), None
    except Exception as error:
        mine = None, error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    for _, raised in answers:
        if raised is not None:
            raise raised
    return [result for result, _ in answers]
