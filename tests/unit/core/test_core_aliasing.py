"""The classifier against an oracle that writes out every element of every shard."""

from __future__ import annotations

import itertools
import random

import pytest

from rollplex.core.aliasing import AliasCase, Aliasing, classify
from rollplex.core.errors import BadInput
from rollplex.core.tensor_maps import Axis, Fused, TensorMap, padded_vocabulary

PAIRS = [(train, rollout) for train in (1, 2, 4, 8) for rollout in (1, 2, 4, 8) if train % rollout == 0]

Shard = list[list[tuple]]
"""The logical (name, row, column) at each row and column of a shard."""


def whole(name: str, rows: int, cols: int) -> Shard:
    return [[(name, row, col) for col in range(cols)] for row in range(rows)]


def heads_of(count: int, tp: int, rank: int) -> list[int]:
    return [rank * count // tp] if count < tp else list(range(rank * count // tp, (rank + 1) * count // tp))


def head_rows(name: str, heads: list[int], size: int, cols: int) -> Shard:
    return [[(name, head * size + row, col) for col in range(cols)] for head in heads for row in range(size)]


def qkv(heads: int, kv_heads: int, size: int, cols: int, tp: int, rank: int) -> Shard:
    """[q; k; v], as vLLM has it."""
    own = heads_of(kv_heads, tp, rank)
    return (head_rows("q", heads_of(heads, tp, rank), size, cols) + head_rows("k", own, size, cols)
            + head_rows("v", own, size, cols))


def interleaved(heads: int, kv_heads: int, size: int, cols: int, tp: int, rank: int) -> Shard:
    """Each kv group's queries, key and value together, as Megatron has it."""
    own, queries, rows = heads_of(kv_heads, tp, rank), heads_of(heads, tp, rank), []
    share = len(queries) // len(own)
    for index, group in enumerate(own):
        rows += head_rows("q", queries[index * share:(index + 1) * share], size, cols)
        rows += head_rows("k", [group], size, cols) + head_rows("v", [group], size, cols)
    return rows


def row_cut(shard: Shard, tp: int, rank: int) -> Shard:
    step = len(shard) // tp
    return shard[rank * step:(rank + 1) * step]


def col_cut(shard: Shard, tp: int, rank: int) -> Shard:
    step = len(shard[0]) // tp
    return [row[rank * step:(rank + 1) * step] for row in shard]


def transpose(shard: Shard) -> Shard:
    return [list(column) for column in zip(*shard)]


def is_one_view(shard: Shard, storage: Shard, *, one_run: bool) -> bool:
    """Whole rows of the storage, in order: equal runs at one stride, or a single run."""
    where = {tuple(row): index for index, row in enumerate(storage)}
    rows = [where.get(tuple(row)) for row in shard]
    if None in rows:
        return False
    for runs in range(1, 2 if one_run else len(rows) + 1):
        count, rest = divmod(len(rows), runs)
        stride = rows[count] - rows[0] if runs > 1 and not rest else count
        if not rest and stride >= count and rows == [rows[0] + (index // count) * stride + index % count
                                                     for index in range(len(rows))]:
            return True
    return False


def expected_case(rollout: list[Shard], training: list[list[Shard]]) -> AliasCase:
    """training: tensor -> rank -> shard."""
    q = len(training[0]) // len(rollout)

    def fits(turn, one_run: bool) -> bool:
        for index, shard in enumerate(rollout):
            peers = [tensor[rank] for tensor in training for rank in range(index * q, (index + 1) * q)]
            seen = {label for peer in peers for row in peer for label in row}
            if seen != {label for row in shard for label in row}:
                return False
            if not all(is_one_view(turn(peer), turn(shard), one_run=one_run) for peer in peers):
                return False
        return True

    if fits(lambda shard: shard, one_run=False):
        return AliasCase.IDENTICAL
    if len(training) == 1 and fits(transpose, one_run=True):
        return AliasCase.TRANSPOSED
    return AliasCase.INCOMPATIBLE


def read(storage: dict[int, tuple], placement) -> list[tuple]:
    """What a placement shows, in row-major order of its shape."""
    start = placement.offset_bytes // 2
    return [storage.get(start + sum(i * stride for i, stride in zip(index, placement.strides)))
            for index in itertools.product(*map(range, placement.shape))]


def flat(shard: Shard) -> list[tuple]:
    return [label for row in shard for label in row]


def check_placements(verdict: Aliasing, rollout: list[Shard], training: list[list[Shard]]) -> None:
    q, offset = verdict.topology.q, 512
    for index, shard in enumerate(rollout):
        place = verdict.rollout_placement("slab", offset, "bfloat16")
        addresses = read({address: address for address in range(4096 * 4)}, place)
        storage = dict(zip(addresses, flat(shard), strict=True))
        assert len(storage) == verdict.elements
        assert (min(addresses), max(addresses)) == (offset // 2, offset // 2 + verdict.elements - 1)
        written: list[int] = []
        for rank, tensor in itertools.product(range(index * q, (index + 1) * q), range(len(training))):
            own = verdict.training_placement(tensor, rank, "slab", offset, "bfloat16")
            assert own.slab == "slab" and own.dtype == "bfloat16"
            assert read(storage, own) == flat(training[tensor][rank])
            for start, stop in verdict.shares[tensor][rank].owned:
                written += range(start, stop)
        extent = verdict.rollout.shape[1 if verdict.case is AliasCase.TRANSPOSED else 0]
        assert sorted(written) == list(range(extent))


def check_copies(verdict: Aliasing, rollout: list[Shard], training: list[list[Shard]]) -> None:
    for index, shard in enumerate(rollout):
        rebuilt: list[list] = [[None] * len(shard[0]) for _ in shard]
        for copy in verdict.copies(index):
            source = training[copy.tensor][copy.rank]
            for row, col in itertools.product(range(copy.rows), range(copy.cols)):
                assert rebuilt[copy.row + row][copy.col + col] is None
                rebuilt[copy.row + row][copy.col + col] = source[copy.source_row + row][copy.source_col + col]
        assert rebuilt == shard


def check(rollout_map: TensorMap, training_maps: list[TensorMap], rollout: list[Shard],
          training: list[list[Shard]]) -> Aliasing:
    for shards, item in ((rollout, rollout_map), *zip(training, training_maps)):
        assert all((len(shard), len(shard[0])) == item.shape for shard in shards)
    verdict = classify(rollout_map, training_maps)
    assert verdict.case is expected_case(rollout, training)
    if verdict.case is not AliasCase.INCOMPATIBLE:
        check_placements(verdict, rollout, training)
    check_copies(verdict, rollout, training)
    return verdict


def attention_maps(heads: int, kv_heads: int, size: int, cols: int, tp: int) -> dict[str, TensorMap]:
    q, k, v = (Fused(name, count * size, count) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    return {"fused": TensorMap((q, k, v), cols, tp), "grouped": TensorMap((q, k, v), cols, tp, groups=kv_heads),
            **{part.name: TensorMap((part,), cols, tp) for part in (q, k, v)}}


ATTENTION = [(heads, kv, size, cols, pair) for heads in (4, 8, 16) for kv in (1, 2, 4, 8) for size in (1, 2)
             for cols in (1, 3) for pair in PAIRS if heads % pair[0] == 0 and heads % kv == 0]


def test_attention_of_every_small_shape():
    """Split and grouped training against [q; k; v], with replicated kv heads; a bias is one column."""
    cases = {"split": set(), "grouped": set(), "fused": set()}
    for heads, kv, size, cols, (train, roll) in ATTENTION:
        if (kv % train and train % kv) or (kv % roll and roll % kv):
            continue
        ours, theirs = attention_maps(heads, kv, size, cols, train), attention_maps(heads, kv, size, cols, roll)
        rollout = [qkv(heads, kv, size, cols, roll, rank) for rank in range(roll)]
        ranks = range(train)
        split = [[head_rows(name, heads_of(count, train, rank), size, cols) for rank in ranks]
                 for name, count in (("q", heads), ("k", kv), ("v", kv))]
        verdict = check(theirs["fused"], [ours["q"], ours["k"], ours["v"]], rollout, split)
        assert verdict.case is AliasCase.IDENTICAL
        for kind, build in (("fused", qkv), ("grouped", interleaved)):
            shards = [build(heads, kv, size, cols, train, rank) for rank in ranks]
            cases[kind].add(check(theirs["fused"], [ours[kind]], rollout, [shards]).case)
    assert cases["grouped"] == cases["fused"] == {AliasCase.IDENTICAL, AliasCase.INCOMPATIBLE}


@pytest.mark.parametrize(("train", "roll"), PAIRS)
@pytest.mark.parametrize("cols", [1, 2])
def test_gate_and_up(train, roll, cols):
    """Two equal halves are one strided view at q > 1; apart they are plain runs."""
    gate, up = Fused("gate", 16), Fused("up", 16)

    def fused(tp: int) -> list[Shard]:
        return [row_cut(whole("gate", 16, cols), tp, rank) + row_cut(whole("up", 16, cols), tp, rank) for rank in range(tp)]

    rollout = TensorMap((gate, up), cols, roll)
    together = check(rollout, [TensorMap((gate, up), cols, train)], fused(roll), [fused(train)])
    halves = [[row_cut(whole(name, 16, cols), train, rank) for rank in range(train)] for name in ("gate", "up")]
    apart = check(rollout, [TensorMap((part,), cols, train) for part in (gate, up)], fused(roll), halves)
    assert together.case is apart.case is AliasCase.IDENTICAL
    assert {share.runs for share in together.shares[0]} == {1 if train == roll else 2}
    assert {share.runs for shares in apart.shares for share in shares} == {1}


@pytest.mark.parametrize(("train", "roll"), PAIRS)
@pytest.mark.parametrize(("ours", "theirs"), itertools.product((Axis.NONE, Axis.ROWS, Axis.COLS), repeat=2))
def test_every_pair_of_axes(train, roll, ours, theirs):
    cuts = {Axis.NONE: lambda shard, tp, rank: shard, Axis.ROWS: row_cut, Axis.COLS: col_cut}
    part, full = Fused("w", 8), whole("w", 8, 16)
    verdict = check(TensorMap((part,), 16, roll, theirs), [TensorMap((part,), 16, train, ours)],
                    [cuts[theirs](full, roll, rank) for rank in range(roll)],
                    [[cuts[ours](full, train, rank) for rank in range(train)]])
    if ours is theirs is Axis.COLS:
        assert verdict.case is (AliasCase.IDENTICAL if train == roll else AliasCase.TRANSPOSED)


@pytest.mark.parametrize(("train", "roll"), PAIRS)
@pytest.mark.parametrize("rows", [5, 16, 23])
def test_a_padded_vocabulary(train, roll, rows):
    padded = padded_vocabulary(rows, 2, train)
    assert padded % 2 == padded % train == 0 and 0 <= padded - rows < 2 * train
    full = whole("embedding", padded, 3)
    verdict = check(TensorMap((Fused("embedding", rows),), 3, roll, Axis.VOCAB, padded),
                    [TensorMap((Fused("embedding", rows),), 3, train, Axis.VOCAB, padded)],
                    [row_cut(full, roll, rank) for rank in range(roll)],
                    [[row_cut(full, train, rank) for rank in range(train)]])
    assert verdict.case is AliasCase.IDENTICAL


def test_two_paddings_cannot_be_shared():
    part = Fused("embedding", 10)
    verdict = classify(TensorMap((part,), 3, 2, Axis.VOCAB, 10), [TensorMap((part,), 3, 4, Axis.VOCAB, 12)])
    assert verdict.case is AliasCase.INCOMPATIBLE
    rows = sorted((copy.rank, copy.source_row, copy.row, copy.rows) for copy in verdict.copies(1))
    assert rows == [(1, 2, 0, 1), (2, 0, 1, 3), (3, 0, 4, 1)]


def test_megatrons_permutation_at_one_degree():
    """W_vllm = W_megatron[perm], perm as in training.md."""
    groups, n, size = 3, 2, 4
    maps = attention_maps(groups * n, groups, size, 5, 1)
    index = [[list(range((g * (n + 2) + part) * size, (g * (n + 2) + part + 1) * size)) for part in range(n + 2)]
             for g in range(groups)]
    heads = [head for group in index for head in group[:n]]
    wanted = [*heads, *(group[n] for group in index), *(group[n + 1] for group in index)]
    verdict = classify(maps["fused"], [maps["grouped"]])
    assert verdict.case is AliasCase.INCOMPATIBLE
    assert verdict.row_permutation(0) == [row for head in wanted for row in head]


@pytest.mark.parametrize(("train", "roll"), PAIRS)
def test_the_permutation_rebuilds_from_stacked_training_shards(train, roll):
    ours, theirs = attention_maps(16, 8, 2, 3, train), attention_maps(16, 8, 2, 3, roll)
    verdict = classify(theirs["fused"], [ours["grouped"]])
    q = train // roll
    for shard in range(roll):
        stacked = [row for rank in range(shard * q, (shard + 1) * q) for row in interleaved(16, 8, 2, 3, train, rank)]
        assert [stacked[row] for row in verdict.row_permutation(shard)] == qkv(16, 8, 2, 3, roll, shard)


def test_no_permutation_of_rows_across_axes():
    part = Fused("w", 8)
    with pytest.raises(BadInput, match="w is no permutation"):
        classify(TensorMap((part,), 8, 2), [TensorMap((part,), 8, 2, Axis.COLS)]).row_permutation(0)
    with pytest.raises(BadInput, match="w is shared by no placement"):
        classify(TensorMap((part,), 8, 2), [TensorMap((part,), 8, 2, Axis.COLS)]).training_placement(0, 0, "", 0, "float32")


def test_a_vector_has_one_axis():
    part = Fused("bias", 8)
    verdict = classify(TensorMap((part,), 1, 2), [TensorMap((part,), 1, 4)], is_vector=True)
    assert verdict.rollout_placement("s", 0, "float32").shape == (4,)
    own = verdict.training_placement(0, 3, "s", 256, "float32")
    assert (own.shape, own.strides, own.offset_bytes) == ((2,), (1,), 256 + 2 * 4)


@pytest.mark.parametrize(("build", "words"), [
    (lambda: classify(TensorMap((Fused("w", 12),), 1, 4), [TensorMap((Fused("w", 12),), 1, 6)]), "TP 6 and rollout at TP 4"),
    (lambda: classify(TensorMap((Fused("w", 8),), 1, 4), [TensorMap((Fused("w", 8),), 1, 2)]), "TP 2 and rollout at TP 4"),
    (lambda: TensorMap((Fused("w", 10),), 1, 4), "10 rows of w are not divisible by TP 4"),
    (lambda: TensorMap((Fused("w", 8),), 6, 4, Axis.COLS), "6 columns of w are not divisible by TP 4"),
    (lambda: TensorMap((Fused("w", 8),), 1, 4, Axis.VOCAB, 10), "10 rows of w are not divisible by TP 4"),
    (lambda: TensorMap((Fused("k", 12, 6),), 1, 4), "6 heads of k and TP 4: neither divides the other"),
    (lambda: TensorMap((Fused("k", 12, 5),), 1, 1), "12 rows of k are no 5 equal heads"),
    (lambda: TensorMap((Fused("q", 8, 8), Fused("k", 3)), 1, 1, groups=2), "3 rows of k on a rank"),
    (lambda: TensorMap((Fused("w", 8),), 1, 0), "size 0 is below 1"),
    (lambda: TensorMap((), 1, 1), "holds nothing"),
    (lambda: TensorMap((Fused("w", 8),), 1, 1, Axis.NONE, groups=2), "cut along rows, not none"),
    (lambda: TensorMap((Fused("a", 8), Fused("b", 8)), 1, 1, Axis.VOCAB), "only one parameter"),
    (lambda: classify(TensorMap((Fused("w", 8),), 1, 1), [TensorMap((Fused("w", 9),), 1, 1)]), "not the same parameters"),
    (lambda: classify(TensorMap((Fused("a", 8), Fused("b", 8)), 1, 1),
                      [TensorMap((Fused("a", 8),), 1, 1), TensorMap((Fused("b", 8),), 1, 2)]), r"sizes: \[1, 2\]"),
])
def test_what_does_not_divide_is_refused_with_the_numbers(build, words):
    with pytest.raises(BadInput, match=words):
        build()


def random_case(rng: random.Random) -> tuple[TensorMap, list[TensorMap], list[Shard], list[list[Shard]]]:
    """Parts in any fusion and order on either side, cut along rows, with heads that may be fewer than ranks."""
    train = rng.choice((1, 2, 3, 4, 6, 8))
    roll = rng.choice([tp for tp in range(1, train + 1) if train % tp == 0])
    cols = rng.randint(1, 3)
    parts = []
    for name in "abc"[:rng.randint(1, 3)]:
        heads = rng.choice([None, *(n for n in (1, 2, 3, 4, 6, 8, 12, 24) if all(n % tp == 0 or tp % n == 0
                                                                               for tp in (train, roll)))])
        parts.append(Fused(name, (heads or 24) * rng.randint(1, 2), heads))

    def shards(part: Fused, tp: int) -> list[Shard]:
        heads = part.heads or part.rows
        return [head_rows(part.name, heads_of(heads, tp, rank), part.rows // heads, cols) for rank in range(tp)]

    def tensor(order: list[Fused], tp: int) -> tuple[TensorMap, list[Shard]]:
        pieces = [shards(part, tp) for part in order]
        return TensorMap(tuple(order), cols, tp), [[row for piece in pieces for row in piece[rank]] for rank in range(tp)]

    shuffled = rng.sample(parts, len(parts)) if rng.random() < 0.5 else parts
    cut = rng.randint(0, len(parts) - 1)
    training = [tensor(order, train) for order in (shuffled[:cut], shuffled[cut:]) if order]
    theirs, rollout = tensor(parts, roll)
    return theirs, [item for item, _ in training], rollout, [item for _, item in training]


def test_random_fusions_agree_with_the_oracle():
    rng = random.Random(20)
    seen = {check(*random_case(rng)).case for _ in range(1500)}
    assert seen == {AliasCase.IDENTICAL, AliasCase.INCOMPATIBLE}
