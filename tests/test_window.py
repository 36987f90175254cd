"""The holes of the schedule, read from what Slurm's commands print, and the sizes that are chosen for them."""

from __future__ import annotations

import time

from pipeline.slurm.commands import NODE_COLUMNS, PLANNED_COLUMNS
from pipeline.slurm.window import (
    Claim,
    Hole,
    Need,
    Node,
    choose_sizes,
    find_holes,
    nodes_from,
    planned_from,
    reservations_from,
)

NOW = time.mktime((2026, 11, 30, 11, 15, 0, 0, 0, -1))

# As Slurm 22.05 prints them: n1 and n2 are full, one GPU of n3 is taken, n4 does not answer, n5 is drained.
SINFO = """\
n1   |allocated  |8/0/0/8  |gpu:h100:4 |gpu:h100:4(IDX:0-3) |main*  |
n3   |mixed      |2/6/0/8  |gpu:h100:4 |gpu:h100:1(IDX:0)   |main*  |
n3   |mixed      |2/6/0/8  |gpu:h100:4 |gpu:h100:1(IDX:0)   |high   |
n4   |idle*      |0/8/0/8  |gpu:h100:4 |gpu:h100:0           |main*  |
n5   |drained    |0/8/0/8  |gpu:h100:4 |gpu:h100:0           |main*  |
n6   |planned    |0/8/0/8  |(null)     |gpu:0                |cpu    |
"""
PLANNED = """\
3  |2026-11-30T11:20:00 |n[1-3]  |Resources  |
4  |N/A                 |(null)  |Dependency |
5  |2026-11-30T12:15:00 |(null)  |BeginTime  |
"""
RESERVATION = (
    "ReservationName=maint StartTime=2026-11-30T11:45:00 EndTime=2026-11-30T12:45:00 Duration=01:00:00 Nodes=n[6-7] "
    "NodeCnt=2 Flags=MAINT Users=root State=INACTIVE\n"
)
N3 = Node("n3", 3, 6, frozenset({"main", "high"}))


def test_nodes_that_take_jobs_with_what_is_free_on_them() -> None:
    assert nodes_from(SINFO) == [N3, Node("n6", 0, 8, frozenset({"cpu"}))]
    assert nodes_from("") == []


def test_planned_starts_and_their_nodes() -> None:
    assert planned_from(PLANNED) == [Claim("job 3", NOW + 300, frozenset({"n1", "n2", "n3"}))]
    assert planned_from(PLANNED, ours=["3"]) == []


def test_where_no_planned_nodes_are_named_a_job_may_come_to_stand_on_any() -> None:
    old = PLANNED.replace("n[1-3]", "(null)")
    assert planned_from(old) == [Claim("job 3", NOW + 300, None)]


def test_a_hole_ends_at_the_next_planned_start_or_reservation() -> None:
    claims = planned_from(PLANNED) + reservations_from(RESERVATION)
    holes = find_holes(NOW, nodes_from(SINFO), claims)
    assert holes == [
        Hole("n6", 0, 8, 1800.0, "reservation maint"),
        Hole("n3", 3, 6, 300.0, "job 3"),
    ]
    assert [hole.node for hole in find_holes(NOW, nodes_from(SINFO), claims, "high,other")] == ["n3"]
    assert reservations_from("No reservations in the system\n") == []


def test_without_other_users_jobs_a_hole_has_no_end() -> None:
    assert [hole.seconds for hole in find_holes(NOW, [N3], [])] == [None]


def need(seconds: float, **changes: float) -> Need:
    values = {"startup": 10.0, "gpus": 1, "cpus": 1, "longest": 3600.0, "jobs": 4} | changes
    return Need(seconds, **values)  # type: ignore[arg-type]


def sizes(holes: list[Hole], wanted: Need) -> list[tuple[int, int]]:
    return [(size.minutes, size.least) for size in choose_sizes(holes, wanted)]


def test_jobs_fill_the_hole_and_ask_for_half_of_it_at_least() -> None:
    hole = Hole("n3", 3, 6, 630.0, "job 3")
    assert sizes([hole], need(10_000)) == [(10, 5)] * 3  # one on each GPU
    assert sizes([hole], need(10_000, jobs=2)) == [(10, 5)] * 2
    assert sizes([hole], need(10_000, gpus=0, cpus=4)) == [(10, 5)]
    assert sizes([hole], need(10_000, longest=240)) == [(4, 2)] * 3


def test_a_job_is_no_longer_than_the_work_is() -> None:
    hole = Hole("n3", 3, 6, 3630.0, "job 3")
    assert sizes([hole], need(100)) == [(2, 1)]
    assert sizes([hole], need(0)) == []
    assert sizes([hole], need(4000)) == [(60, 30), (8, 4)]


def test_five_start_ups_are_the_least() -> None:
    assert sizes([Hole("n3", 1, 6, 630.0, "job 3")], need(10_000, startup=100)) == [(10, 9)]
    assert sizes([Hole("n3", 1, 6, 400.0, "job 3")], need(10_000, startup=100)) == [(30, 15)]  # too short: for the next


def test_an_open_hole_and_none_at_all_get_a_modest_size() -> None:
    assert sizes([Hole("n3", 1, 6, None, "nothing that can be seen")], need(10_000)) == [(29, 15)]
    assert sizes([], need(10_000)) == [(30, 15)]
    assert "no hole now" in choose_sizes([], need(10_000))[0].why


def test_nodes_that_cannot_be_read_may_be_any() -> None:
    cut = "5 |2026-11-30T11:20:00 |n[1-3,|Resources|\n6 |2026-11-30T11:30:00 |n7|Resources|\n"
    assert planned_from(cut) == [Claim("job 5", NOW + 300, None), Claim("job 6", NOW + 900, frozenset({"n7"}))]
    (reserved,) = reservations_from(RESERVATION.replace("n[6-7]", "n[6-"))
    assert reserved.nodes is None


def test_a_long_list_of_planned_nodes_is_read_whole() -> None:
    names = [f"gpu-rack{number}-node{number * 7}" for number in range(1000)]
    (claim,) = planned_from(f"5|2026-11-30T11:20:00|{','.join(names)}|Resources|\n")
    assert claim.nodes == frozenset(names)


def test_no_column_is_padded_so_that_20000_pending_jobs_cost_little() -> None:
    columns = f"{NODE_COLUMNS.rstrip(',')},{PLANNED_COLUMNS.rstrip(',')}".split(",")
    assert [column for column in columns if not column.endswith(":0|")] == []
