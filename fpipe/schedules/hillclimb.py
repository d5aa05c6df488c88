"""Make an order better, one small change after another: what is no worse stays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from fpipe.schedules.blocks import Block, words_of
from fpipe.schedules.line import NEVER, Line, Word, play

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)


class Order(NamedTuple):
    """An order of a line, and how good it is: the smaller, the better."""

    value: tuple[float, float]
    words: list[Word]
    patience: list[float]

    def full(self, line: Line) -> list[Word]:
        """The words with their W."""
        made: list[Word] = [[] for _ in self.words]
        play(line, self.words, self.patience, made)
        return made


def played(line: Line, words: list[Word], patience: float | Sequence[float]) -> Order:
    """Words and what they are worth."""
    each: list[float] = list(patience) if isinstance(patience, Sequence) else [patience] * line.ranks
    return Order(line.worth(play(line, words, each)), words, each)


@lru_cache(maxsize=16)
def floor(line: Line) -> tuple[float, float]:
    """What no order of a line can beat in makespan and span.

    A rank works from when the first forward reaches it. Until its first input gradient can start it has only forwards
    to do, as many as it may hold; and after its last one those of the stages before still follow, and a W, for which
    the first rank has to stay.
    """
    stages, seconds, count = line.stages, line.seconds, line.microbatches
    heads, tails = [0.0] * stages, [seconds[2 * stages]] * stages
    for stage in range(1, stages):
        heads[stage] = heads[stage - 1] + seconds[stage - 1] + line.ways[stage]
        tails[stage] = tails[stage - 1] + seconds[stages + stage - 1] + line.ways[stages + stage - 1]
    back = heads[-1] + seconds[stages - 1] + line.ways[2 * stages - 1] + seconds[2 * stages - 1] + tails[-1]
    makespan = span = 0.0
    for rank, own in enumerate(line.lanes):
        chain = count * sum(seconds[stage] + seconds[stages + stage] for stage in own)
        work = chain + count * sum(seconds[2 * stages + stage] for stage in own)
        whole = heads[own[0]] + chain + tails[own[0]]
        alone = back - heads[own[0]] - tails[own[-1]] - seconds[stages + own[-1]]
        work += max(0.0, alone - min(count * len(own), int(line.caps[rank])) * max(seconds[stage] for stage in own))
        makespan = max(makespan, heads[own[0]] + work, whole)
        span = max(span, work, whole)
    return makespan, span


def at_floor(line: Line, value: tuple[float, float]) -> bool:
    """Whether there is nothing left to gain."""
    return all(found <= least * (1 + 1e-9) for found, least in zip(value, floor(line), strict=True))


def climb(line: Line, order: Order, plays: int, seed: int = 0) -> Order:
    """Move one op of one rank, or change a rank's patience, as often as said; the same seed gives the same order."""
    dice = Random(seed)
    value, words, patience = order.value, [word[:] for word in order.words], order.patience[:]
    for _ in range(plays):
        if value == NEVER or at_floor(line, value):
            break
        rank = dice.randrange(line.ranks)
        word, before = words[rank], patience[rank]
        if dice.random() < 0.08:
            patience[rank] = dice.choice(PATIENCE)
        else:
            take = dice.randrange(len(word))
            put = take + dice.choice((-4, -3, -2, -1, -1, 1, 1, 2, 3, 4))
            if dice.random() < 0.05:
                put = dice.randrange(len(word))
            if not 0 <= put < len(word) or set(word[min(take, put) : max(take, put) + 1]) == {word[take]}:
                continue
            moved = word[:]
            moved.insert(put, moved.pop(take))
            words[rank] = moved
        found = line.worth(play(line, words, patience))
        if found <= value:
            value = found
        else:
            words[rank], patience[rank] = word, before
    return Order(value, words, patience)


def loosen(line: Line, block: Block, patience: float, plays: int, seed: int = 0) -> tuple[Order, Block]:
    """Move offsets of a block by sixths of its interval: a lane, all that follow it, or a leg that goes slower."""
    dice, path, ranks = Random(seed), line.path, line.ranks
    best = played(line, words_of(line, block), patience)
    for _ in range(plays):
        if at_floor(line, best.value):
            break
        offsets, interval, each = list(block.offsets), block.interval, best.patience[:]
        chance = dice.random()
        if chance < 0.1:
            each = [dice.choice(PATIENCE)] * ranks
        elif chance < 0.2:
            interval *= dice.choice((0.9, 0.95, 0.98, 1.02, 1.05, 1.1))
        else:
            step = dice.choice((-3, -2, -1, -0.5, 0.5, 1, 2, 3)) * line.work / 6
            at = dice.randrange(len(path))
            kind = dice.random()
            if kind < 0.25:
                offsets[path[at]] += step
            elif kind < 0.75:
                until = len(path) if kind < 0.5 else at + 1 + dice.randrange(ranks)
                for lane in path[at:until]:
                    offsets[lane] += step
            else:
                leg = at - at % ranks
                for slope, lane in enumerate(path[leg:]):
                    offsets[lane] += step * min(1.0, slope / max(1, ranks - 1))
        moved = Block(tuple(offsets), interval)
        found = played(line, words_of(line, moved), each)
        if found.value <= best.value:
            best, block = found, moved
    return best, block


def stretched(line: Line, order: Order, longer: Line) -> list[Word]:
    """An order for more microbatches: the middle of this one is repeated at its own pace."""
    times: list[list[float]] = [[] for _ in range(2 * line.stages)]
    play(line, order.words, order.patience, None, times)
    middle, more = line.microbatches // 2, longer.microbatches - line.microbatches
    pace = sum(times[lane][middle] - times[lane][middle - 1] for lane in line.path) / len(line.path)
    words: list[Word] = []
    for own in line.lanes:
        timed: list[tuple[float, int]] = []
        for lane in (*own, *(line.stages + stage for stage in own)):
            ends, seconds = times[lane], line.seconds[lane]
            repeated = [ends[middle - 1] + pace * step for step in range(1, more + 1)]
            later = [end + pace * more for end in ends[middle:]]
            timed += [(end - seconds, lane) for end in (*ends[:middle], *repeated, *later)]
        timed.sort()
        words.append([lane for _, lane in timed])
    return words
