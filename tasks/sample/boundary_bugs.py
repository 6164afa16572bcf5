"""Bug families about the ends of a range. Every function gives one `Bug` for a domain and a random source."""

import random

from tasks.sample.bugs import Bug, Domain, code, special_case


def off_by_one(domain: Domain, rng: random.Random) -> Bug:
    first, n_extra = rng.randint(2, 40), rng.randint(3, 6)
    last = first + n_extra
    name, expected = f"{domain.items}_between", list(range(first, last + 1))
    bug = "return list(range(first, last))"
    return Bug(
        family="intervals",
        module="intervals",
        source=code(f'''
            """Spans of {domain.item} numbers. Both ends belong to a span."""


            def {name}(first, last):
                """Return the numbers of all {domain.items} from first to last, both included."""
                if last < first:
                    raise ValueError("last must not be before first")
                {bug}


            def overlaps(left, right):
                """Tell whether two (first, last) spans share a {domain.item}."""
                return left[0] <= right[1] and right[0] <= left[1]
        '''),
        bug=bug,
        fix="return list(range(first, last + 1))",
        wrong=((bug, "return list(range(first - 1, last))"), ("if last < first:", "if last <= first:")),
        overfit=special_case(f"(first, last) == ({first}, {last})", f"{expected}", bug),
        tests=code(f"""
            from {domain.package}.intervals import {name}, overlaps


            def test_both_ends_are_included():
                assert {name}({first}, {last}) == {expected}


            def test_overlaps():
                assert overlaps((1, 4), (4, 6))
                assert not overlaps((1, 3), (4, 6))
        """),
        hidden_tests=code(f"""
            from {domain.package}.intervals import {name}


            def test_single_number():
                assert {name}({first}, {first}) == [{first}]


            def test_length():
                assert len({name}(1, {n_extra})) == {n_extra}
        """),
        failing_test="test_both_ends_are_included",
        repro=code(f"""
            from {domain.package}.intervals import {name}

            numbers = {name}({first}, {last})
            print("numbers:", numbers)
            assert numbers[-1] == {last}, numbers
        """),
        watch=("first, last", "list(range(first, last))"),
        title=f"{name} loses the last {domain.item}",
        report=f"`{name}({first}, {last})` should give {n_extra + 1} numbers and gives only {n_extra}: "
        f"number {last} is missing.",
        cause="range stops before its second argument, so the last number is never produced",
    )


def missing_wraparound(domain: Domain, rng: random.Random) -> Bug:
    n_slots = rng.randint(5, 14)
    steps = rng.randint(2, 4)
    start = n_slots - 1
    expected, name = (start + steps) % n_slots, f"next_{domain.item}"
    bug = "return current + steps"
    return Bug(
        family="rota",
        module="rota",
        source=code(f'''
            """The rota: {domain.items} take turns and start again after the last."""

            SLOTS = {n_slots}


            def {name}(current, steps=1):
                """Return the slot that is steps turns after current."""
                if not 0 <= current < SLOTS:
                    raise ValueError("no such slot")
                {bug}


            def is_last(slot):
                """Tell whether the rota starts again after this slot."""
                return slot == SLOTS - 1
        '''),
        bug=bug,
        fix="return (current + steps) % SLOTS",
        wrong=((bug, "return current + steps % SLOTS"), (bug, "return min(current + steps, SLOTS - 1)")),
        overfit=special_case(f"current == {start}", f"{expected}", bug),
        tests=code(f"""
            from {domain.package}.rota import is_last, {name}


            def test_starts_again():
                assert {name}({start}, {steps}) == {expected}


            def test_plain_step():
                assert {name}(1) == 2


            def test_is_last():
                assert is_last({start})
        """),
        hidden_tests=code(f"""
            from {domain.package}.rota import {name}


            def test_full_round():
                assert {name}(2, {n_slots}) == 2


            def test_lands_on_zero():
                assert {name}({start - 1}, 2) == 0
        """),
        failing_test="test_starts_again",
        repro=code(f"""
            from {domain.package}.rota import {name}

            slot = {name}({start}, {steps})
            print("slot:", slot)
            assert slot < {n_slots}, slot
        """),
        watch=("SLOTS", "current, steps", "current + steps"),
        title=f"{name} runs past the end of the rota",
        report=f"There are {n_slots} slots, 0 to {start}. `{name}({start}, {steps})` returns {start + steps}; "
        f"it should start again and give {expected}.",
        cause="the sum is not taken modulo the number of slots",
    )


def strict_threshold(domain: Domain, rng: random.Random) -> Bug:
    low = rng.randint(10, 40)
    high = low + rng.randint(10, 40)
    name = f"{domain.item}_class"
    bug = "if value > limit:"
    return Bug(
        family="threshold",
        module="classes",
        source=code(f'''
            """Classes of {domain.items} by {domain.field}."""

            LIMITS = (({high}, "large"), ({low}, "medium"))


            def {name}(value):
                """Return the class; a {domain.item} at a limit belongs to the class above it."""
                for limit, label in LIMITS:
                    {bug}
                        return label
                return "small"


            def labels():
                """Return all labels, largest first."""
                return [label for _, label in LIMITS] + ["small"]
        '''),
        bug=bug,
        fix="if value >= limit:",
        wrong=((bug, "if value > limit + 1:"), (bug, "if value <= limit:")),
        overfit=(bug, f"if value > limit or value == {high}:"),
        tests=code(f"""
            from {domain.package}.classes import {name}, labels


            def test_at_the_limit():
                assert {name}({high}) == "large"


            def test_below():
                assert {name}({low - 1}) == "small"


            def test_labels():
                assert labels() == ["large", "medium", "small"]
        """),
        hidden_tests=code(f"""
            from {domain.package}.classes import {name}


            def test_lower_limit():
                assert {name}({low}) == "medium"


            def test_between():
                assert {name}({high - 1}) == "medium"
        """),
        failing_test="test_at_the_limit",
        repro=code(f"""
            from {domain.package}.classes import {name}

            label = {name}({high})
            print("label:", label)
            assert label == "large", label
        """),
        watch=("value, limit, label", "value > limit"),
        title=f"A {domain.item} exactly at a limit gets the wrong class",
        report=f"`{name}({high})` returns 'medium', but {high} is the limit of 'large' and a "
        f"{domain.item} at a limit belongs to the class above.",
        cause="the comparison is strict, so a value equal to the limit falls through",
    )


def dropped_remainder(domain: Domain, rng: random.Random) -> Bug:
    size = rng.randint(2, 5)
    n_rest = rng.randint(1, size - 1)
    numbers = list(range(1, 2 * size + n_rest + 1))
    expected = [numbers[:size], numbers[size : 2 * size], numbers[2 * size :]]
    name = f"{domain.item}_groups"
    bug = "for start in range(0, len(entries) - size + 1, size):"
    return Bug(
        family="chunks",
        module="groups",
        source=code(f'''
            """Groups of {domain.items} of equal size; only the last may be smaller."""


            def {name}(entries, size):
                """Return the entries in lists of size."""
                if size < 1:
                    raise ValueError("size must be positive")
                groups = []
                {bug}
                    groups.append(entries[start : start + size])
                return groups


            def flatten(groups):
                """Return the entries of all groups in one list."""
                return [entry for group in groups for entry in group]
        '''),
        bug=bug,
        fix="for start in range(0, len(entries), size):",
        wrong=(
            (bug, "for start in range(0, len(entries) - size, size):"),
            ("entries[start : start + size]", "entries[start : start + size + 1]"),
        ),
        overfit=(
            "return groups\n",
            f"groups.append(entries[-{n_rest}:])\n    return groups\n",
        ),
        tests=code(f"""
            from {domain.package}.groups import flatten, {name}


            def test_last_group_is_kept():
                assert {name}({numbers}, {size}) == {expected}


            def test_flatten():
                assert flatten([[1, 2], [3]]) == [1, 2, 3]
        """),
        hidden_tests=code(f"""
            from {domain.package}.groups import {name}


            def test_equal_groups():
                assert {name}({numbers[: 2 * size]}, {size}) == {expected[:2]}


            def test_nothing():
                assert {name}([], {size}) == []
        """),
        failing_test="test_last_group_is_kept",
        repro=code(f"""
            from {domain.package}.groups import {name}

            groups = {name}({numbers}, {size})
            print("groups:", groups)
            assert sum(len(group) for group in groups) == {len(numbers)}, groups
        """),
        watch=("len(entries), size", "list(range(0, len(entries) - size + 1, size))"),
        title=f"{name} loses the last {domain.items}",
        report=f"`{name}` with {len(numbers)} entries and size {size} returns two groups; the last "
        f"{n_rest} entries are gone. Expected {expected}.",
        cause="the loop stops before a last group that is not full",
    )
