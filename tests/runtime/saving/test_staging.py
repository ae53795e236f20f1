import random

import pytest

from rearview.runtime.saving.staging import MOST_IN_FLIGHT, PAGE, SMALL, Staging, _group_room


def test_leases_never_overlap_and_stay_within_the_bound():
    dice = random.Random(1)
    bound = 64 * PAGE
    staging, held = Staging(bound), []
    refused = 0
    for _ in range(3000):
        if held and dice.random() < 0.5:
            staging.release(held.pop(0))
            continue
        lease = staging.take(dice.randrange(1, 24 * PAGE))
        if lease is None:
            refused += 1
            continue
        for other in held:
            assert lease.end <= other.start or other.end <= lease.start
        assert lease.end <= bound
        held.append(lease)
    assert refused > 100
    assert staging.touched <= bound


def test_the_content_of_a_lease_survives_another_lease():
    staging = Staging(4 * PAGE)
    first, second = staging.take(PAGE), staging.take(2 * PAGE)
    first.view[:] = b"a" * PAGE
    second.view[:] = b"b" * 2 * PAGE
    assert bytes(first.view) == b"a" * PAGE
    staging.release(first)
    third = staging.take(PAGE)
    third.view[:] = b"c" * PAGE
    assert bytes(second.view) == b"b" * 2 * PAGE


def test_without_a_bound_staging_memory_holds_one_checkpoint():
    staging = Staging()
    lease = staging.take(SMALL + PAGE)
    assert staging.take(PAGE) is None
    assert staging.depth == 1
    staging.release(lease)
    assert staging.take(2 * SMALL) is not None
    assert staging.touched == 2 * SMALL


def test_small_checkpoints_may_wait_together():
    staging = Staging()
    taken = [staging.take(SMALL // 4) for _ in range(5)]
    assert [lease is not None for lease in taken] == [True] * 4 + [False]
    assert staging.touched == SMALL
    assert staging.depth == 4
    staging = Staging()
    staging.take(1)
    assert staging.depth == MOST_IN_FLIGHT


def test_a_request_beyond_the_bound_can_never_be_met():
    staging = Staging(10 * PAGE)
    assert not staging.fits(11 * PAGE)
    assert staging.take(11 * PAGE) is None


def test_staging_memory_is_reused():
    staging = Staging()
    for _ in range(3):
        lease = staging.take(PAGE)
        lease.view[:4] = b"warm"
        staging.release(lease)
    assert bytes(staging.take(PAGE).view[:4]) == b"warm"


def test_warming_makes_memory_present_and_keeps_the_bound():
    staging = Staging(8 * PAGE)
    staging.warm(100 * PAGE)
    assert staging.touched == 8 * PAGE
    staging = Staging()
    staging.warm(100 * PAGE)
    assert staging.touched == 100 * PAGE
    lease = staging.take(3 * PAGE)
    lease.view[:] = b"x" * 3 * PAGE


def test_trimming_frees_memory_that_is_no_longer_needed():
    staging = Staging(100 * PAGE)
    staging.release(staging.take(100 * PAGE))
    staging.trim(60 * PAGE)
    assert staging.touched == 100 * PAGE
    staging.trim(10 * PAGE)
    assert staging.touched == 10 * PAGE
    lease = staging.take(100 * PAGE)
    staging.trim(1)
    assert staging.touched == 100 * PAGE
    assert bytes(lease.view[50 * PAGE :]) == bytes(50 * PAGE)


def test_closing_twice_is_harmless():
    staging = Staging()
    staging.take(PAGE)
    staging.close()
    staging.close()
    assert staging.take(PAGE) is not None


@pytest.mark.parametrize("limit", [256 << 20])
def test_staging_works_under_a_limit_on_address_space(limit, monkeypatch):
    import mmap as real

    made = real.mmap

    def limited(fd, size, *rest):
        if size > limit:
            raise OSError(12, "Cannot allocate memory")
        return made(fd, size, *rest)

    monkeypatch.setattr("rearview.runtime.saving.staging.mmap.mmap", limited)
    staging = Staging()
    assert staging.take(10 * PAGE) is not None
    with pytest.raises(MemoryError):
        Staging().take(limit + 1)


def test_memory_limits_of_control_groups_count(tmp_path):
    inner = tmp_path / "cg" / "jobs" / "one"
    inner.mkdir(parents=True)
    for folder, most, used, cached in (
        (tmp_path / "cg" / "jobs", "5000", "1000", "200"),
        (inner, "max", "900", "0"),
    ):
        (folder / "memory.max").write_text(most + "\n")
        (folder / "memory.current").write_text(used + "\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    own = tmp_path / "own"
    own.write_text("0::/jobs/one\n")
    assert list(_group_room(str(tmp_path / "cg"), str(own))) == [4200]


def test_limits_of_the_first_kind_of_control_groups_count(tmp_path):
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("3000")
    (folder / "memory.usage_in_bytes").write_text("1000")
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/job\n3:memory:/job\n1:name=systemd:/\n")
    assert list(_group_room(str(tmp_path), str(own))) == [2000]


def test_without_control_groups_only_the_machine_counts(tmp_path):
    assert list(_group_room(str(tmp_path), str(tmp_path / "absent"))) == []
